"""One tokenizer under test, and slow, obvious answers that know nothing of how it works."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from typing import Any

import numpy as np
import sentencepiece
import tokenizers

from pipeline.batches import TokenBatch
from pipeline.tokenization import Tokenizer
from tests.fuzz.report import Fault
from tests.support.reference import spelled_offsets, vocabulary_bytes

Range = tuple[int, int]
MAX_SLOW_BYTES = 4000
"""Longer texts are held against the library's ids alone: oracles are slow."""


@dataclass
class Oracle:
    """Compares a tokenizer's answers with its library's, and its ranges with oracles."""

    tested: Tokenizer  # as a job loads it
    slow: Tokenizer  # the same without the fast path
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        """Load the library's own tokenizer, and read what its tokens stand for."""
        data = self.tested.file_bytes
        self.added, self.control, self.spells = dict[int, str](), set[int](), True
        self.unknown = set[int | None]()
        if self.tested.file_name == "tokenizer.model":
            library: Any = sentencepiece.SentencePieceProcessor(model_proto=data)
            self.encode = library.encode
            self.contents = {i: self.tested.token_bytes(i) for i in range(library.vocab_size())}
            return
        definition = json.loads(data)
        model = definition["model"]
        library = tokenizers.Tokenizer.from_str(data.decode())
        self.encode = lambda text: library.encode(text, add_special_tokens=False).ids
        self.contents = vocabulary_bytes(definition)
        self.spells = model.get("type", "BPE") in ("BPE", "Unigram")
        self.spells &= not model.get("end_of_word_suffix")
        self.unknown = {model.get("unk_id")}
        for token in definition["added_tokens"]:
            number, content = token["id"], token["content"]
            form = library.normalizer.normalize_str(content) if library.normalizer else content
            self.added[number] = content if form else ""  # that splits every text, says the library
            if token["normalized"] and not form:
                self.encode = _fail  # as the library does at most texts; at some it takes 20 GB
            prefixed = token["normalized"] and form.startswith((" ", "▁"))
            blank = content.startswith(" ") or not form.strip(" ▁") or prefixed
            if blank or token["lstrip"] or token["rstrip"]:
                self.contents[number] = b""  # how much white space, nobody says
            if content == model.get("unk_token"):
                self.unknown.add(number)
            if token["special"] or content.startswith("<|") or "｜" in content:
                self.control.add(number)

    def find_faults(self, texts: Sequence[str]) -> dict[int, Fault]:
        """Return what is wrong with texts that are tokenized together, by their place."""
        data = [text.encode() for text in texts]
        try:
            batch, slow = self.tested.tokenize_batch(data), self.slow.tokenize_batch(data)
        except BaseException as error:  # a panic of a Rust library
            return dict.fromkeys(range(len(data)), Fault("raises", f"{type(error)}: {error}"))
        found = (self._compare(place, text, batch, slow) for place, text in enumerate(texts))
        return {place: fault for place, fault in enumerate(found) if fault}

    def _compare(self, place: int, text: str, batch: TokenBatch, slow: TokenBatch) -> Fault | None:
        self.counts["texts"] += 1
        ids, ranges = _document(batch, place)
        expected = self._expected(text)
        if place in batch.failures:
            self.counts["dead letters" if expected else "dead letters where the library fails"] += 1
            return None
        if expected is None:
            return None
        if self.tested.special_strings == "plain" and self._control_strings(text, expected):
            self.counts["texts with control strings"] += 1
            forged = (self.control - self.unknown) & set(ids)
            return Fault("forged", f"a text became control tokens {forged}") if forged else None
        if ids != expected:
            at = sum(1 for _ in takewhile(lambda p: p[0] == p[1], zip(ids, expected, strict=False)))
            near = slice(at, at + 4)
            return Fault("ids", f"at token {at}: {ids[near]}, not {expected[near]}")
        if (ids, ranges) != _document(slow, place):
            return Fault("paths", f"{ranges} on the fast path, {_document(slow, place)[1]} else")
        if len(text) > MAX_SLOW_BYTES:
            return None
        return self._compare_ranges(text, ids, ranges, tiles=bool(batch.tiles[place]))

    def _control_strings(self, text: str, expected: list[int]) -> bool:
        """Return whether a text holds control strings: they hide others, and merges make them."""
        held = any(self.added[i].lower() in text.lower() for i in self.control)
        return held or bool(self.control & set(expected) - self.unknown)

    def _expected(self, text: str) -> list[int] | None:
        """Return the library's own ids, None where it raises or panics."""
        try:
            return list(self.encode(text))
        except BaseException:  # a panic of a Rust library
            return None

    def _compare_ranges(
        self, text: str, ids: list[int], ranges: list[Range], *, tiles: bool
    ) -> Fault | None:
        self.counts["ranges"] += 1
        size = len(text.encode())
        if any(not 0 <= a <= b <= size for a, b in ranges):
            return Fault("ranges", f"{ranges} in {size} bytes")
        if any(a > c or b > d for (a, b), (c, d) in pairwise(ranges)):
            return Fault("ranges", f"{ranges} decrease")
        if tiles != _tile(ranges, size):
            return Fault("tiles", f"{ranges} of {size} bytes are said to tile: {tiles}")
        self.counts["ranges proven by content"] += 1
        pairs = np.array(ranges, int).reshape(-1, 2)
        unproven = self.tested.find_unproven(np.array(ids, int), pairs, text.encode())
        if unproven:
            return Fault("unproven", f"tokens {unproven} of {ranges}")
        pieces = [self.contents.get(i, b"") for i in ids]
        expected = spelled_offsets(pieces, text.encode())
        prefixed = sum(map(len, pieces)) > size and ids[0] in self.added  # which space is it?
        if expected is not None and all(pieces) and self.spells and not prefixed:
            self.counts["ranges of tokens that spell the text"] += 1
            return Fault("ranges", f"{ranges}, not {expected}") if ranges != expected else None
        return None


def _document(batch: TokenBatch, place: int) -> tuple[list[int], list[Range]]:
    start, stop = batch.cu_tokens[place : place + 2]
    ranges = [(int(a), int(b)) for a, b in batch.byte_offsets[start:stop]]
    return np.asarray(batch.input_ids[start:stop]).tolist(), ranges


def _tile(ranges: list[Range], size: int) -> bool:
    ends = [0, *(end for _, end in ranges)]
    return all(a == b for (a, _), b in zip(ranges, ends, strict=False)) and ends[-1] == size


def _fail(_: str) -> list[int]:
    raise ValueError("an added token is nothing when normalised")
