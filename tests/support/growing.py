"""Datasets that grow: small inputs, one pair of tokenizers, and what a reader then sees."""

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from beam_jobs.align.command import align
from beam_jobs.align.options import AlignOptions
from beam_jobs.running.run_options import RunOptions
from pipeline.dataset.chosen_documents import select_documents
from pipeline.dataset.files import open_dataset
from schemas.document import decode_document
from schemas.manifest import Manifest
from tests.support.datasets import byte_level

QUIET = RunOptions(quiet=True)


def write_input(path: Path, ids: Iterable[str], *, repeat: int = 3) -> Path:
    """Write documents whose text is a function of their id, as JSON lines."""
    lines = [
        {"id": name, "text": f"{name}: the law of large numbers. " * repeat, "source": name[0]}
        for name in ids
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    return path


def options(root: Path, inputs: Path, *, append: bool = False, **changes: object) -> AlignOptions:
    """Return the options that let a dataset `root/aligned` begin, or grow by some input."""
    for side, size in (("student", 300), ("teacher", 340)):
        path = root / f"{side}.json"
        if not path.exists():
            path.write_bytes(byte_level(size).file_bytes)
    values: dict[str, object] = {
        "input": (str(inputs),),
        "output": str(root / "aligned"),
        "student": str(root / "student.json"),
        "teacher": str(root / "teacher.json"),
        "append": append,
        "metadata": "source",
        "shard_bytes": 1 << 14,
        "max_dead_letters": 1.0,
        "run": QUIET,
    }
    return AlignOptions(**{**values, **changes})  # type: ignore[arg-type]


def grow(
    root: Path, name: str, ids: Iterable[str], *, repeat: int = 3, **changes: object
) -> Manifest:
    """Align documents into `root/aligned`, which they begin, or become the next generation of."""
    exists = (root / "aligned" / "manifest.json").exists()
    inputs = write_input(root / "in" / f"{name}.jsonl", ids, repeat=repeat)
    return align(options(root, inputs, append=exists, **changes))


def documents(folder: Path, generation: int | None = None) -> dict[str, tuple[object, ...]]:
    """Return what a reader sees of each document: ids, offsets and spans as they are stored."""
    dataset = open_dataset(str(folder), generation=generation)
    found: dict[str, tuple[object, ...]] = {}
    for shard, kept in enumerate(select_documents(dataset).each(lambda _, kept: kept)):
        index = dataset.read_index(shard, with_names=True)
        places = range(len(index)) if kept is None else np.flatnonzero(kept).tolist()
        sources = index.metadata["source"].to_pylist()
        for place, sample in dataset.samples(shard, index, documents=places):
            assert index.document_id[place] not in found
            found[index.document_id[place]] = (sources[place], *_content(sample))
    return found


def _content(sample: memoryview) -> tuple[object, ...]:
    document = decode_document(sample)
    arrays = [document.teacher_spans]
    for side in (document.student, document.teacher):
        arrays += [side.input_ids, side.byte_offsets]
    return document.text_sha256, *(array.tolist() for array in arrays)
