"""Documents that hold questions of test sets, as `vocag overlap` lists them."""

from collections.abc import Iterable, Iterator, Mapping
from hashlib import sha256

import orjson

from beam_jobs import storage
from beam_jobs.align.inputs.documents import Outcome, PlacedDocument, Reason
from beam_jobs.errors import OptionsError


def read_overlap(path: str) -> dict[str, str]:
    """Return what each listed document holds, by its id.

    Raises:
        OptionsError: no such list, or a line that is none of it.
    """
    try:
        with storage.open_to_read(path) as file:
            lines = file.read().splitlines()
    except FileNotFoundError as error:
        raise OptionsError(
            f"--exclude-overlap {path} is not there: vocag overlap makes it"
        ) from error
    found: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        try:
            body = orjson.loads(line)
            said = f"{len(body['words'].split())} words of {body['set']} {body['place']}"
            found.setdefault(body["document_id"], f"{said} stand in it")
        except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise OptionsError(
                f"--exclude-overlap {path}: line {number} is none of vocag overlap ({error!r}): "
                "name its overlap.jsonl"
            ) from error
    return found


def exclude_overlap(outcomes: Iterable[Outcome], overlap: Mapping[str, str]) -> Iterator[Outcome]:
    """Make dead letters of documents that are listed.

    Example:
        >>> documents = [PlacedDocument("a.jsonl", 0, "forum/7", b"text")]
        >>> [made.reason.value for made in exclude_overlap(documents, {"forum/7": "…"})]
        ['overlap']
    """
    for outcome in outcomes:
        if isinstance(outcome, PlacedDocument) and outcome.document_id in overlap:
            yield outcome.refuse(Reason.OVERLAP, overlap[outcome.document_id])
        else:
            yield outcome


def digest_of_overlap(overlap: Mapping[str, str]) -> str:
    """Return 64 hex digits over the listed ids: other ids, another dataset."""
    return sha256(orjson.dumps(sorted(overlap))).hexdigest()
