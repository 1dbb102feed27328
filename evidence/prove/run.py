"""Run an experiment; the same command goes on where it was stopped.

python evidence/prove/run.py few --data benchmarks --output prove --scale small
"""

import argparse
import importlib
import sys
from dataclasses import replace
from pathlib import Path

sys.path += [str(Path(__file__).parents[2] / name) for name in ("evidence", "examples")]

from prove.chain import Chain
from prove.tasks import perform

EXPERIMENTS = (
    *("few", "filter", "transfer", "distributions", "code", "tokens"),
    *("cells", "fresh", "random_weights"),
)
TRANSFERS = ("transfer", "distributions", "cells", "random_weights")
CODE = ("code", "fresh")


def main() -> int:
    """Run what is missing; return doit's status."""
    parser = argparse.ArgumentParser(description="Run an experiment of evidence/.")
    parser.add_argument("experiment", choices=EXPERIMENTS)
    parser.add_argument("--data", type=Path, required=True, help="folder of GSM8K and MATH")
    parser.add_argument("--output", type=Path, required=True, help="folder of all experiments")
    parser.add_argument("--scale", default="full", help="tiny, small, full, gpu; once: of filter")
    parser.add_argument("--jobs", type=int, default=2, help="runs at one time")
    parser.add_argument("--tasks", nargs="*", default=[], help="only these, with what they need")
    parser.add_argument(
        "--tokenizer",
        type=Path,
        help="of experiments with a new vocabulary: a folder or a file",
    )
    parser.add_argument(
        "--records", type=Path, help="folder of published records: taken over, and added to"
    )
    parser.add_argument("--teacher", help="of code and fresh: a folder, a repository or .gguf file")
    options = parser.parse_args()
    if (options.experiment in TRANSFERS) != (options.tokenizer is not None):
        parser.error(f"--tokenizer is the new vocabulary of {', '.join(TRANSFERS)}: needed there")
    if (options.experiment in CODE) != (options.teacher is not None):
        parser.error("--teacher is the model that teaches code: needed there, and only there")
    scales = importlib.import_module(f"prove.{options.experiment}").SCALES
    if options.scale not in scales:
        parser.error(f"--scale {options.scale}: {options.experiment} has {', '.join(scales)}")
    tokenizer = options.tokenizer.resolve() if options.tokenizer else None
    experiment = replace(
        scales[options.scale], scale=options.scale, tokenizer=tokenizer, teacher=options.teacher
    )
    published = options.records.resolve() if options.records else None
    chain = Chain(experiment, options.data.resolve(), options.output.resolve(), published)
    return perform(chain.tasks, chain.own, options.tasks, jobs=options.jobs)


if __name__ == "__main__":
    sys.exit(main())
