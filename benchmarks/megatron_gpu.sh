#!/usr/bin/env bash
# Step time, tokens/s and peak memory of a 1.1B student under a 7B teacher on one GPU, in bf16,
# against the FLOPs limit of the matmul rate that this machine reaches. Random weights.
#
#     benchmarks/megatron_gpu.sh /scratch/megatron-gpu     (needs 40 GB there and 100 GB of GPU memory)
#
# Needs vocag[megatron,demo,test] and one CUDA device. Prints a table for docs/megatron.md.
set -euo pipefail
work=$1
python=${PYTHON:-python}
steps=${STEPS:-12}
mkdir -p "$work"

$python -m pytest -q -m gpu tests/megatron

if [ ! -f "$work/aligned/manifest.json" ]; then
  $python examples/docstring_corpus.py --output "$work/corpus.jsonl"
  $python -m beam_jobs.align --runner=DirectRunner \
    --input "$work/corpus.jsonl" --output "$work/aligned" --name docstrings \
    --student "$($python examples/packaged_tokenizer.py mistral)" \
    --teacher "$($python examples/packaged_tokenizer.py deepseek)"
fi
$python benchmarks/megatron_gpu.py models "$work"
$python benchmarks/megatron_gpu.py matmul "$work"

train() { # name, ranks, further arguments
  local name=$1 ranks=$2
  shift 2
  $python -m torch.distributed.run --standalone --nproc-per-node "$ranks" \
    -m megatron_plugin.pretrain_gpt \
    --vocag-data "$work/aligned" --vocag-student "$work/student" --bf16 \
    --seq-length 2048 --micro-batch-size 4 --global-batch-size 64 --train-iters "$steps" \
    --lr 8e-5 --min-lr 8e-6 --lr-decay-style cosine --calculate-per-token-loss \
    --eval-iters 0 --log-interval 1 --num-workers 4 \
    --use-distributed-optimizer "$@" 2>&1 | tee "$work/$name.log"
}

teacher=(--vocag-teacher "$work/teacher" --vocag-allow-untrained-teacher
  --vocag-teacher-micro-batch-size 4)
train plain 1
train random 1 --vocag-selector random
train colocated 1 "${teacher[@]}"
train two_worlds 2 "${teacher[@]}" --vocag-teacher-world-size 1
$python benchmarks/megatron_gpu.py table "$work"
