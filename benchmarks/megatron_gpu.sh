#!/usr/bin/env bash
set -euo pipefail
usage() {
  cat <<'TEXT'
An engineer's first hour with GPUs, eight of them or one: predicted and measured step time, tokens/s
and peak memory of a 1.1B student under a 7B teacher in bf16. Random weights.

    benchmarks/megatron_gpu.sh /scratch/megatron-gpu

Needs vocag[megatron,demo,test], CUDA devices with 80 GB of memory, and 60 GB in the folder. In this
order, so that what fails fails early:

    1  the GPU tests, and the matmul rate that this machine reaches
    2  what is predicted, before anything is measured
    3  plain training on one GPU with a checkpoint, and the run that continues from it
    4  with a teacher on the student's ranks (on eight GPUs on all of them), and in a world of its
       own: 4 + 4 of eight GPUs, 1 + 1 of two, on one GPU together with the student
    5  random selection; with two GPUs or more a student that shares layers, layers and places, or
       rows; Transformer Engine's layers where it is installed, with the distributed optimizer
    6  with losses that vocag score stores first, which takes longest

Prints a table for docs/guides/megatron.md after each run, so that it can be stopped at any time. By
arithmetic some 45 minutes on one H100, half of it the starts of eleven jobs; it has never run.

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

every=$((gpus >= 8 ? 8 : 1))
half=$((gpus >= 8 ? 4 : 1))
$python benchmarks/megatron_gpu.py --predict --student "$work/student" --teacher "$work/teacher" \
  --gpus "$every" --global-batch-size 64 --micro-batch-size 4 --teacher-micro-batch-size 4

train() { # name, ranks, further arguments
  local name=$1 ranks=$2
  shift 2
  $python -m torch.distributed.run --standalone --nproc-per-node "$ranks" \
    -m megatron_plugin.pretrain_gpt \
    --vocag-data "$work/aligned" --vocag-student "$work/student" --bf16 \
    --seq-length 2048 --micro-batch-size 4 --global-batch-size 64 --train-iters "$steps" \
    --lr 8e-5 --min-lr 8e-6 --lr-decay-style cosine --calculate-per-token-loss \
    --eval-iters 0 --log-interval 1 --num-workers 4 \
    --transformer-impl local "$@" 2>&1 | tee "$work/$name.log"
  $python benchmarks/megatron_gpu.py table "$work" --gpus "$gpus"
}

whole=(--train-iters "$((2 * steps))") # its first half, then the rest
rm -rf "$work/checkpoint"
train plain 1 "${whole[@]}" --exit-interval "$steps" --save "$work/checkpoint" --save-interval "$steps"
# On Hopper and Blackwell torch keeps cuDNN's graphs; nearly all calls must find theirs.
TORCH_CUDNN_SDPA_CACHE_DEBUG=1 train resumed 1 "${whole[@]}" --load "$work/checkpoint"
grep -o 'SDPA Cache Called.*' "$work/resumed.log" | tail -n 1 || true
teacher=(--vocag-teacher "$work/teacher" --vocag-allow-untrained-teacher
  --vocag-teacher-micro-batch-size 4)
train colocated "$every" "${teacher[@]}"
train two_worlds "$((2 * half))" "${teacher[@]}" --vocag-teacher-world-size "$half"
train random 1 --vocag-method random
if [ "$gpus" -ge 2 ]; then
  train tensor 2 --tensor-model-parallel-size 2
  train sequence 2 --tensor-model-parallel-size 2 --sequence-parallel
  train context 2 --context-parallel-size 2
fi
if [ "$engine" = 1 ]; then
  train engine 1 --transformer-impl transformer_engine --use-distributed-optimizer
fi
# Takes over what an earlier call has scored.
$python -m beam_jobs.score "$work/aligned" --teacher "$work/teacher" --allow-untrained-teacher \
  --seq-length 2048 --dtype bfloat16
train cached 1 --vocag-stored-losses "$work/teacher"
