"""Find items of the nine sets in an aligned dataset, by 13 words in a row.

Problems, options and worked solutions are searched for, of MATH all 5,000: a model trained on the
others has seen similar ones. Words are runs of letters and digits in lower case; at least three
different ones must be of letters alone, for "1 2 3 … 13" is in many texts.

Source: the 13-grams of GPT-3's appendix C.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tqdm import tqdm

from pipeline.chats.messages import CONTENT, ChatError
from pipeline.command_line.failures import naming
from pipeline.command_line.pasted import pasted
from pipeline.dataset.chosen_documents import open_remaining
from pipeline.dataset.files import Dataset
from pipeline.dataset.groups import count_read
from pipeline.dataset.tokenizers import text_in
from pipeline.drawing.formatting import format_count, format_share, format_table
from pipeline.evaluation.set_files import MissingSetError, read_items
from pipeline.evaluation.sets import SETS, Item, chat_of
from schemas.document import decode_document

NUM_WORDS, NUM_OF_LETTERS = 13, 3
LIST_FILE = "overlap.jsonl"

_WORDS = re.compile(r"[^\W_]+")


@dataclass(frozen=True)
class Question:
    """A found item, its matching part and words."""

    set: str
    place: int
    part: str
    words: str


class Questions:
    """Items' word sequences, for finding them in texts."""

    def __init__(self, items: Iterable[tuple[str, int, Mapping[str, str]]]) -> None:
        """Take (set, place, texts by part) of items; `num_hidden` counts unsearchable ones."""
        self.num_hidden = Counter[str]()
        self._found: dict[str, list[Question]] = {}
        for set_name, place, texts in items:
            made = [
                Question(set_name, place, part, " ".join(sequence))
                for part, text in texts.items()
                for sequence in _sequences(text)
                if len(set(filter(str.isalpha, sequence))) >= NUM_OF_LETTERS
            ]
            for question in made:
                self._found.setdefault(question.words, []).append(question)
            if not made:
                self.num_hidden[set_name] += 1

    def find(self, text: str) -> list[Question]:
        """Return the items that share 13 words in a row with a text, each once."""
        found: dict[tuple[str, int], Question] = {}
        for sequence in _sequences(text):
            for question in self._found.get(" ".join(sequence), ()):
                found.setdefault((question.set, question.place), question)
        return list(found.values())


def _sequences(text: str) -> Iterator[list[str]]:
    words = split_words(text)
    for start in range(len(words) - NUM_WORDS + 1):
        yield words[start : start + NUM_WORDS]


def split_words(text: str) -> list[str]:
    """Return a text's words in lower case."""
    return _WORDS.findall(text.lower())


def check_overlap(
    dataset_path: str, sets: Sequence[str], *, data: str, output: Path
) -> Iterator[str]:
    """List the sets' questions in a dataset, and yield a table; ValueError for unreadable data."""
    dataset = open_remaining(dataset_path)
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
    total, num_lost = count_read(dataset).totals["num_documents"], 0
    temporary = path.with_suffix(".tmp")
    with naming(str(path)), temporary.open("w", encoding="utf-8") as file:
        for document_id, text in _texts(dataset, total):
            num_lost += text is None
            for question in questions.find((text or b"").decode()):
                seen[question.set].add(question.place)
                documents.add(document_id)
                line = {"document_id": document_id, **asdict(question)}
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
    temporary.replace(path)
    rows = [["set", "items", "found", "share", "can't be found"]]
    for name, made in items.items():
        num, num_hidden = len(seen[name]), questions.num_hidden[name]
        counts = [format_count(len(made)), format_count(num), format_share(num, len(made))]
        rows.append([SETS[name].title, *counts, format_count(num_hidden)])
    yield from format_table(rows, align="<>>>>")
    if num_lost:
        lost = f"{format_count(num_lost)} of {format_count(total)}"
        yield f"not searched: {lost} documents (texts not kept, and not spelled by tokens)"
    held = f"{format_count(len(documents))} of {format_count(total)}"
    yield f"{held} documents hold one; wrote {path}"
    if documents:
        yield f"to leave them out: vocag remove {pasted(dataset_path)} --ids {pasted(str(path))}"


def parts_of(item: Item) -> dict[str, str]:
    """Return an item's texts that a document may contain."""
    if item.chat:
        try:
            messages = chat_of(item).messages
        except ChatError:
            return {}  # counted as one that can't be found
        return {f"message {n}": each.get(CONTENT, "") for n, each in enumerate(messages)}
    listed = [f"({letter}) {text}" for letter, text in zip("ABCDE", item.options, strict=False)]
    # With the problem before them: few options have 13 words.
    options = " ".join([item.problem, *listed]) if listed else ""
    return {"problem": item.problem, "options": options, "solution": item.solution}


def _read_all(name: str, data: str) -> tuple[str, Sequence[Item]]:
    """Return a set's name and items; all of MATH, if available."""
    if name == "math":
        try:
            return "math_full", read_items("math_full", data)
        except MissingSetError:  # a folder with math500.jsonl alone
            pass
    return name, read_items(name, data)


def _texts(dataset: Dataset, num_documents: int) -> Iterator[tuple[str, bytes | None]]:
    """Yield each document's id and text; None if tokens don't spell it."""
    # disable=None: no bar if stderr isn't a terminal.
    with tqdm(total=num_documents, unit=" documents", disable=None) as bar:
        for shard in range(len(dataset.manifest.shards)):
            index = dataset.read_index(shard, with_names=True)
            for _, sample in dataset.samples(shard, index):
                document = decode_document(sample)
                yield document.document_id, text_in(dataset, document)
                bar.update()
