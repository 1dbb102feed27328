"""`python -m tests.fuzz`: the command line."""

import argparse
import json
import logging
import os
import random
import sys
import time
import warnings
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # processes fork

from tests.fuzz import bits, commands, files, rounds
from tests.fuzz.report import Report


def main() -> int:
    """Fuzz for some minutes, or try one failure again; return 1 where something failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument(
        "--minutes",
        type=float,
        default=20,
        help="a tenth for files, one for bits, the rest in halves",
    )
    parser.add_argument("--seed", help="draws the same tokenizers, texts, commands and faults")
    parser.add_argument("--output", type=Path, default=Path("fuzz"), help="where failures go")
    parser.add_argument("--replay", type=Path, help="try one failure again")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
    if options.replay:
        body = json.loads(options.replay.read_bytes())
        kinds = {"trial": files, "texts": rounds, "bits": bits}
        part = next((kinds[name] for name in kinds if name in body), commands)
        return part.replay(body)
    seed = options.seed or str(random.randrange(1 << 32))
    report = Report(options.output.absolute())
    print(f"seed {seed}, {options.minutes:g} minutes, failures go to {options.output}", flush=True)
    parts = ((files.fuzz_files, 6), (bits.fuzz_bits, 6))
    halves = ((rounds.fuzz_tokenizers, 24), (commands.fuzz_commands, 24))
    for fuzz, seconds in (*parts, *halves):  # of each minute
        fuzz(seed, time.monotonic() + options.minutes * seconds, report)
    print(report.summary())
    return int(bool(report.failures))


if __name__ == "__main__":
    sys.exit(main())
