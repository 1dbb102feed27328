"""A dataset's content: `manifest.json`, written last, so a dataset without one is unfinished."""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from hashlib import sha256
from typing import Annotated, Any, Final, Literal

from msgspec import Meta, Raw

from schemas.document import SCHEMA_VERSION
from schemas.errors import DatasetError, ForeignTokenizerError
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
"""Of manifests of chats, which a reader of texts alone must refuse; all else is as before."""

MetadataType = Literal["string", "int64", "float64", "bool"]
"""Types that a document's metadata may have; every value may be missing."""


@dataclass(frozen=True)
class ConventionRecord:
    """The tokens that rows put around a text of one side, as the dataset's maker chose them.

    Attributes:
        first_token_id: before a document's first token, None for nothing.
        continued_token_id: before a piece that continues a document.
        end_token_id: after a document's last token.
    """

    first_token_id: TokenId | None
    continued_token_id: TokenId | None
    end_token_id: TokenId | None


def default_convention(
    bos_token_id: int | None, eos_token_id: int | None, *, adds_bos: bool
) -> ConventionRecord:
    """Return the default tokens of rows around a text.

    A tokenizer that puts BOS before a text gets BOS before every piece. One that does not (Qwen)
    belongs to a model that saw documents divided by the end-of-document token: that token is then
    the first context, so that every token of the text has a loss.

    Example:
        >>> default_convention(None, 151643, adds_bos=False)
        ConventionRecord(first_token_id=151643, continued_token_id=151643, end_token_id=151643)
    """
    bos_stands = adds_bos and bos_token_id is not None
    context = bos_token_id if bos_stands or eos_token_id is None else eos_token_id
    return ConventionRecord(context, context, eos_token_id)


@dataclass(frozen=True)
class TokenizerRecord:
    """Which tokenizer made one side of the dataset.

    Attributes:
        source: what the user named.
        file: the copy kept in the dataset, a path relative to the manifest.
        sha256: of that file; this is the tokenizer's fingerprint.
        vocab_size: one greater than the largest id, added tokens included.
        special_strings: "plain" if a special string in a text is plain text, "honoured" if
            it becomes its control token.
        bos_token_id: begin-of-sequence id, None if the tokenizer has none.
        eos_token_id: end-of-document id, None if unknown.
        adds_bos: whether the tokenizer's own convention puts BOS before a text.
        adds_eos: whether it puts EOS after one.
        convention: what rows put around a text; None if the manifest doesn't say.
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
        """The rows' tokens around a text: as recorded, else by default from the ids above."""
        if self.convention is not None:
            return self.convention
        return default_convention(self.bos_token_id, self.eos_token_id, adds_bos=self.adds_bos)


@dataclass(frozen=True)
class ShardRecord:
    """One shard: its tar and the index next to it.

    Attributes:
        file: the tar's name, relative to the manifest.
        num_bytes: the tar's size.
        sha256: of the tar.
        index_file: the index's name.
        index_num_bytes: the index's size.
        index_sha256: of the index.
        num_documents: samples in the tar.
        num_text_bytes: UTF-8 bytes of their texts.
        num_student_tokens: student tokens in the tar.
        num_teacher_tokens: teacher tokens in the tar.
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
    """Documents that could not be used; `dead_letters.jsonl` names each.

    Attributes:
        file: the file's name, relative to the manifest.
        sha256: of that file.
        count: its lines.
        by_reason: count of each reason.
    """

    file: FilePath
    sha256: Sha256
    count: Count
    by_reason: Mapping[str, Count]


@dataclass(frozen=True)
class MetadataColumn:
    """A field of the documents that the shards' indices hold, as column `metadata.NAME`.

    Attributes:
        name: the field, dots and all.
        type: of its values.
    """

    name: Name
    type: MetadataType


@dataclass(frozen=True)
class GenerationRecord:
    """An earlier state of the dataset.

    Attributes:
        number: counts from 0.
        file: its manifest, a path relative to this one; the files that it names lie where the
            files of this one do.
        fingerprint: of its content.
    """

    number: Count
    file: FilePath
    fingerprint: Sha256


@dataclass(frozen=True)
class RemovedRecord:
    """Documents that are in the shards and that a reader leaves out.

    Attributes:
        file: a Parquet file that lists them, see `schemas/README.md`.
        sha256: of that file.
        count: its rows.
    """

    file: FilePath
    sha256: Sha256
    count: Count


@dataclass(frozen=True)
class TemplateRecord:
    """The chat template by which one side of a dataset of chats was rendered.

    Attributes:
        file: the copy kept in the dataset, a path relative to the manifest.
        sha256: of that file.
        names: strings of special tokens, by what the template calls them.
        options: what else it was given.
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
        learn_end: whether what ends a learned turn is.
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
        shards: every shard, in order.
        dead_letters: what was left out.
        configuration: the options that determine the shards' bytes.
        statistics: histograms and quality figures, see `pipeline.alignment.quality`.
        schema_version: of this file and its shards.
        metadata: fields of the documents that the indices hold.
        generation: counts the dataset's states from 0.
        generations: the earlier ones, in order.
        removed: documents that a reader leaves out, None if there are none.
        chats: how documents are chats; None, and not named, of texts.
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
        """64 hex digits over everything that determines rows: shards, tokenizers, removals."""
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
        """Fingerprints of its generations by number, its own last."""
        earlier = {entry.number: entry.fingerprint for entry in self.generations}
        return earlier | {self.generation: self.fingerprint}

    @property
    def totals(self) -> dict[str, int]:
        """Documents, bytes and tokens over all shards."""
        return totals_of(self.shards)

    @property
    def newest_shards(self) -> tuple[ShardRecord, ...]:
        """The shards of the newest generation that added any; all if it never grew."""
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
            if given is not None and given != made_with.sha256:
                raise ForeignTokenizerError(
                    f"{side} tokenizer {given[:16]}… is not the dataset's: it was made with "
                    f'"{made_with.source}" ({made_with.sha256[:16]}…); use that tokenizer or run '
                    "vocag align again"
                )


def totals_of(shards: Iterable[ShardRecord]) -> dict[str, int]:
    """Return documents, bytes and tokens over some shards."""
    listed = tuple(shards)
    return {name: sum(getattr(shard, name) for shard in listed) for name in _TOTALS}


def kept_manifest_file(generation: int) -> str:
    """Return the file of a generation's manifest after its replacement.

    Example:
        >>> kept_manifest_file(7)
        'manifests/007.json'
    """
    return f"manifests/{generation:03d}.json"


def generation_of(file: str, *, name: str) -> int:
    """Return a shard's generation, by the name of its tar or index.

    Example:
        >>> generation_of("corpus-g002-000000-of-000001.tar", name="corpus")
        2
    """
    found = _GENERATION.match(file.removeprefix(f"{name}-"))
    return int(found[1]) if found else 0


def next_generation(manifest: Manifest, **changes: Any) -> Manifest:
    """Return the next manifest: with changes, and a record of the one before."""
    number = manifest.generation
    before = GenerationRecord(number, kept_manifest_file(number), manifest.fingerprint)
    return replace(
        manifest, generation=number + 1, generations=(*manifest.generations, before), **changes
    )


@dataclass(frozen=True)
class ManifestClaims:
    """What a manifest says of itself and what must follow from its other fields.

    Attributes:
        schema: names the format.
        fingerprint: names the content: SHA-256 of the shards' file names and hashes, both
            tokenizers' hashes, the schema version and the hash of what is removed.
        totals: sums over the shards.
        digest: SHA-256 of all other fields but the shards, which the fingerprint names; None if no
            convention is recorded, as in early manifests.
    """

    schema: Literal["vocag.aligned_dataset"]
    fingerprint: Sha256
    totals: Annotated[Mapping[str, Count], Meta(extra_json_schema={"required": _TOTALS})]
    digest: Sha256 | None = None


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the manifest as JSON; equal manifests give equal bytes."""
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
    """Return the manifest in a JSON file; errors name its path.

    Raises:
        DatasetError: not a manifest, fields missing or of another type, files outside the dataset,
            or totals or a fingerprint that contradict the shards.
        SchemaVersionError: another version of the format.
    """
    try:
        require_format(data, FORMAT, at=at, remedy="name a folder made by align")
        claims = read_record(data, ManifestClaims)
        manifest = read_record(data, Manifest)
        raw = read_record(data, dict[str, Raw])
    except RecordError as error:
        raise DatasetError(
            f"{at} isn't a complete manifest ({error}): it is cut or altered; restore it or run "
            "vocag align again"
        ) from error
    for name in ("fingerprint", "totals"):
        claim, found = getattr(claims, name), getattr(manifest, name)
        if claim != found:
            raise DatasetError(
                f"{at}: {name} {claim} does not follow from its shards "
                f"({found}): it was altered; restore it or run align again"
            )
    body = {name: json.loads(bytes(value)) for name, value in raw.items() if name != "shards"}
    if claims.digest not in (None, _digest(body)):
        raise DatasetError(
            f"{at}: digest {claims.digest} is not that of its other fields: one was altered; "
            "restore it or run align again"
        )
    return manifest
