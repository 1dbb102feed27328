"""The options of `align`: the command line, and the frozen dataclass that the job is made from."""

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from beam_jobs.align.blocks import Shuffle
from beam_jobs.align.inputs import Format
from beam_jobs.align.reading import ReadingRules
from beam_jobs.align.templates import parse_template
from beam_jobs.align.tokenizer_files import SpecialStrings
from beam_jobs.errors import OptionsError
from beam_jobs.run_options import HERE, RunOptions, add_run_options, option_names, take_run_options
from pipeline.dataset.conventions import add_convention_options

MIN_SHARD_BYTES = 1 << 14
MAX_DOCUMENT_BYTES = 1 << 30

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmg]i?)?b?", re.IGNORECASE)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")

_DESCRIPTION = """\
Tokenize documents with a student's and a teacher's tokenizer, align the two, and write shards to
train from. The result depends on the input and these options alone: any runner, any number of
workers and any number of retries give the same bytes. Run the same command again to resume."""

_EXAMPLES = """\
examples:
  # JSON lines with a "text" field, on this machine
  vocag align --input 'corpus/*.jsonl.zst' --output aligned \\
      --student TinyLlama/TinyLlama_v1.1 --teacher Qwen/Qwen2.5-1.5B

  # two worker processes; parquet with other column names; texts kept in the samples
  vocag align --input 'corpus/**.parquet' --text-field content --id-field url --keep-text \\
      --student student/tokenizer.json --teacher teacher/tokenizer.model --output aligned \\
      --workers 2

  # Dataflow, from bucket to bucket (docs/dataflow.md has the worker image)
  vocag align --input 'gs://bucket/corpus/*.jsonl.gz' --output gs://bucket/aligned \\
      --student TinyLlama/TinyLlama_v1.1 --teacher Qwen/Qwen2.5-1.5B --runner DataflowRunner \\
      --project my-project --region europe-west4 --temp_location gs://bucket/temp \\
      --sdk_container_image my-registry/vocag-worker

  # questions and answers of a Hugging Face dataset that was saved to a folder
  vocag align --input gsm8k/train --text-template 'Question: {question}\\nAnswer: {answer}' \\
      --student student/tokenizer.json --teacher Qwen/Qwen2.5-1.5B --output aligned

  # what would that take? (nothing is written)
  vocag align --dry-run --input 'corpus/*.jsonl.zst' --output aligned \\
      --student TinyLlama/TinyLlama_v1.1 --teacher Qwen/Qwen2.5-1.5B

  # then check what was written
  vocag validate aligned

input: .jsonl and .ndjson (one object a line), .json (the same, an array, or one object), .csv and
.tsv (with a header), .txt (one document a file), each also .gz, .zst, .bz2 or .xz; .parquet; .arrow
and .feather; folders that Hugging Face datasets saved; - for standard input. Other names need
--format: --format text reads .md or .tex. A document that can't be used goes to
OUTPUT/dead_letters.jsonl with its reason and stops nothing; an input file that changes while it is
read stops the job.

output: NAME-000000-of-000012.tar (plain WebDataset) and its .index.parquet, manifest.json,
dead_letters.jsonl, tokenizers/ and report.html.

exit status: 0 done; 1 the job failed, run it again to resume; 2 asked for wrongly; 3 done, but more
documents are left out than --max-dead-letters allows.

Every other option goes to Apache Beam (--runner, --region, ...)."""


@dataclass(frozen=True)
class AlignOptions:
    """What `align` is asked to do.

    Attributes:
        input: paths or globs of the documents.
        output: folder of the dataset, local or in an object store.
        student: the student's tokenizer: repository, folder or file.
        teacher: the teacher's.
        student_bos: token before a student's text, its id, or "none"; None: the tokenizer's own.
        student_eos: token after a student's document, likewise.
        teacher_context: token before a teacher's text, likewise.
        name: prefix of the shards.
        shard_bytes: about how large a shard is.
        keep_text: whether samples hold their text.
        max_document_bytes: longest text; longer ones are dead letters.
        text_field: field or column of the text.
        text_template: how the text is joined from several fields; "" for `text_field` alone.
        id_field: field or column of the id, "" to name documents by their place.
        format: what all input files are; None goes by their names.
        special_strings: "plain" or "honoured".
        fast: False never takes the fast path.
        shuffle: how documents travel to their buckets: "auto", "files" or "runner".
        max_dead_letters: largest share of the documents that may be left out, 0 to 1.
        run: how many processes, and what they say.
        dry_run: the command only says what it would do.
        beam_arguments: options for Beam.
    """

    input: tuple[str, ...]
    output: str
    student: str
    teacher: str
    student_bos: str | None = None
    student_eos: str | None = None
    teacher_context: str | None = None
    name: str = "corpus"
    shard_bytes: int = 256 << 20
    keep_text: bool = False
    max_document_bytes: int = 16 << 20
    text_field: str = "text"
    text_template: str = ""
    id_field: str = "id"
    format: Format | None = None
    special_strings: SpecialStrings = "plain"
    fast: bool = True
    shuffle: Shuffle | Literal["auto"] = "auto"
    max_dead_letters: float = 0.01
    run: RunOptions = HERE
    dry_run: bool = False
    beam_arguments: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check each option by itself.

        Raises:
            OptionsError: with the option, its value and the rule.
        """
        if not self.input:
            raise OptionsError("--input names no file; give a path or a glob")
        if not _NAME.fullmatch(self.name):
            raise OptionsError(f'--name "{self.name}" must be letters, digits, ".", "_" and "-"')
        if self.shard_bytes < MIN_SHARD_BYTES:
            raise OptionsError(f"--shard-bytes {self.shard_bytes} is below {MIN_SHARD_BYTES}")
        if not 1 <= self.max_document_bytes < 1 << 32:
            raise OptionsError(
                f"--max-document-bytes {self.max_document_bytes} is not in 1 .. 4 GiB"
            )
        if not self.text_field:
            raise OptionsError("--text-field is empty; name the field that holds the text")
        if self.text_template:
            self._check_template()

    def _check_template(self) -> None:
        if self.text_field != "text":
            raise OptionsError("--text-field and --text-template say different things; give one")
        try:
            parse_template(self.text_template)
        except ValueError as error:
            raise OptionsError(f"--text-template: {error}") from None

    @property
    def rules(self) -> ReadingRules:
        """What counts as a document."""
        return ReadingRules(
            self.text_field, self.id_field, self.max_document_bytes, self.text_template
        )


def parse_options(arguments: Sequence[str] | None = None) -> AlignOptions:
    """Return the options of a command line; what is not ours goes to Beam.

    Raises:
        OptionsError: a value breaks a rule.
        SystemExit: argparse's own errors, and --help.

    Example:
        >>> parse_options("--input a.jsonl --output out --student s --teacher t".split()).name
        'corpus'
    """
    known, unknown = _parser().parse_known_args(arguments)
    values = vars(known)
    values.pop("_given", None)
    values["input"] = tuple(values["input"])
    values["run"] = take_run_options(values)
    return AlignOptions(**values, beam_arguments=tuple(unknown))


def parse_size(text: str) -> int:
    """Return a number of bytes written as `1048576`, `1MiB` or `1.5 GB`.

    Example:
        >>> parse_size("256MiB")
        268435456
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f'"{text}" is no size; write 268435456, 256MiB or 250MB')
    return int(float(match[1]) * _UNITS[(match[2] or "").lower()])


def parse_share(text: str) -> float:
    """Return a share written as `0.01` or `1%`.

    Example:
        >>> parse_share("1%")
        0.01
    """
    number = text.strip().removesuffix("%")
    try:
        share = float(number) / (100 if number != text.strip() else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise argparse.ArgumentTypeError(f'"{text}" is no share; write 0.01 or 1%')
    return share


def own_options() -> list[str]:
    """Return the names of the options that don't go to Beam."""
    return option_names(_parser())


class _Once(argparse.Action):
    """An option that a second use would silently overrule."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        given = getattr(namespace, "_given", None) or set()
        if self.dest in given:
            raise OptionsError(
                f"{option_string} is given twice; to join fields, use --text-template "
                r"'{question}\n{answer}'"
            )
        namespace._given = {*given, self.dest}
        setattr(namespace, self.dest, values)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vocag align",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--input", action="append", required=True, metavar="GLOB",
        help="documents: files, globs, folders of Hugging Face datasets, or - for standard input; "
        "repeatable")  # fmt: skip
    add("--format", choices=get_args(Format),
        help="what the input files are (default: what their names say)")  # fmt: skip
    add("--output", required=True, metavar="FOLDER", help="where the dataset goes")
    tokenizer = "tokenizer: Hugging Face repository, folder, tokenizer.json or SentencePiece model"
    add("--student", required=True, metavar="TOKENIZER", help=f"the student's {tokenizer}")
    add("--teacher", required=True, metavar="TOKENIZER", help="the teacher's, likewise")
    add_convention_options(add, default="BOS where the tokenizer puts one, else what separates "
        "documents")  # fmt: skip
    add("--name", default="corpus", help="prefix of the shards (default: %(default)s)")
    add("--shard-bytes", type=parse_size, default=256 << 20, metavar="SIZE",
        help="about how large a shard is (default: 256MiB)")  # fmt: skip
    add("--keep-text", action="store_true", help="keep each document's text in its sample")
    add("--max-document-bytes", type=parse_size, default=16 << 20, metavar="SIZE",
        help="longest text; longer ones become dead letters (default: 16MiB)")  # fmt: skip
    add("--text-field", default="text", metavar="FIELD", action=_Once,
        help="field or column of the text; a.b for nested ones (default: %(default)s)")  # fmt: skip
    add("--text-template", default="", metavar="TEMPLATE", action=_Once,
        help=r"join the text from several fields, such as '{question}\n{answer}'; a document that "
        "lacks one is left out")  # fmt: skip
    add("--id-field", default="id", metavar="FIELD",
        help="field or column of the id, used where present; '' to name every document by its "
        "file and place (default: %(default)s)")  # fmt: skip
    add("--max-dead-letters", type=parse_share, default=0.01, metavar="SHARE",
        help="end with status 3 where a larger share of the documents is left out, such as 0.05 or "
        "5%%; the dataset is written all the same (default: 1%%)")  # fmt: skip
    add("--special-strings", choices=get_args(SpecialStrings), default="plain",
        help="whether <s> or <|endoftext|> in a text is plain text or its control token "
        "(default: %(default)s)")  # fmt: skip
    add("--no-fast-path", dest="fast", action="store_false",
        help="tokenize with the reference only; the result is the same, later")  # fmt: skip
    add("--shuffle", choices=["auto", *get_args(Shuffle)], default="auto",
        help="how texts travel to their shards: files in OUTPUT, or the runner's own shuffle "
        "(default: files where OUTPUT is a local or shared folder)")  # fmt: skip
    add_run_options(parser)
    add("--dry-run", action="store_true",
        help="say what the job would read, write and take; write nothing")  # fmt: skip
    return parser
