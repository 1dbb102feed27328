"""The options of `add-teacher` and `add-student`, and what both ask for: a `ViewRequest`."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from beam_jobs.errors import OptionsError
from beam_jobs.run_options import HERE, RunOptions
from schemas.view_file import Side
from vocag_cli import options
from vocag_cli.options import DatasetSource, Option, Rest, TokenizerSource, TokenName

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

_TEACHER_FIRST = """\
examples:
  # the dataset in aligned/ was made with Llama 2 as its teacher; now Qwen 2.5 teaches, too
  vocag add-teacher aligned --teacher Qwen/Qwen2.5-Math-7B --name qwen

  # see, score and train as if it had been aligned with that teacher
"""

_THEN = """\
  vocag explore preview aligned --view {name}
  vocag score aligned --view {name} --teacher Qwen/Qwen2.5-Math-7B --seq-length 2048
  vocag train --data aligned --view {name} --stored-losses Qwen/Qwen2.5-Math-7B \\
      --seq-length 2048 --student models/student --output runs/guided

text: from the samples where it was kept (vocag align --keep-text), else spelled by the dataset's
own tokens, where these spell all of it: SHA-256 decides. If a document's text can't be had, nothing
is written, and the number of such documents is told.

output: NAME-000000-of-000012.view-VIEW.bin and .parquet beside every shard, the tokenizer under
tokenizers/views/ and, last, manifest.json with the view in it. Shards never change, and whoever
reads without --view notices nothing. Run the same command again to resume, or after the dataset has
grown.

Every other option goes to Apache Beam (--runner, --region, ...)."""

_STUDENT_FIRST = """\
examples:
  # the dataset in aligned/ was made for TinyLlama; now SmolLM2 learns from the same teacher
  vocag add-student aligned --student HuggingFaceTB/SmolLM2-135M --name smol

  # see, score and train as if it had been aligned for that student
"""


@dataclass(frozen=True)
class ViewRequest:
    """A view to make.

    Attributes:
        output: the dataset's folder.
        side: whose tokenizer is another one.
        tokenizer: which.
        name: the view's; "" takes one after the tokenizer.
        before: token that stands before a text of that side, its id, or none; None: the
            tokenizer's own convention.
        after: token that stands after a student's document, likewise; rows end a teacher's text
            with nothing.
        no_fast_path: tokenize with the reference only.
        run: how many processes, and what they say.
        beam_arguments: options for Beam.
    """

    output: str
    side: Side
    tokenizer: str
    name: str = ""
    before: str | None = None
    after: str | None = None
    no_fast_path: bool = False
    run: RunOptions = HERE
    beam_arguments: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check the name.

        Raises:
            OptionsError: it can't be part of a file's name.
        """
        if self.name and not _NAME.fullmatch(self.name):
            raise OptionsError(
                f'--name "{self.name}" must be at most 64 letters, digits, ".", "_" and "-", a '
                "letter or digit first"
            )

    @property
    def view_name(self) -> str:
        """The view's name, as given or after the tokenizer.

        Example:
            >>> ViewRequest("aligned", "teacher", "Qwen/Qwen2.5-Math-7B").view_name
            'Qwen2.5-Math-7B'
        """
        if self.name:
            return self.name
        parts = [part for part in re.split(r"[/\\]", self.tokenizer) if part]
        if len(parts) > 1 and parts[-1].startswith("tokenizer."):
            parts.pop()  # a file of that name says nothing, its folder does
        found = re.sub(r"[^A-Za-z0-9._-]+", "-", parts[-1] if parts else "").strip("._-")[:64]
        if not found:
            raise OptionsError(f'no name follows from "{self.tokenizer}": give --name')
        return found


@dataclass(frozen=True)
class AddTeacherOptions:
    """Add a view to an aligned dataset: another teacher's tokens, and their spans.

    A teacher is exchanged without aligning the corpus again: the view takes a third of the shards'
    bytes, or less, and gives what a fresh alignment with that teacher would, token by token.

    Attributes:
        output: folder of a finished dataset, local or in an object store.
        teacher: the new teacher's tokenizer: Hugging Face repository, folder, tokenizer.json or
            SentencePiece model.
        name: the view's, for --view (default: after the tokenizer).
        teacher_context: token that stands before a teacher's text, its id, or none (default: BOS
            where the tokenizer puts one, else what separates documents).
        no_fast_path: tokenize with the reference only; the result is the same, later.
        run: how many processes, and what they say.
        beam_arguments: options for Beam.
    """

    output: DatasetSource
    teacher: TokenizerSource
    name: Annotated[str, Option("NAME")] = ""
    teacher_context: TokenName | None = None
    no_fast_path: bool = False
    run: RunOptions = HERE
    beam_arguments: Rest = ()

    def request(self) -> ViewRequest:
        """Return what is asked for."""
        return ViewRequest(
            self.output,
            "teacher",
            self.teacher,
            self.name,
            before=self.teacher_context,
            no_fast_path=self.no_fast_path,
            run=self.run,
            beam_arguments=self.beam_arguments,
        )


@dataclass(frozen=True)
class AddStudentOptions:
    """Add a view to an aligned dataset: another student's tokens, and their spans.

    Another student learns from the same teacher without aligning the corpus again: the view gives
    what a fresh alignment for that student would, token by token.

    Attributes:
        output: folder of a finished dataset, local or in an object store.
        student: the new student's tokenizer: Hugging Face repository, folder, tokenizer.json or
            SentencePiece model.
        name: the view's, for --view (default: after the tokenizer).
        student_bos: token that stands before a student's text, its id, or none (default: BOS where
            the tokenizer puts one, else what separates documents).
        student_eos: token that stands after a student's document, likewise.
        no_fast_path: tokenize with the reference only; the result is the same, later.
        run: how many processes, and what they say.
        beam_arguments: options for Beam.
    """

    output: DatasetSource
    student: TokenizerSource
    name: Annotated[str, Option("NAME")] = ""
    student_bos: TokenName | None = None
    student_eos: TokenName | None = None
    no_fast_path: bool = False
    run: RunOptions = HERE
    beam_arguments: Rest = ()

    def request(self) -> ViewRequest:
        """Return what is asked for."""
        return ViewRequest(
            self.output,
            "student",
            self.student,
            self.name,
            before=self.student_bos,
            after=self.student_eos,
            no_fast_path=self.no_fast_path,
            run=self.run,
            beam_arguments=self.beam_arguments,
        )


_KINDS: dict[Side, tuple[type[AddTeacherOptions | AddStudentOptions], str]] = {
    "teacher": (AddTeacherOptions, _TEACHER_FIRST + _THEN.format(name="qwen")),
    "student": (AddStudentOptions, _STUDENT_FIRST + _THEN.format(name="smol")),
}


def parse_request(side: Side, arguments: Sequence[str] | None = None) -> ViewRequest:
    """Return what a command line asks for; what is not ours goes to Beam.

    Raises:
        OptionsError: a value breaks a rule.
        SystemExit: argparse's own errors, and --help.

    Example:
        >>> parse_request("teacher", ["aligned", "--teacher", "Qwen/Qwen2.5-0.5B"]).view_name
        'Qwen2.5-0.5B'
    """
    kind, examples = _KINDS[side]
    return options.parse_options(
        kind, arguments, prog=f"vocag add-{side}", epilog=examples
    ).request()


def own_options(side: Side) -> list[str]:
    """Return the names of the options that don't go to Beam."""
    return options.option_names(_KINDS[side][0])
