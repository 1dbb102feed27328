"""What other people's runners align here, and its dataset made by Beam's own runner."""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.corpus import STUDENT
from tests.support.servers import wait_until

ROOT = Path(__file__).parents[2]
RUN_SECONDS = 3600
MEGABYTES = int(os.environ.get("ENGINE_MEGABYTES", "20"))
NUM_FILES = 8
SLOWLY = "--no-fast-path"
"""Gives the same bytes ten times later: there is a middle of aligning to lose something in."""
TOKENIZERS = ROOT.parent / "shared" / "tokenizers"


@dataclass(frozen=True)
class Workload:
    """The pattern of a corpus of real text in several files, and its dataset, made here."""

    pattern: str
    dataset: Path

    def arguments(self, output: Path, *beam: str) -> list[str]:
        return align_arguments(self.pattern, output, *beam)


def make_workload(folder: Path, *, megabytes: int = MEGABYTES) -> Workload:
    script = str(ROOT / "benchmarks" / "corpus.py")
    size = [f"--bytes={megabytes}MB", f"--files={NUM_FILES}"]
    finish(start([script, f"--output={folder}/corpus", *size]))
    workload = Workload(f"{folder}/corpus/*.jsonl", folder / "local")
    finish(start(workload.arguments(workload.dataset)))
    return workload


def align_arguments(pattern: str, output: Path, *beam: str) -> list[str]:
    """Return a command that aligns with tokenizers that have a fast path."""
    student, teacher = (TOKENIZERS / n / "tokenizer.json" for n in ("llama2", "qwen2_5"))
    if not student.exists():
        student, teacher = Path(STUDENT), Path(STUDENT)
    return [
        "-m", "beam_jobs.align", f"--input={pattern}", f"--output={output}",
        f"--student={student}", f"--teacher={teacher}", "--shard-bytes=1MiB", *beam,
    ]  # fmt: skip


def external(address: str) -> list[str]:
    return ["--environment_type=EXTERNAL", f"--environment_config={address}"]


def start(
    arguments: Sequence[str],
    *,
    on: Callable[..., list[str]] = lambda *command: list(command),
    environment: Mapping[str, str] = os.environ,
) -> "subprocess.Popen[str]":
    """Start Python with a module's or script's arguments; `on` makes a command run elsewhere."""
    return subprocess.Popen(
        on(sys.executable, *arguments),
        env={**environment, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: "subprocess.Popen[str]") -> str:
    """Wait for a command that must succeed; return what it said."""
    said, _ = process.communicate(timeout=RUN_SECONDS)
    assert process.returncode == 0, said
    return said


def await_commits(process: "subprocess.Popen[str]", output: Path, count: int) -> None:
    """Wait until a job has finished so many buckets, and is in the middle of aligning."""

    def enough() -> bool:
        return len(list(output.glob(".vocag-*/commit-*.json"))) >= count

    assert wait_until(enough, process, seconds=RUN_SECONDS), "the job ended too early"
    assert not (output / "manifest.json").exists()
