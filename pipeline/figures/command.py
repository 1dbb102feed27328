"""`vocag figures`: the paper's figures."""

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pipeline.command_line.option_parsing import ModelSource, Option, TokenizerSource, parse_command
from pipeline.drawing.charts import require_drawable, write_figure
from pipeline.drawing.formatting import short_names
from pipeline.drawing.printing import prints, write_page

# Figures' modules are imported in `lines`: help needs no tokenizer.
if TYPE_CHECKING:
    from pipeline.tokenization import Tokenizer

PAPER_CHUNKS = (8, 16, 32, 64, 128, 256, 512)
PAPER_SEQ_LENGTH = 2048

Text = Annotated[str, Option("TEXT", form="positional")]

_EPILOG = """\
examples:
  vocag figures vocabulary --student llama2 --teacher qwen2_5 mistral --output fig1.svg
      Fig. 1: the share of each teacher's vocabulary that the student has.
  vocag figures tokens "Probability, Uncertainty" --tokenizers llama2 qwen2_5 mistral
      Fig. 2: one text by each tokenizer, and how the first maps to the others.
  vocag figures alignment --student llama2 --teacher qwen2_5 --input corpus.jsonl --output fig3.svg
      Fig. 3: IoU and IoS of equal chunks against alignment by token.
  vocag figures kept "$(cat text.txt)" --student student --teacher teacher --output fig8.html
      Fig. 8: which tokens of a text the teacher keeps.

A tokenizer is a tokenizer.json, a SentencePiece model, a folder that holds one, or a Hugging Face
repository; NAME=SOURCE names it in the figure.
"""


@dataclass(frozen=True)
class VocabularyOptions:
    """Fig. 1: vocabulary overlap.

    Attributes:
        student: the student's tokenizer.
        teacher: the teachers' tokenizers.
        output: also draw it: .svg, .pdf or .png.
    """

    student: TokenizerSource
    teacher: tuple[TokenizerSource, ...]
    output: Path | None = None

    def __post_init__(self) -> None:
        require_drawable(self.output)

    def lines(self) -> Iterator[str]:
        """Yield the output."""
        from pipeline.figures.vocabulary import describe_overlaps, draw_overlaps, measure_overlaps

        student, _ = _split_name(self.student)
        overlaps = measure_overlaps(_load(self.student), _load_all(self.teacher))
        yield from describe_overlaps(student, overlaps)
        if self.output is not None:
            write_figure(draw_overlaps(student, overlaps), self.output)
            yield f"wrote {self.output}"


@dataclass(frozen=True)
class TokensOptions:
    """Fig. 2: one text's tokens.

    Attributes:
        text: the text itself.
        tokenizers: tokenizers, the student's first.
        output: also write .html.
    """

    text: Text
    tokenizers: tuple[TokenizerSource, ...]
    output: Path | None = None

    def __post_init__(self) -> None:
        if not self.text:
            raise ValueError("the text is empty")
        _require_page(self.output)

    def lines(self) -> Iterator[str]:
        """Yield the output."""
        from pipeline.figures.tokens import describe_text, draw_text, tokenize_text

        result = tokenize_text(self.text, _load_all(self.tokenizers))
        width = shutil.get_terminal_size((100, 24)).columns
        yield from describe_text(result, width=width)
        if self.output is not None:
            write_page(self.output, draw_text(result))
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
        chunks: numbers of chunks to cut them into.
        output: also draw it: .svg, .pdf or .png.
    """

    student: TokenizerSource
    teacher: TokenizerSource
    input: Path
    text_field: Annotated[str, Option("NAME")] = "text"
    seq_length: int = PAPER_SEQ_LENGTH
    chunks: tuple[int, ...] = PAPER_CHUNKS
    output: Path | None = None

    def __post_init__(self) -> None:
        for count in (self.seq_length, *self.chunks):
            if count < 1:
                raise ValueError(f"--seq-length and --chunks must be at least 1, got {count}")
        require_drawable(self.output)

    def lines(self) -> Iterator[str]:
        """Yield the output."""
        from pipeline.dataset.texts import read_texts
        from pipeline.figures.chunking import describe_chunking, draw_chunking, measure_chunking

        documents = read_texts([str(self.input)], text_field=self.text_field)
        texts = [document.text.decode() for document in documents]
        loaded = _load_all((self.student, self.teacher))
        (student, students_own), (teacher, teachers_own) = loaded.items()
        chunks = sorted(set(self.chunks))
        quality = measure_chunking(
            texts, students_own, teachers_own, chunks, seq_length=self.seq_length
        )
        yield f"student {student}, teacher {teacher}"
        yield from describe_chunking(quality)
        if self.output is not None:
            write_figure(draw_chunking(quality, student, teacher), self.output)
            yield f"wrote {self.output}"


@dataclass(frozen=True)
class KeptOptions:
    """Fig. 8: tokens that a teacher keeps.

    Attributes:
        text: the text itself.
        student: a causal language model with its tokenizer: folder or Hugging Face repository.
        teacher: the teacher, in the same form.
        keep_fraction: share of the mapped tokens to keep.
        aggregation: how the teacher's losses over a span become one.
        output: also write .html.
    """

    text: Text
    student: ModelSource
    teacher: ModelSource
    keep_fraction: float = 0.4
    aggregation: Literal["mean", "max", "sum"] = "max"
    output: Path | None = None

    def __post_init__(self) -> None:
        _require_page(self.output)

    def lines(self) -> Iterator[str]:
        """Yield the output."""
        # Only this figure needs torch and transformers.
        from pipeline.figures import kept

        student, teacher = _split_name(self.student), _split_name(self.teacher)
        tokens = kept.score_text(
            self.text,
            student=(student[1], _load(self.student)),
            teacher=(teacher[1], _load(self.teacher)),
            keep_fraction=self.keep_fraction,
            aggregation=self.aggregation,
        )
        yield kept.describe_kept(tokens)
        if self.output is not None:
            write_page(self.output, kept.draw_kept(tokens, student[0], teacher[0]))
            yield f"wrote {self.output}"


_FIGURES: dict[str, type[VocabularyOptions | TokensOptions | AlignmentOptions | KeptOptions]] = {
    "vocabulary": VocabularyOptions,
    "tokens": TokensOptions,
    "alignment": AlignmentOptions,
    "kept": KeptOptions,
}


@prints("vocag figures")
def main(argv: list[str] | None = None) -> Iterator[str]:
    """Run the command."""
    return parse_command(
        _FIGURES,
        argv,
        prog="vocag figures",
        description="The paper's figures, from real tokenizers, texts and models.",
        epilog=_EPILOG,
    ).lines()


def _split_name(source: str) -> tuple[str, str]:
    name, equals, rest = source.partition("=")
    if equals and name and not Path(source).exists():
        return name, rest
    return short_names(str(Path(source).absolute()))[0], source


def _load(source: str) -> "Tokenizer":
    from pipeline.tokenization import load_tokenizer

    return load_tokenizer(_split_name(source)[1])


def _load_all(sources: Sequence[str]) -> "dict[str, Tokenizer]":
    names = [_split_name(source)[0] for source in sources]
    if len(set(names)) < len(names):
        raise ValueError(f"several tokenizers are called {', '.join(names)}: write NAME=SOURCE")
    return {name: _load(source) for name, source in zip(names, sources, strict=True)}


def _require_page(output: Path | None) -> None:
    if output is not None and output.suffix != ".html":
        raise ValueError(f"--output {output}: this figure is a page; name a file ending in .html")
