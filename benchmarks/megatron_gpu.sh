#!/usr/bin/env bash
set -euo pipefail
usage() {
  cat <<'TEXT'
Step time, tokens/s and peak memory of a 1.1B student under a 7B teacher on one GPU or two, in bf16,
against the FLOPs limit of the matmul rate that this machine reaches. Random weights.

    benchmarks/megatron_gpu.sh /scratch/megatron-gpu

Needs vocag[megatron,demo,test], one CUDA device with 100 GB of memory, and 40 GB in the folder.
Runs the GPU tests, then the trainer with Megatron's own layers: plain, with random selection, with
stored losses, with a colocated teacher, and with a teacher in a world of its own, on a second GPU
or on the same one, where steps and scoring overlap as far as the device lets them. With two GPUs
also a student on both of them, sharing layers, layers and places, or rows; with Transformer Engine
also its layers. Prints a table for docs/megatron.md.

Environment: PYTHON (python), STEPS of each run (12), GPUS to use (those there are), ENGINE (1 where
Transformer Engine is installed, else 0).
TEXT
}
case ${1:-} in
  -h | --help) usage; exit 0 ;;
  "" | -*) usage >&2; exit 2 ;;
esac
work=$1
python=${PYTHON:-python}
steps=${STEPS:-12}
gpus=${GPUS:-$($python -c 'import torch; print(torch.cuda.device_count())')}
engine=${ENGINE:-$($python -c '
from importlib.util import find_spec; print(int(find_spec("transformer_engine") is not None))')}
mkdir -p "$work"
rm -f "$work"/*.log # of an earlier call, with other GPUs perhaps

$python -m pytest -q -m gpu tests/megatron_plugin

if [ ! -f "$work/aligned/manifest.json" ]; then
  $python examples/docstring_corpus.py --output "$work/corpus.jsonl"
  $python -m beam_jobs.align --runner=DirectRunner \
    --input "$work/corpus.jsonl" --output "$work/aligned" --name docstrings \
    --student "$($python examples/packaged_tokenizer.py mistral)" \
    --teacher "$($python examples/packaged_tokenizer.py deepseek)"
fi
$python benchmarks/megatron_gpu.py models "$work"
$python benchmarks/megatron_gpu.py matmul "$work"

# Takes over what an earlier call has scored.
$python -m beam_jobs.score "$work/aligned" --teacher "$work/teacher" --allow-untrained-teacher \
  --seq-length 2048 --dtype bfloat16

train() { # name, ranks, further arguments
  local name=$1 ranks=$2
  shift 2
  $python -m torch.distributed.run --standalone --nproc-per-node "$ranks" \
    -m megatron_plugin.pretrain_gpt \
    --vocag-data "$work/aligned" --vocag-student "$work/student" --bf16 \
    --seq-length 2048 --micro-batch-size 4 --global-batch-size 64 --train-iters "$steps" \
    --lr 8e-5 --min-lr 8e-6 --lr-decay-style cosine --calculate-per-token-loss \
    --eval-iters 0 --log-interval 1 --num-workers 4 \
    --use-distributed-optimizer --transformer-impl local "$@" 2>&1 | tee "$work/$name.log"
}

teacher=(--vocag-teacher "$work/teacher" --vocag-allow-untrained-teacher
  --vocag-teacher-micro-batch-size 4)
train plain 1
train random 1 --vocag-method random
train cached 1 --vocag-stored-losses "$work/teacher"
train colocated 1 "${teacher[@]}"
train two_worlds 2 "${teacher[@]}" --vocag-teacher-world-size 1
if [ "$gpus" -ge 2 ]; then
  train tensor 2 --tensor-model-parallel-size 2
  train sequence 2 --tensor-model-parallel-size 2 --sequence-parallel
  train context 2 --context-parallel-size 2
fi
if [ "$engine" = 1 ]; then
  train engine 1 --transformer-impl transformer_engine
fi
$python benchmarks/megatron_gpu.py table "$work" --gpus "$gpus"
