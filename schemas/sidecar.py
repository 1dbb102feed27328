"""A teacher's losses next to a shard, two bytes a token: `*.teacher-<fingerprint>.safetensors`.

A frozen teacher gives the same text the same losses every time, so they are computed once. Shards
are never rewritten; several teachers' sidecars coexist.
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
"""Losses beyond fp16 are stored as this, 65504 nats; probabilities that small mean nothing more."""

_METADATA_KEY = "vocag"


@dataclass(frozen=True)
class EngineRecord:
    """What ran a teacher, other than transformers or Megatron.

    Attributes:
        name: "openai": a server of the completions API.
        server: the server's program, such as "vllm"; "" if unknown.
        version: of that program, "" if unknown.
        quantization: of weights and activations, "none" or such as "fp8".
        model: its name at the server.
        weights_of: whether the rule's `weights_sha256` is over "files", or over the model's "name"
            if the files are out of sight.
    """

    name: Name
    server: str
    version: str
    quantization: Name
    model: str
    weights_of: Literal["files", "name"]

    def describe(self) -> str:
        """Return it in words.

        Example:
            >>> EngineRecord("openai", "vllm", "0.20.2", "fp8", "teacher", "name").describe()
            'openai (vllm 0.20.2, quantization fp8)'
        """
        program = f"{self.server} {self.version}".strip()
        return f"{self.name} ({program}, quantization {self.quantization})"


@dataclass(frozen=True)
class TeacherRule:
    """What determines a teacher's losses on a dataset, besides its text.

    Attributes:
        weights_sha256: 64 hex digits over the teacher's weights and configuration.
        dtype: of the running teacher, such as "float32".
        tokenizer_sha256: the dataset's teacher tokenizer.
        context: where each token's left context starts, see
            `pipeline.scoring.contexts.ContextRule`.
        engine: what ran it; None for transformers and Megatron, and then omitted.
        where: documents that don't match were not scored, see
            `pipeline.dataset.chosen_documents`; "": all were, and it is omitted.
        distributions: the stored part of its distributions; None: losses only, and omitted.
        learned_only: whether of chats only tokens of learned texts are stored; omitted if not.
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
        """Return plain values; unset ones are left out."""
        body = asdict(self)
        if self.distributions is not None:
            body["distributions"] = self.distributions.to_json()
        return {name: value for name, value in body.items() if value not in (None, "", False)}


@dataclass(frozen=True, eq=False)
class ShardLosses:
    """The losses of every teacher token of one shard's scored documents.

    Losses are float16 [M], nats, documents in the index's order; NaN without a context. Document i
    owns losses starts[i]:starts[i + 1], int64 [N + 1], none if it was not scored. `teacher` is the
    `TeacherRule`'s fingerprint; `entries` are of its distributions, if stored. Of chats, only the
    losses of `learned` tokens, bool [M], may be stored; the others are NaN.
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
        file: its name, relative to the score manifest.
        num_bytes: its size.
        sha256: 64 hex digits of the file.
        shard: the tar it belongs to.
        num_tokens: teacher tokens of the shard's documents that were scored.
        num_losses: those of them with a loss.
        loss_sum: nats over them, of the stored values.
        num_split_documents: documents whose tokens don't all see the document's start.
        context_sha256: 64 hex digits of where those tokens' contexts start, see
            `pipeline.scoring.contexts.Pieces`.
        entries: totals of its entries; None, and omitted, without any.
        documents_sha256: 64 hex digits of the table of its documents' scores; None, and omitted, if
            unknown: the table is then only compared with the sidecar's SHA-256.
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
        """Return plain values; None is left out."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True)
class ScoreManifest:
    """A teacher's scores of a dataset; written last.

    `dataset` is the fingerprint of its manifest, `source` the user's name for the teacher; sidecars
    are one per shard, in the dataset's order.
    """

    dataset: Sha256
    rule: TeacherRule
    source: str
    sidecars: tuple[SidecarRecord, ...]


@dataclass(frozen=True)
class _ScoreClaims:
    """Claims that must follow from a score manifest's other fields, and the written rule."""

    teacher: Sha256
    rule: Mapping[str, Any]


@dataclass(frozen=True)
class _SidecarMetadata:
    """The JSON in a sidecar's metadata, without its version."""

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
    """Round losses to fp16, those beyond its range to the largest finite number; NaN stays.

    Example:
        >>> to_fp16(np.float32([2.5, 1e6])).tolist()
        [2.5, 65504.0]
    """
    return np.minimum(losses, np.float32(LARGEST_LOSS)).astype(np.float16)


def encode_sidecar(scores: ShardLosses) -> bytes:
    """Encode the sidecar as safetensors; equal scores give equal bytes."""
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
    # one key: the library writes several in random order
    return bytes(save(tensors, {_METADATA_KEY: json.dumps(metadata, sort_keys=True)}))


def decode_sidecar(data: bytes | memoryview, *, at: str) -> ShardLosses:
    """Return a sidecar's losses, as views of `data`; for texts nothing is copied.

    Raises:
        DamagedShardError: not a complete sidecar.
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
    """Return which tokens are learned, and all tokens' losses, from the learned ones'."""
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
    """Encode the score manifest as JSON; equal manifests give equal bytes."""
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
    """Return the score manifest in a JSON file.

    Raises:
        DatasetError: not a score manifest, fields missing or of another type, files outside the
            dataset, or a fingerprint that does not match.
        SchemaVersionError: another version of the format.
    """
    try:
        require_format(data, FORMAT, at=at, remedy="run vocag score")
        manifest = read_record(data, ScoreManifest)
        claims = read_record(data, _ScoreClaims)
        if claims.rule != (known := manifest.rule.to_json()):
            # Whatever else determines the losses, this release would not hold it against rows.
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
