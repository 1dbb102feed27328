"""A teacher's losses next to a shard: `*.teacher-<fingerprint>.safetensors`.

Several teachers' sidecars coexist.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from schemas.distribution_rule import DistributionRule
from schemas.errors import DamagedShardError, DatasetError, SchemaVersionError
from schemas.records import (
    Count,
    FilePath,
    Format,
    Name,
    RecordError,
    Sha256,
    read_record,
    require_format,
    write_file,
)
from schemas.safetensors_view import read_header, view_vector
from schemas.stored_distributions import EntriesRecord, ShardEntries, decode_entries

SIDECAR_VERSION = 1
FORMAT = Format("vocag.teacher_losses", SIDECAR_VERSION, "vocag score")
LARGEST_LOSS = float(np.finfo(np.float16).max)
"""65504 nats, stored for losses beyond fp16."""

_METADATA_KEY = "vocag"


@dataclass(frozen=True)
class EngineRecord:
    """A program that ran a teacher, other than transformers or Megatron.

    Attributes:
        name: "openai": a server of the completions API.
        server: its program, such as "vllm"; "" if unknown.
        version: of that program; "" if unknown.
        quantization: of weights and activations, such as "fp8", or "none".
        model: its name at the server.
        weights_of: `weights_sha256` is over "files", or the model's "name" if they are out of
            sight.
    """

    name: Name
    server: str
    version: str
    quantization: Name
    model: str
    weights_of: Literal["files", "name"]

    def describe(self) -> str:
        """Return it in words."""
        program = f"{self.server} {self.version}".strip()
        return f"{self.name} ({program}, quantization {self.quantization})"


@dataclass(frozen=True)
class TeacherRule:
    """Everything but the text that determines a teacher's losses on a dataset.

    Attributes:
        weights_sha256: over the teacher's weights and configuration.
        dtype: of the running teacher, such as "float32".
        tokenizer_sha256: of the dataset's teacher tokenizer.
        context: start of each token's context, see `pipeline.scoring.contexts.ContextRule`.
        engine: None for transformers and Megatron.
        where: condition on scored documents, see `pipeline.dataset.chosen_documents`; "" for all.
        distributions: None for losses only.
        learned_only: whether only learned tokens of chats are stored.
    """

    weights_sha256: Sha256
    dtype: Name
    tokenizer_sha256: Sha256
    context: Mapping[str, Any]
    engine: EngineRecord | None = None
    where: str = ""
    distributions: DistributionRule | None = None
    learned_only: bool = False

    @property
    def fingerprint(self) -> str:
        """64 hex digits; sidecars with equal fingerprints hold the same losses."""
        return sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """Return plain values, without unset ones."""
        body = asdict(self)
        if self.distributions is not None:
            body["distributions"] = self.distributions.to_json()
        return {name: value for name, value in body.items() if value not in (None, "", False)}


@dataclass(frozen=True, eq=False)
class ShardLosses:
    """The losses of one shard's scored documents.

    Losses are float16 [M], nats, in index order; NaN without a context. Document i owns losses
    starts[i]:starts[i + 1], int64 [N + 1], none if it wasn't scored. `teacher` is the
    `TeacherRule`'s fingerprint. `learned`, bool [M], marks the only tokens of chats with stored
    losses; the others' are NaN.
    """

    losses: NDArray[np.float16]
    starts: NDArray[np.int64]
    teacher: str
    shard_sha256: str
    entries: ShardEntries | None = None
    learned: NDArray[np.bool_] | None = None


@dataclass(frozen=True)
class SidecarRecord:
    """One sidecar.

    Attributes:
        file: relative to the score manifest.
        num_bytes: of the file.
        sha256: of the file.
        shard: its tar.
        num_tokens: scored documents' teacher tokens, with `learned_only` the learned ones.
        num_losses: tokens with a loss.
        loss_sum: nats, of stored values.
        num_split_documents: documents whose tokens don't all see the document's start.
        context_sha256: over starts of those tokens' contexts, see
            `pipeline.scoring.contexts.Pieces`.
        entries: totals; None without any.
        documents_sha256: of the table of documents' scores; None if unknown.
    """

    file: FilePath
    num_bytes: Count
    sha256: Sha256
    shard: FilePath
    num_tokens: Count
    num_losses: Count
    loss_sum: float
    num_split_documents: Count
    context_sha256: Sha256
    entries: EntriesRecord | None = None
    documents_sha256: Sha256 | None = None

    def to_json(self) -> dict[str, Any]:
        """Return plain values, without None."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True)
class ScoreManifest:
    """A teacher's scores of a dataset; written last.

    `dataset` is its manifest's fingerprint, `source` the user's name for the teacher; sidecars are
    in shard order.
    """

    dataset: Sha256
    rule: TeacherRule
    source: str
    sidecars: tuple[SidecarRecord, ...]


@dataclass(frozen=True)
class _ScoreClaims:
    teacher: Sha256
    rule: Mapping[str, Any]


@dataclass(frozen=True)
class _SidecarMetadata:
    teacher: Sha256
    shard_sha256: Sha256
    distributions: DistributionRule | None = None


def sidecar_name(shard: str, teacher: str) -> str:
    """Return a sidecar's file name.

    Example:
        >>> sidecar_name("c-000000-of-000001.tar", "ab12" * 16)
        'c-000000-of-000001.teacher-ab12ab12ab12ab12.safetensors'
    """
    return f"{shard.removesuffix('.tar')}.teacher-{teacher[:16]}.safetensors"


def score_manifest_name(teacher: str) -> str:
    """Return a score manifest's file name."""
    return f"teacher-{teacher[:16]}.json"


def to_fp16(losses: NDArray[np.float32]) -> NDArray[np.float16]:
    """Round losses to fp16, at most `LARGEST_LOSS`; NaN stays."""
    return np.minimum(losses, np.float32(LARGEST_LOSS)).astype(np.float16)


def encode_sidecar(scores: ShardLosses) -> bytes:
    """Encode a sidecar as safetensors; equal scores give equal bytes."""
    metadata: dict[str, Any] = {
        "sidecar_version": SIDECAR_VERSION,
        "teacher": scores.teacher,
        "shard_sha256": scores.shard_sha256,
    }
    tensors: dict[str, NDArray[Any]] = {
        "losses": scores.losses,
        "starts": scores.starts.astype(np.uint32),
    }
    if scores.learned is not None:
        changes = np.diff(np.concatenate([[False], scores.learned, [False]]).astype(np.int8))
        tensors["learned"] = np.flatnonzero(changes).astype(np.uint32)
        tensors["losses"] = scores.losses[scores.learned]
    if scores.entries is not None:
        metadata["distributions"] = scores.entries.rule.to_json()
        tensors |= scores.entries.tensors()
    # one key: safetensors writes several in random order
    return bytes(save(tensors, {_METADATA_KEY: json.dumps(metadata, sort_keys=True)}))


def decode_sidecar(data: bytes | memoryview, *, at: str) -> ShardLosses:
    """Decode a sidecar; a text's losses are views of `data`.

    Raises:
        DamagedShardError: incomplete sidecar.
        SchemaVersionError: another version of the format.
    """
    try:
        header, body = read_header(data)
        about = header["__metadata__"][_METADATA_KEY]
        version = read_record(about, dict[str, Any])["sidecar_version"]
        if version != SIDECAR_VERSION:
            raise SchemaVersionError(at, version, SIDECAR_VERSION, job="vocag score")
        metadata = read_record(about, _SidecarMetadata)
        starts = view_vector(data, body, header["starts"], "U32").astype(np.int64)
        losses = view_vector(data, body, header["losses"], "F16")
        learned = None
        if "learned" in header:
            bounds = view_vector(data, body, header["learned"], "U32").astype(np.int64)
            learned, losses = _spread(losses, bounds, int(starts[-1]))
        if starts[0] or starts[-1] != len(losses) or (np.diff(starts) < 0).any():
            raise ValueError(f"starts don't divide its {len(losses)} losses")
        entries, rule = None, metadata.distributions
        if rule is not None:
            entries = decode_entries(data, body, header, rule=rule, starts=starts)
        about_losses = metadata.teacher, metadata.shard_sha256, entries, learned
        return ShardLosses(losses, starts, *about_losses)
    except SchemaVersionError:
        raise
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise DamagedShardError(
            f"{at} isn't a complete sidecar ({error!r}): it is cut or altered; delete it and "
            "run vocag score again"
        ) from error


def _spread(
    losses: NDArray[np.float16], bounds: NDArray[np.int64], num_tokens: int
) -> tuple[NDArray[np.bool_], NDArray[np.float16]]:
    if len(bounds) % 2 or (np.diff(bounds) < 0).any() or bounds.max(initial=0) > num_tokens:
        raise ValueError(f"learned isn't ranges of {num_tokens} tokens")
    changes = np.bincount(bounds, minlength=num_tokens + 1)[:num_tokens]
    learned = np.cumsum(changes) % 2 == 1
    if np.count_nonzero(learned) != len(losses):
        raise ValueError(f"{len(losses)} losses of {np.count_nonzero(learned)} learned tokens")
    spread = np.full(num_tokens, np.nan, np.float16)
    spread[learned] = losses
    return learned, spread


def _fields(rule: Mapping[str, Any]) -> list[str]:
    nested = {name: value for name, value in rule.items() if isinstance(value, Mapping)}
    nested.pop("context", None)  # checked when it is read
    return sorted([*rule, *(f"{name}.{inner}" for name in nested for inner in nested[name])])


def encode_score_manifest(manifest: ScoreManifest) -> bytes:
    """Encode a score manifest as JSON; equal manifests give equal bytes."""
    body = {
        "schema": FORMAT.name,
        "schema_version": FORMAT.version,
        "teacher": manifest.rule.fingerprint,
        **vars(manifest),
        "rule": manifest.rule.to_json(),
        "sidecars": [record.to_json() for record in manifest.sidecars],
    }
    return write_file(body)


def decode_score_manifest(data: bytes, *, at: str) -> ScoreManifest:
    """Decode a score manifest.

    Raises:
        DatasetError: missing, mistyped or unknown fields, a file outside the dataset, or a wrong
            fingerprint.
        SchemaVersionError: another version of the format.
    """
    try:
        require_format(data, FORMAT, at=at, remedy="run vocag score")
        manifest = read_record(data, ScoreManifest)
        claims = read_record(data, _ScoreClaims)
        if claims.rule != (known := manifest.rule.to_json()):
            # This release couldn't compare an unknown field with rows.
            raise RecordError(f"$.rule has {_fields(claims.rule)}, not {_fields(known)}")
    except RecordError as error:
        raise DatasetError(
            f"{at} isn't a complete score manifest ({error}): it is cut or altered; run "
            "vocag score again"
        ) from error
    claimed = claims.teacher
    if claimed != manifest.rule.fingerprint:
        raise DatasetError(
            f"{at} names teacher {claimed[:16]}… but its rule gives "
            f"{manifest.rule.fingerprint[:16]}…: it was altered; run vocag score again"
        )
    return manifest
