#!/usr/bin/env bash
# A small student learns under SmolLM2-135M, which runs in a two-rank pipeline of its own:
# align, train (with metrics and checkpoints), export, load in transformers.
#
#     examples/megatron_demo.sh demo
#
# Needs vocag[megatron-demo], and runs from the repository's folder. With fewer than three GPUs it
# runs on the CPU, with the tests' stand-in for torch.cuda.
set -euo pipefail
demo=$1
python=${PYTHON:-python}
here=$(dirname "$0")

$python "$here/packaged_model.py" --output "$demo/smollm2"
if [ ! -f "$demo/guided/manifest.json" ]; then
  $python "$here/docstring_corpus.py" --output "$demo/networkx.jsonl" --packages networkx
  $python -m beam_jobs.align --runner=DirectRunner \
    --input "$demo/networkx.jsonl" --output "$demo/guided" --name networkx \
    --student "$($python "$here/packaged_tokenizer.py" mistral)" --teacher "$demo/smollm2"
fi

if $python -c 'import sys, torch; sys.exit(torch.cuda.device_count() < 3)'; then
  device="GPUs"
  trainer=(-m megatron_plugin.pretrain_gpt --bf16)
else
  device="CPU, some minutes"
  trainer=(tests/megatron_plugin/trainer.py --distributed-backend gloo --use-cpu-initialization
    --vocag-teacher-dtype float32 --no-bias-swiglu-fusion --no-bias-dropout-fusion)
fi

show_steps() { # of Megatron's log: every fifth step, and a few of its numbers
  grep --line-buffered -oE 'iteration +(1|5|10|15|20|25|30)/ +30 .*' |
    sed -u -E 's/ consumed.*(lm loss: [^|]*)\|.*(vocag\/kept_fraction: [^|]*)\|.*(vocag\/teacher_loss: [^|]*)\|.*/ \1\2\3/'
}

rm -rf "$demo/checkpoint" "$demo/student" "$demo/tensorboard"
echo "Training 30 steps on the $device: 1 student rank, 2 teacher ranks. Megatron's log: $demo/train.log"
OMP_NUM_THREADS=1 PYTHONPATH=. $python -W ignore -m torch.distributed.run --standalone \
  --nproc-per-node 3 "${trainer[@]}" \
  --vocag-data "$demo/guided" \
  --vocag-teacher "$demo/smollm2" --vocag-method teacher \
  --vocag-teacher-world-size 2 --vocag-teacher-pipeline-model-parallel-size 2 \
  --num-layers 4 --hidden-size 128 --ffn-hidden-size 384 --num-attention-heads 4 \
  --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear \
  --seq-length 256 --max-position-embeddings 256 --micro-batch-size 2 --global-batch-size 4 \
  --train-iters 30 --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --lr-warmup-iters 3 \
  --calculate-per-token-loss --eval-iters 0 --log-interval 1 --num-workers 0 \
  --save "$demo/checkpoint" --save-interval 30 --tensorboard-dir "$demo/tensorboard" \
  2>&1 | tee "$demo/train.log" | show_steps || { tail -n 40 "$demo/train.log"; exit 1; }
$python -m megatron_plugin.export_command "$demo/checkpoint" "$demo/student"
$python - "$demo" <<'PYTHON'
import sys
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, AutoTokenizer

demo = Path(sys.argv[1])
model, report = AutoModelForCausalLM.from_pretrained(demo / "student", output_loading_info=True)
if report["missing_keys"] or report["unexpected_keys"]:
    sys.exit(f"the export doesn't fit: {report}")
events = EventAccumulator(str(demo / "tensorboard"))
events.Reload()
losses = [event.value for event in events.Scalars("lm loss")]
first, last = sum(losses[:3]) / 3, sum(losses[-3:]) / 3
if not last < first - 1:
    sys.exit(f"the student did not learn: loss {first:.2f} at first, {last:.2f} at last")
tokenizer = AutoTokenizer.from_pretrained(demo / "student")
prompt = tokenizer("Returns the", return_tensors="pt")
written = model.generate(**prompt, max_new_tokens=12, do_sample=False)
print(f"It writes (after 30 steps): {tokenizer.decode(written[0], skip_special_tokens=True)!r}")
size = sum(parameter.numel() for parameter in model.parameters())
print(f"The student ({size / 1e6:.1f} M parameters) went from {first:.2f} to {last:.2f} nats per "
      f"token and loads in transformers: {demo}/student   Curves: tensorboard --logdir {demo}/tensorboard")
PYTHON
