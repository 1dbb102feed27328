"""A small corpus with every kind of input and of damage, and one reference run over it."""

import atexit
import gzip
import hashlib
import json
import random
import shutil
import tempfile
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from beam_jobs.align.command import align
from beam_jobs.align.inputs.decompression import zstd
from beam_jobs.align.options import AlignOptions
from tests.support.tokenizer_zoo import PACKAGED, source

STUDENT = str(PACKAGED["mistral_v1"])
TEACHER = str(PACKAGED["deepseek"])
PATTERN = "in/**"
SHARD_BYTES = 1 << 17
MAX_DOCUMENT_BYTES = 1 << 16
NOT_COMPARED = ("report.html", "README.md", "inputs.json")
"""Files of a dataset that hold times, or what differs between places."""

_SENTENCE = (
    "the prime numbers ∑ x² ≥ 0 λ-calculus Ω naïve éclair 北京 是 大 城市 🤗 👩‍👩‍👧 مرحبا <s> </s> "
    "<|endoftext|> def f(x): return x**2 and integral ∫ theorem proof QED e\u0301 1234567"
)
_WORDS = tuple(_SENTENCE.split())
_SPACES = (" ", " ", " ", "  ", "\n", "\t")


@dataclass(frozen=True)
class Corpus:
    """Files below `in/`, the usable texts in them, and how many dead letters by reason."""

    folder: Path | str
    texts: dict[str, str] = field(default_factory=dict)
    dead: Counter[str] = field(default_factory=Counter)

    @property
    def num_documents(self) -> int:
        return len(self.texts) + self.dead.total()


@cache
def reference_dataset() -> tuple[Corpus, Path]:
    """Write the corpus once and align it in memory; every other run must give the same bytes."""
    folder = Path(tempfile.mkdtemp(prefix="vocag-reference-"))
    atexit.register(shutil.rmtree, folder)
    corpus = write_corpus(folder / "corpus")
    output = folder / "dataset"
    align(align_options(corpus, output))
    return corpus, output


def align_options(corpus: Corpus, output: Path, *beam: str, **changes: object) -> AlignOptions:
    """Return the options that every run over the corpus shares; small tokenizers load at once."""
    values: dict[str, object] = {
        "input": (f"{corpus.folder}/{PATTERN}",),
        "output": str(output),
        "student": str(source("sentencepiece_bpe")),
        "teacher": str(source("gpt2_like")),
        "shard_bytes": SHARD_BYTES,
        "max_document_bytes": MAX_DOCUMENT_BYTES,
        "max_dead_letters": 1.0,  # bad documents are what it is for
        "beam_arguments": beam,
    }
    return AlignOptions(**{**values, **changes})  # type: ignore[arg-type]


def command_line(options: AlignOptions) -> list[str]:
    """Return the arguments that give these options."""
    arguments = [f"--input={pattern}" for pattern in options.input]
    names = ("output", "student", "teacher", "shard_bytes", "max_document_bytes")
    for name in (*names, "max_dead_letters"):
        arguments.append(f"--{name.replace('_', '-')}={getattr(options, name)}")
    return [*arguments, *options.beam_arguments]


def digests(output: Path) -> dict[str, str]:
    """Return the SHA-256 of every file of a dataset, but for `NOT_COMPARED`."""
    return {
        str(path.relative_to(output)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(output.rglob("*"))
        if path.is_file() and path.name not in NOT_COMPARED
    }


def write_corpus(folder: Path, *, num_documents: int = 400) -> Corpus:
    """Write documents to every format, and bad ones of every kind among them."""
    inputs = folder / "in"
    (inputs / "notes").mkdir(parents=True)
    texts = {f"doc-{number}": make_text(number) for number in range(num_documents)}
    names = list(texts)
    quarter = num_documents // 4
    lines = [json_line(name, texts[name]) for name in names]
    bad, dead = bad_lines()
    plain = lines[:quarter]
    for place, line in enumerate(bad):
        plain.insert(place * 3, line)
    (inputs / "a.jsonl").write_bytes(b"".join(plain) + b"\n  \n")
    (inputs / "b.jsonl.gz").write_bytes(gzip.compress(b"".join(lines[quarter : 2 * quarter])))
    frames = [lines[2 * quarter : 2 * quarter + 9], lines[2 * quarter + 9 : 3 * quarter]]
    compress = zstd.compress
    (inputs / "c.jsonl.zst").write_bytes(b"".join(compress(b"".join(frame)) for frame in frames))
    table = pa.table({"id": names[3 * quarter :], "text": [texts[n] for n in names[3 * quarter :]]})
    pq.write_table(table, inputs / "d.parquet", row_group_size=17)
    texts[names[-1]] = "the same id, later in another file"  # which comes first: a.jsonl
    texts |= _write_odd_files(inputs, dead)
    return Corpus(folder, texts, dead)


def bad_lines() -> tuple[list[bytes], Counter[str]]:
    """Return lines that can't be samples, and the reasons they must get."""
    cases: list[tuple[bytes, str]] = [
        (b'{"id": "cut", "text": "x', "bad_json"),
        (b'["a list"]', "bad_json"),
        (b'{"id": "none"}', "missing_text"),
        (b'{"id": "null", "text": null}', "missing_text"),
        (b'{"id": "number", "text": 7}', "text_not_a_string"),
        (b'{"id": "empty", "text": ""}', "empty_text"),
        (b'{"id": "lone", "text": "\\ud800"}', "invalid_unicode"),
        (b'{"id": "latin", "text": "\xff"}', "invalid_unicode"),
        (b'{"id": {"a": 1}, "text": "x"}', "bad_id"),
        (b'{"id": 1.5, "text": "x"}', "bad_id"),
        (json.dumps({"id": "large", "text": "y" * (MAX_DOCUMENT_BYTES + 1)}).encode(), "too_large"),
        (b'{"id": "long line", "text": "' + b"z" * (4 * MAX_DOCUMENT_BYTES) + b'"}', "too_large"),
        (b'{"id": "doc-1", "text": "the same id again"}', "duplicate_id"),
        (b'{"id": "doc-399", "text": "the same id, later in another file"}', "duplicate_id"),
    ]
    return [line + b"\n" for line, _ in cases], Counter(reason for _, reason in cases)


def small_corpus(folder: Path, **files: Sequence[bytes]) -> Corpus:
    """Write files of JSON lines, named by what they are given as."""
    (folder / "in").mkdir(parents=True)
    for name, lines in files.items():
        (folder / "in" / f"{name}.jsonl").write_bytes(b"".join(lines))
    return Corpus(folder)


def fail(*_: object, **__: object) -> None:
    """Take the place of a function that a job calls."""
    raise RuntimeError("injected")


def json_line(document_id: str | int | None, text: str) -> bytes:
    """Return a line of JSON; None leaves the id out."""
    record = {"text": text} if document_id is None else {"id": document_id, "text": text}
    return (json.dumps(record) + "\n").encode()


def make_text(seed: int, *, words: Sequence[str] = _WORDS) -> str:
    """Return a text of a few hundred words in several scripts, special strings among them."""
    generator = random.Random(seed)
    return "".join(
        generator.choice(words) + generator.choice(_SPACES)
        for _ in range(generator.randint(1, 400))
    )


def _write_odd_files(inputs: Path, dead: Counter[str]) -> dict[str, str]:
    """Write text files, documents without ids and a cut file; return their usable texts."""
    texts = {}
    (inputs / "notes" / "one.txt").write_text("One document a file.\n", "utf-8")
    texts["notes/one.txt#0"] = "One document a file.\n"
    (inputs / "notes" / "two.txt.gz").write_bytes(gzip.compress("Two: ∞".encode()))
    texts["notes/two.txt.gz#0"] = "Two: ∞"
    (inputs / "notes" / "empty.txt").write_bytes(b"")
    dead["empty_text"] += 1
    first, second = json_line(None, "no id"), json_line(12, "a number")
    (inputs / "e.ndjson").write_bytes(b"\xef\xbb\xbf" + first + second + first)
    texts |= {"e.ndjson#0": "no id", "12": "a number"}
    texts[f"e.ndjson#{3 + len(first) + len(second)}"] = "no id"
    whole = gzip.compress(b"".join(json_line(f"cut-{n}", make_text(n)) for n in range(40)))
    half = whole[: len(whole) // 2]
    (inputs / "f.jsonl.gz").write_bytes(half)
    dead["unreadable_input"] += 1
    num_whole_lines = zlib.decompressobj(31).decompress(half).count(b"\n")
    assert 0 < num_whole_lines < 40
    texts |= {f"cut-{n}": make_text(n) for n in range(num_whole_lines)}
    return texts
