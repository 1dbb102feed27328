"""`vocag train`: the command."""

import logging
import shlex
import sys
from collections.abc import Iterator, Sequence

from pipeline.drawing.formatting import printable
from pipeline.training.config import TrainConfig
from pipeline.training.options import parse_config


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status: 0, or 2 where it can't run."""
    who = "vocag train"
    logging.getLogger("pipeline").setLevel(logging.WARNING)
    try:
        config = parse_config(argv)
        # After the options: help needs no transformers.
        from pipeline.training.loop import train
        from pipeline.training.ranks import joined_ranks

        with joined_ranks(config.device) as ranks:
            who += f", process {ranks.number}" if ranks.count > 1 else ""
            train(config, ranks)
            for line in what_next(config) if ranks.is_first else ():
                print(line)
    except (ValueError, OSError) as error:
        print(f"{who}: {printable(str(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{who}: stopped; the same command goes on from the last checkpoint", file=sys.stderr)
        return 130
    return 0


def what_next(config: TrainConfig) -> Iterator[str]:
    """Yield where a run's student is, and what to do with it.

    Example:
        >>> list(what_next(config))  # doctest: +SKIP
        ['the student is in runs/guided/model, a Hugging Face folder with its tokenizer',
         'next: vocag evaluate runs/guided/model --output evaluated']
    """
    model = config.output / "model"
    if config.exit_after and config.exit_after < config.num_steps:
        yield f"stopped after step {config.exit_after}, as asked: leave out --exit-after to go on"
    else:
        yield f"the student is in {model}, a Hugging Face folder with its tokenizer"
        yield f"next: vocag evaluate {shlex.quote(str(model))} --output evaluated"
