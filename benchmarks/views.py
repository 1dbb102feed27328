"""What a view costs: bytes a teacher token, and CPU time beside an alignment of the same corpus.

    python benchmarks/views.py [--megabytes 24] [--rounds 3]

A dataset of real text, none of it kept, is made once. Then two commands take turns, each in a
process of its own: `align` with another teacher, and `add-teacher` of that one, which first spells
each text from the student's ids. CPU time is that of the whole process, libraries and tokenizers
loaded, so that both pay what a user pays; medians of ratios of a round decide. Sizes count
everything that a view adds, indices and all. The exit code is 1 where a target is missed.
"""

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from align import find_tokenizer_file
from corpus import Corpus, write_corpus
from measure import Report, measure, run_process

from schemas.manifest import MANIFEST_FILE, decode_manifest

MB = 10**6
STUDENT, TEACHER, OTHER = "llama2", "deepseek_llm", "qwen2_5"
MOST_BYTES = 6.0
LEAST_SPEED = 0.5


def main() -> int:
    """Measure, print, and say whether the targets hold."""
    options = parse_arguments()
    report = Report()
    with tempfile.TemporaryDirectory(prefix="vocag-views-") as name:
        folder = Path(name)
        corpus = write_corpus(folder / "corpus", int(options.megabytes * MB))
        print(f"  corpus: {corpus.describe()}")
        align(corpus, folder / "data", TEACHER)
        for teacher in (OTHER, "smollm2", "mistral"):
            measure_size(folder, teacher, report)
        measure_speed(folder, corpus, options.rounds, report)
    if report.missed:
        print(f"missed: {', '.join(report.missed)}")
    return 1 if report.missed else 0


def align(corpus: Corpus, output: Path, teacher: str) -> None:
    """Align the corpus with a teacher, in a process of its own."""
    inputs: list[str | Path] = [part for path in corpus.files for part in ("--input", path)]
    tokenizers: list[str | Path] = ["--student", _file(STUDENT), "--teacher", _file(teacher)]
    run_process(["-m", "beam_jobs.align", *inputs, "--output", output, *tokenizers, "--quiet"])


def add_teacher(dataset: Path, teacher: str) -> None:
    """Add a teacher to a dataset, likewise."""
    command: list[str | Path] = [
        "-m",
        "beam_jobs.views.add_teacher",
        dataset,
        "--teacher",
        _file(teacher),
    ]
    run_process([*command, "--name", teacher, "--quiet"])


def measure_size(folder: Path, teacher: str, report: Report) -> None:
    """Print what a view of this teacher takes."""
    add_teacher(folder / "data", teacher)
    manifest = decode_manifest((folder / "data" / MANIFEST_FILE).read_bytes())
    view = next(view for view in manifest.views if view.name == teacher)
    num_tokens = sum(file.num_tokens for file in view.files)
    sizes = {
        "documents": sum(file.num_bytes for file in view.files),
        "indices": sum(file.index_num_bytes for file in view.files),
        "of the manifest": len(json.dumps(view, default=vars)),
    }
    parts = ", ".join(f"{what} {size / num_tokens:.3f}" for what, size in sizes.items())
    report.say(f"{teacher} for {STUDENT}", f"{num_tokens:,} teacher tokens: {parts}")
    each = sum(sizes.values()) / num_tokens
    report.check("bytes a teacher token", each, most=MOST_BYTES, unit="bytes")


def measure_speed(folder: Path, corpus: Corpus, rounds: int, report: Report) -> None:
    """Print the CPU time of adding a teacher beside that of aligning with it."""

    def prepare_align() -> Callable[[], object]:
        shutil.rmtree(folder / "fresh", ignore_errors=True)
        return lambda: align(corpus, folder / "fresh", OTHER)

    def prepare_view() -> Callable[[], object]:
        shutil.rmtree(folder / "viewed", ignore_errors=True)
        shutil.copytree(folder / "data", folder / "viewed")
        path = folder / "viewed" / MANIFEST_FILE
        body = json.loads(path.read_bytes())
        del body["views"]
        path.write_text(json.dumps(body))
        return lambda: add_teacher(folder / "viewed", OTHER)

    times = measure({"align": prepare_align, "add-teacher": prepare_view}, rounds)
    for name in ("align", "add-teacher"):
        cpu = sorted(times.cpu[name])
        report.say(f"{name}, CPU", f"{cpu[len(cpu) // 2]:.1f} s ({cpu[0]:.1f} to {cpu[-1]:.1f})")
    ratio = times.cpu_ratio("align", "add-teacher")
    report.check("add-teacher's speed by align's, in CPU time", ratio, least=LEAST_SPEED)


def parse_arguments() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=float, default=24.0, help="of text")
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


def _file(name: str) -> Path:
    return find_tokenizer_file(name)


if __name__ == "__main__":
    sys.exit(main())
