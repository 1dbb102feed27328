#!/usr/bin/env bash
# SmolLM2-135M gets Mistral v0.1's vocabulary, and wins back what it lost: by plain training, and by
# the distributions that the original has stored once. Equal steps, equal rows.
#
#     examples/transfer_demo.sh transfer-demo
#
# Needs vocag[train-demo]. Run it again to continue where it stopped. STEPS is the number of steps of
# each training, SCORE more options of vocag score.
set -euo pipefail
demo=$1
python=${PYTHON:-python}
here=$(dirname "$0")
export HF_HUB_DISABLE_PROGRESS_BARS=1

# A folder has its name when it is whole.
made() {
  local folder=$1
  shift
  [ ! -d "$folder" ] || return 0
  rm -rf "$folder.tmp"
  "$@" --output "$folder.tmp"
  mv "$folder.tmp" "$folder"
}

mkdir -p "$demo"
original=$demo/smollm2 transplanted=$demo/transplanted texts=$demo/texts
tokenizer=$($python "$here/packaged_tokenizer.py" mistral)
made "$original" $python "$here/packaged_model.py"
made "$texts" $python "$here/transfer_texts.py"
made "$transplanted" $python -m vocag transfer "$original" --tokenizer "$tokenizer" \
  --text "$texts/train.jsonl"

[ -f "$demo/aligned/manifest.json" ] || $python -m beam_jobs.align --runner=DirectRunner \
  --input "$texts/train.jsonl" --output "$demo/aligned" --name docstrings \
  --student "$transplanted" --teacher "$original"
$python -m vocag score "$demo/aligned" --teacher "$original" --seq-length 512 --top-k 8 ${SCORE:-}

# Half precision only where the machine computes in it: twice as fast there, slower elsewhere.
precision=()
if grep -qsw avx512_bf16 /proc/cpuinfo; then
  precision=(--bf16)
fi
for method in full distill; do
  stored=()
  [ "$method" = full ] || stored=(--stored-losses "$original")
  echo "== $method"
  $python -m vocag train --data "$demo/aligned" --student "$transplanted" --method "$method" \
    "${stored[@]}" --num-steps "${STEPS:-20}" --warmup-steps 3 --learning-rate 2e-4 \
    --seq-length 512 --global-batch-size 2 --micro-batch-size 2 "${precision[@]}" \
    --checkpoint-every 10 --output "$demo/runs/$method"
done
$python "$here/transfer_table.py" --texts "$texts" --trained-on docstrings \
  original="$original" transplanted="$transplanted" \
  "plain training"="$demo/runs/full/model" distributions="$demo/runs/distill/model"
