"""Plans on disk: planned once per dataset and rules, then memory-mapped by every process.

A plan is a folder of `.npy` files and a `plan.json` that says what it was planned for. It is
written under a temporary name and renamed, so a folder that exists is complete; processes that
start together wait for the first of them.
"""

import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock
from numpy.typing import NDArray

from pipeline.dataset.selection import ChosenDocuments, Kept, require_documents
from pipeline.packing.plan import RowPlan, SplitShard, Splitter, plan_rows
from pipeline.packing.rules import PackingRules
from schemas.index import ShardIndex

logger = logging.getLogger(__name__)

FORMAT = 1
"""Raised when the arrays or the packing change, so that an old plan is not taken for a new one."""

_PLANS_FOLDER = "plans"


@dataclass(frozen=True, eq=False)
class SampleTable:
    """Where each of N samples lies, over all shards: int64 and uint32 [N], as in `ShardIndex`.

    `shard_document_starts` is int64 [shards + 1]; shard i owns these samples.
    """

    payload_offset: NDArray[np.int64]
    payload_bytes: NDArray[np.uint32]
    crc32: NDArray[np.uint32]
    num_student_tokens: NDArray[np.uint32]
    num_teacher_tokens: NDArray[np.uint32]
    shard_document_starts: NDArray[np.int64]


def load_plan(
    documents: ChosenDocuments, rules: PackingRules, *, cache_folder: Path
) -> tuple[RowPlan, SampleTable]:
    """Return a dataset's plan, memory-mapped, and plan it first if that was not done yet.

    Args:
        documents: of the dataset, those to plan.
        rules: lengths and conventions.
        cache_folder: where plans lie whose dataset is remote or can't be written to; others lie
            in the dataset's folder under `plans/`.

    Raises:
        WhereError: there are none.
        DamagedShardError: an index is missing or is not the manifest's.

    Example:
        >>> plan, samples = load_plan(select_documents(dataset), rules, cache_folder=Path("c"))
    """
    folder = plan_folder(documents, rules, cache_folder=cache_folder)
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_suffix(".lock")):
            if not folder.exists():
                _plan(documents, rules, folder)
    return _load(folder, rules)


def plan_folder(documents: ChosenDocuments, rules: PackingRules, *, cache_folder: Path) -> Path:
    """Return where a plan lies or would lie."""
    dataset = documents.dataset
    name = f"{dataset.manifest.fingerprint[:16]}-{rules.fingerprint[:16]}-v{FORMAT}"
    if documents.where:
        chosen = documents.where + documents.scores_digest
        name += f"-{sha256(chosen.encode()).hexdigest()[:16]}"
    beside = Path(dataset.location) / _PLANS_FOLDER
    if dataset.is_local and (
        (beside / name).exists()
        or os.access(beside if beside.exists() else dataset.location, os.W_OK)
    ):
        return beside / name
    return cache_folder / _PLANS_FOLDER / name


def _plan(selection: ChosenDocuments, rules: PackingRules, folder: Path) -> None:
    started = time.monotonic()
    # Of each index only what reading samples needs is kept.
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
    arrays |= {name: getattr(plan, name) for name in _PLAN_ARRAYS}
    about = {
        "fingerprint": selection.dataset.manifest.fingerprint,
        "rules": asdict(rules),
        "where": selection.where,
        "num_rows": len(plan),
    }
    _write(folder, arrays, about)


def _write(folder: Path, arrays: dict[str, NDArray[np.generic]], about: dict[str, object]) -> None:
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        for name, array in arrays.items():
            np.save(temporary / f"{name}.npy", array)
        (temporary / "plan.json").write_text(json.dumps(about, indent=1) + "\n")
        temporary.chmod(0o755)
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _load(folder: Path, rules: PackingRules) -> tuple[RowPlan, SampleTable]:
    def array(name: str) -> NDArray[Any]:
        # A plain array: indexing the memmap class costs microseconds.
        return np.asarray(np.load(folder / f"{name}.npy", mmap_mode="r"))

    try:
        plan = RowPlan(rules=rules, **{name: array(name) for name in _PLAN_ARRAYS})
        table = SampleTable(
            **{name: array(name) for name in _SAMPLE_COLUMNS},
            shard_document_starts=plan.shard_document_starts,
        )
    except (OSError, ValueError) as error:
        raise ValueError(
            f"plan {folder} is unreadable ({error}): remove that folder, and it is planned again"
        ) from error
    return plan, table


_PLAN_ARRAYS = tuple(field.name for field in fields(RowPlan) if field.name != "rules")
_SAMPLE_COLUMNS = {
    "payload_offset": np.int64,
    "payload_bytes": np.uint32,
    "crc32": np.uint32,
    "num_student_tokens": np.uint32,
    "num_teacher_tokens": np.uint32,
}
