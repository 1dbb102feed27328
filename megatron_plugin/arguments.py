"""The --vocag-* arguments: one frozen dataclass, read once, checked before anything starts."""

from __future__ import annotations

from argparse import SUPPRESS, ArgumentParser
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

from pipeline.guidance import PAPER_RULE, Aggregation, Expectation, SelectionRule
from pipeline.guidance.selection import RANKED_BY_TEACHER, Scope, Selector, UnmappedStrategy
from vocag_cli import options
from vocag_cli.options import Condition, ModelSource, Option, TokenName

_PREFIX = "vocag_"
_GROUPS = {
    "vocag_data": "vocag: data and student",
    "vocag_teacher": "vocag: teacher",
    "vocag_aggregation": "vocag: guidance",
}

Dtype = Literal["float32", "bfloat16"]


class ArgumentError(ValueError):
    """Arguments that can't work together; the message says what to change."""


@dataclass(frozen=True)
class TeacherOptions:
    """Which teacher runs in this job, and on which ranks.

    Attributes:
        name: Hugging Face folder or repository (Llama, Mistral, Qwen2, Qwen3, Qwen3-MoE), or a
            checkpoint of this trainer (default: none).
        world_size: ranks for the teacher alone, the last ones of the job; 0: it shares the
            student's ranks.
        tensor_model_parallel_size: tensor-parallel ranks of each copy of the teacher.
        pipeline_model_parallel_size: pipeline-parallel ranks of each copy of the teacher.
        expert_model_parallel_size: expert-parallel ranks of each copy of the teacher.
        layers_per_stage: layers on each pipeline stage of the teacher (default: the cut that makes
            the slowest stage fastest, counting the output layer on the last).
        micro_batch_size: rows per forward pass of the teacher.
        dtype: of the teacher's weights.
        timeout_minutes: minutes that the student waits for losses before the job ends.
    """

    name: ModelSource = ""
    world_size: int = 0
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    layers_per_stage: tuple[int, ...] | None = None
    micro_batch_size: int = 1
    dtype: Dtype = "bfloat16"
    timeout_minutes: float = 10.0

    @property
    def num_replicas(self) -> int:
        """Copies of the teacher in its world, each on its own ranks."""
        return self.world_size // self.ranks_of_replica

    @property
    def ranks_of_replica(self) -> int:
        """Ranks that hold one copy of the teacher together."""
        return (
            self.tensor_model_parallel_size
            * self.pipeline_model_parallel_size
            * self.expert_model_parallel_size
        )

    def __post_init__(self) -> None:
        """Check what concerns the teacher alone."""
        sizes = [f"{kind}_model_parallel_size" for kind in ("tensor", "pipeline", "expert")]
        for name in (*sizes, "micro_batch_size"):
            if getattr(self, name) < 1:
                raise ArgumentError(f"the teacher's {name} is {getattr(self, name)}, below 1")
        if not self.timeout_minutes > 0:
            raise ArgumentError(
                f"--vocag-teacher-timeout-minutes {self.timeout_minutes} is not above 0: a student "
                "would never wait for its teacher"
            )
        ranks = self.ranks_of_replica
        if self.world_size % ranks:
            raise ArgumentError(
                f"--vocag-teacher-world-size {self.world_size} isn't a multiple of "
                f"{self.tensor_model_parallel_size} tensor-parallel by "
                f"{self.pipeline_model_parallel_size} pipeline-parallel by "
                f"{self.expert_model_parallel_size} expert-parallel ranks: use a multiple of "
                f"{ranks}"
            )
        if not self.world_size and ranks > 1:
            raise ArgumentError(
                "--vocag-teacher-world-size 0 puts the teacher on the student's ranks, with the "
                "student's parallelism: leave out --vocag-teacher-tensor-model-parallel-size, "
                "--vocag-teacher-pipeline-model-parallel-size and "
                "--vocag-teacher-expert-model-parallel-size"
            )


NO_TEACHER = TeacherOptions()


@dataclass(frozen=True)
class VocagOptions:
    """Everything that --vocag-* says.

    Attributes:
        data: aligned dataset, folder or URL, or a mixture's FILE.toml (required).
        where: train only on those documents of --vocag-data that match, such as "language == 'en'
            and score > 0.5"; any condition of DuckDB over their metadata (default: all documents).
        generation: state of a growing --vocag-data to train on, by its number, or latest, to which
            a resumed run then moves (default: the newest, and a resumed run keeps its own).
        student_bos: token before a student's text, its id, or none (default: the dataset's).
        student_eos: token after a student's document, its id, or none (default: the dataset's).
        teacher_context: token before a teacher's text, its id, or none (default: the dataset's).
        validation_data: aligned dataset for --eval-iters (default: none; then --eval-iters must be
            0).
        student: Hugging Face folder or repository to start from; it also sets Megatron's model
            arguments (default: random weights, model arguments as given).
        on_damage: stop at a sample that can't be read, or mask and count it.
        shuffle_shards: shards that are shuffled together.
        cache_folder: for remote shards and packing plans (default: ~/.cache/vocag).
        cache_gigabytes: GiB of remote shards kept on local disk.
        teacher: which teacher runs in this job.
        allow_untrained_teacher: accept a teacher that predicts a probe text no better than chance
            (default: refuse).
        stored_losses: what vocag score has stored, in place of a teacher: a score manifest or a
            teacher's name; "" if there is only one (default: none).
        teacher_seq_length: teacher tokens per row (default: the dataset's ratio plus 12.5 %).
        aggregation: Φ over the teacher tokens of a student token.
        method: what ranks the tokens (default: teacher, or full without a teacher).
        keep_fraction: share of the competing tokens that count, 0..1.
        unmapped: tokens that no teacher token covers.
        scope: where the share is counted: each row, each rank's micro-batch, or the micro-batches
            of all data-parallel ranks together.
        seed: seed of method random's choices; Megatron's --seed orders the rows.
        expectation: divide the loss by the kept tokens or by all.
    """

    data: Annotated[str, Option("DATASET")]
    where: Condition = ""
    generation: Annotated[str, Option("N")] = ""
    student_bos: TokenName | None = None
    student_eos: TokenName | None = None
    teacher_context: TokenName | None = None
    validation_data: Annotated[str, Option("DATASET")] | None = None
    student: ModelSource | None = None
    # `OnDamage` by its values: its wing's kernels, which an export doesn't use, take half a second.
    on_damage: Literal["raise", "quarantine"] = "raise"
    shuffle_shards: int = 8
    cache_folder: Annotated[Path, Option("FOLDER")] = Path("~/.cache/vocag")
    cache_gigabytes: int = 256
    teacher: Annotated[TeacherOptions, Option(form="prefix")] = NO_TEACHER
    allow_untrained_teacher: bool = False
    stored_losses: Annotated[str, Option("NAME")] | None = None
    teacher_seq_length: int | None = None
    aggregation: Aggregation = "max"
    method: Selector | None = None
    keep_fraction: float = PAPER_RULE.keep_fraction
    unmapped: UnmappedStrategy = PAPER_RULE.unmapped
    scope: Scope = PAPER_RULE.scope
    seed: int = 0
    expectation: Expectation = "kept"

    @property
    def rule(self) -> SelectionRule:
        """Which student tokens count."""
        default: Selector = "teacher" if self._has_losses else "full"
        return SelectionRule(
            self.method or default, self.keep_fraction, self.unmapped, self.scope, self.seed
        )

    def __post_init__(self) -> None:
        """Check what concerns more than the teacher alone; find the user's home."""
        object.__setattr__(self, "cache_folder", self.cache_folder.expanduser())
        if self.teacher.name and self.stored_losses is not None:
            raise ArgumentError(
                "--vocag-teacher and --vocag-stored-losses are given: choose one of them"
            )
        if not self.teacher.name:
            self._require_no_teacher_options()
        selector = self.rule.selector
        if selector in RANKED_BY_TEACHER and not self._has_losses:
            raise ArgumentError(
                f"--vocag-method {selector} needs --vocag-teacher or --vocag-stored-losses; "
                "without them use --vocag-method full, random, student_loss or student_entropy"
            )

    @property
    def _has_losses(self) -> bool:
        return bool(self.teacher.name) or self.stored_losses is not None

    def _require_no_teacher_options(self) -> None:
        """Refuse what only a running teacher reads: it would be left out without a word."""
        given = {f"teacher_{name}": value for name, value in asdict(self.teacher).items()}
        unset = {f"teacher_{name}": value for name, value in asdict(NO_TEACHER).items()}
        given["allow_untrained_teacher"] = self.allow_untrained_teacher
        unset["allow_untrained_teacher"] = False
        for name in given:
            if given[name] != unset[name]:
                option = "--vocag-" + name.replace("_", "-")
                raise ArgumentError(
                    f"{option} {given[name]} needs --vocag-teacher, which is missing: name the "
                    f"teacher, or leave {option} out to train without one"
                )


def add_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add all --vocag-* arguments to Megatron's parser, in groups.

    Example:
        >>> parse_and_validate_args(extra_args_provider=add_arguments)
    """
    options.add_options(parser, VocagOptions, prefix=_PREFIX, groups=_GROUPS)
    return parser


def read_options(argv: Sequence[str]) -> VocagOptions | None:
    """Read the options from a command line that also holds Megatron's own arguments.

    This happens before Megatron looks at its arguments, because the number of teacher ranks decides
    what `RANK` and `WORLD_SIZE` mean to it.

    Returns:
        The options; None where help is asked for.

    Raises:
        ArgumentError: impossible options.
        SystemExit: argparse's own errors.
    """
    if "--help" in argv or "-h" in argv:
        return None
    # Every rank would print the usage, without Megatron's half of it.
    parser = ArgumentParser(usage=SUPPRESS, add_help=False, allow_abbrev=False)
    given, _ = add_arguments(parser).parse_known_args(argv)
    return options.read_options(VocagOptions, vars(given), prefix=_PREFIX)
