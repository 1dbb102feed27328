"""Checks of an input's first documents."""

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from beam_jobs.align.inputs.documents import DeadLetter, ReadingRules, Reason
from beam_jobs.align.inputs.metadata import settle_columns
from beam_jobs.align.inputs.sampling import SampledPart
from beam_jobs.align.inputs.standard_input import is_spooled
from beam_jobs.job_errors import InputError
from pipeline.tokenization.pieces import start_of

PROBED_BYTES = 1 << 20
"""About as much text is used to compare a tokenizer's paths."""

LONGEST_PROBE = 64 << 10
"""Longer documents are cut: a reference library is slow."""


def require_fields(sample: Sequence[SampledPart], rules: ReadingRules) -> None:
    """Raise InputError if no sampled document has the text's field, or the id's, or is a chat."""
    outcomes = [outcome for sampled in sample for outcome in sampled.outcomes]
    missing = [o for o in outcomes if isinstance(o, DeadLetter) and o.reason == Reason.MISSING_TEXT]
    if missing and len(missing) == len(outcomes):
        fields = '" and "'.join(rules.text_fields)
        first = missing[0]
        raise InputError(
            f'none of the first {len(missing)} documents has a field "{fields}" (name it with '
            f"{'--messages' if rules.messages_field else '--text-field or --text-template'}); the "
            f"first one is {first.source}#{first.position}: {first.detail}"
        )
    if outcomes and all(
        isinstance(o, DeadLetter) and o.reason == Reason.BAD_CHAT for o in outcomes
    ):
        first = cast(DeadLetter, outcomes[0])
        raise InputError(
            f"none of the first {len(outcomes)} documents is a conversation; the first one is "
            f"{first.source}#{first.position}: {first.detail}"
        )
    field = rules.id_field
    usable = [d for each in sample if each.part.file.format != "text" for d in each.documents]
    if not usable or field in ("", "id"):  # the default need not be there
        return
    if all(document.document_id == f"{document.source}#{document.position}" for document in usable):
        raise InputError(
            f'--id-field {field}: none of the first {len(usable)} documents has a field "{field}" '
            f"(the first one is {usable[0].source}#{usable[0].position}); name one that they have, "
            "or leave the option out and documents are named by their place"
        )


def require_names(sample: Sequence[SampledPart]) -> None:
    """Raise InputError if documents without ids would be added from standard input.

    Their places there are those of an earlier stream's documents, which the dataset may have.
    """
    for each in sample:
        for document in each.documents if is_spooled(each.part.file.path) else ():
            if document.document_id == f"{document.source}#{document.position}":
                raise InputError(
                    f"--append --input -: document #{document.position} has no id, and its place "
                    "doesn't tell it from one of an earlier stream: give every document an id "
                    "(--id-field), or write this input to a file with a name of its own"
                )


def settle_metadata(rules: ReadingRules, sample: Sequence[SampledPart]) -> ReadingRules:
    """Give each metadata column a type, see `settle_columns`.

    InputError also if no document could be used to infer one.
    """
    documents = [document.metadata for sampled in sample for document in sampled.documents]
    outcomes = [outcome for sampled in sample for outcome in sampled.outcomes]
    first = next((o for o in outcomes if isinstance(o, DeadLetter)), None)
    unknown = [field.name for field in rules.metadata if field.type is None]
    if unknown and not documents and first is not None:
        raise InputError(
            f"--metadata {unknown[0]}: none of the first {len(outcomes)} documents can be used to "
            f"infer its type; the first one is {first.source}#{first.position}: {first.reason}: "
            f"{first.detail}"
        )
    return replace(rules, metadata=settle_columns(rules.metadata, documents))


def probe_texts(sample: Sequence[SampledPart]) -> list[bytes]:
    """Starts of some documents, few enough for the reference path."""
    documents = [document for sampled in sample for document in sampled.documents]
    texts = [start_of(document.text, LONGEST_PROBE) for document in documents]
    return texts[:: 1 + sum(map(len, texts)) // PROBED_BYTES]
