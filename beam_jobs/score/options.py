"""The options of `score`: the frozen dataclass that its command line and the job are made from."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from beam_jobs.errors import OptionsError
from beam_jobs.running.run_options import HERE, RunOptions
from beam_jobs.score.engine_options import EngineOptions
from pipeline.packing.mixture_file import is_mixture
from vocag_cli import options
from vocag_cli.options import (
    Condition,
    DatasetSource,
    ModelSource,
    Option,
    Rest,
    TokenName,
)

Dtype = Literal["", "float32", "bfloat16", "float16"]

_EXAMPLES = """\
examples:
  # for training with rows of 2,048 student tokens; a GPU is used where there is one
  vocag score aligned --teacher Qwen/Qwen2.5-Math-7B --seq-length 2048

  # a quantised model in a file, on two processes of this machine with one thread each
  vocag score aligned --teacher models/smollm2.gguf --seq-length 512 --threads 1 --workers 2

  # what would it take? a hundred documents, nothing written
  vocag score aligned --teacher Qwen/Qwen2.5-Math-7B --seq-length 2048 --limit 100


  # only what a run with the same --where reads
  vocag score aligned --teacher models/teacher --seq-length 2048 --where "language == 'en'"

  # the same documents aligned with another student: what was scored before is taken over
  vocag score aligned-anew --teacher models/teacher --seq-length 2048 --reuse aligned

  # overlapping windows for documents that are longer than the teacher's window
  vocag score aligned --teacher models/teacher --teacher-seq-length 4096 --stride 2048

  # a mixture of experts in FP8 behind two vLLM servers (vllm serve … --served-model-name teacher)
  vocag score aligned --engine openai --endpoint http://gpu-1:8000 --endpoint http://gpu-2:8000 \\
      --model teacher --dtype bfloat16 --quantization fp8 --seq-length 2048

  # then train without a teacher
  vocag train --data aligned --stored-losses Qwen/Qwen2.5-Math-7B \\
      --seq-length 2048 --student models/student --output runs/guided

context: every document has its own left context. One that is longer than a row of the given
lengths is split where rows split it, so that stored losses equal those that a teacher would give
while training with the same lengths; training with rows that split a document elsewhere is refused.

output: NAME-000000-of-000012.teacher-FINGERPRINT.safetensors beside every shard and, last,
teacher-FINGERPRINT.json.

Every other option goes to Apache Beam (--runner, --region, ...)."""


TRANSFORMERS = EngineOptions()
"""A model in the workers' own processes."""

_GROUPS = {
    "teacher": "whose losses, in which context",
    "dtype": "how the job runs",
    "engine": "what runs the teacher",
    "workers": "processes of this machine",
}


@dataclass(frozen=True)
class ScoreOptions:
    """Run a frozen teacher over every document of an aligned dataset, once, and store its losses.

    Each teacher token's loss stands beside the shards, in two bytes. Training then needs no
    teacher. Shards are never rewritten; several teachers' losses live side by side. Run the same
    command again to resume.

    Attributes:
        dataset: folder of a finished dataset, or a mixture's FILE.toml, whose datasets are scored.
        teacher: folder, Hugging Face repository (owner/name) or .gguf file. With --engine openai,
            the files behind the servers where they are at hand: their digest, in place of the
            model's name, then tells the scores from others.
        seq_length: student tokens per training row.
        teacher_seq_length: teacher tokens per training row (default: the dataset's ratio plus
            12.5 %, as training takes it), or of a window with --stride.
        stride: score documents longer than --teacher-seq-length in overlapping windows that advance
            by N tokens.
        student_bos: token that stands before a student's text, its id, or none (default: the
            dataset's). It and --student-eos take room in rows, so they decide where documents are
            split.
        student_eos: token that stands after a student's document, likewise.
        teacher_context: token that stands before a teacher's text, likewise.
        allow_untrained_teacher: accept a teacher that predicts a plain text no better than chance.
        dtype: of the teacher (default: bfloat16 on a GPU, on a CPU the faster one in a trial).
        device: such as cuda:1 (default: the GPU where there is one).
        batch_tokens: teacher tokens per batch (default: 2048 on a CPU, 32768 elsewhere).
        threads: of each worker on a CPU; state it to get equal bytes on unequal machines (default:
            torch's).
        where: score those documents only that this is true of, such as "language == 'en' and score
            > 0.5"; any condition of DuckDB over the metadata. Rows that hold others don't take the
            losses. A mixture's datasets are scored by their own conditions.
        reuse: dataset whose stored losses by the same teacher are taken over: those of every
            document with the same teacher tokens and context, whatever its id; the rest is
            computed. Give several for several datasets.
        limit: score the first N documents in this process, say how fast and how well, and write
            nothing.
        dry_run: say what the job would read and write, without loading the teacher; write nothing.
        engine: what runs the teacher.
        run: how many processes, and what they say.
        beam_arguments: options for Beam.
    """

    dataset: DatasetSource
    teacher: ModelSource = ""
    seq_length: int | None = None
    teacher_seq_length: int | None = None
    stride: int | None = None
    student_bos: TokenName | None = None
    student_eos: TokenName | None = None
    teacher_context: TokenName | None = None
    allow_untrained_teacher: bool = False
    dtype: Dtype = ""
    device: Annotated[str, Option("NAME")] = ""
    batch_tokens: int = 0
    threads: int = 0
    where: Condition = ""
    reuse: Annotated[tuple[str, ...] | None, Option("DATASET", form="repeated")] = None
    limit: int | None = None
    dry_run: bool = False
    engine: EngineOptions = TRANSFORMERS
    run: RunOptions = HERE
    beam_arguments: Rest = ()

    def __post_init__(self) -> None:
        """Check each option by itself.

        Raises:
            OptionsError: with the option, its value and the rule.
        """
        if not self.teacher and self.engine.name != "openai":
            raise OptionsError("--teacher is missing: whose losses are to be stored?")
        if (self.seq_length is None) == (self.stride is None):
            raise OptionsError(
                "give --seq-length, the student tokens per training row, or --stride with "
                "--teacher-seq-length for overlapping windows; one of the two"
            )
        if self.stride is not None and self.teacher_seq_length is None:
            raise OptionsError(
                f"--stride {self.stride} needs --teacher-seq-length, the tokens of a window"
            )
        if self.where.strip() and is_mixture(self.dataset):
            raise OptionsError(
                f"--where {self.where} is of one dataset, and {self.dataset} a mixture of several: "
                'give its datasets a "where" there'
            )
        if self.dtype not in get_args(Dtype):
            raise OptionsError(f"--dtype {self.dtype} is none of{', '.join(get_args(Dtype))[1:]}")
        if self.limit is not None and self.limit < 1:
            raise OptionsError(f"--limit {self.limit} is below 1 document")
        for name in ("batch_tokens", "threads"):
            if getattr(self, name) < 0:
                option = "--" + name.replace("_", "-")
                raise OptionsError(f"{option} {getattr(self, name)} is below 0")


def parse_options(arguments: Sequence[str] | None = None) -> ScoreOptions:
    """Return the options of a command line; what is not ours goes to Beam.

    Raises:
        OptionsError: a value breaks a rule.
        SystemExit: argparse's own errors, and --help.

    Example:
        >>> parse_options("aligned --teacher t --seq-length 2048".split()).seq_length
        2048
    """
    return options.parse_options(
        ScoreOptions, arguments, prog="vocag score", epilog=_EXAMPLES, groups=_GROUPS
    )


def own_options() -> list[str]:
    """Return the names of the options that don't go to Beam."""
    return options.option_names(ScoreOptions)
