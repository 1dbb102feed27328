"""`vocag compare-scores`: what two teachers' stored losses of one dataset differ by."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from pipeline.command_line.failures import report
from pipeline.command_line.options import DatasetSource, Option, parse_options
from pipeline.drawing.formatting import format_count, printable

if TYPE_CHECKING:
    from pipeline.scoring.comparison import Comparison

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


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit status: 0, or 2 if it could not run."""
    try:
        options = parse_options(CompareOptions, argv, prog="vocag compare-scores", epilog=_EPILOG)
        from pipeline.scoring.comparison import compare_scores

        print(describe_comparison(compare_scores(options.dataset, options.first, options.second)))
    except (ValueError, OSError) as error:
        report("vocag compare-scores", error, printable(str(error)))
        return 2
    return 0


def describe_comparison(found: "Comparison") -> str:
    """Return what two teachers' losses differ by, in lines."""
    from pipeline.scoring.comparison import KEPT

    changed = 100 * found.num_changed / max(1, found.num_kept)
    return "\n".join(
        [
            f"compared {format_count(found.num_tokens)} teacher tokens: the second's losses less "
            "the first's",
            f"  difference      mean {found.mean:+.4f} nats, mean size {found.mean_absolute:.4f}, "
            f"largest {found.largest:.3g}",
            f"  kept tokens     {changed:.1f} % of {format_count(found.num_kept)} would differ "
            f"at {100 * KEPT:g} %, ranked by the teacher's losses alone",
        ]
    )
