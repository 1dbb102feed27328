"""`vocag train`: the command."""

import logging
import sys
from collections.abc import Sequence

from pipeline.drawing.formatting import printable
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
    except (ValueError, OSError) as error:
        print(f"{who}: {printable(str(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{who}: stopped; the same command goes on from the last checkpoint", file=sys.stderr)
        return 130
    return 0
