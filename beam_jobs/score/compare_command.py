"""`vocag compare-scores`: how two teachers' stored losses of one dataset differ."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from pipeline.command_line.option_parsing import DatasetSource, Option, parse_options
from pipeline.drawing.formatting import format_count
from pipeline.drawing.printing import prints

_EPILOG = """\
examples:
  vocag compare-scores aligned Qwen/Qwen2.5-Math-7B teacher
      How far a served teacher's losses are from those of its files here."""


@dataclass(frozen=True)
class CompareOptions:
    """Compare two teachers' stored losses of a dataset, token by token.

    Attributes:
        dataset: folder, URL or manifest of a dataset.
        first: scores, named as train's --stored-losses names them.
        second: the scores to compare with them.
    """

    dataset: DatasetSource
    first: Annotated[str, Option("A", form="positional")]
    second: Annotated[str, Option("B", form="positional")]


@prints("vocag compare-scores")
def main(argv: list[str] | None = None) -> Iterator[str]:
    """Yield the command's output."""
    options = parse_options(CompareOptions, argv, prog="vocag compare-scores", epilog=_EPILOG)
    from pipeline.scoring.comparison import KEPT, compare_scores
    from schemas.errors import ForeignLossesError

    found = compare_scores(options.dataset, options.first, options.second)
    if not found.num_tokens:
        raise ForeignLossesError(
            f"no token of {options.dataset} has a loss by both {options.first} and "
            f"{options.second}: all documents that they scored are removed"
        )
    changed = 100 * found.num_changed / max(1, found.num_kept)
    yield (
        f"compared {format_count(found.num_tokens)} teacher tokens: the second's losses less the "
        "first's"
    )
    yield (
        f"  difference      mean {found.mean:+.4f} nats, mean size {found.mean_absolute:.4f}, "
        f"largest {found.largest:.3g}"
    )
    yield (
        f"  kept tokens     {changed:.1f} % of {format_count(found.num_kept)} would differ at "
        f"{100 * KEPT:g} %, ranked by the teacher's losses alone"
    )
