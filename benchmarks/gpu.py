"""What a GPU shows of vocag, in eight minutes: speeds, memory, and whether it is right.

    python benchmarks/gpu.py WORK [--minutes 8] [--only matmul plain full …]

Needs vocag[hf,test] and 60 GB in WORK for a GPU of 80 GB; nothing is fetched. Parts run in the
order of what they tell, each in a process and with a limit of its own, so that one that hangs or
fails costs the others nothing. Those for which no time is left are named: `--only` runs them later,
in the same WORK. Results are appended to WORK/results.jsonl as they come, with the end of a failed
part's log, which lies next to it; what a part leaves on the disk goes before the next. The table at
the end compares with the plain loop of transformers, of the same run. Megatron's parts are skipped
without megatron-core. `--device cpu --small --minutes 60` tries all of it with tiny models on a
machine without a GPU, each part with ten times its limit.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from gpu_results import note, read_results

ROOT = Path(__file__).resolve().parents[1]
# Seconds at most, in the order in which parts run.
LIMITS = {
    "matmul": 40,
    "data": 120,
    "plain": 45,
    "full": 60,
    "tests": 100,
    "parity": 120,
    "stored": 100,
    "teacher": 60,
    "distill": 75,
    "alm": 60,
    "score": 110,
    "running": 120,
    "profile": 60,
    "plain_compiled": 120,
    "full_compiled": 120,
    "megatron_plain": 100,
    "megatron_colocated": 120,
    "megatron_two_worlds": 120,
}
# In which torchrun stops its processes; others need none.
_GRACE, _MEGATRONS_GRACE = 3, 40
# Characters of a failed part's log that its result holds.
_TOLD = 2000
# Seconds of a step by those of the plain loop, at most.
AIMS = {"full": 1.03, "teacher": 0.97, "distill": 1.08, "alm": 1.03}
COLUMNS = ["part", "s a step", "tokens/s", "/ plain", "aim", "peak GiB", "predicted GiB"]
_NEEDED = {
    "stored": ("data",),
    **dict.fromkeys(("plain", "plain_compiled", "full", "full_compiled", "running"), ("data",)),
    **dict.fromkeys(("score", "profile", "megatron_plain", "megatron_colocated"), ("data",)),
    "megatron_two_worlds": ("data",),
    **dict.fromkeys(("teacher", "distill", "alm"), ("data", "stored")),
}


def main() -> None:
    """Run the parts, or one of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("work", type=Path, help="folder for data, models and results")
    parser.add_argument("--minutes", type=float, default=8, help="of all parts (default: 8)")
    parser.add_argument("--only", nargs="+", choices=LIMITS, metavar="PART", default=list(LIMITS),
                        help=f"parts: {', '.join(LIMITS)}")  # fmt: skip
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to try the script")
    parser.add_argument("--small", action="store_true", help="tiny models and texts")
    parser.add_argument("--part", choices=LIMITS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    if options.part:
        from gpu_parts import Bench

        getattr(Bench(options.work.resolve(), options.device, options.small), options.part)()
        return
    failed = run_parts(options)
    print("\n".join(table(read_results(options.work))))
    sys.exit(1 if failed else 0)


def run_parts(options: argparse.Namespace) -> set[str]:
    """Run the chosen parts and what they need, in order; return those that failed."""
    wanted = {*options.only, *(need for part in options.only for need in _NEEDED.get(part, ()))}
    deadline, failed = time.monotonic() + 60 * options.minutes, set[str]()
    for part in (name for name in LIMITS if name in wanted):
        left = deadline - time.monotonic()
        if left < 5:
            note(options.work, part, status="no time left")
            continue
        if missing := failed & set(_NEEDED.get(part, ())):
            note(options.work, part, status=f"left out, as {min(missing)} failed")
            failed.add(part)
            continue
        started = time.monotonic()
        limit = LIMITS[part] * (10 if options.small else 1)
        status = _run_part(options, part, min(limit, left))
        seconds = round(time.monotonic() - started, 1)
        why = "" if status == "done" else _end_of(options.work / f"{part}.log")
        note(options.work, part, status=status, seconds=seconds, log=why)
        print(f"{part}: {status} in {seconds} s", *[why] * bool(why), sep="\n", flush=True)
        failed |= {part} if why else set()
        shutil.rmtree(options.work / "runs", ignore_errors=True)
    return failed


def _run_part(options: argparse.Namespace, part: str, limit: float) -> str:
    command = [sys.executable, __file__, str(options.work), "--part", part]
    command += ["--device", options.device, *(["--small"] if options.small else [])]
    # What is measured is this checkout, not one that is installed.
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    # Else what a part printed before it was stopped would be lost.
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": os.pathsep.join(paths)}
    with (options.work / f"{part}.log").open("w") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, env=environment
        )
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            _stop(process, _MEGATRONS_GRACE if part.startswith("megatron") else _GRACE)
            return f"stopped after {limit:.0f} s"
    return "done" if status == 0 else f"failed with status {status}"


def _end_of(log: Path) -> str:
    """Return the last lines, which say why a part failed."""
    lines = log.read_text("utf-8", errors="replace").replace("\r", "\n").splitlines()
    return "\n".join(line for line in lines if line.strip())[-_TOLD:] or "it printed nothing"


def _stop(process: subprocess.Popen[bytes], grace: float) -> None:
    """Stop a part and what it has started; torchrun, of its group, stops its own processes."""
    deadline = time.monotonic() + grace
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        while time.monotonic() < deadline:
            process.poll()
            os.killpg(process.pid, 0)  # an error, once all have ended
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def table(found: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield the results, in Markdown."""
    machine = found.get("matmul", {})
    yield f"\n{machine.get('machine', 'no machine')}: {machine.get('tflops', '?')} TFLOP/s\n"
    yield f"| {' | '.join(COLUMNS)} |"
    yield "|---" * len(COLUMNS) + "|"
    plain = found.get("plain", {}).get("step")
    for part, values in found.items():
        if "step" in values:
            ratio = f"{values['step'] / plain:.2f}" if plain else "–"
            cells = [f"{values['step']:.3g}", f"{values['tokens_s']:,}", ratio]
            cells += [f"{AIMS[part]:g}" if part in AIMS else "–"]
            cells += [str(values.get(name) or "–") for name in ("peak", "predicted")]
            yield f"| {part} | {' | '.join(cells)} |"
    for part, values in found.items():
        others = {name: value for name, value in values.items() if name not in _OF_STEPS}
        if others:
            yield f"- {part}: {json.dumps(others)}"


_OF_STEPS = {"step", "tokens_s", "peak", "predicted", "machine", "tflops", "losses", "log"}


if __name__ == "__main__":
    main()
