"""The --vocag-* arguments: one frozen dataclass, read once, checked before anything starts."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from pipeline.guidance import PAPER_RULE, Aggregation, Expectation, SelectionRule
from pipeline.guidance.selection import RANKED_BY_TEACHER, Scope, Selector, UnmappedStrategy

if TYPE_CHECKING:  # the wing's kernels, which an export has no use for, take half a second
    from pipeline.streaming.damage import OnDamage

CACHED = "cached"
_DTYPES = ("fp32", "bf16")


class ArgumentError(ValueError):
    """Arguments that can't work together; the message says what to change."""


@dataclass(frozen=True)
class TeacherOptions:
    """Which teacher, and on which ranks.

    Attributes:
        source: folder, repository or Megatron checkpoint; "cached": losses that beam_jobs.score
            has stored, and no teacher.
        world_size: ranks of its own, the last ones of the job; 0: it shares the student's.
        tensor_parallel: ranks that share each of its layers.
        pipeline_parallel: ranks that share its depth.
        expert_parallel: ranks that share the experts of its layers; 1 for a dense one.
        seq_length: teacher tokens per row, None: from the dataset.
        micro_batch_size: rows per forward pass.
        dtype: "fp32" or "bf16".
        timeout_minutes: how long the student waits for losses.
        allow_untrained: accept a teacher that predicts no better than chance.
        losses: whose stored losses are read; "": the only ones there are.
        layers_per_stage: of its pipeline; None: as makes the slowest stage fastest.
    """

    source: str
    world_size: int
    tensor_parallel: int
    pipeline_parallel: int
    expert_parallel: int
    seq_length: int | None
    micro_batch_size: int
    dtype: str
    timeout_minutes: float
    allow_untrained: bool
    losses: str = ""
    layers_per_stage: tuple[int, ...] | None = None

    @property
    def is_cached(self) -> bool:
        """Whether losses are read with the rows."""
        return self.source == CACHED

    @property
    def num_replicas(self) -> int:
        """Copies of the teacher in its world, each on its own ranks."""
        return self.world_size // self.ranks_of_replica

    @property
    def ranks_of_replica(self) -> int:
        """Ranks that hold one copy of the teacher together."""
        return self.tensor_parallel * self.pipeline_parallel * self.expert_parallel

    def __post_init__(self) -> None:
        """Check what concerns the teacher alone."""
        if self.is_cached and self.world_size:
            raise ArgumentError(
                f"--vocag-teacher-world-size {self.world_size} gives ranks to a teacher, but "
                "--vocag-teacher cached needs none: leave it out, or name a teacher model"
            )
        if self.losses and not self.is_cached:
            raise ArgumentError(
                f"--vocag-stored-losses {self.losses} is read with --vocag-teacher cached only: "
                f"leave it out, or name cached in place of {self.source}"
            )
        for name in ("tensor_parallel", "pipeline_parallel", "expert_parallel", "micro_batch_size"):
            if getattr(self, name) < 1:
                raise ArgumentError(f"the teacher's {name} is {getattr(self, name)}, below 1")
        if not self.timeout_minutes > 0:
            raise ArgumentError(
                f"--vocag-teacher-timeout-minutes {self.timeout_minutes} is not above 0: a student "
                "would never wait for its teacher"
            )
        if self.dtype not in _DTYPES:
            raise ArgumentError(f"--vocag-teacher-dtype {self.dtype!r} is none of {_DTYPES}")
        ranks = self.ranks_of_replica
        if self.world_size and self.world_size % ranks:
            raise ArgumentError(
                f"--vocag-teacher-world-size {self.world_size} is no multiple of "
                f"{self.tensor_parallel} tensor-parallel by {self.pipeline_parallel} "
                f"pipeline-parallel by {self.expert_parallel} expert-parallel ranks: use a "
                f"multiple of {ranks}"
            )
        if not self.world_size and ranks > 1:
            raise ArgumentError(
                "--vocag-teacher-world-size 0 puts the teacher on the student's ranks, with the "
                "student's parallelism: leave out --vocag-teacher-tensor-model-parallel-size, "
                "--vocag-teacher-pipeline-model-parallel-size and "
                "--vocag-teacher-expert-model-parallel-size"
            )


@dataclass(frozen=True)
class VocagOptions:
    """Everything that --vocag-* says.

    Attributes:
        data: aligned dataset, or mixture of them, to train on.
        validation_data: aligned dataset to validate on, None for no validation.
        student: model that training starts from, None: random or Megatron's --load.
        teacher: None: plain pretraining on the same rows.
        aggregation: Φ, of the teacher's losses over a student token.
        rule: which student tokens count.
        expectation: what the sum over the kept tokens is divided by.
        on_damage: "raise" or "quarantine".
        shuffle_shards: shards that are shuffled together.
        cache_folder: for remote shards and plans.
        cache_gigabytes: limit of the remote shards kept there.
        student_bos: token before a student's text, its id, or "none"; None: the dataset's.
        student_eos: token after a student's document, likewise.
        teacher_context: token before a teacher's text, likewise.
        where: of which documents of `data` to train on, "" for all.
        generation: of `data`: a number or "latest"; "": the one that the run was started on.
    """

    data: str
    validation_data: str | None
    student: str | None
    teacher: TeacherOptions | None
    aggregation: Aggregation
    rule: SelectionRule
    expectation: Expectation
    on_damage: OnDamage
    shuffle_shards: int
    cache_folder: Path
    cache_gigabytes: int
    student_bos: str | None = None
    student_eos: str | None = None
    teacher_context: str | None = None
    where: str = ""
    generation: str = ""

    def __post_init__(self) -> None:
        """Check what concerns the guidance alone."""
        if self.teacher is None and self.rule.selector in RANKED_BY_TEACHER:
            raise ArgumentError(
                f"--vocag-selector {self.rule.selector} needs --vocag-teacher; without one use "
                "--vocag-selector full, random, student_loss or student_entropy"
            )


def add_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add all --vocag-* arguments to Megatron's parser, in groups.

    Example:
        >>> parse_and_validate_args(extra_args_provider=add_arguments)
    """
    _add_data_arguments(parser)
    _add_teacher_arguments(parser)
    _add_guidance_arguments(parser)
    return parser


def read_options(argv: Sequence[str]) -> VocagOptions | None:
    """Read the options from a command line that also holds Megatron's own arguments.

    This happens before Megatron looks at its arguments, because the number of teacher ranks decides
    what `RANK` and `WORLD_SIZE` mean to it.

    Returns:
        The options; None where help is asked for.

    Raises:
        ArgumentError: impossible options.
    """
    if "--help" in argv or "-h" in argv:
        return None
    parser = add_arguments(ArgumentParser(add_help=False, allow_abbrev=False))
    given, _ = parser.parse_known_args(argv)
    return options_of(given)


def options_of(given: Namespace) -> VocagOptions:
    """Return the options that parsed arguments hold.

    Raises:
        ArgumentError: impossible options.
    """
    if given.vocag_data is None:
        raise ArgumentError(
            "--vocag-data is missing: name the dataset that beam_jobs.align has made"
        )
    if not given.vocag_teacher:
        _require_no_teacher_options(given)
    default: Selector = "teacher" if given.vocag_teacher else "full"
    selector: Selector = given.vocag_selector or default
    return VocagOptions(
        data=given.vocag_data,
        validation_data=given.vocag_validation_data,
        student=given.vocag_student,
        teacher=_teacher_of(given) if given.vocag_teacher else None,
        aggregation=given.vocag_aggregation,
        rule=SelectionRule(
            selector=selector,
            keep_fraction=given.vocag_keep_fraction,
            unmapped=given.vocag_unmapped,
            scope=given.vocag_scope,
            seed=given.vocag_selection_seed,
        ),
        expectation=given.vocag_expectation,
        on_damage=given.vocag_on_damage,
        shuffle_shards=given.vocag_shuffle_shards,
        cache_folder=Path(given.vocag_cache_folder).expanduser(),
        cache_gigabytes=given.vocag_cache_gigabytes,
        student_bos=given.vocag_student_bos,
        student_eos=given.vocag_student_eos,
        teacher_context=given.vocag_teacher_context,
        where=given.vocag_where,
        generation=given.vocag_generation,
    )


def add_convention_options(add: Callable[..., object], *, prefix: str = "--") -> None:
    """Add the options that say which tokens stand around a text.

    Args:
        add: of a parser or a group of one.
        prefix: of the options' names.

    Example:
        >>> add_convention_options(parser.add_argument)
    """
    for name, place in (
        ("student-bos", "before a student's text"),
        ("student-eos", "after a student's document"),
        ("teacher-context", "before a teacher's text"),
    ):
        text = f"token that stands {place}, its id, or none (default: the dataset's)"
        add(f"{prefix}{name}", metavar="TOKEN", help=text)


def _require_no_teacher_options(given: Namespace) -> None:
    """Refuse what only a teacher reads: without one it would be left out without a word."""
    defaults = add_arguments(ArgumentParser(add_help=False, allow_abbrev=False))
    for name, value in sorted(vars(given).items()):
        of_teacher = name.startswith("vocag_teacher_") or name == "vocag_allow_untrained_teacher"
        # Rows have a teacher's side, and so its context, with or without a teacher.
        if not of_teacher or name == "vocag_teacher_context" or value == defaults.get_default(name):
            continue
        option = "--" + name.replace("_", "-")
        raise ArgumentError(
            f"{option} {value} needs --vocag-teacher, which is missing: name the teacher, or leave "
            f"{option} out to pretrain without one"
        )


def _teacher_of(given: Namespace) -> TeacherOptions:
    return TeacherOptions(
        source=given.vocag_teacher,
        world_size=given.vocag_teacher_world_size,
        tensor_parallel=given.vocag_teacher_tensor_model_parallel_size,
        pipeline_parallel=given.vocag_teacher_pipeline_model_parallel_size,
        expert_parallel=given.vocag_teacher_expert_model_parallel_size,
        seq_length=given.vocag_teacher_seq_length,
        micro_batch_size=given.vocag_teacher_micro_batch_size,
        dtype=given.vocag_teacher_dtype,
        timeout_minutes=given.vocag_teacher_timeout_minutes,
        allow_untrained=given.vocag_allow_untrained_teacher,
        losses=given.vocag_stored_losses,
        layers_per_stage=_numbers(given.vocag_teacher_layers_per_stage),
    )


def _numbers(given: str | None) -> tuple[int, ...] | None:
    try:
        return None if given is None else tuple(int(part) for part in given.split(","))
    except ValueError as error:
        raise ArgumentError(
            f'--vocag-teacher-layers-per-stage: "{given}" are no numbers with commas between them, '
            "such as 9,9,8,2"
        ) from error


def _add_data_arguments(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("vocag: data and student")
    add = group.add_argument
    add(
        "--vocag-data",
        metavar="DATASET",
        help="aligned dataset, folder or URL, or a mixture's FILE.toml (required)",
    )
    add(
        "--vocag-where",
        default="",
        metavar="CONDITION",
        help="train on those documents of --vocag-data only that this is true of, such as "
        "\"language == 'en' and score > 0.5\"; any condition of DuckDB over their metadata "
        "(default: all documents)",
    )
    add(
        "--vocag-generation",
        default="",
        metavar="N",
        help="of --vocag-data that grows, the state to train on, by its number, or latest, to "
        "which a run that goes on then moves (default: the newest, and a run that goes on keeps "
        "its own)",
    )
    add(
        "--vocag-validation-data",
        metavar="DATASET",
        help="aligned dataset for --eval-iters (default: none; then --eval-iters must be 0)",
    )
    add(
        "--vocag-student",
        metavar="MODEL",
        help="Hugging Face folder or repository to start from; it also sets Megatron's model "
        "arguments (default: random weights, model arguments as given)",
    )
    add_convention_options(add, prefix="--vocag-")
    add(
        "--vocag-on-damage",
        choices=("raise", "quarantine"),
        default="raise",
        help="a sample that can't be read stops the job, or is masked and counted (default: raise)",
    )
    add(
        "--vocag-shuffle-shards",
        type=int,
        default=8,
        help="shards that are shuffled together (default: 8)",
    )
    add(
        "--vocag-cache-folder",
        default="~/.cache/vocag",
        help="for remote shards and packing plans (default: ~/.cache/vocag)",
    )
    add(
        "--vocag-cache-gigabytes",
        type=int,
        default=256,
        help="GiB of remote shards kept on local disk (default: 256)",
    )


def _add_teacher_arguments(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("vocag: teacher")
    add = group.add_argument
    add(
        "--vocag-teacher",
        metavar="MODEL",
        help="Hugging Face folder or repository (Llama, Mistral, Qwen2, Qwen3, Qwen3-MoE), or a "
        "checkpoint of this trainer; cached: losses that vocag score has stored (default: none, "
        "plain pretraining)",
    )
    add(
        "--vocag-stored-losses",
        metavar="NAME",
        default="",
        help="with --vocag-teacher cached: a score manifest, or a teacher as vocag score was given "
        "it (default: the only one that has scored the dataset)",
    )
    add(
        "--vocag-teacher-world-size",
        type=int,
        default=0,
        help="ranks for the teacher alone, the last ones of the job; 0: it shares the student's "
        "ranks (default: 0)",
    )
    for kind in ("tensor", "pipeline", "expert"):
        add(
            f"--vocag-teacher-{kind}-model-parallel-size",
            type=int,
            default=1,
            help=f"{kind}-parallel ranks of each copy of the teacher (default: 1)",
        )
    add(
        "--vocag-teacher-layers-per-stage",
        metavar="N,N,…",
        help="layers on each pipeline stage of the teacher (default: as makes the slowest stage "
        "fastest, the output layer being on the last)",
    )
    add(
        "--vocag-teacher-seq-length",
        type=int,
        help="teacher tokens per row (default: the dataset's ratio plus 12.5 %%)",
    )
    add(
        "--vocag-teacher-micro-batch-size",
        type=int,
        default=1,
        help="rows per forward pass of the teacher (default: 1)",
    )
    add("--vocag-teacher-dtype", choices=_DTYPES, default="bf16", help="weights (default: bf16)")
    add(
        "--vocag-teacher-timeout-minutes",
        type=float,
        default=10.0,
        help="minutes that the student waits for losses before the job ends (default: 10)",
    )
    add(
        "--vocag-allow-untrained-teacher",
        action="store_true",
        help="accept a teacher that predicts a probe text no better than chance (default: refuse)",
    )


def _add_guidance_arguments(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("vocag: guidance")
    add = group.add_argument
    add(
        "--vocag-aggregation",
        choices=get_args(Aggregation),
        default="max",
        help="Φ over the teacher tokens of a student token (default: max)",
    )
    add(
        "--vocag-selector",
        choices=get_args(Selector),
        help="what tokens are ranked by (default: teacher, or full without a teacher)",
    )
    add(
        "--vocag-keep-fraction",
        type=float,
        default=0.4,
        help="share of the competing tokens that count, 0..1 (default: 0.4)",
    )
    add(
        "--vocag-unmapped",
        choices=get_args(UnmappedStrategy),
        default="include",
        help="tokens that no teacher token covers (default: include)",
    )
    add(
        "--vocag-scope",
        choices=get_args(Scope),
        default=PAPER_RULE.scope,
        help="where the share is counted: each row, each rank's micro-batch, or the micro-batches "
        f"of all data-parallel ranks together (default: {PAPER_RULE.scope})",
    )
    add("--vocag-selection-seed", type=int, default=0, help="of the random selector (default: 0)")
    add(
        "--vocag-expectation",
        choices=get_args(Expectation),
        default="kept",
        help="divide the loss by the kept tokens or by all (default: kept)",
    )
