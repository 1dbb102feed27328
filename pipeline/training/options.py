"""The command line of `vocag train`: an option for every field of two dataclasses."""

from collections.abc import Sequence

from pipeline.training.config import TrainConfig
from vocag_cli.options import parse_options

_EXAMPLES = """\
examples:
  # the paper's setting, small: a teacher that runs beside the student
  vocag train --data aligned --student TinyLlama/TinyLlama_v1.1 --teacher Qwen/Qwen2.5-Math-1.5B \\
      --seq-length 2048 --global-batch-size 64 --micro-batch-size 2 --bf16 --output runs/teacher

  # the teacher's losses once, then any number of runs without it
  vocag score aligned --teacher Qwen/Qwen2.5-Math-7B --seq-length 2048
  vocag train --data aligned --student TinyLlama/TinyLlama_v1.1 --seq-length 2048 \\
      --stored-losses Qwen/Qwen2.5-Math-7B --output runs/stored

  # what costs no teacher: plain continual pretraining, and chance
  vocag train --data aligned --student TinyLlama/TinyLlama_v1.1 --method full --output runs/full
  vocag train --data aligned --student TinyLlama/TinyLlama_v1.1 --method random --output runs/random

  # eight GPUs; bits per byte of two held-out sets and a Hugging Face folder every 500 steps
  torchrun --nproc-per-node 8 -m pipeline.training --data aligned --student models/student \\
      --teacher models/teacher --heldout math=heldout/math code=heldout/code \\
      --evaluate-every 500 --export-every 500 --tensorboard --output runs/eight

  # then compare
  vocag figures runs runs/full runs/random runs/teacher --output selectors.svg

methods, --method (docs/guidance.md has the equations):
  teacher         tokens on which the student is furthest behind the teacher: the paper
  full            every token: plain continual pretraining, no teacher
  random, student_loss, student_entropy
                  chance, or the student's own judgement: what a teacher must beat, no teacher
  teacher_loss    tokens that the teacher finds easiest
  alm             no selection: match the teacher's likelihood of every piece of text that both
                  vocabularies can spell; with --keep-fraction, beside the paper's choice
  rho1, rho1_self, kld
                  Rho-1 with a reference model, its self-reference, and distillation by
                  distributions: a teacher of the student's own vocabulary
  uld             distillation by sorted probabilities, any vocabulary
  chunks, chunks_random
                  equal chunks in place of alignment, by the teacher or by chance

output: log.jsonl (a line a step), checkpoint.pt, and at the end model/, a folder that
AutoModelForCausalLM and AutoTokenizer load."""

_GROUPS = {
    "data": "data and models",
    "method": "method (docs/guidance.md)",
    "num_steps": "steps",
    "evaluate_every": "measuring and keeping",
}


def parse_config(argv: Sequence[str] | None = None) -> TrainConfig:
    """Return the run that a command line describes.

    Raises:
        ValueError: options that contradict each other.
        SystemExit: argparse's own errors, and --help.

    Example:
        >>> arguments = ["--data", "a", "--student", "s", "--output", "o", "--method", "full"]
        >>> parse_config(arguments).method.name
        'full'
    """
    return parse_options(TrainConfig, argv, prog="vocag train", epilog=_EXAMPLES, groups=_GROUPS)
