"""Options of `vocag evaluate`."""

from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from pipeline.command_line.option_parsing import Option, require_known, require_least
from pipeline.evaluation.sets import NINE, SETS

Measure = Literal["accuracy", "text", "solution", "answer", "options"]
MEASURES: tuple[Measure, ...] = get_args(Measure)


@dataclass(frozen=True)
class Asked:
    """What is measured.

    Attributes:
        tasks: sets to measure on (default: the nine; math_full is MATH's whole test set).
        measures: measures to take; each set takes those that it allows (default: all).
        data: a folder of the sets' files, NAME.jsonl or NAME/test.jsonl (default:
            math-evaluation-harness's, downloaded once).
        limit: items of each set, spread evenly; 0 for all.
        max_answer_tokens: longest answer; the protocol allows 1024.
    """

    tasks: Annotated[tuple[str, ...], Option("SET")] = NINE
    measures: Annotated[tuple[str, ...], Option("MEASURE")] = MEASURES
    data: Annotated[str, Option("FOLDER")] = ""
    limit: int = 0
    max_answer_tokens: int = 1024

    def __post_init__(self) -> None:
        require_known("tasks=", self.tasks, tuple(SETS))
        require_known("measures=", self.measures, MEASURES)
        if self.limit < 0:
            raise ValueError(f"limit={self.limit}: it must be 0 or more")
        require_least(self, "max_answer_tokens")


@dataclass(frozen=True)
class StudentEngine:
    """How a student runs.

    Attributes:
        dtype: data type of the weights; auto keeps the stored one.
        device: device such as cpu or cuda:1 (default: the GPU if there is one).
        batch_size: questions at a time; with more than one, 16-bit answers may differ in rare
            cases.
    """

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: Annotated[str, Option("NAME")] = ""
    batch_size: int = 1

    def __post_init__(self) -> None:
        require_least(self, "batch_size")
