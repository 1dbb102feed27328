"""`vocag train`: the command."""

import logging
import sys
from collections.abc import Sequence

from pipeline.command_line.failures import report
from pipeline.command_line.option_parsing import in_options, naming_options, parse_options
from pipeline.command_line.pasted import pasted
from pipeline.methods import METHODS
from pipeline.training.config import OPTION_GROUPS, TrainConfig
from pipeline.training.stopping import RunStoppedError

_METHODS = "\n".join(f"  {kind.name:<15} {kind.help}" for kind in METHODS.values())
_EPILOG = f"""\
examples:
  # the teacher's likeliest next tokens once, then any number of runs without it
  vocag score aligned --teacher Qwen/Qwen2.5-Math-7B --seq-length 2048 --top-k 8
  vocag train --data aligned --student TinyLlama/TinyLlama_v1.1 --seq-length 2048 \\
      --method distill --stored-losses Qwen/Qwen2.5-Math-7B --output runs/distill

  # the paper's setting, small: a teacher that runs next to the student
  vocag train --data aligned --student TinyLlama/TinyLlama_v1.1 --teacher Qwen/Qwen2.5-Math-1.5B \\
      --method teacher --seq-length 2048 --global-batch-size 64 --micro-batch-size 2 --bf16 \\
      --output runs/teacher

  # without a teacher: plain continual pretraining, and random tokens
  vocag train --data aligned --student TinyLlama/TinyLlama_v1.1 --method full --output runs/full
  vocag train --data aligned --student TinyLlama/TinyLlama_v1.1 --method random --output runs/random

  # another's run again, with one option of one's own
  vocag train --config runs/distill/run.toml --seed 1 --output runs/again

  # eight GPUs; bits per byte of two held-out sets and a Hugging Face folder every 500 steps
  torchrun --nproc-per-node 8 -m pipeline.training --data aligned --student models/student \\
      --teacher models/teacher --method distill --heldout math=heldout/math code=heldout/code \\
      --evaluate-every 500 --export-every 500 --tracker tensorboard --output runs/eight

methods, --method (docs/concepts/guidance.md has the equations):
{_METHODS}

output: log.jsonl (a line a step), run.toml (the options), checkpoint.pt, and at the end model/, a
folder that AutoModelForCausalLM and AutoTokenizer load. After SIGTERM, Ctrl-C or a closed terminal
the step is finished and a checkpoint written; the same command continues from it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    who = "vocag train"
    logging.getLogger("pipeline").setLevel(logging.WARNING)
    try:
        config = parse_config(argv)
        # After the options: help needs no torch.
        from pipeline.training.ranks import joined_ranks
        from pipeline.training.run_rows import open_rows

        with naming_options(TrainConfig), joined_ranks(config.device) as ranks:
            who += f", process {ranks.number}" if ranks.count > 1 else ""
            if ranks.is_first and config.kind.known:
                print(f"--method {config.kind.name}: {config.kind.known}")
            with ranks.first_alone():
                rows = open_rows(config, ranks)
            # After the rows: too few need no transformers, which takes longer.
            from pipeline.training.dry_run import describe_run
            from pipeline.training.loop import train

            if not config.dry_run:
                train(config, ranks, rows)
            if ranks.is_first:
                if config.dry_run:
                    for line in describe_run(config, ranks, rows):
                        print(in_options(line, TrainConfig))
                else:
                    print(what_next(config))
    except (ValueError, OSError) as error:
        report(who, error)
        return 2
    except RunStoppedError as stopped:
        print(f"{who}: {stopped}", file=sys.stderr)
        return 128 + stopped.signal_number
    return 0


def parse_config(argv: Sequence[str] | None = None) -> TrainConfig:
    """Parse a command line.

    Example:
        >>> arguments = ["--data", "a", "--student", "s", "--output", "o", "--method", "full"]
        >>> parse_config(arguments).method.name
        'full'
    """
    return parse_options(
        TrainConfig, argv, prog="vocag train", epilog=_EPILOG, groups=OPTION_GROUPS, with_file=True
    )


def what_next(config: TrainConfig) -> str:
    """Say where the student is, and what to run next."""
    from pipeline.training.log import LOG_FILE, read_log

    model = config.output / "model"
    if config.last_step < config.num_steps and not model.exists():
        steps = read_log(config.output / LOG_FILE)
        step = steps[-1]["step"] if steps else config.last_step
        return f"stopped after step {step}, as asked: omit --exit-after to continue"
    return (
        f"the student is in {model}, a Hugging Face folder with its tokenizer\n"
        f"next: vocag evaluate {pasted(str(model))} --output evaluated"
    )
