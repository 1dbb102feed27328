"""Some of the first documents of a few tasks, looked at before a job starts."""

from collections.abc import Sequence
from dataclasses import replace

from beam_jobs.align.inputs.listing import InputError
from beam_jobs.align.inputs.metadata import settle_columns
from beam_jobs.align.inputs.pieces import Piece, decode_task
from beam_jobs.align.inputs.reading import (
    DeadLetter,
    PlacedDocument,
    ReadingRules,
    Reason,
    read_piece,
)

PROBE_TASKS = 4
PROBE_DOCUMENTS = 32
PROBE_BYTES = 64 << 10

Outcome = PlacedDocument | DeadLetter


def probe_documents(
    tasks: Sequence[str],
    rules: ReadingRules,
    *,
    num_documents: int = PROBE_DOCUMENTS,
    num_bytes: int = PROBE_BYTES,
) -> list[Outcome]:
    """Return what becomes of the first documents of a few tasks that are spread over the input.

    Args:
        tasks: the reading tasks.
        rules: what counts as a document.
        num_documents: at most, of each task.
        num_bytes: of text at most, of each task.

    Raises:
        InputError: none of them has the text field, or the id field that was asked for.
    """
    chosen = tasks[:: max(1, len(tasks) // PROBE_TASKS)][:PROBE_TASKS]
    pieces = [decode_task(task)[0] for task in chosen]
    found = [(piece, _read_first(piece, rules, num_documents, num_bytes)) for piece in pieces]
    require_fields(found, rules)
    return [outcome for _, outcomes in found for outcome in outcomes]


def require_fields(found: Sequence[tuple[Piece, Sequence[Outcome]]], rules: ReadingRules) -> None:
    """Check that some of the first documents have the fields that hold text and id.

    Raises:
        InputError: none of them has the text field, or the id field that was asked for.
    """
    outcomes = [outcome for _, own in found for outcome in own]
    _require_text_field(outcomes, '" and "'.join(rules.text_fields))
    with_fields = [outcome for piece, own in found if piece.format != "text" for outcome in own]
    _require_id_field(with_fields, rules.id_field)


def usable_texts(outcomes: Sequence[Outcome]) -> list[bytes]:
    """Return the texts of the documents that can be used."""
    return [outcome.text for outcome in outcomes if isinstance(outcome, PlacedDocument)]


def settle_metadata(rules: ReadingRules, outcomes: Sequence[Outcome]) -> ReadingRules:
    """Return the rules with a type for each column of metadata.

    Raises:
        InputError: the documents' values don't tell a type that the options don't name.
    """
    documents = [outcome.metadata for outcome in outcomes if isinstance(outcome, PlacedDocument)]
    return replace(rules, metadata=settle_columns(rules.metadata, documents))


def _read_first(piece: Piece, rules: ReadingRules, most: int, most_bytes: int) -> list[Outcome]:
    found: list[Outcome] = []
    num_bytes = 0
    for outcome in read_piece(piece, rules):
        num_bytes += len(outcome.text) if isinstance(outcome, PlacedDocument) else 0
        if len(found) == most or num_bytes > most_bytes:
            break
        found.append(outcome)
    return found


def _require_text_field(outcomes: Sequence[Outcome], field: str) -> None:
    missing = [o for o in outcomes if isinstance(o, DeadLetter) and o.reason == Reason.MISSING_TEXT]
    if missing and len(missing) == len(outcomes):
        raise InputError(
            f'none of the first {len(missing)} documents has a field "{field}" (the '
            f"first one is {missing[0].source}#{missing[0].position}); name it with --text-field"
        )


def _require_id_field(outcomes: Sequence[Outcome], field: str) -> None:
    """Check a field that was asked for; "id", the default, need not be there."""
    usable = [outcome for outcome in outcomes if isinstance(outcome, PlacedDocument)]
    if not usable or field in ("", "id"):
        return
    if all(document.document_id == f"{document.source}#{document.position}" for document in usable):
        raise InputError(
            f'--id-field {field}: none of the first {len(usable)} documents has a field "{field}" '
            f"(the first one is {usable[0].source}#{usable[0].position}); name one that they have, "
            "or leave the option out and documents are named by their place"
        )
