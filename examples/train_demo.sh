#!/usr/bin/env bash
# Is a teacher with another vocabulary worth listening to? A student of 10 M parameters, with random
# weights and the vocabulary of Mistral v0.1, learns from docstrings by each selector, under the
# losses of SmolLM2-135M where the selector asks for them. Equal steps, equal rows, equal weights at
# the start; only the choice of tokens differs.
#
#     examples/train_demo.sh train-demo [SEED ...]
#
# Needs vocag[train-demo]. Run it again to go on where it stopped.
set -euo pipefail
demo=$1
seeds=${*:2}
python=${PYTHON:-python}
here=$(dirname "$0")
export HF_HUB_DISABLE_PROGRESS_BARS=1

$python "$here/packaged_model.py" --output "$demo/smollm2"
if [ ! -f "$demo/heldout.jsonl" ]; then
  $python "$here/docstring_corpus.py" --output "$demo/corpus.jsonl"
  $python "$here/hold_out.py" --input "$demo/corpus.jsonl" --output "$demo" --every 100
fi
for part in train heldout; do
  [ -f "$demo/$part/manifest.json" ] || $python -m beam_jobs.align --runner=DirectRunner \
    --input "$demo/$part.jsonl" --output "$demo/$part" --name docstrings \
    --student "$($python "$here/packaged_tokenizer.py" mistral)" --teacher "$demo/smollm2"
done

# Half precision only where the machine computes in it: twice as fast there, slower elsewhere.
precision=()
if grep -qsw avx512_bf16 /proc/cpuinfo || $python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  precision=(--bf16)
fi

runs=()
for seed in ${seeds:-0}; do
  for method in full random student_loss student_entropy teacher; do
    run="$demo/runs/seed-$seed/$method"
    runs+=("$run")
    echo "== $method, seed $seed"
    $python -m pipeline.training --data "$demo/train" --heldout "$demo/heldout" \
      --student "$here/student_10m" --random-init --teacher "$demo/smollm2" --method "$method" \
      --seed "$seed" --num-steps 300 --warmup-steps 15 --learning-rate 2e-3 \
      --seq-length 512 --global-batch-size 2 --micro-batch-size 2 "${precision[@]}" \
      --evaluate-every 75 --checkpoint-every 75 --tracker tensorboard --output "$run" |
      awk '/^step/ && $2 % 25 { next } { print; fflush() }'
  done
done

$python "$here/compare_runs.py" "${runs[@]}" --output "$demo/selectors.svg"
# What the teacher would choose in a text that neither has seen, for the student that it guided.
$python -m vocag figures kept --student "student=${runs[-1]}/model" --teacher "SmolLM2=$demo/smollm2" \
  --output "$demo/kept.html" \
  "Compute the eigenvalues of a real symmetric matrix. The matrix is first reduced to tridiagonal \
form, then the QR algorithm finds the eigenvalues in ascending order. If the matrix is not \
symmetric, only its lower triangle is read. The sum of the eigenvalues is the trace of the matrix, \
their product its determinant." | tail -n 1
echo "Curves of every run: tensorboard --logdir $demo/runs"
