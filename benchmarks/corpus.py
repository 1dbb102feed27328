"""Real text from what is already installed, without repeating any: the corpus of the benchmarks.

    python benchmarks/corpus.py --output /tmp/corpus --bytes 100MB

One document per source file of the installed packages (docstrings included), and one per problem of
a folder of mathematical benchmarks where there is one. Documents are taken in the order of a hash
of their names, so that every prefix is the same mixture, and equal texts are taken once.
"""

import argparse
import sysconfig
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import orjson

from beam_jobs.align.options import parse_size

SHARED = Path(__file__).resolve().parents[2] / "shared"
"""A folder next to the repository, with data that is used if it exists."""

SOURCE_SUFFIXES = {".py", ".pyi", ".h", ".hpp", ".cuh", ".md", ".rst", ".txt"}
MIN_DOCUMENT_BYTES = 200
MAX_DOCUMENT_BYTES = 1 << 20


class CorpusError(ValueError):
    """This machine does not hold as much text as asked for."""


@dataclass(frozen=True)
class Corpus:
    """JSON lines files with fields "id" and "text".

    Attributes:
        files: the files.
        num_documents: documents in them.
        num_bytes: UTF-8 bytes of the texts.
        by_origin: bytes by where they came from, the largest first.
        num_equal: documents left out because their text was there already.
    """

    files: tuple[Path, ...]
    num_documents: int
    num_bytes: int
    by_origin: dict[str, int]
    num_equal: int

    def describe(self, most: int = 6) -> str:
        """Return what was used, in one line."""
        largest = list(self.by_origin.items())[:most]
        rest = len(self.by_origin) - len(largest)
        parts = [f"{origin} {count / 1e6:.1f}" for origin, count in largest]
        more = f", and {rest} more" if rest > 0 else ""
        return (
            f"{self.num_documents:,} documents, {self.num_bytes / 1e6:.1f} MB, in "
            f"{len(self.files)} files; {self.num_equal:,} equal ones left out "
            f"(MB by origin: {', '.join(parts)}{more})"
        )


def write_corpus(
    folder: Path, num_bytes: int, *, num_files: int = 1, num_copies: int = 1
) -> Corpus:
    """Write a corpus of real text.

    Args:
        folder: where the files go.
        num_bytes: of distinct text.
        num_files: files for it.
        num_copies: 2 and more write the same text again under new ids, in files of their own; only
            for measurements that the repetition can't flatter.

    Raises:
        CorpusError: the machine holds less text.

    Example:
        >>> write_corpus(Path("/tmp/corpus"), 10**8).num_bytes >= 10**8
        True
    """
    folder.mkdir(parents=True, exist_ok=True)
    seen: set[bytes] = set()
    origins: Counter[str] = Counter()
    num_equal = 0
    paths = [folder / f"part-{place:03d}.jsonl" for place in range(num_files)]
    outputs = [path.open("wb") for path in paths]
    for origin, name, text in documents():
        digest = sha256(text.encode()).digest()
        if digest in seen:
            num_equal += 1
            continue
        outputs[len(seen) % num_files].write(orjson.dumps({"id": name, "text": text}) + b"\n")
        seen.add(digest)
        origins[origin] += len(text.encode())
        if origins.total() >= num_bytes:
            break
    for output in outputs:
        output.close()
    found = origins.total()
    if found < num_bytes:
        raise CorpusError(
            f"only {found / 1e6:.0f} MB of distinct text found of {num_bytes / 1e6:.0f} MB asked "
            "for; install more packages or ask for less"
        )
    paths += [_copy(path, copy) for copy in range(1, num_copies) for path in paths[:num_files]]
    by_origin = {name: count * num_copies for name, count in origins.most_common()}
    return Corpus(tuple(paths), len(seen) * num_copies, found * num_copies, by_origin, num_equal)


def write_sample(corpus: Corpus, path: Path, num_bytes: int) -> Corpus:
    """Write about `num_bytes` of a corpus's documents, spread evenly over it."""
    stride = max(1, corpus.num_bytes // num_bytes)
    taken = taken_bytes = 0
    with path.open("wb") as output:
        for place, (name, text) in enumerate(read_documents(corpus.files)):
            if place % stride == 0:
                output.write(orjson.dumps({"id": name, "text": text.decode()}) + b"\n")
                taken, taken_bytes = taken + 1, taken_bytes + len(text)
    return Corpus((path,), taken, taken_bytes, {"a sample": taken_bytes}, 0)


def read_documents(files: Sequence[Path]) -> Iterator[tuple[str, bytes]]:
    """Yield (id, UTF-8 text) of JSON lines files."""
    for path in files:
        with path.open("rb", buffering=1 << 20) as file:
            for line in file:
                record = orjson.loads(line)
                yield record["id"], record["text"].encode()


def documents() -> Iterator[tuple[str, str, str]]:
    """Yield (origin, name, text) of all documents on this machine, in the order of a hash."""
    packages = Path(sysconfig.get_paths()["purelib"])
    candidates: list[tuple[str, Path, int | None]] = [
        (str(path.relative_to(packages)), path, None)
        for path in packages.rglob("*")
        if path.suffix in SOURCE_SUFFIXES and path.is_file()
    ]
    for path in sorted((SHARED / "data/benchmarks").glob("*.jsonl")):
        num_lines = sum(1 for _ in path.open("rb"))
        candidates += [(f"{path.name}#{line}", path, line) for line in range(num_lines)]
    # Not the plain hash of the name, by which documents find their buckets: a prefix of that order
    # would be a job of few, full buckets.
    candidates.sort(key=lambda candidate: sha256(f"order {candidate[0]}".encode()).digest())
    lines: dict[Path, list[bytes]] = {}
    for name, path, line in candidates:
        if line is None:
            text = _read_source(path)
        else:
            text = _join_strings(orjson.loads(lines.setdefault(path, _read_lines(path))[line]))
        if MIN_DOCUMENT_BYTES <= len(text.encode()) <= MAX_DOCUMENT_BYTES:
            yield name.split("/")[0].split("#")[0], name, text


def _read_source(path: Path) -> str:
    """Return a file's text, "" where it is not UTF-8."""
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError:
        return ""


def _read_lines(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines()


def _join_strings(record: object) -> str:
    """Return all strings of a JSON record, one a line: problem, options, solution."""
    if isinstance(record, str):
        return record
    if not isinstance(record, dict | list):
        return ""
    parts = record.values() if isinstance(record, dict) else record
    return "\n".join(filter(None, map(_join_strings, parts)))


def _copy(path: Path, copy: int) -> Path:
    """Write a file's documents again under new ids."""
    target = path.with_stem(f"{path.stem}-copy-{copy}")
    with target.open("wb") as output:
        for name, text in read_documents([path]):
            record = {"id": f"copy {copy} of {name}", "text": text.decode()}
            output.write(orjson.dumps(record) + b"\n")
    return target


def main() -> None:
    """Write a corpus and say what is in it."""
    parser = argparse.ArgumentParser(description="Write real text as JSON lines.")
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--bytes", type=parse_size, default=10**8, metavar="SIZE")
    parser.add_argument("--files", type=int, default=1)
    parser.add_argument("--copies", type=int, default=1, help="the same text under new ids")
    options = parser.parse_args()
    corpus = write_corpus(
        options.output, options.bytes, num_files=options.files, num_copies=options.copies
    )
    print(corpus.describe(most=20))


if __name__ == "__main__":
    main()
