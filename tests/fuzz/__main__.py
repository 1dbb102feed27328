"""`python -m tests.fuzz`: the command line."""

import argparse
import json
import os
import random
import sys
import time
import warnings
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # processes fork

from tests.fuzz import commands, files, rounds
from tests.fuzz.report import Report


def main() -> int:
    """Fuzz for some minutes, or try one failure again; return 1 where something failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument(
        "--minutes", type=float, default=20, help="a tenth for files, the rest for two halves"
    )
    parser.add_argument("--seed", help="draws the same tokenizers, texts, commands and faults")
    parser.add_argument("--output", type=Path, default=Path("fuzz"), help="where failures go")
    parser.add_argument("--replay", type=Path, help="try one failure again")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
    if options.replay:
        body = json.loads(options.replay.read_bytes())
        part = files if "trial" in body else rounds if "texts" in body else commands
        return part.replay(body)
    seed = options.seed or str(random.randrange(1 << 32))
    report = Report(options.output.absolute())
    print(f"seed {seed}, {options.minutes:g} minutes, failures go to {options.output}", flush=True)
    files.fuzz_files(seed, time.monotonic() + options.minutes * 6, report)
    for half in (rounds.fuzz_tokenizers, commands.fuzz_commands):
        half(seed, time.monotonic() + options.minutes * 27, report)
    print(report.summary())
    return int(bool(report.failures))


if __name__ == "__main__":
    sys.exit(main())
