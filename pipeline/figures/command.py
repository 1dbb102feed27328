"""`python -m pipeline.figures`: the paper's figures, from real tokenizers, texts and models."""

import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Literal, Protocol

from pipeline.drawing.charts import require_drawable, write_figure
from pipeline.drawing.formatting import printable
from pipeline.figures.alignment import (
    PAPER_CHUNKS,
    PAPER_SEQ_LENGTH,
    describe_chunking,
    draw_chunking,
    measure_chunking,
)
from pipeline.figures.runs import compare_runs
from pipeline.figures.tokens import describe_text, draw_text, tokenize_text
from pipeline.figures.vocabulary import describe_overlaps, draw_overlaps, measure_overlaps
from pipeline.tokenization import Tokenizer, load_tokenizer
from vocag_cli import install
from vocag_cli.options import ModelSource, Option, TokenizerSource, TokenName, parse_command

Text = Annotated[str, Option("TEXT", form="positional")]

_EPILOG = """\
examples:
  vocag figures vocabulary --student llama2 --teacher qwen2_5 mistral --output fig1.svg
      Fig. 1: the share of each teacher's vocabulary that the student has.
  vocag figures tokens "Probability, Uncertainty" --tokenizers llama2 qwen2_5 mistral
      Fig. 2: one text by each tokenizer, and how the first maps to the others.
  vocag figures alignment --student llama2 --teacher qwen2_5 --input corpus.jsonl --output fig3.svg
      Fig. 3: IoU and IoS of equal chunks against alignment by token.
  vocag figures kept --student ./student --teacher ./teacher --text-file text.txt --output fig8.html
      Fig. 8: which tokens of a text the teacher keeps.
  vocag figures runs runs/full runs/random runs/teacher --output selectors.svg
      Runs of vocag train: held-out bits per byte by step.

A tokenizer is a tokenizer.json, a SentencePiece model, a folder that holds one, or a Hugging Face
repository; NAME=SOURCE names it in the figure.
"""


@dataclass(frozen=True)
class VocabularyOptions:
    """Fig. 1: vocabulary overlap.

    Attributes:
        student: the student's tokenizer.
        teacher: the teachers'.
        output: also write .svg or .html.
    """

    student: TokenizerSource
    teacher: tuple[TokenizerSource, ...]
    output: Path | None = None

    def __post_init__(self) -> None:
        """Check that the figure can be written."""
        require_drawable(self.output)

    def lines(self) -> Iterator[str]:
        """Yield what to print, and write the figure where one is wanted."""
        student, _ = _split_name(self.student)
        overlaps = measure_overlaps(_load(self.student), _load_all(self.teacher))
        table = list(describe_overlaps(student, overlaps))
        yield from table
        if self.output is not None:
            write_figure(draw_overlaps(student, overlaps), self.output, notes=table)
            yield f"wrote {self.output}"


@dataclass(frozen=True)
class TokensOptions:
    """Fig. 2: one text's tokens.

    Attributes:
        text: the text itself.
        tokenizers: the student's first.
        output: also write .html.
    """

    text: Text
    tokenizers: tuple[TokenizerSource, ...]
    output: Path | None = None

    def __post_init__(self) -> None:
        """Check the text and the file's ending."""
        if not self.text:
            raise ValueError("the text is empty")
        _require_page(self.output)

    def lines(self) -> Iterator[str]:
        """Yield what to print, and write the page where one is wanted."""
        result = tokenize_text(self.text, _load_all(self.tokenizers))
        width = shutil.get_terminal_size((100, 24)).columns
        yield from describe_text(result, width=width, colour=_use_colour())
        if self.output is not None:
            self.output.write_text(draw_text(result), "utf-8")
            yield f"wrote {self.output}"


@dataclass(frozen=True)
class AlignmentOptions:
    """Fig. 3: chunks against tokens.

    Attributes:
        student: the student's tokenizer.
        teacher: the teacher's.
        input: .jsonl or .txt.
        text_field: the field of each line that holds the text.
        seq_length: student tokens of the sequences that are cut into chunks, as in the paper.
        chunks: into how many.
        output: also write .svg or .html.
    """

    student: TokenizerSource
    teacher: TokenizerSource
    input: Path
    text_field: Annotated[str, Option("NAME")] = "text"
    seq_length: int = PAPER_SEQ_LENGTH
    chunks: tuple[int, ...] = PAPER_CHUNKS
    output: Path | None = None

    def __post_init__(self) -> None:
        """Check the counts, and that the figure can be written."""
        for count in (self.seq_length, *self.chunks):
            if count < 1:
                raise ValueError(f"--seq-length and --chunks must be at least 1, got {count}")
        require_drawable(self.output)

    def lines(self) -> Iterator[str]:
        """Yield what to print, and write the figure where one is wanted."""
        (student, _), (teacher, _) = _split_name(self.student), _split_name(self.teacher)
        quality = measure_chunking(
            _read_texts(self.input, self.text_field),
            _load(self.student),
            _load(self.teacher),
            sorted(set(self.chunks)),
            seq_length=self.seq_length,
        )
        table = [f"student {student}, teacher {teacher}", *describe_chunking(quality)]
        yield from table
        if self.output is not None:
            figure = draw_chunking(quality, student=student, teacher=teacher)
            write_figure(figure, self.output, notes=table)
            yield f"wrote {self.output}"


@dataclass(frozen=True)
class KeptOptions:
    """Fig. 8: tokens that a teacher keeps.

    Attributes:
        student: a causal language model: folder, Hugging Face repository or .gguf file.
        teacher: likewise.
        student_tokenizer: where it isn't beside the model (.gguf).
        teacher_tokenizer: likewise.
        text: the text itself; or --text-file.
        text_file: read the text from a file.
        student_bos: token that stands before the student's text, its id, or none (default: its
            tokenizer's).
        teacher_context: token that stands before the teacher's text, likewise.
        keep_fraction: share of the mapped tokens to keep.
        aggregation: of the teacher's losses over a span.
        output: also write .html.
    """

    student: ModelSource
    teacher: ModelSource
    student_tokenizer: TokenizerSource | None = None
    teacher_tokenizer: TokenizerSource | None = None
    text: Text | None = None
    text_file: Path | None = None
    student_bos: TokenName | None = None
    teacher_context: TokenName | None = None
    keep_fraction: float = 0.4
    aggregation: Literal["mean", "max", "sum"] = "max"
    output: Path | None = None

    def __post_init__(self) -> None:
        """Check that there is one text, and the file's ending."""
        if (self.text is None) == (self.text_file is None):
            raise ValueError("give the text itself or --text-file, not both")
        _require_page(self.output)

    def lines(self) -> Iterator[str]:
        """Yield what to print, and write the page where one is wanted."""
        # Only this figure needs torch and transformers.
        kept = import_module("pipeline.figures.kept")
        text = self.text_file.read_text("utf-8") if self.text_file else self.text
        student, teacher = _split_name(self.student), _split_name(self.teacher)
        tokens = kept.score_text(
            text,
            student=(student[1], _load(self.student_tokenizer or self.student)),
            teacher=(teacher[1], _load(self.teacher_tokenizer or self.teacher)),
            keep_fraction=self.keep_fraction,
            aggregation=self.aggregation,
            student_bos=self.student_bos,
            teacher_context=self.teacher_context,
        )
        yield from kept.describe_kept(tokens)
        if self.output is not None:
            self.output.write_text(kept.draw_kept(tokens, student[0], teacher[0]), "utf-8")
            yield f"wrote {self.output}"


@dataclass(frozen=True)
class RunsOptions:
    """Runs of vocag train, compared.

    Attributes:
        runs: folders that vocag train has written.
        heldout: name of the held-out set, where the runs have several.
        output: also write .svg or .html.
    """

    runs: Annotated[tuple[Path, ...], Option("RUN", form="positional")]
    heldout: Annotated[str, Option("NAME")] = ""
    output: Path | None = None

    def __post_init__(self) -> None:
        """Check that the figure can be written."""
        require_drawable(self.output)

    def lines(self) -> Iterator[str]:
        """Yield what to print, and write the figure where one is wanted."""
        yield from compare_runs(self.runs, self.output, heldout=self.heldout)
        if self.output is not None:
            yield f"wrote {self.output}"


class _Figure(Protocol):
    def lines(self) -> Iterator[str]: ...


_FIGURES: dict[str, type[_Figure]] = {
    "vocabulary": VocabularyOptions,
    "tokens": TokensOptions,
    "alignment": AlignmentOptions,
    "kept": KeptOptions,
    "runs": RunsOptions,
}


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit status: 0, or 2 where it could not run."""
    try:
        options = parse_command(
            _FIGURES,
            argv,
            prog="vocag figures",
            description="The paper's figures, from real tokenizers, texts and models.",
            epilog=_EPILOG,
        )
        for line in options.lines():
            print(line)
    except BrokenPipeError:
        # Whoever reads has enough (`| head`); stdout must not be flushed again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except ModuleNotFoundError as error:
        print(f"figures: {error}: {install('hf')}", file=sys.stderr)
        return 2
    except (ValueError, OSError) as error:
        print(f"figures: {printable(str(error))}", file=sys.stderr)
        return 2
    return 0


def _split_name(source: str) -> tuple[str, str]:
    """Return the name and the source of `NAME=SOURCE` or `SOURCE`.

    Example:
        >>> _split_name("models/llama2/tokenizer.json")
        ('llama2', 'models/llama2/tokenizer.json')
    """
    name, equals, rest = source.partition("=")
    if equals and name and not Path(source).exists():
        return name, rest
    path = Path(source)
    generic = path.name in ("tokenizer.json", "tokenizer.model")
    return path.resolve().parent.name if generic else path.name, source


def _load(source: str) -> Tokenizer:
    return load_tokenizer(_split_name(source)[1])


def _load_all(sources: Sequence[str]) -> dict[str, Tokenizer]:
    names = [_split_name(source)[0] for source in sources]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ValueError(f"two tokenizers are called {twice.pop()}: name them, NAME=SOURCE")
    return {name: _load(source) for name, source in zip(names, sources, strict=True)}


def _read_texts(path: Path, text_field: str) -> list[str]:
    if path.suffix == ".txt":
        return [path.read_text("utf-8")]
    texts = []
    # Not splitlines: a JSON string may hold U+2028, which it takes for a line's end.
    for number, line in enumerate(path.read_text("utf-8").rstrip("\n").split("\n"), start=1):
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number} is no JSON: {error}") from error
        if not isinstance(record, dict) or not isinstance(record.get(text_field), str):
            raise ValueError(f'{path}, line {number} has no text "{text_field}": see --text-field')
        texts.append(record[text_field])
    return texts


def _require_page(output: Path | None) -> None:
    if output is not None and output.suffix != ".html":
        raise ValueError(f"--output {output}: this figure is a page; name a file ending in .html")


def _use_colour() -> bool:
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ
