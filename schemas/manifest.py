"""A dataset's content: `manifest.json`, written last, so a dataset without one is unfinished."""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from hashlib import sha256
from typing import Annotated, Any, Final, Literal

from msgspec import Meta, Raw

from schemas.document import SCHEMA_VERSION
from schemas.errors import RESTORE, DatasetError, ForeignTokenizerError
from schemas.records import (
    Count,
    FilePath,
    Format,
    Name,
    RecordError,
    Sha256,
    TokenId,
    read_record,
    require_format,
    write_file,
    write_record,
)

MANIFEST_FILE = "manifest.json"
DEAD_LETTERS_FILE = "dead_letters.jsonl"
FORMAT = Format("vocag.aligned_dataset", SCHEMA_VERSION, "vocag align", also=(3,))

CHATS_VERSION: Final = 3
"""Version of manifests of chats, which readers of texts alone must refuse."""

MetadataType = Literal["string", "int64", "float64", "bool"]
"""Types of documents' metadata; any value may be missing."""


@dataclass(frozen=True)
class ConventionRecord:
    """One side's tokens around a text in rows.

    Attributes:
        first_token_id: before a document's first token; None: nothing.
        continued_token_id: before a piece that continues a document.
        end_token_id: after a document's last token.
    """

    first_token_id: TokenId | None
    continued_token_id: TokenId | None
    end_token_id: TokenId | None


def default_convention(
    bos_token_id: int | None, eos_token_id: int | None, *, adds_bos: bool
) -> ConventionRecord:
    """Return the default tokens around a text.

    BOS comes before every piece if the tokenizer adds it or has no EOS; else EOS, as in such
    models' training (Qwen), so even the first token has a loss.
    """
    bos_stands = adds_bos and bos_token_id is not None
    context = bos_token_id if bos_stands or eos_token_id is None else eos_token_id
    return ConventionRecord(context, context, eos_token_id)


@dataclass(frozen=True)
class TokenizerRecord:
    """The tokenizer of one side.

    Attributes:
        source: as the user named it.
        file: its copy in the dataset, relative to the manifest.
        sha256: of that file, the tokenizer's fingerprint.
        vocab_size: largest id plus one, added tokens included.
        special_strings: a special string in a text is "plain" text, or "honoured" as its control
            token.
        bos_token_id: begin-of-sequence id; None if the tokenizer has none.
        eos_token_id: end-of-document id; None if unknown.
        adds_bos: whether the tokenizer itself puts BOS before a text.
        adds_eos: whether it puts EOS after one.
        convention: tokens around a text in rows; None in early manifests, which omit it.
    """

    source: str
    file: FilePath
    sha256: Sha256
    vocab_size: Annotated[int, Meta(ge=1)]
    special_strings: Literal["plain", "honoured"]
    bos_token_id: TokenId | None
    eos_token_id: TokenId | None
    adds_bos: bool
    adds_eos: bool
    convention: ConventionRecord | None = None

    def __post_init__(self) -> None:
        ids = {"bos_token_id": self.bos_token_id, "eos_token_id": self.eos_token_id}
        for name, token_id in (ids | vars(self.around_text)).items():
            if token_id is not None and token_id >= self.vocab_size:
                raise ValueError(
                    f"{name} {token_id} is outside the vocabulary of {self.vocab_size}"
                )

    @property
    def around_text(self) -> ConventionRecord:
        """The recorded convention, else the default."""
        if self.convention is not None:
            return self.convention
        return default_convention(self.bos_token_id, self.eos_token_id, adds_bos=self.adds_bos)


@dataclass(frozen=True)
class ShardRecord:
    """A shard: a tar, and its index next to it.

    Attributes:
        file: the tar, relative to the manifest.
        num_bytes: of the tar.
        sha256: of the tar.
        index_file: the index, relative to the manifest.
        index_num_bytes: of the index.
        index_sha256: of the index.
        num_documents: samples in the tar.
        num_text_bytes: UTF-8 bytes of their texts.
        num_student_tokens: of all samples.
        num_teacher_tokens: of all samples.
    """

    file: FilePath
    num_bytes: Count
    sha256: Sha256
    index_file: FilePath
    index_num_bytes: Count
    index_sha256: Sha256
    num_documents: Count
    num_text_bytes: Count
    num_student_tokens: Count
    num_teacher_tokens: Count


_GENERATION = re.compile(r"g(\d{3,})-\d{6}-of-\d{6}\.")
_TOTALS = [entry.name for entry in fields(ShardRecord) if entry.name.startswith("num_")]


@dataclass(frozen=True)
class DeadLetterRecord:
    """Documents that couldn't be used; `dead_letters.jsonl` names each.

    Attributes:
        file: relative to the manifest.
        sha256: of that file.
        count: its lines.
        by_reason: lines per reason.
    """

    file: FilePath
    sha256: Sha256
    count: Count
    by_reason: Mapping[str, Count]


@dataclass(frozen=True)
class MetadataColumn:
    """A field of documents' metadata, in the indices as column `metadata.NAME`.

    Attributes:
        name: the field, dots included.
        type: of its values.
    """

    name: Name
    type: MetadataType


@dataclass(frozen=True)
class GenerationRecord:
    """An earlier state of the dataset.

    Attributes:
        number: from 0.
        file: its manifest; this path and those in it are relative to the current manifest.
        fingerprint: of its content.
    """

    number: Count
    file: FilePath
    fingerprint: Sha256


@dataclass(frozen=True)
class RemovedRecord:
    """Documents in the shards that readers skip.

    Attributes:
        file: their list, a Parquet file specified in `schemas/README.md`.
        sha256: of that file.
        count: its rows.
    """

    file: FilePath
    sha256: Sha256
    count: Count


@dataclass(frozen=True)
class TemplateRecord:
    """The chat template that rendered one side of a dataset of chats.

    Attributes:
        file: its copy in the dataset, relative to the manifest.
        sha256: of that file.
        names: special tokens' strings, by variable such as bos_token.
        options: other variables.
    """

    file: FilePath
    sha256: Sha256
    names: Mapping[str, str]
    options: Mapping[str, Any]


@dataclass(frozen=True)
class ChatsRecord:
    """How the documents of a dataset are chats.

    Attributes:
        learn: whose messages are learned.
        learn_end: whether a learned turn's end is learned, too.
        student: the student's template.
        teacher: the teacher's template.
    """

    learn: Literal["assistant", "last", "all"]
    learn_end: bool
    student: TemplateRecord
    teacher: TemplateRecord


@dataclass(frozen=True)
class Manifest:
    """Everything a reader may trust about a dataset.

    Attributes:
        name: the shards' common prefix.
        student: the student's tokenizer.
        teacher: the teacher's tokenizer.
        shards: in order.
        dead_letters: documents left out.
        configuration: options that determine the shards' bytes.
        statistics: histograms and quality figures, see `pipeline.alignment.quality`.
        schema_version: of this file and its shards.
        metadata: documents' fields in the indices.
        generation: the dataset's state, counted from 0.
        generations: the earlier ones, in order.
        removed: documents that readers skip; omitted without any.
        chats: how documents are chats; omitted for texts.
    """

    name: Name
    student: TokenizerRecord
    teacher: TokenizerRecord
    shards: tuple[ShardRecord, ...]
    dead_letters: DeadLetterRecord
    configuration: Mapping[str, Any]
    statistics: Mapping[str, Any]
    schema_version: Literal[2, 3] = SCHEMA_VERSION
    metadata: tuple[MetadataColumn, ...] = ()
    generation: Count = 0
    generations: tuple[GenerationRecord, ...] = ()
    removed: RemovedRecord | None = None
    chats: ChatsRecord | None = None

    def __post_init__(self) -> None:
        if (self.schema_version == CHATS_VERSION) != (self.chats is not None):
            raise ValueError(f"schema_version {self.schema_version}: chats have version 3, texts 2")

    @property
    def fingerprint(self) -> str:
        """64 hex digits of what determines rows, see `ManifestClaims`."""
        content: dict[str, Any] = {
            "schema_version": self.schema_version,
            "student": [self.student.sha256, self.student.special_strings],
            "teacher": [self.teacher.sha256, self.teacher.special_strings],
            "shards": [[s.file, s.sha256, s.index_sha256] for s in self.shards],
            "removed": self.removed and self.removed.sha256,
        }
        if self.chats is not None:
            content["chats"] = self.chats
        return sha256(json.dumps(content, sort_keys=True, default=vars).encode()).hexdigest()

    @property
    def fingerprints(self) -> dict[int, str]:
        """Fingerprints of all generations by number, its own last."""
        earlier = {entry.number: entry.fingerprint for entry in self.generations}
        return earlier | {self.generation: self.fingerprint}

    @property
    def totals(self) -> dict[str, int]:
        """Documents, bytes and tokens over all shards."""
        return totals_of(self.shards)

    @property
    def newest_shards(self) -> tuple[ShardRecord, ...]:
        """The shards of the newest generation that added any."""
        numbers = [generation_of(shard.file, name=self.name) for shard in self.shards]
        newest = max(numbers, default=0)
        pairs = zip(self.shards, numbers, strict=True)
        return tuple(shard for shard, number in pairs if number == newest)

    def require_tokenizers(
        self, *, student_sha256: str | None = None, teacher_sha256: str | None = None
    ) -> None:
        """Raise ForeignTokenizerError unless the given tokenizers made this dataset."""
        for side, given in (("student", student_sha256), ("teacher", teacher_sha256)):
            made_with: TokenizerRecord = getattr(self, side)
            other = "teacher" if side == "student" else "student"
            if given is not None and given != made_with.sha256:
                swapped = f", but its {other}'s" if given == getattr(self, other).sha256 else ""
                raise ForeignTokenizerError(
                    f"{side} tokenizer {given[:16]}… is not the dataset's{swapped}: it was made "
                    f'with "{made_with.source}" ({made_with.sha256[:16]}…); use that tokenizer or '
                    "run vocag align again"
                )


def totals_of(shards: Iterable[ShardRecord]) -> dict[str, int]:
    """Return documents, bytes and tokens over some shards."""
    listed = tuple(shards)
    return {name: sum(getattr(shard, name) for shard in listed) for name in _TOTALS}


def kept_manifest_file(generation: int) -> str:
    """Return the file that keeps a replaced generation's manifest.

    Example:
        >>> kept_manifest_file(7)
        'manifests/007.json'
    """
    return f"manifests/{generation:03d}.json"


def generation_of(file: str, *, name: str) -> int:
    """Return a shard's generation from the name of its tar or index.

    Example:
        >>> generation_of("corpus-g002-000000-of-000001.tar", name="corpus")
        2
    """
    found = _GENERATION.match(file.removeprefix(f"{name}-"))
    return int(found[1]) if found else 0


def next_generation(manifest: Manifest, **changes: Any) -> Manifest:
    """Return the next generation's manifest, with changes and a record of this one."""
    number = manifest.generation
    before = GenerationRecord(number, kept_manifest_file(number), manifest.fingerprint)
    return replace(
        manifest, generation=number + 1, generations=(*manifest.generations, before), **changes
    )


@dataclass(frozen=True)
class ManifestClaims:
    """A manifest's format, and fields that follow from others.

    Attributes:
        schema: names the format.
        fingerprint: SHA-256 over the schema version, tokenizers' hashes and special strings,
            shards' file names and hashes, the removed list's hash, and chats.
        totals: sums over the shards.
        digest: SHA-256 of all other fields except shards; omitted if a convention is.
    """

    schema: Literal["vocag.aligned_dataset"]
    fingerprint: Sha256
    totals: Annotated[Mapping[str, Count], Meta(extra_json_schema={"required": _TOTALS})]
    digest: Sha256 | None = None


def encode_manifest(manifest: Manifest) -> bytes:
    """Encode the manifest as JSON; equal manifests give equal bytes."""
    body = {
        "schema": FORMAT.name,
        "fingerprint": manifest.fingerprint,
        "totals": manifest.totals,
        **{entry.name: getattr(manifest, entry.name) for entry in fields(Manifest)},
    }
    for side in ("student", "teacher"):
        if body[side].convention is None:  # an early manifest keeps its bytes
            body[side] = {n: v for n, v in vars(body[side]).items() if n != "convention"}
    for name in ("removed", "chats"):
        if body[name] is None:
            del body[name]
    if manifest.student.convention and manifest.teacher.convention:
        body["digest"] = _digest(body)
    return write_file(body)


def _digest(body: Mapping[str, Any]) -> str:
    named = {name: value for name, value in body.items() if name not in ("digest", "shards")}
    return sha256(write_record(named).encode()).hexdigest()


def decode_manifest(data: bytes, *, at: str = MANIFEST_FILE) -> Manifest:
    """Decode a manifest; errors name its path, `at`.

    Raises:
        DatasetError: missing, mistyped or contradictory fields, or a file outside the dataset.
        SchemaVersionError: another version of the format.
    """
    try:
        require_format(data, FORMAT, at=at, remedy="name a folder made by align")
        claims = read_record(data, ManifestClaims)
        manifest = read_record(data, Manifest)
        raw = read_record(data, dict[str, Raw])
    except RecordError as error:
        raise DatasetError(
            f"{at} isn't a complete manifest ({error}): it is cut or altered; {RESTORE}"
        ) from error
    for name in ("fingerprint", "totals"):
        claim, found = getattr(claims, name), getattr(manifest, name)
        if claim != found:
            raise DatasetError(
                f"{at}: {name} {claim} does not follow from its shards "
                f"({found}): it was altered; {RESTORE}"
            )
    body = {name: json.loads(bytes(value)) for name, value in raw.items() if name != "shards"}
    if claims.digest not in (None, _digest(body)):
        raise DatasetError(
            f"{at}: digest {claims.digest} is not that of its other fields: one was altered; "
            f"{RESTORE}"
        )
    return manifest
