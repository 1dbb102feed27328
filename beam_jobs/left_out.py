"""What a job left out: summed up by file, and refused where it is more than was allowed."""

from collections import Counter
from dataclasses import dataclass, field

import orjson

from beam_jobs import storage
from pipeline.drawing.formatting import format_count, format_share
from schemas.manifest import Manifest, totals_of

EXIT_STATUS = 3
"""What `vocag align` ends with where too many documents are dead letters."""

DUPLICATE_OF = "the id was first used at "
"""How the detail of a duplicate begins; its first use's place follows."""


ASKED_FOR = "overlap"
"""The reason of documents that are left out because the user listed them."""


class TooManyDeadLettersError(RuntimeError):
    """The dataset is written, but more of the input is left out than was allowed."""


@dataclass
class FileLosses:
    """What is left out of one input file.

    Attributes:
        source: the file's name in dead letters.
        first: position of the first document that is left out.
        by_reason: how many documents, by reason.
    """

    source: str
    first: int
    by_reason: Counter[str] = field(default_factory=Counter)


@dataclass
class Losses:
    """What is left out of the whole input.

    Attributes:
        files: files that lost documents, in the order of their names.
        first_places: where each reason occurs first.
        num_repeated_ids: duplicates whose id was first used in another file.
    """

    files: list[FileLosses] = field(default_factory=list)
    first_places: dict[str, str] = field(default_factory=dict)
    num_repeated_ids: int = 0


def read_losses(output: str, manifest: Manifest) -> Losses:
    """Return what a dataset's dead letters say, one line in memory at a time."""
    losses = Losses()
    with storage.open_to_read(storage.join(output, manifest.dead_letters.file)) as lines:
        for line in lines:
            letter = orjson.loads(line)
            source, position, reason = letter["source"], letter["position"], letter["reason"]
            if not losses.files or losses.files[-1].source != source:
                losses.files.append(FileLosses(source, position))
            losses.files[-1].by_reason[reason] += 1
            losses.first_places.setdefault(reason, f"{source}#{position}")
            detail = letter["detail"]
            if detail.startswith(DUPLICATE_OF):
                other = detail.removeprefix(DUPLICATE_OF).rpartition("#")[0]
                losses.num_repeated_ids += other != source
    return losses


def require_few_losses(
    manifest: Manifest, losses: Losses, *, max_share: float, output: str
) -> None:
    """Check that no larger share of the input is lost than allowed; what was asked for is not.

    Raises:
        TooManyDeadLettersError: with the reasons, their first places, and the likely remedy.
    """
    reasons_of = dict(manifest.dead_letters.by_reason)
    left_out = manifest.dead_letters.count - reasons_of.pop(ASKED_FOR, 0)
    num_documents = totals_of(manifest.newest_shards)["num_documents"] + left_out
    if left_out <= max_share * num_documents:
        return
    by_reason = sorted(reasons_of.items(), key=lambda item: (-item[1], item[0]))
    reasons = ", ".join(
        f"{reason} {format_count(count)} (first: {losses.first_places[reason]})"
        for reason, count in by_reason
    )
    raise TooManyDeadLettersError(
        f"{format_count(left_out)} of {format_count(num_documents)} documents "
        f"({format_share(left_out, num_documents)}) are left out, more than --max-dead-letters "
        f"{100 * max_share:.6g} %: {reasons}; {_advice(losses)}the dataset is written without "
        f"them, {storage.join(output, manifest.dead_letters.file)} names each"
    )


def _advice(losses: Losses) -> str:
    if not losses.num_repeated_ids:
        return ""
    return (
        f"{format_count(losses.num_repeated_ids)} ids are used again in another file: if each file "
        "numbers its own documents, name documents by file and place with --id-field ''; "
    )
