"""Texts of datasets and plain files."""

import json
import logging
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator
from pathlib import Path

from pipeline.batches import SourceDocument
from pipeline.dataset.chosen_documents import open_remaining, select_documents
from pipeline.dataset.tokenizers import text_in
from schemas.document import decode_document

logger = logging.getLogger(__name__)


def read_texts(sources: Iterable[str], *, text_field: str = "text") -> Iterator[SourceDocument]:
    """Yield the texts of .txt files, .jsonl files and aligned datasets, in order.

    A .txt file is one text, a .jsonl line has one in `text_field`, and a dataset's are kept or
    spelled by tokens. ValueError for a line or a dataset without text, or bytes that aren't UTF-8.
    """
    for source in sources:
        if source.endswith(".txt"):
            text = Path(source).read_bytes()
            _require_utf8(text, source)
            yield SourceDocument(source, text.removeprefix(BOM_UTF8))
        elif source.endswith(".jsonl"):
            yield from _of_lines(Path(source), text_field)
        else:
            yield from _of_dataset(source)


def _of_lines(path: Path, text_field: str) -> Iterator[SourceDocument]:
    with path.open("rb") as file:
        blank, start = "", 0
        for number, line in enumerate(file, start=1):
            place = f"{path}, line {number}"
            _require_utf8(line, str(path), start=start)
            start += len(line)
            line = line if number > 1 else line.removeprefix(BOM_UTF8)
            if not line.strip():  # nothing, if no text follows
                blank = blank or f"{place} is blank"
                continue
            if blank:
                raise ValueError(f"{blank}: take it out, or write a text there")
            yield SourceDocument(f"{path}:{number}", _text_of(line, text_field, place))


def _text_of(line: bytes, text_field: str, place: str) -> bytes:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place} isn't JSON ({error}): write an object a line") from error
    found = record.get(text_field) if isinstance(record, dict) else None
    if not isinstance(found, str):
        raise ValueError(f'{place} has no text "{text_field}": see --text-field')
    try:
        return found.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(found[error.start]):04x}"
        raise ValueError(
            f'{place}: character {error.start} of "{text_field}" is half of a surrogate pair '
            f"({half}): write the whole character, or take the line out"
        ) from error


def _require_utf8(text: bytes, place: str, *, start: int = 0) -> None:
    try:
        text.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{place}: byte {start + error.start} ({text[error.start]:#04x}) isn't UTF-8: convert "
            "the file, for example with iconv"
        ) from error


def _of_dataset(source: str) -> Iterator[SourceDocument]:
    documents = select_documents(open_remaining(source))
    num_found = num_lost = 0
    for number in range(len(documents.dataset.manifest.shards)):
        index, kept = documents.read(number, with_names=True)
        wanted = None if kept is None else kept.nonzero()[0].tolist()
        for _, sample in documents.dataset.samples(number, index, documents=wanted):
            document = decode_document(sample)
            text = text_in(documents.dataset, document)
            num_found, num_lost = num_found + (text is not None), num_lost + (text is None)
            if text is not None:
                yield SourceDocument(document.document_id, text)
    if num_lost:
        logger.warning("%s: %d documents neither keep nor spell their text", source, num_lost)
    if not num_found:
        raise ValueError(
            f"{source}: no document has its text; align it with --keep-text, or name the files"
        )
