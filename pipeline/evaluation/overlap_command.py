"""`vocag overlap`: find test questions in a dataset."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pipeline.command_line.folder_lock import hold_folder
from pipeline.command_line.option_parsing import (
    DatasetSource,
    Folder,
    Option,
    naming_options,
    parse_options,
    require_known,
)
from pipeline.drawing.printing import prints
from pipeline.evaluation.sets import NINE, SETS

OUTPUT_LOCK = ".overlap-lock"
"""The lock's name in the list's folder; it goes when that is written."""

_EPILOG = """\
examples:
  vocag overlap aligned --output overlap
      Look for the nine sets' questions, from math-evaluation-harness's files.
  vocag remove aligned --ids overlap/overlap.jsonl
      Leave out the documents that hold one.

output: overlap.jsonl, a line for each document and question."""


@dataclass(frozen=True, kw_only=True)
class OverlapOptions:
    """Look for the test sets' questions in an aligned dataset, and list where they are.

    Attributes:
        dataset: folder, URL or manifest of a dataset.
        output: folder for the list.
        tasks: sets (default: the nine).
        data: a folder of the sets' files, NAME.jsonl or NAME/test.jsonl (default:
            math-evaluation-harness's, downloaded once).
    """

    dataset: DatasetSource
    output: Folder
    tasks: Annotated[tuple[str, ...], Option("SET")] = NINE
    data: Folder = ""

    def __post_init__(self) -> None:
        require_known("tasks=", self.tasks, tuple(SETS))


@prints("vocag overlap")
def main(argv: list[str] | None = None) -> Iterator[str]:
    """Run the command."""
    options = parse_options(OverlapOptions, argv, prog="vocag overlap", epilog=_EPILOG)
    from pipeline.evaluation.overlap import check_overlap  # help does without

    # Two at once would write one list of both.
    lock = hold_folder(os.path.join(options.output, OUTPUT_LOCK), options.output)
    with naming_options(OverlapOptions), lock:
        yield from check_overlap(
            options.dataset, options.tasks, data=options.data, output=Path(options.output)
        )
