"""Check one shard in one read."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256

import numpy as np
from numpy.typing import NDArray

from pipeline.alignment.quality import AlignmentStatistics
from pipeline.dataset.files import Dataset
from pipeline.dataset.tokenizers import load_dataset_tokenizer
from pipeline.validate.chat_checks import Speakers
from pipeline.validate.findings import Findings
from pipeline.validate.sample_checks import SIDES, check_samples
from pipeline.validate.tar import FileDigest, TarReader, digest_file
from schemas.errors import RESTORE, DatasetError
from schemas.index import METADATA_TYPES, ShardIndex, decode_index
from schemas.manifest import ShardRecord

_KEY = re.compile("[0-9a-f]{32}")

Advance = Callable[[int], object]
"""Takes the number of bytes read since the last call."""


@dataclass(frozen=True, eq=False)
class ShardResult:
    """A shard's results; `keys` are bytes [N], 16 for each of the index."""

    findings: Findings
    keys: NDArray[np.bytes_]
    statistics: AlignmentStatistics


def check_shard(
    dataset: Dataset,
    shard_record: ShardRecord,
    *,
    with_tokenizers: bool = False,
    advance: Advance = int,
) -> ShardResult:
    """Check a shard against itself and the manifest, whose list of shards isn't used."""
    manifest = dataset.manifest
    findings = Findings(shard_record.file)
    tokenizers = None
    if with_tokenizers:
        tokenizers = {side: load_dataset_tokenizer(dataset, side) for side in SIDES}
    speakers = _load_speakers(dataset, findings)
    index = _read_index(dataset, shard_record, findings)
    statistics = []
    try:
        with dataset.open_file(shard_record.file) as file:
            if index is None:
                digest = digest_file(file, advance)
            else:
                reader = TarReader(file, index, findings, advance)
                for samples in reader.windows():
                    part = check_samples(
                        samples,
                        index,
                        manifest,
                        findings,
                        tokenizers=tokenizers,
                        speakers=speakers,
                    )
                    statistics.append(part)
                digest = reader.digest
        check_digest(
            shard_record.file, digest, shard_record.num_bytes, shard_record.sha256, findings
        )
    except OSError as error:
        findings.add("files", f"{shard_record.file} can't be read: {describe(error, RESTORE)}")
    keys = _key_bytes(() if index is None else index.key)
    return ShardResult(findings, keys, AlignmentStatistics.merge(statistics))


def _load_speakers(dataset: Dataset, findings: Findings) -> Speakers | None:
    if dataset.manifest.chats is None:
        return None
    from pipeline.dataset.chat_templates import load_speakers

    try:
        return load_speakers(dataset)
    except (OSError, ValueError) as error:
        findings.add("chats", f"no chat was rendered again: {error}")
        return None


def describe(error: OSError, remedy: str) -> str:
    """Describe why a file can't be read, and what to do, which for damage is `remedy`."""
    if isinstance(error, PermissionError):
        return "it is closed to you by its permissions; change them"
    if isinstance(error, FileNotFoundError):
        return f"there is no such file; {remedy}"
    return f"{error.strerror or str(error) or type(error).__name__}; {remedy}"


def check_digest(
    name: str, digest: FileDigest, num_bytes: int | None, sha256_hex: str, findings: Findings
) -> None:
    """Report a file whose size or hash differs."""
    if num_bytes is not None and digest.num_bytes != num_bytes:
        text = f"{name} has {digest.num_bytes} bytes, the manifest says {num_bytes}"
        findings.add("files", text)
    if digest.sha256 != sha256_hex:
        text = f"{name} has SHA-256 {digest.sha256[:16]}…, the manifest says {sha256_hex[:16]}…"
        findings.add("sha256", text)


def _read_index(
    dataset: Dataset, shard_record: ShardRecord, findings: Findings
) -> ShardIndex | None:
    name = shard_record.index_file
    try:
        data = dataset.read_file(name)
    except OSError as error:
        text = f"{name} can't be read, so no sample was checked: {describe(error, RESTORE)}"
        findings.add("files", text)
        return None
    digest = FileDigest(len(data), sha256(data).hexdigest())
    check_digest(name, digest, shard_record.index_num_bytes, shard_record.index_sha256, findings)
    try:
        index = decode_index(data)
    except DatasetError as error:
        findings.add("index", f"{name}: {error}; no sample was checked")
        return None
    columns = [f"{field} ({values.type})" for field, values in index.metadata.items()]
    claims = [f"{entry.name} ({METADATA_TYPES[entry.type]})" for entry in dataset.manifest.metadata]
    if columns != claims:
        text = f"{name} has metadata {columns}, the manifest names {claims}"
        findings.add("index", text)
    found = {"num_documents": len(index)}
    for count in ("num_text_bytes", "num_student_tokens", "num_teacher_tokens"):
        found[count] = int(getattr(index, count).sum())
    for count, value in found.items():
        claim = getattr(shard_record, count)
        if claim != value:
            findings.add("counts", f"{count} is {value} by the index, the manifest says {claim}")
    return index


def _key_bytes(keys: Sequence[str]) -> NDArray[np.bytes_]:
    """Return keys' bytes; damaged keys get unique ones."""
    return np.array(
        [
            bytes.fromhex(key) if _KEY.fullmatch(key) else sha256(key.encode()).digest()[:16]
            for key in keys
        ],
        "S16",
    )
