"""What a dataset holds: `manifest.json`, written last, so a dataset without one is unfinished."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from hashlib import sha256
from pathlib import PurePosixPath
from typing import Any, get_origin, get_type_hints

from schemas.document import SCHEMA_VERSION
from schemas.errors import DatasetError, ForeignTokenizerError, SchemaVersionError

MANIFEST_FILE = "manifest.json"
DEAD_LETTERS_FILE = "dead_letters.jsonl"
SCHEMA_NAME = "vocag.aligned_dataset"


@dataclass(frozen=True)
class ConventionRecord:
    """The tokens that rows put around a text of one side, as the dataset's maker chose them.

    Attributes:
        first_token_id: before a document's first token, None for nothing.
        continued_token_id: before a piece that continues a document.
        end_token_id: after a document's last token.
    """

    first_token_id: int | None
    continued_token_id: int | None
    end_token_id: int | None


def default_convention(
    bos_token_id: int | None, eos_token_id: int | None, *, adds_bos: bool
) -> ConventionRecord:
    """Return what rows put around a text where nobody says otherwise.

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
        special_strings: "plain" where a special string in a text is plain text, "honoured" where
            it becomes its control token.
        bos_token_id: begin-of-sequence id, None where the tokenizer has none.
        eos_token_id: end-of-document id, None where unknown.
        adds_bos: whether the tokenizer's own convention puts BOS before a text.
        adds_eos: whether it puts EOS after one.
        convention: what rows put around a text; None where the dataset is older than this field.
    """

    source: str
    file: str
    sha256: str
    vocab_size: int
    special_strings: str
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    adds_bos: bool = False
    adds_eos: bool = False
    convention: ConventionRecord | None = None

    @property
    def around_text(self) -> ConventionRecord:
        """What rows put around a text: as recorded, else as the ids above say."""
        if self.convention is not None:
            return self.convention
        return default_convention(self.bos_token_id, self.eos_token_id, adds_bos=self.adds_bos)


@dataclass(frozen=True)
class ShardRecord:
    """One shard: its tar and the index beside it.

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

    file: str
    num_bytes: int
    sha256: str
    index_file: str
    index_num_bytes: int
    index_sha256: str
    num_documents: int
    num_text_bytes: int
    num_student_tokens: int
    num_teacher_tokens: int


@dataclass(frozen=True)
class DeadLetterRecord:
    """Documents that could not be used; `dead_letters.jsonl` names each.

    Attributes:
        file: the file's name, relative to the manifest.
        sha256: of that file.
        count: its lines.
        by_reason: count of each reason.
    """

    file: str
    sha256: str
    count: int
    by_reason: Mapping[str, int]


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
    """

    name: str
    student: TokenizerRecord
    teacher: TokenizerRecord
    shards: tuple[ShardRecord, ...]
    dead_letters: DeadLetterRecord
    configuration: Mapping[str, Any] = field(default_factory=dict)
    statistics: Mapping[str, Any] = field(default_factory=dict)

    @property
    def fingerprint(self) -> str:
        """64 hex digits that name the dataset's content: shards' hashes and tokenizers."""
        content = {
            "schema_version": SCHEMA_VERSION,
            "student": [self.student.sha256, self.student.special_strings],
            "teacher": [self.teacher.sha256, self.teacher.special_strings],
            "shards": [[s.file, s.sha256, s.index_sha256] for s in self.shards],
        }
        return sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    @property
    def totals(self) -> dict[str, int]:
        """Documents, bytes and tokens over all shards."""
        counts = [entry.name for entry in fields(ShardRecord) if entry.name.startswith("num_")]
        return {name: sum(getattr(s, name) for s in self.shards) for name in counts}

    def require_tokenizers(
        self, *, student_sha256: str | None = None, teacher_sha256: str | None = None
    ) -> None:
        """Check that the given tokenizers made this dataset.

        Raises:
            ForeignTokenizerError: a fingerprint differs.
        """
        for side, given in (("student", student_sha256), ("teacher", teacher_sha256)):
            made_with: TokenizerRecord = getattr(self, side)
            if given is not None and given != made_with.sha256:
                raise ForeignTokenizerError(
                    f"{side} tokenizer {given[:16]}… is not the dataset's: it was made with "
                    f'"{made_with.source}" ({made_with.sha256[:16]}…); use that tokenizer or run '
                    "beam_jobs.align again"
                )


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the manifest as JSON; equal manifests give equal bytes."""
    body = {
        "schema": SCHEMA_NAME,
        "schema_version": SCHEMA_VERSION,
        "fingerprint": manifest.fingerprint,
        "totals": manifest.totals,
        **asdict(manifest),
    }
    for side in ("student", "teacher"):
        if body[side]["convention"] is None:  # an older dataset's manifest keeps its bytes
            del body[side]["convention"]
    return (json.dumps(body, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode()


def decode_manifest(data: bytes, *, where: str = MANIFEST_FILE) -> Manifest:
    """Return the manifest held by a JSON file.

    Args:
        data: the file's bytes.
        where: its path, for errors.

    Raises:
        DatasetError: no manifest, fields missing or of another type, files outside the dataset,
            or totals or a fingerprint that don't follow from the shards.
        SchemaVersionError: another version of the format.
    """
    try:
        body = json.loads(data)
        if body.get("schema") != SCHEMA_NAME:
            raise DatasetError(f"{where} is no {SCHEMA_NAME} manifest; name a folder made by align")
        if body["schema_version"] != SCHEMA_VERSION:
            raise SchemaVersionError(where, body["schema_version"], SCHEMA_VERSION)
        manifest = Manifest(
            name=body["name"],
            student=_tokenizer(body["student"]),
            teacher=_tokenizer(body["teacher"]),
            shards=tuple(_record(ShardRecord, shard) for shard in body["shards"]),
            dead_letters=_record(DeadLetterRecord, body["dead_letters"]),
            configuration=body["configuration"],
            statistics=body["statistics"],
        )
        claims = {"fingerprint": body["fingerprint"], "totals": body["totals"]}
    except DatasetError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise DatasetError(
            f"{where} is no complete manifest ({error!r}): it is cut or altered; restore it or run "
            "beam_jobs.align again"
        ) from error
    for name, claim in claims.items():
        if claim != getattr(manifest, name):
            raise DatasetError(
                f"{where}: {name} {claim} does not follow from its shards "
                f"({getattr(manifest, name)}): it was altered; restore it or run align again"
            )
    return manifest


def _tokenizer(values: Mapping[str, Any]) -> TokenizerRecord:
    """Return a tokenizer's record; `convention` is younger than the format, so it may be absent."""
    convention = values.get("convention")
    return _record(
        TokenizerRecord,
        {
            **values,
            "convention": None if convention is None else _record(ConventionRecord, convention),
        },
    )


def _record[Record](kind: type[Record], values: Mapping[str, Any]) -> Record:
    """Return a record, every field of the type that its class declares.

    Optional fields must be there too: a writer always writes them.
    """
    hints = get_type_hints(kind)
    for name, declared in hints.items():
        value = values[name]
        expected = dict if get_origin(declared) is Mapping else declared
        if not isinstance(value, expected) or (isinstance(value, bool) and expected is not bool):
            raise TypeError(f"{kind.__name__}.{name} is {value!r}, not {expected}")
        if name.endswith("file") and _leaves_folder(str(value)):
            raise ValueError(f"{kind.__name__}.{name} {value!r} is not inside the dataset")
    return kind(**{name: values[name] for name in hints})


def _leaves_folder(file: str) -> bool:
    path = PurePosixPath(file)
    return path.is_absolute() or ".." in path.parts or not path.parts
