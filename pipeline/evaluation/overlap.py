"""Which items of the nine sets are in an aligned dataset: 13 words in a row say so.

Of an item its problem, its options and its worked solution are looked for, and of MATH all 5,000
items, not the 500 that are evaluated: who trains on the others has seen their like.

Words are runs of letters and digits in lower case, so spacing, punctuation and mark-up don't hide a
question. At least three different ones must be of letters alone: "1 2 3 4 5 6 7 8 9 10 11 12 13" is
in a problem of MATH, and in many other texts. An item that can't be found so is counted.

Source: the 13-grams of GPT-3's appendix C, which others have taken over.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from pipeline.dataset.files import Dataset, open_dataset
from pipeline.dataset.groups import count_read
from pipeline.dataset.tokenizers import load_dataset_tokenizer
from pipeline.drawing.formatting import format_count, format_share, format_table
from pipeline.evaluation.data import read_items
from pipeline.evaluation.sets import SETS, Item
from schemas.document import AlignedDocument, decode_document

NUM_WORDS, NUM_OF_LETTERS = 13, 3
LIST_FILE = "overlap.jsonl"

_WORDS = re.compile(r"[^\W_]+")
_BASE = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class Question:
    """A set's item that was found, in which part of it, and words of that."""

    set: str
    place: int
    part: str
    words: str


class Questions:
    """The word sequences of items, to be looked for in texts."""

    def __init__(self, items: Iterable[tuple[str, int, Mapping[str, str]]]) -> None:
        """Take (set, place, texts by part) of every item."""
        self.num_hidden: dict[str, int] = {}
        self._ids: dict[str, int] = {}
        self._found: dict[str, list[Question]] = {}
        hashes = [np.array([np.iinfo(np.uint64).max], np.uint64)]  # so that any can be looked up
        for set_name, place, texts in items:
            found = [self._add(set_name, place, *text) for text in texts.items()]
            hashes += found
            if not sum(map(len, found)):
                self.num_hidden[set_name] = self.num_hidden.get(set_name, 0) + 1
        self._hashes = np.unique(np.concatenate(hashes))

    def find(self, text: str) -> list[Question]:
        """Return the items of which 13 words in a row stand in a text, each once.

        Example:
            >>> words = "one two three four five six seven eight nine ten eleven twelve thirteen"
            >>> questions = Questions([("gsm8k", 7, {"problem": words})])
            >>> [question.place for question in questions.find(f"No: {words.upper()}!")]
            [7]
        """
        words = split_words(text)
        hashes = self._hash(words)
        is_known = self._hashes[np.searchsorted(self._hashes, hashes)] == hashes
        found: dict[tuple[str, int], Question] = {}
        # A hash may be another sequence's: the words decide.
        for start in np.flatnonzero(is_known).tolist():
            sequence = " ".join(words[start : start + NUM_WORDS])
            for question in self._found.get(sequence, ()):
                found.setdefault((question.set, question.place), question)
        return list(found.values())

    def _add(self, set_name: str, place: int, part: str, text: str) -> NDArray[np.uint64]:
        """Take an item's part; return hashes of what it can be found by."""
        words = split_words(text)
        for word in words:
            self._ids.setdefault(word, len(self._ids) + 1)
        starts = []
        for start in range(len(words) - NUM_WORDS + 1):
            sequence = words[start : start + NUM_WORDS]
            if len({word for word in sequence if word.isalpha()}) >= NUM_OF_LETTERS:
                found = Question(set_name, place, part, " ".join(sequence))
                self._found.setdefault(found.words, []).append(found)
                starts.append(start)
        return self._hash(words)[starts]

    def _hash(self, words: Sequence[str]) -> NDArray[np.uint64]:
        """Return a hash of every 13 words in a row, uint64 [max(words - 12, 0)]."""
        num = max(len(words) - NUM_WORDS + 1, 0)
        ids = np.array([self._ids.get(word, 0) for word in words], np.uint64)
        hashes = np.zeros(num, np.uint64)
        for offset in range(NUM_WORDS):  # wraps around, as hashes may
            hashes = hashes * _BASE + ids[offset : offset + num]
        return hashes


def split_words(text: str) -> list[str]:
    """Return a text's words in lower case.

    Example:
        >>> split_words("He's $5.00, isn't it?")
        ['he', 's', '5', '00', 'isn', 't', 'it']
    """
    return _WORDS.findall(text.lower())


def check_overlap(
    dataset_path: str, sets: Sequence[str], *, data: str = "", output: Path
) -> Iterator[str]:
    """Look for the sets' questions in an aligned dataset; write a list and yield a table.

    Args:
        dataset_path: folder, URL or manifest of the dataset.
        sets: of `SETS`.
        data: as in `read_items`.
        output: folder for `overlap.jsonl`: a line for each document and question.

    Raises:
        ValueError: the dataset or a set can't be read.

    Example:
        >>> out = Path("overlap")
        >>> list(check_overlap("aligned", ["math"], output=out))  # doctest: +SKIP
    """
    dataset = open_dataset(dataset_path)
    items = dict(_read_all(name, data) for name in sets)
    questions = Questions(
        (name, place, parts_of(item))
        for name, made in items.items()
        for place, item in enumerate(made)
    )
    output.mkdir(parents=True, exist_ok=True)
    path = output / LIST_FILE
    seen: dict[str, set[int]] = {name: set() for name in items}
    documents: set[str] = set()
    temporary = path.with_suffix(".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        for document_id, question in _search(dataset, questions):
            seen[question.set].add(question.place)
            documents.add(document_id)
            line = {"document_id": document_id, **asdict(question)}
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
    temporary.replace(path)
    rows = [["set", "items", "found", "share", "can't be found"]]
    for name, made in items.items():
        num, num_hidden = len(seen[name]), questions.num_hidden.get(name, 0)
        counts = [format_count(len(made)), format_count(num), format_share(num, len(made))]
        rows.append([SETS[name].title, *counts, format_count(num_hidden)])
    yield from format_table(rows, align="<>>>>")
    total = count_read(dataset).totals["num_documents"]
    held = f"{format_count(len(documents))} of {format_count(total)}"
    yield f"{held} documents hold one; wrote {path}"
    if documents:
        yield f"to leave them out: vocag align … --exclude-overlap {path}"


def parts_of(item: Item) -> dict[str, str]:
    """Return the texts of an item that a document may hold.

    Example:
        >>> parts_of(Item(question="", problem="2 + 2?", answer="4", options=("4", "5"), label=0))
        {'problem': '2 + 2?', 'options': '2 + 2? (A) 4 (B) 5', 'solution': ''}
    """
    listed = [f"({letter}) {text}" for letter, text in zip("ABCDE", item.options, strict=False)]
    # With the problem before them: few options have 13 words.
    options = " ".join([item.problem, *listed]) if listed else ""
    return {"problem": item.problem, "options": options, "solution": item.solution}


def _read_all(name: str, data: str) -> tuple[str, Sequence[Item]]:
    """Return a set's items, of MATH all where its whole file is there, and their set's name."""
    if name == "math":
        try:
            return "math_full", read_items("math_full", data)
        except ValueError:  # a folder with math500.jsonl alone
            pass
    return name, read_items(name, data)


def _search(dataset: Dataset, questions: Questions) -> Iterator[tuple[str, Question]]:
    total = count_read(dataset).totals["num_documents"]
    # disable=None: no bar where stderr is no terminal.
    with tqdm(total=total, unit=" documents", disable=None) as bar:
        for shard in range(len(dataset.manifest.shards)):
            index = dataset.read_index(shard, with_names=True)
            for _, sample in dataset.samples(shard, index):
                document = decode_document(sample)
                for question in questions.find(_text(dataset, document)):
                    yield document.document_id, question
                bar.update()


def _text(dataset: Dataset, document: AlignedDocument) -> str:
    """Return a document's text, or what its student tokens spell where it was not kept."""
    if document.text is not None:
        return document.text.decode()
    tokenizer = load_dataset_tokenizer(dataset.location, dataset.manifest.student)
    pieces = (tokenizer.token_bytes(token_id) for token_id in document.student.input_ids.tolist())
    return b"".join(piece or b" " for piece in pieces).decode(errors="replace")
