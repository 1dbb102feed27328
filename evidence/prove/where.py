"""Where does a teacher help? Every experiment's sets, by how far the student is from its teacher.

    python evidence/prove/where.py evidence/records --output docs/figures/where.svg

Across: how many bits per byte more the student needs before training than its teacher. Up: how many
it needs less after distillation than after plain training of as many steps. Experiments whose runs,
student or teacher aren't all in the records are left out.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path += [str(Path(__file__).parents[2] / name) for name in ("evidence", "examples")]

from prove import code, few, random_weights, transfer
from prove.compare import (
    Difference,
    Records,
    best_arm,
    bits_per_byte,
    compare,
    find_missing,
    read_records,
    table,
)


@dataclass(frozen=True)
class Source:
    """Runs of an experiment.

    Attributes:
        title: what is trained.
        folder: of the records.
        plain: arms of plain training; the best one on the development set is compared with.
        taught: the arm that reads distributions.
        sets: those of the text's own kind, and those never trained on.
        at: the measured unit.
    """

    title: str
    folder: str
    plain: tuple[str, ...]
    taught: str
    sets: tuple[Sequence[str], Sequence[str]]
    at: str = "last"


_TRANSFER = (transfer.DOMAIN, transfer.ELSEWHERE)
SOURCES = (
    Source("Llama 2's tokens, prefixes", "distributions", ("plain",), "drawn-plain", _TRANSFER),
    Source("GPT-NeoX's tokens", "cells-gpt_neox", ("plain",), "cells", _TRANSFER),
    Source("Llama 2's tokens", "cells-llama2", ("plain",), "cells", _TRANSFER),
    Source(
        "40 documents, a cut model",
        "few-cells",
        few.CELLS_PLAIN,
        "cells",
        (few.DECIDING, few.KNOWN),
        at="best",
    ),
    Source("fresh code", "fresh", ("full",), "cells", (code.SETS[:1], code.SETS[1:])),
    Source(
        "random weights",
        "random_weights",
        ("full",),
        "cells",
        (random_weights.SETS[:1], random_weights.SETS[1:]),
    ),
)
KINDS = ("its own kind of text", "never trained on")


@dataclass(frozen=True)
class Place:
    """A held-out set of an experiment.

    Attributes:
        title: of the source.
        held_out: the set.
        kind: of `KINDS`.
        gap: bits per byte of the student before training less its teacher's.
        less: of distillation less plain training.
    """

    title: str
    held_out: str
    kind: str
    gap: float
    less: Difference


def places(root: Path, sources: Sequence[Source] = SOURCES) -> Iterator[Place]:
    """Yield every set of the experiments whose records are complete."""
    for source in sources:
        records = read_records(root / source.folder)
        if {"original", "start"} <= records.keys() and not _missing(records, source):
            plain = best_arm(records, source.plain)
            for kind, names in zip(KINDS, source.sets, strict=True):
                for name in names:
                    start, least = (
                        bits_per_byte(records[model][0], name, "last")
                        for model in ("start", "original")
                    )
                    less = compare(records, source.taught, plain, name, source.at)
                    yield Place(source.title, name, kind, start - least, less)


def _missing(records: Records, source: Source) -> str:
    return find_missing(records, (*source.plain, source.taught))


def place_table(found: Sequence[Place]) -> str:
    """Return the places as Markdown, the nearest student first."""
    heads = ["student", "set", "of", "bits per byte behind its teacher", "distillation less plain"]
    rows = [
        [own.title, own.held_out, own.kind, f"{own.gap:.2f}", own.less]
        for own in sorted(found, key=lambda own: own.gap)
    ]
    return table(heads, rows)


def draw(found: Sequence[Place], path: Path) -> None:
    """Draw the places as an SVG: gains above zero, with their wider intervals."""
    from matplotlib import rcParams
    from matplotlib.figure import Figure

    rcParams["svg.hashsalt"] = "vocag"
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.axhline(0, color="0.6", linewidth=0.8)
    titles = list(dict.fromkeys(own.title for own in found))
    for own in found:
        low = min(own.less.low, own.less.mean - own.less.half_width)
        high = max(own.less.high, own.less.mean + own.less.half_width)
        axes.errorbar(
            own.gap,
            -own.less.mean,
            yerr=[[high - own.less.mean], [own.less.mean - low]],
            color=f"C{titles.index(own.title)}",
            marker="o" if own.kind == KINDS[1] else "s",
            fillstyle="full" if own.kind == KINDS[1] else "none",
            elinewidth=0.8,
        )
    for number, title in enumerate(titles):
        axes.plot([], [], color=f"C{number}", marker="o", linestyle="", label=title)
    for kind, style in zip(KINDS, ("none", "full"), strict=True):
        marker = "s" if style == "none" else "o"
        axes.plot([], [], color="0.3", marker=marker, fillstyle=style, linestyle="", label=kind)
    axes.set_xlabel("student behind its teacher before training, bits per byte")
    axes.set_ylabel("gained by distillation,\nbits per byte")
    axes.legend(fontsize="small", frameon=False)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Print the table; draw the figure if it is asked for."""
    parser = argparse.ArgumentParser(description="Where does a teacher help?")
    parser.add_argument("records", type=Path, help="folder of all records")
    parser.add_argument("--output", type=Path, help="figure to draw")
    options = parser.parse_args()
    found = list(places(options.records))
    print(place_table(found), end="")
    if options.output is not None:
        draw(found, options.output)


if __name__ == "__main__":
    main()
