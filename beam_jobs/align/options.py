"""The options of `vocag align`."""

import argparse
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from beam_jobs.align.inputs.formats import Format, describe_formats
from beam_jobs.align.inputs.parts import DATASET, STANDARD_INPUT
from beam_jobs.job_errors import OptionsError
from beam_jobs.running.run_options import HERE, RunOptions
from pipeline.command_line import option_parsing
from pipeline.command_line.option_parsing import (
    Condition,
    Folder,
    Option,
    Rest,
    TokenizerSource,
    TokenName,
)

Shuffle = Literal["files", "runner"]
"""How texts travel to their buckets: in files that all workers see, or through the runner."""

MIN_SHARD_BYTES = 1 << 14
SIDES = ("student", "teacher")

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmg]i?)?b?", re.IGNORECASE)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")

_INPUT = (
    f"input: {describe_formats()}; "
    "folders that Hugging Face datasets saved; - for standard input; or one dataset that "
    "vocag align has made. Other names need --format: --format text reads .md or .tex. A "
    "document that can't be used goes to OUTPUT/dead_letters.jsonl with its reason, and the "
    "job continues. An input file that changes while it is read stops the job."
)
_EXAMPLES = """\
examples:
  # JSON lines with a "text" field, on this machine
  vocag align --input 'corpus/*.jsonl.zst' --output aligned \\
      --student TinyLlama/TinyLlama_v1.1 --teacher Qwen/Qwen2.5-1.5B

  # two worker processes; parquet with other column names; sources and scores travel along
  vocag align --input 'corpus/**.parquet' --text-field content --id-field url --workers 2 \\
      --metadata source,meta.score --student student/tokenizer.json \\
      --teacher teacher/tokenizer.model --output aligned

  # Dataflow, from bucket to bucket (docs/guides/clusters.md has the worker image)
  vocag align --input 'gs://bucket/corpus/*.jsonl.gz' --output gs://bucket/aligned \\
      --student TinyLlama/TinyLlama_v1.1 --teacher Qwen/Qwen2.5-1.5B --runner DataflowRunner \\
      --project my-project --region europe-west4 --temp_location gs://bucket/temp \\
      --sdk_container_image my-registry/vocag-worker

  # questions and answers of a Hugging Face dataset that was saved to a folder
  vocag align --input gsm8k/train --text-template 'Question: {question}\\nAnswer: {answer}' \\
      --student student/tokenizer.json --teacher Qwen/Qwen2.5-1.5B --output aligned

  # conversations, each side in its own chat template; the assistant's messages are learned
  vocag align --input chats.jsonl --messages messages --output chats \\
      --student HuggingFaceTB/SmolLM2-135M-Instruct --teacher Qwen/Qwen2.5-1.5B-Instruct

  # more documents of the same kind, later: a document whose id is there already is left out
  vocag align --append --input 'new/*.jsonl.zst' --output aligned \\
      --student TinyLlama/TinyLlama_v1.1 --teacher Qwen/Qwen2.5-1.5B

  # what would that take? (nothing is written)
  vocag align --dry-run --input 'corpus/*.jsonl.zst' --output aligned \\
      --student TinyLlama/TinyLlama_v1.1 --teacher Qwen/Qwen2.5-1.5B

  # the documents of a dataset with another teacher, and a part of one
  vocag align --input aligned --teacher Qwen/Qwen2.5-Math-7B --output aligned-math
  vocag align --input aligned --where "source = 'forum' and score > 0.5" --output forum

  # then check what was written
  vocag validate aligned

{INPUT}

--input DATASET reads the newest generation without its removed documents. Texts are the kept ones,
or are spelled from tokens and compared by SHA-256; missing ones are counted and named before any
document is aligned. Ids and metadata travel along. Options that aren't given are the dataset's
(with --append, those of the dataset in OUTPUT): the other tokenizer, the tokens around a text,
--keep-text, --shard-bytes and --name.

output: NAME-000000-of-000012.tar (plain WebDataset) and its .index.parquet, manifest.json,
dead_letters.jsonl, tokenizers/, report.html and a dataset card, README.md.

--append writes shards NAME-g001-000000-of-000003.tar next to those already there, and
dead_letters-g001.jsonl. A running job keeps its exact rows. A document whose id the dataset has or
had is left out and counted: known_id in the dead letters, which --max-dead-letters does not count.
vocag score then scores what is new.

exit status: 0 done; 1 the job failed, run it again to resume; 2 wrong usage; 3 done, but more
documents are left out than --max-dead-letters allows, or a file can't be read to its end or has no
document that can be used.

Every other option goes to Apache Beam (--runner, --region, ...).""".replace("{INPUT}", _INPUT)

_GROUPS = {
    "input": "documents in, shards out",
    "format": "what counts as a document",
    "messages": "conversations",
    "student_bos": "tokens",
    "name": "shards",
    "shuffle": "how the job runs; the shards stay the same",
}


def parse_size(text: str) -> int:
    """Parse a number of bytes such as `1048576`, `1MiB` or `1.5 GB`.

    Example:
        >>> parse_size("256MiB")
        268435456
    """
    match = _SIZE.fullmatch(text.strip())
    size = int(float(match[1]) * _UNITS[(match[2] or "").lower()]) if match else 0
    if not size:
        raise argparse.ArgumentTypeError(f"{text!r} isn't a size: write 268435456, 256MiB or 250MB")
    return size


Size = Annotated[int, Option("SIZE", parse_size)]
Learn = Literal["assistant", "last", "all"]
_ALL_FIELDS = "name all fields at once: --metadata source,language"
_ONE_TEXT = r"to join fields, use --text-template '{question}\n{answer}'"


@dataclass(frozen=True)
class ChatOptions:
    """How conversations are read, and what of them is learned.

    Attributes:
        messages: field of a conversation's messages: documents are then chats, which each side
            sees in its own chat template.
        tools: field of the tools that a conversation may call.
        learn: whose messages are learned.
        learn_end: whether what ends a learned turn is learned, too.
        chat_template: a side's template, student=FILE or teacher=FILE (default: the one next to its
            tokenizer); repeatable.
        template_options: what templates are given, such as enable_thinking=false, or
            teacher.enable_thinking=false for one of them.
    """

    messages: Annotated[str, Option("FIELD")] = ""
    tools: Annotated[str, Option("FIELD")] = ""
    learn: Learn = "assistant"
    learn_end: Literal["yes", "no"] = "yes"
    chat_template: Annotated[tuple[str, ...] | None, Option("SIDE=FILE", form="repeated")] = None
    template_options: Annotated[tuple[str, ...], Option("NAME=VALUE")] = ()

    def __post_init__(self) -> None:
        for side, file in self.template_files.items():
            if not Path(file).exists():  # not read yet: a pipe can be read once
                raise OptionsError(f"--chat-template {side}: {file} is not there")
        _ = self.template_values

    @property
    def template_files(self) -> dict[str, str]:
        """The given templates' files by side; OptionsError if one isn't SIDE=FILE."""
        found: dict[str, str] = {}
        for value in self.chat_template or ():
            side, equals, file = value.partition("=")
            if side not in SIDES or not equals or not file:
                raise OptionsError(
                    f"--chat-template {side}: write SIDE=FILE, SIDE being student or teacher"
                )
            found[side] = file
        return found

    @property
    def template_values(self) -> dict[str, dict[str, Any]]:
        """What each side's template is given; OptionsError if one isn't [SIDE.]NAME=VALUE."""
        found: dict[str, dict[str, Any]] = {side: {} for side in SIDES}
        for given in self.template_options:
            name, equals, text = given.partition("=")
            side, dot, rest = name.partition(".")
            of = [side] if dot and side in SIDES else [*SIDES]
            name = rest if len(of) == 1 else name
            if not equals or not name.isidentifier():
                raise OptionsError(
                    f"--template-options {given}: write NAME=VALUE, or student.NAME=VALUE, such as "
                    "enable_thinking=false"
                )
            try:
                value = json.loads(text)
            except ValueError:
                value = text
            for each in of:
                found[each][name] = value
        return found


NO_CHATS = ChatOptions()


@dataclass(frozen=True)
class AlignOptions:
    r"""Tokenize documents with a student's and a teacher's tokenizer, align the two, write shards.

    The result depends on the input and these options alone: any runner, any number of workers and
    any number of retries give the same bytes. Run the same command again to resume.

    Attributes:
        input: documents: files, globs, folders of Hugging Face datasets, or - for standard input;
            repeatable. Or a dataset that vocag align has made.
        output: where the dataset goes, local or in an object store.
        student: the student's tokenizer: Hugging Face repository, folder, tokenizer.json,
            SentencePiece model, or bytes: the byte values; may be left out if the input is a
            dataset.
        teacher: the teacher's tokenizer, in the same forms.
        where: which of a dataset's documents to read, such as "source = 'web' and score > 0.5".
        append: add the input's documents to the finished dataset in OUTPUT, as its next
            generation. Give the tokenizers and options that made it again: others are refused.
        format: what the input files are (default: what their names say).
        text_field: field or column of the text; a.b for nested ones.
        text_template: join the text from several fields, such as '{question}\n{answer}'; a document
            that lacks one is left out.
        id_field: field or column of the id, used if present; '' to name every document by its
            file and place.
        metadata: fields or columns that become columns of the index, to filter, count and mix by:
            source,language,meta.score; :string, :int64, :float64 or :bool behind a name says its
            type, which is otherwise that of the first documents' values.
        max_document_bytes: longest text; longer ones become dead letters (default: 16MiB).
        max_dead_letters: end with status 3 if a larger share of the documents is left out, or if
            a file can't be read to its end or has no usable document, however little that is; 1
            accepts any loss. The dataset is written all the same.
        chats: how conversations are read.
        student_bos: token that comes before a student's text, its id, or none (default: BOS if
            the tokenizer puts one, else what separates documents).
        student_eos: token that comes after a student's document, its id, or none (default:
            by the tokenizer).
        teacher_context: token that comes before a teacher's text, its id, or none (default:
            by the tokenizer).
        special_strings: whether <s> or <|endoftext|> in a text is plain text or its control token
            (default: plain). Chats are read as templates' own libraries do, honoured; with plain,
            one whose texts hold such a string is left out.
        name: prefix of the shards (default: corpus).
        shard_bytes: about how large a shard is (default: 256MiB).
        keep_text: keep each document's text in its sample.
        shuffle: how texts travel to their shards: files in OUTPUT, or the runner's own shuffle
            (default: files if OUTPUT is a local or shared folder).
        no_fast_path: tokenize with the reference only; the result is the same, but slower.
        run: how many processes, and what they say.
        dry_run: report what the job would read, write and take; write nothing.
        beam_arguments: options for Beam.
    """

    input: Annotated[tuple[str, ...], Option("GLOB", form="repeated")]
    output: Folder
    student: TokenizerSource = ""
    teacher: TokenizerSource = ""
    where: Condition = ""
    append: bool = False
    format: Format | None = None
    text_field: Annotated[str, Option("FIELD", once=_ONE_TEXT)] = "text"
    text_template: Annotated[str, Option("TEMPLATE", once=_ONE_TEXT)] = ""
    id_field: Annotated[str, Option("FIELD")] = "id"
    metadata: Annotated[str, Option("FIELDS", once=_ALL_FIELDS)] = ""
    max_document_bytes: Size = 0
    max_dead_letters: float = 0.01
    chats: ChatOptions = NO_CHATS
    student_bos: TokenName | None = None
    student_eos: TokenName | None = None
    teacher_context: TokenName | None = None
    special_strings: Literal["plain", "honoured", ""] = ""
    name: str = ""
    shard_bytes: Size = 0
    keep_text: bool | None = None
    shuffle: Literal["auto"] | Shuffle = "auto"
    no_fast_path: bool = False
    run: RunOptions = HERE
    dry_run: bool = False
    beam_arguments: Rest = ()

    def __post_init__(self) -> None:
        if not all(self.input or ("",)):
            raise OptionsError("--input names no file; give a path or a glob")
        if not self.output:
            raise OptionsError("--output is empty; name the dataset's folder")
        if self.name and not _NAME.fullmatch(self.name):
            raise OptionsError(f'--name "{self.name}" must be letters, digits, ".", "_" and "-"')
        if self.shard_bytes and self.shard_bytes < MIN_SHARD_BYTES:
            raise OptionsError(f"--shard-bytes {self.shard_bytes} is below {MIN_SHARD_BYTES}")
        if not 0 <= self.max_document_bytes < 1 << 32:
            raise OptionsError(
                f"--max-document-bytes {self.max_document_bytes} is not in 1 .. 4 GiB"
            )
        if STANDARD_INPUT in self.input and self.format == DATASET:
            raise OptionsError("--format dataset: a dataset is a folder; give its path or URL")
        if not 0 <= self.max_dead_letters <= 1:
            raise OptionsError(f"--max-dead-letters {self.max_dead_letters} is not in 0 .. 1")
        if not self.text_field:
            raise OptionsError("--text-field is empty; name the field that holds the text")
        if self.text_template and self.text_field != "text":
            raise OptionsError("--text-field and --text-template say different things; give one")
        self._require_fit_for_chats()

    def _require_fit_for_chats(self) -> None:
        chats = self.chats
        if not chats.messages:
            given = [
                name for name, value in vars(chats).items() if value != getattr(NO_CHATS, name)
            ]
            if given:
                raise OptionsError(
                    f"--{given[0].replace('_', '-')} is about chats: name the field of their "
                    "messages, such as --messages messages"
                )
            return
        texts = {"text_field": "text", "text_template": "", "student_bos": None}
        texts |= {"student_eos": None, "teacher_context": None}
        for name, default in texts.items():
            if getattr(self, name) != default:
                raise OptionsError(
                    f"--{name.replace('_', '-')} is about texts: of a chat (--messages) the "
                    "template says what is around each message"
                )
        if self.keep_text is False:
            raise OptionsError("--no-keep-text: a chat is kept, to be rendered again")


def parse_options(arguments: Sequence[str] | None = None) -> AlignOptions:
    """Parse a command line; unknown options go to Beam."""
    return option_parsing.parse_options(
        AlignOptions, arguments, prog="vocag align", epilog=_EXAMPLES, groups=_GROUPS
    )
