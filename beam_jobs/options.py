"""The options of `align`: the command line, and the frozen dataclass that the job is made from."""

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from beam_jobs.blocks import Shuffle
from beam_jobs.reading import ReadingRules
from beam_jobs.run_options import HERE, RunOptions, add_run_options, option_names, take_run_options
from beam_jobs.tokenizer_files import SpecialStrings
from pipeline.conventions import add_convention_options

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

  # then check what was written
  vocag validate aligned

input: .jsonl, .ndjson, .json (one object a line) and .txt (one document a file), each also .gz or
.zst, and .parquet. A document that can't be used goes to OUTPUT/dead_letters.jsonl with its reason
and stops nothing.

output: NAME-000000-of-000012.tar (plain WebDataset) and its .index.parquet, manifest.json,
dead_letters.jsonl, tokenizers/ and report.html.

Every other option goes to Apache Beam (--runner, --region, ...)."""


class OptionsError(ValueError):
    """An option, or a combination of them, can't be used."""


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
        id_field: field or column of the id, "" to name documents by their place.
        special_strings: "plain" or "honoured".
        fast: False never takes the fast path.
        shuffle: how documents travel to their buckets: "auto", "files" or "runner".
        run: how many processes, and what they say.
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
    id_field: str = "id"
    special_strings: SpecialStrings = "plain"
    fast: bool = True
    shuffle: Shuffle | Literal["auto"] = "auto"
    run: RunOptions = HERE
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

    @property
    def rules(self) -> ReadingRules:
        """What counts as a document."""
        return ReadingRules(self.text_field, self.id_field, self.max_document_bytes)


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


def own_options() -> list[str]:
    """Return the names of the options that don't go to Beam."""
    return option_names(_parser())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vocag align",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--input", action="append", required=True, metavar="GLOB", help="documents; repeatable")
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
    add("--text-field", default="text", metavar="FIELD",
        help="field or column of the text; a.b for nested ones (default: %(default)s)")  # fmt: skip
    add("--id-field", default="id", metavar="FIELD",
        help="field or column of the id, used where present; '' to name every document by its "
        "file and place (default: %(default)s)")  # fmt: skip
    add("--special-strings", choices=get_args(SpecialStrings), default="plain",
        help="whether <s> or <|endoftext|> in a text is plain text or its control token "
        "(default: %(default)s)")  # fmt: skip
    add("--no-fast-path", dest="fast", action="store_false",
        help="tokenize with the reference only; the result is the same, later")  # fmt: skip
    add("--shuffle", choices=["auto", *get_args(Shuffle)], default="auto",
        help="how texts travel to their shards: files in OUTPUT, or the runner's own shuffle "
        "(default: files where OUTPUT is a local or shared folder)")  # fmt: skip
    add_run_options(parser)
    return parser
