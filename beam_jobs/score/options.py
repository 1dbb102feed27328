"""The options of `score`: the command line, and the frozen dataclass that the job is made from."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from beam_jobs.errors import OptionsError
from beam_jobs.run_options import HERE, RunOptions, add_run_options, option_names, take_run_options
from pipeline.dataset.conventions import add_convention_options

DTYPES = ("float32", "bfloat16", "float16")

_DESCRIPTION = """\
Run a frozen teacher over every document of an aligned dataset, once, and store the loss of each
teacher token beside the shards, two bytes each. Training then needs no teacher. Shards are never
rewritten; several teachers' losses live side by side. Run the same command again to resume."""

_EXAMPLES = """\
examples:
  # for training with rows of 2,048 student tokens; a GPU is used where there is one
  vocag score aligned --teacher Qwen/Qwen2.5-Math-7B --seq-length 2048

  # a quantised model in a file, on two processes of this machine with one thread each
  vocag score aligned --teacher models/smollm2.gguf --seq-length 512 --threads 1 --workers 2

  # what would it take? a hundred documents, nothing written
  vocag score aligned --teacher Qwen/Qwen2.5-Math-7B --seq-length 2048 --limit 100

  # overlapping windows for documents that are longer than the teacher's window
  vocag score aligned --teacher models/teacher --teacher-seq-length 4096 --stride 2048

  # then train without a teacher
  vocag train --data aligned --stored-losses Qwen/Qwen2.5-Math-7B \\
      --seq-length 2048 --student models/student --output runs/guided

context: every document has its own left context. One that is longer than a row of the given
lengths is split where rows split it, so that stored losses equal those that a teacher would give
while training with the same lengths; training with rows that split a document elsewhere is refused.

output: NAME-000000-of-000012.teacher-FINGERPRINT.safetensors beside every shard and, last,
teacher-FINGERPRINT.json.

Every other option goes to Apache Beam (--runner, --region, ...)."""


@dataclass(frozen=True)
class ScoreOptions:
    """What `score` is asked to do.

    Attributes:
        output: folder of a finished dataset.
        teacher: folder, Hugging Face repository or .gguf file.
        seq_length: student tokens per training row; None with `stride`.
        teacher_seq_length: teacher tokens per training row, or of a window; None takes rows'
            default.
        stride: teacher tokens by which windows advance; None scores as rows are split.
        dtype: of the teacher; "": bfloat16 on a GPU and on a CPU that is faster in it.
        device: "" takes the GPU where there is one.
        batch_tokens: teacher tokens per batch; 0: the device's default.
        threads: of each worker on a CPU; 0: torch's default.
        student_bos: token before a student's text, its id, or "none"; None: the dataset's. It and
            the next take room in rows, so they decide where documents are split.
        student_eos: token after a student's document, likewise.
        teacher_context: token before a teacher's text, likewise.
        allow_untrained_teacher: accept one that predicts no better than chance.
        limit: score only so many documents, here, and write nothing.
        run: how many processes, and what they say.
        beam_arguments: options for Beam.
    """

    output: str
    teacher: str
    seq_length: int | None = None
    teacher_seq_length: int | None = None
    stride: int | None = None
    dtype: str = ""
    device: str = ""
    batch_tokens: int = 0
    threads: int = 0
    allow_untrained_teacher: bool = False
    limit: int | None = None
    student_bos: str | None = None
    student_eos: str | None = None
    teacher_context: str | None = None
    run: RunOptions = HERE
    beam_arguments: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check each option by itself.

        Raises:
            OptionsError: with the option, its value and the rule.
        """
        if (self.seq_length is None) == (self.stride is None):
            raise OptionsError(
                "give --seq-length, the student tokens per training row, or --stride with "
                "--teacher-seq-length for overlapping windows; one of the two"
            )
        if self.stride is not None and self.teacher_seq_length is None:
            raise OptionsError(
                f"--stride {self.stride} needs --teacher-seq-length, the tokens of a window"
            )
        if self.dtype and self.dtype not in DTYPES:
            raise OptionsError(f"--dtype {self.dtype} is none of {', '.join(DTYPES)}")
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
    known, unknown = _parser().parse_known_args(arguments)
    values = vars(known)
    values["run"] = take_run_options(values)
    return ScoreOptions(**values, beam_arguments=tuple(unknown))


def own_options() -> list[str]:
    """Return the names of the options that don't go to Beam."""
    return option_names(_parser())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vocag score",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("output", metavar="OUTPUT", help="folder of a finished dataset")
    add("--teacher", required=True, metavar="MODEL",
        help="folder, Hugging Face repository (owner/name) or .gguf file")  # fmt: skip
    add("--seq-length", type=int, metavar="N", help="student tokens per training row")
    add("--teacher-seq-length", type=int, metavar="N",
        help="teacher tokens per training row (default: the dataset's ratio plus 12.5 %%, as "
        "training takes it), or of a window with --stride")  # fmt: skip
    add("--stride", type=int, metavar="N",
        help="score documents longer than --teacher-seq-length in overlapping windows that "
        "advance by N tokens")  # fmt: skip
    add_convention_options(add)
    add("--dtype", choices=DTYPES, default="",
        help="of the teacher (default: bfloat16 on a GPU, on a CPU the faster one in a "
        "trial)")  # fmt: skip
    add("--device", default="", help="such as cuda:1 (default: the GPU where there is one)")
    add("--batch-tokens", type=int, default=0, metavar="N",
        help="teacher tokens per batch (default: 2048 on a CPU, 32768 elsewhere)")  # fmt: skip
    add("--threads", type=int, default=0, metavar="N",
        help="of each worker on a CPU; state it to get equal bytes on unequal machines "
        "(default: torch's)")  # fmt: skip
    add("--limit", type=int, metavar="N",
        help="score the first N documents in this process, say how fast and how well, and write "
        "nothing")  # fmt: skip
    add("--allow-untrained-teacher", action="store_true",
        help="accept a teacher that predicts a plain text no better than chance")  # fmt: skip
    add_run_options(parser)
    return parser
