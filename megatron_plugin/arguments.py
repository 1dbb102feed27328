"""The --vocag-* arguments, read once and checked before anything starts."""

from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal

from pipeline.command_line import option_parsing
from pipeline.command_line.failures import hinted
from pipeline.command_line.option_parsing import ModelSource, Option
from pipeline.methods import kind_of
from pipeline.methods.kind import MethodKind, Served
from pipeline.methods.method import Method
from pipeline.packing.reading import Reading
from pipeline.scoring.teaching import NOBODY, Teaching

_PREFIX = "vocag_"
_GROUPS = {
    "vocag_data": "vocag: data and student",
    "vocag_teacher": "vocag: teacher",
    "vocag_method": "vocag: guidance",
}


class ArgumentError(ValueError):
    """Arguments that can't work together."""


@dataclass(frozen=True)
class TeacherOptions:
    """On which ranks a teacher runs in this job, and how.

    Attributes:
        world_size: ranks for the teacher alone, the last ones of the job; 0: it shares the
            student's ranks.
        tensor_model_parallel_size: tensor-parallel ranks of each copy of the teacher.
        pipeline_model_parallel_size: pipeline-parallel ranks of each copy of the teacher.
        expert_model_parallel_size: expert-parallel ranks of each copy of the teacher.
        micro_batch_size: rows per forward pass of the teacher.
        dtype: data type of the teacher's weights.
    """

    world_size: int = 0
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    micro_batch_size: int = 1
    dtype: Literal["float32", "bfloat16"] = "bfloat16"

    @property
    def num_replicas(self) -> int:
        """Copies of the teacher in its world."""
        return self.world_size // self.ranks_of_replica

    @property
    def ranks_of_replica(self) -> int:
        """Ranks that share one copy."""
        return prod(self._parallel_sizes.values())

    @property
    def _parallel_sizes(self) -> dict[str, int]:
        kinds = ("tensor", "pipeline", "expert")
        return {kind: getattr(self, f"{kind}_model_parallel_size") for kind in kinds}

    def __post_init__(self) -> None:
        if self.world_size < 0:
            raise ArgumentError(
                f"--vocag-teacher-world-size {self.world_size}: give the teacher's ranks, or leave "
                "it out to run the teacher on the student's"
            )
        if min(self.micro_batch_size, *self._parallel_sizes.values()) < 1:
            raise ArgumentError(
                f"the teacher's micro-batch size {self.micro_batch_size} and parallel sizes "
                f"{self._parallel_sizes} are 1 or more"
            )
        if self.world_size % self.ranks_of_replica:
            sizes = " by ".join(f"{n} {kind}-parallel" for kind, n in self._parallel_sizes.items())
            error = ArgumentError(
                f"--vocag-teacher-world-size {self.world_size} isn't a multiple of {sizes} ranks: "
                f"use a multiple of {self.ranks_of_replica}"
            )
            more = (self.world_size // self.ranks_of_replica + 1) * self.ranks_of_replica
            raise hinted(error, f"--vocag-teacher-world-size {more}")


NO_TEACHER = TeacherOptions()


@dataclass(frozen=True, kw_only=True)
class VocagOptions:
    """The --vocag-* arguments.

    Attributes:
        data: what to train on.
        validation_data: aligned dataset for --eval-iters (default: none; then --eval-iters must be
            0).
        student: Hugging Face folder or repository to start from; it also sets Megatron's model
            arguments (default: random weights, model arguments as given).
        on_damage: stop at a sample that can't be read, or mask and count it.
        cache_folder: folder for remote shards and packing plans (default: ~/.cache/vocag).
        cache_gigabytes: GiB of remote shards kept on local disk.
        teaching: who teaches.
        teacher: on which ranks.
        allow_untrained_teacher: accept a teacher that predicts a probe text no better than chance
            (default: refuse).
        teacher_seq_length: teacher tokens per row (default: the dataset's ratio plus 12.5 %).
        method: how the loss is made, as in `vocag train`, by any method that runs no model of the
            student's vocabulary.
    """

    data: Reading
    validation_data: Annotated[str, Option("DATASET")] | None = None
    student: ModelSource | None = None
    # Not `OnDamage`, which takes half a second to import.
    on_damage: Literal["raise", "quarantine"] = "raise"
    cache_folder: Annotated[Path, Option("FOLDER")] = Path("~/.cache/vocag")
    cache_gigabytes: int = 256
    teaching: Teaching = NOBODY
    teacher: Annotated[TeacherOptions, Option(form="prefix")] = NO_TEACHER
    allow_untrained_teacher: bool = False
    teacher_seq_length: int | None = None
    method: Method

    @property
    def kind(self) -> MethodKind:
        """The method's kind."""
        return kind_of(self.method)

    @property
    def served(self) -> Served:
        """How the run gets its teacher's answers."""
        return self.kind.serve(self.method, self.teaching)

    @property
    def guidance(self) -> dict[str, Any]:
        """Settings that must stay the same for a run to continue."""
        method, kind = self.method, self.kind
        own = {name: getattr(method, name) for name in kind.options and ("name", *kind.options)}
        own.pop("distill_by", None)  # it is the rule's selector
        if "weight" in own:
            own["weight"] = kind.weight_of(method)
        if kind.needs == "distributions":
            own |= {"top_k": max(self.served.entries.exact - 1, 0)}
        if drawn := self.served.entries.drawn:  # absent from older runs
            own |= {"draws": drawn}
        both = {"aggregation": method.aggregation, "expectation": method.expectation}
        return both | own | asdict(kind.rule(method))

    def __post_init__(self) -> None:
        object.__setattr__(self, "cache_folder", self.cache_folder.expanduser())
        if not self.teaching.teacher:
            self._require_no_teacher_options()
        if not self.teacher.world_size and self.teacher.ranks_of_replica > 1:
            error = ArgumentError(
                "--vocag-teacher-world-size 0 puts the teacher on the student's ranks, with the "
                "student's parallelism: leave out its own tensor, pipeline and expert parallelism"
            )
            raise hinted(error, f"--vocag-teacher-world-size {self.teacher.ranks_of_replica}")
        if self.kind.needs == "model":
            raise ArgumentError(
                f"--vocag-method {self.kind.name} runs a model of the student's vocabulary in the "
                "student's process, as vocag train does: choose another method, or train there"
            )
        if self.served.by == "nothing" and self.teaching.teacher:
            error = ArgumentError(
                f"--vocag-method {self.kind.name} needs no teacher, and its ranks would wait for "
                f"nothing: leave out --vocag-teacher {self.teaching.teacher}"
            )
            raise hinted(error, "leave out --vocag-teacher")

    def _require_no_teacher_options(self) -> None:
        given = asdict(self.teacher).items() - asdict(NO_TEACHER).items()
        unread = {f"teacher_{name}": value for name, value in given}
        if self.allow_untrained_teacher:
            unread["allow_untrained_teacher"] = True
        if unread:
            name, value = min(unread.items())
            option = "--vocag-" + name.replace("_", "-")
            error = ArgumentError(
                f"{option} {value} needs --vocag-teacher, which is missing: name the teacher, or "
                f"leave {option} out to train without one"
            )
            raise hinted(error, f"leave out {option}")


def naming_arguments() -> Any:
    """Name arguments in the library's errors, which name fields."""
    return option_parsing.naming_options(VocagOptions, prefix=_PREFIX, others=("seq_length",))


def add_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add all --vocag-* arguments to Megatron's parser, in groups."""
    option_parsing.add_options(parser, VocagOptions, prefix=_PREFIX, groups=_GROUPS)
    return parser


def read_options(argv: Sequence[str]) -> VocagOptions | None:
    """Read the options from a command line that also holds Megatron's.

    Comes before Megatron's parsing, because teacher ranks change `RANK` and `WORLD_SIZE`. None for
    --help; ArgumentError for impossible options.
    """
    if "--help" in argv or "-h" in argv:
        return None
    parser = option_parsing.Parser(add_help=False, allow_abbrev=False)
    parser.knows_all = False
    given, _ = add_arguments(parser).parse_known_args(argv)
    return option_parsing.read_options(VocagOptions, vars(given), prefix=_PREFIX)
