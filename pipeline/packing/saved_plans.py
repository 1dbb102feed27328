"""Plans on disk: made once per dataset and rules, memory-mapped by every process.

A plan is a folder of `.npy` files and a `plan.json` with its inputs and the files' SHA-256, all
checked on opening; a plan that fails is made again. A folder appears only when complete.
"""

import fcntl
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.command_line.failures import naming
from pipeline.command_line.folder_lock import NO_LOCKS
from pipeline.command_line.links import open_unlinked, refuse_link
from pipeline.dataset.chosen_documents import (
    ChosenDocuments,
    Kept,
    require_documents,
    select_documents,
)
from pipeline.dataset.conditions import WhereError
from pipeline.dataset.dataset_reading import find_generation
from pipeline.dataset.files import Dataset
from pipeline.packing.plan import SEGMENT, RowPlan, SplitShard, Splitter, plan_rows, require_sound
from pipeline.packing.rules import PackingRules
from schemas.errors import DatasetError
from schemas.index import ShardIndex
from schemas.records import Sha256, read_record

logger = logging.getLogger(__name__)

FORMAT = 1
"""Raised when the arrays or the packing change, so no old plan is taken for a new one."""

_PLANS_FOLDER, _ABOUT = "plans", "plan.json"
_ABANDONED_SECONDS = 3600.0
"""After these a killed process's half plan is removed; some file systems' locks end at the host."""


@dataclass(frozen=True, eq=False)
class SampleTable:
    """Places of N samples over all shards, columns as in `ShardIndex`."""

    payload_offset: NDArray[np.int64]
    payload_bytes: NDArray[np.uint32]
    crc32: NDArray[np.uint32]
    num_student_tokens: NDArray[np.uint32]
    num_teacher_tokens: NDArray[np.uint32]
    shard_document_starts: NDArray[np.int64]


Saved = tuple[RowPlan, SampleTable]


@dataclass(frozen=True)
class _PlanRecord:
    fingerprint: Sha256
    rules: PackingRules
    where: str
    scores: str
    sha256: Mapping[str, Sha256]

    @property
    def folder_name(self) -> str:
        name = f"{self.fingerprint[:16]}-{self.rules.fingerprint[:16]}-v{FORMAT}"
        chosen = (self.where + self.scores).encode()
        return f"{name}-{sha256(chosen).hexdigest()[:16]}" if self.where else name


def load_plan(documents: ChosenDocuments, rules: PackingRules, *, cache_folder: Path) -> Saved:
    """Load a dataset's plan, memory-mapped; make it first if necessary.

    It is in the dataset's `plans/`, or in the cache if that is remote or read-only.

    Raises:
        WhereError: there are no documents.
        DamagedShardError: an index is missing or differs from the manifest.
        LinkError: a link is in the plan's place.
    """
    own = plan_folder(documents, rules, cache_folder=cache_folder)
    beside = Path(documents.dataset.location, _PLANS_FOLDER, own.name)
    for folder in filter(Path.exists, dict.fromkeys((beside, own))):
        try:
            return _load(folder, documents, rules)
        except (OSError, ValueError) as error:
            logger.warning("plan %s is not used, but made again: %s", folder, error)
    lock = own.with_suffix(".lock")
    if own == beside:
        for path in (own.parent, own):
            refuse_link(str(path))
    own.parent.mkdir(parents=True, exist_ok=True)
    with _held(lock):
        with suppress(OSError, ValueError):  # if another process has just made it
            return _load(own, documents, rules)
        arrays = _make_arrays(documents, rules)
        with naming(str(own)):
            _write(own, arrays, _record(documents, rules))
    return _load(own, documents, rules)


def plan_folder(documents: ChosenDocuments, rules: PackingRules, *, cache_folder: Path) -> Path:
    """Return the folder for a plan."""
    dataset, name = documents.dataset, _record(documents, rules).folder_name
    beside = Path(dataset.location) / _PLANS_FOLDER
    if dataset.is_local and os.access(beside if beside.exists() else dataset.location, os.W_OK):
        return beside / name
    return cache_folder / _PLANS_FOLDER / name


def check_plans(dataset: Dataset) -> tuple[list[str], list[str]]:
    """Return messages about altered and about stale plans next to a dataset.

    A stale plan is another dataset's, or its documents can't be chosen.
    """
    altered, stale = list[str](), list[str]()
    for folder in sorted(Path(dataset.location, _PLANS_FOLDER).glob("[!.]*/")):
        name = f"{_PLANS_FOLDER}/{folder.name}"
        try:
            about = read_record((folder / _ABOUT).read_bytes(), _PlanRecord)
            if about.folder_name != folder.name:
                raise ValueError(f"{_ABOUT} describes {about.folder_name}")
            number = find_generation(dataset.manifest, about.fingerprint)
            if number is None:
                raise WhereError("the dataset has no such generation")
            documents = select_documents(dataset.at_generation(number), about.where)
            if documents.scores_digest != about.scores:
                raise WhereError("documents were chosen by different losses")
            plan, samples = _load(folder, documents, about.rules)
            found = {**vars(samples), **vars(plan)}
            for array, made in _make_arrays(documents, about.rules).items():
                if not np.array_equal(found[array], made):
                    raise ValueError(f"the dataset gives other {array}")
        except (WhereError, DatasetError) as error:
            stale.append(f"{name} was not compared, and no run will read it: {error}")
        except (OSError, ValueError) as error:
            altered.append(f"{name} was altered ({error}): delete it")
    return altered, stale


def _record(documents: ChosenDocuments, rules: PackingRules) -> _PlanRecord:
    fingerprint = documents.dataset.manifest.fingerprint
    return _PlanRecord(fingerprint, rules, documents.where, documents.scores_digest, {})


def _make_arrays(selection: ChosenDocuments, rules: PackingRules) -> dict[str, NDArray[Any]]:
    started = time.monotonic()
    # Only an index's columns for reading samples are kept.
    kept: list[dict[str, NDArray[np.integer]]] = []

    def each(split: Splitter) -> Iterator[SplitShard]:
        def keep(index: ShardIndex, chosen: Kept) -> tuple[dict[str, Any], SplitShard]:
            columns = {
                name: getattr(index, name).astype(to) for name, to in _SAMPLE_COLUMNS.items()
            }
            return columns, split(index, chosen)

        for columns, result in selection.each(keep):
            kept.append(columns)
            yield result

    plan = plan_rows(each, rules)
    require_documents(len(plan), selection)
    student_padding, teacher_padding = plan.padding()
    logger.info(
        "planned %d rows of %d documents in %.1f s: %.2f %% student padding, %.2f %% teacher "
        "padding, %d forced segments",
        len(plan),
        plan.shard_document_starts[-1],
        time.monotonic() - started,
        100 * student_padding,
        100 * teacher_padding,
        plan.num_forced_segments,
    )
    arrays = {
        name: np.concatenate([np.empty(0, dtype), *(columns[name] for columns in kept)])
        for name, dtype in _SAMPLE_COLUMNS.items()
    }
    return arrays | {name: getattr(plan, name) for name in _PLAN_ARRAYS}


@contextmanager
def _held(lock: Path) -> Iterator[None]:
    """Wait for a lock; on a file system without locks two processes may make one plan."""
    with open(lock, "a", opener=open_unlinked) as file:
        try:
            with naming(str(lock)):
                fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
        yield


def _remove_abandoned(folder: Path) -> None:
    """Remove a plan's halves that killed processes left."""
    for left in folder.parent.glob(f".{folder.name}-????????"):
        with suppress(FileNotFoundError):  # another process's, whole by now
            if time.time() - left.stat().st_mtime > _ABANDONED_SECONDS:
                shutil.rmtree(left, ignore_errors=True)


def _write(folder: Path, arrays: dict[str, NDArray[Any]], about: _PlanRecord) -> None:
    _remove_abandoned(folder)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        for name, array in arrays.items():
            np.save(temporary / f"{name}.npy", array)
        body = asdict(about) | {"sha256": {name: _digest(temporary, name) for name in arrays}}
        (temporary / _ABOUT).write_text(json.dumps(body, indent=1) + "\n")
        temporary.chmod(0o755)
        shutil.rmtree(folder, ignore_errors=True)  # an unusable one; processes that map it keep it
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _digest(folder: Path, name: str) -> str:
    with (folder / f"{name}.npy").open("rb") as file:
        return file_digest(file, "sha256").hexdigest()


def _load(folder: Path, documents: ChosenDocuments, rules: PackingRules) -> Saved:
    """Load a saved plan; ValueError or OSError if it doesn't fit."""
    about = read_record((folder / _ABOUT).read_bytes(), _PlanRecord)
    for name, value in vars(_record(documents, rules)).items():
        if name != "sha256" and getattr(about, name) != value:
            raise ValueError(f"its {name} is {getattr(about, name)}, not {value}")

    def array(name: str, dtype: Any) -> NDArray[Any]:
        if _digest(folder, name) != about.sha256.get(name):
            raise ValueError(f"the SHA-256 of {name}.npy isn't the one in {_ABOUT}")
        try:
            # A plain array: indexing the memmap class costs microseconds.
            found = np.asarray(np.load(folder / f"{name}.npy", mmap_mode="r"))
        except Exception as error:  # numpy evaluates the header, which may raise anything
            raise ValueError(f"{name}.npy can't be read: {error}") from error
        if (found.dtype, found.ndim) != (dtype, 1):
            raise ValueError(f"{name}.npy holds {found.dtype} {found.shape}, not {dtype}")
        return found

    plan = RowPlan(rules, **{name: array(name, dtype) for name, dtype in _PLAN_ARRAYS.items()})
    columns = {name: array(name, dtype) for name, dtype in _SAMPLE_COLUMNS.items()}
    starts = np.cumsum([0, *(shard.num_documents for shard in documents.dataset.manifest.shards)])
    sizes = {len(column) for column in columns.values()}
    if not np.array_equal(plan.shard_document_starts, starts) or sizes != {int(starts[-1])}:
        raise ValueError("its shards don't have the manifest's numbers of documents")
    require_sound(plan, columns["num_student_tokens"], columns["num_teacher_tokens"])
    return plan, SampleTable(**columns, shard_document_starts=plan.shard_document_starts)


_PLAN_ARRAYS = {
    field.name: SEGMENT if field.name == "segments" else np.int64
    for field in fields(RowPlan)
    if field.name != "rules"
}
_SAMPLE_COLUMNS = {
    "payload_offset": np.int64,
    "payload_bytes": np.uint32,
    "crc32": np.uint32,
    "num_student_tokens": np.uint32,
    "num_teacher_tokens": np.uint32,
}
