"""Chats, rendered twice and tokenized, as aligned documents.

A token's offsets are its *origin*: the document's bytes that it covers, none for a template's text.
So spans, statistics and distributions need not know of templates.
"""

import re
from collections.abc import Container, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain, pairwise

import numpy as np
from numpy.typing import NDArray

from pipeline.alignment.token_spans import align_tokens, find_failures
from pipeline.batches import (
    AlignedBatch,
    ChatParts,
    Ranges,
    RenderedSide,
    SourceDocument,
    TokenBatch,
    join_batches,
    without_failures,
)
from pipeline.chats.kernels import (
    count_seams,
    find_origins,
    find_tiled,
    find_turn_cuts,
    list_runs,
    mark_overlaps,
    mark_spans,
)
from pipeline.chats.messages import ChatError, decode_chat
from pipeline.chats.rendering import LearnRule, RenderedChat, Rendering, render_chat
from pipeline.chats.turns import Speaker
from pipeline.tokenization import Tokenizer

_Table = tuple[NDArray[np.int64], NDArray[np.int64]]
"""Rows of all documents of a batch, and int64 [D + 1], which of them are whose."""

_PART_BYTES = 1 << 17
"""Of chats that are tokenized at one time."""


@dataclass(frozen=True)
class ChatSide:
    """A side's tokenizer and its template."""

    tokenizer: Tokenizer
    speaker: Speaker


def align_chats(
    documents: Sequence[SourceDocument],
    sides: tuple[ChatSide, ChatSide],
    rule: LearnRule,
    *,
    refuse_controls: bool = False,
) -> AlignedBatch:
    """Render chats with both templates, tokenize the renderings and align them.

    The documents' texts are from `Chat.encode`; those of the result are the chats' own bytes. With
    `refuse_controls`, a chat with a control string in a text is refused.
    """
    found = _Found()
    with ThreadPoolExecutor(max_workers=1) as first, ThreadPoolExecutor(max_workers=1) as second:
        pending = [
            (
                first.submit(sides[0].tokenizer.tokenize_batch, _texts(chats, 0)),
                second.submit(sides[1].tokenizer.tokenize_batch, _texts(chats, 1)),
            )
            for chats in found.render(documents, sides, rule, refuse_controls=refuse_controls)
        ]
        students, teachers = ([each[side].result() for each in pending] for side in (0, 1))
    tokens = join_batches(students), join_batches(teachers)
    failures = find_failures(*tokens)
    failed = [(found.documents[place], why) for place, why in sorted(failures.items())]
    if failures:
        found.leave_out(failures)
        tokens = _without(tokens[0], failures), _without(tokens[1], failures)
    sizes = [len(document.text) for document in found.documents]
    student, teacher = (
        _in_documents(batch, [chat.sides[number] for chat in found.chats], sizes)
        for number, batch in enumerate(tokens)
    )
    spans = align_tokens(student, teacher)
    parts = [*_parts(found.chats, found.num_controls, tokens, (student, teacher), spans)]
    return AlignedBatch(found.documents, student, teacher, spans, failed, parts, found.refused)


@dataclass
class _Found:
    """Rendered chats with their documents and the control strings in them, and refused ones."""

    chats: list[RenderedChat] = field(default_factory=list)
    documents: list[SourceDocument] = field(default_factory=list)
    num_controls: list[int] = field(default_factory=list)
    refused: list[tuple[SourceDocument, str]] = field(default_factory=list)

    def render(
        self,
        documents: Sequence[SourceDocument],
        sides: tuple[ChatSide, ChatSide],
        rule: LearnRule,
        *,
        refuse_controls: bool,
    ) -> Iterator[list[RenderedChat]]:
        """Yield the chats in parts: one is tokenized while the next one is rendered."""
        speakers = [side.speaker for side in sides]
        names = tuple(name for speaker in speakers for name in speaker.controls)
        start = size = 0
        for document in documents:
            try:
                chat = render_chat(decode_chat(document.text), speakers, rule)
                num_controls = count_controls(chat.text, names)
                if num_controls and refuse_controls:
                    raise ChatError(
                        f"its texts hold {num_controls} strings of control tokens, which "
                        "--special-strings plain refuses"
                    )
            except ChatError as error:
                self.refused.append((document, str(error)))
                continue
            self.chats.append(chat)
            self.documents.append(replace(document, text=chat.text))
            self.num_controls.append(num_controls)
            size += len(chat.text)
            if size >= _PART_BYTES:
                yield self.chats[start:]
                start, size = len(self.chats), 0
        if start < len(self.chats):
            yield self.chats[start:]

    def leave_out(self, failures: Container[int]) -> None:
        rest = [place for place in range(len(self.chats)) if place not in failures]
        self.chats = [self.chats[place] for place in rest]
        self.documents = [self.documents[place] for place in rest]
        self.num_controls = [self.num_controls[place] for place in rest]


def _texts(chats: Sequence[RenderedChat], side: int) -> list[bytes]:
    return [chat.sides[side].text for chat in chats]


def count_controls(text: bytes, names: tuple[str, ...]) -> int:
    """Count the control tokens with these names that texts spell."""
    pattern = _controls_of(names)
    return 0 if pattern is None else len(pattern.findall(text))


@lru_cache(maxsize=4)
def _controls_of(names: tuple[str, ...]) -> re.Pattern[bytes] | None:
    longest_first = sorted({*names}, key=lambda name: (-len(name), name))
    return re.compile(b"|".join(re.escape(n.encode()) for n in longest_first)) if names else None


def _without(batch: TokenBatch, failures: dict[int, str]) -> TokenBatch:
    """Remove some documents from the batch, tokens and places."""
    bare = without_failures(replace(batch, failures=failures))
    kept = np.array([n for n in range(batch.num_documents) if n not in failures], np.int64)
    counts = np.diff(bare.cu_tokens)[kept]
    return TokenBatch(
        bare.input_ids,
        bare.byte_offsets,
        np.cumsum(np.append(0, counts), dtype=np.int64),
        bare.tiles[kept],
    )


def _in_documents(
    batch: TokenBatch, renderings: Sequence[Rendering], sizes: Sequence[int]
) -> TokenBatch:
    """Return tokens of renderings with their origins as offsets."""
    ranges, cu_ranges = _join([each.ranges for each in renderings])
    places = np.fromiter(chain.from_iterable(each.places for each in renderings), np.int64)
    closes = np.fromiter(chain.from_iterable(each.closes for each in renderings), np.int64)
    origins = find_origins(batch.byte_offsets, batch.cu_tokens, ranges, places, closes, cu_ranges)
    tiles = find_tiled(origins, batch.cu_tokens, np.array(sizes, np.int64))
    return replace(batch, byte_offsets=origins, tiles=tiles)


def _join(parts: Sequence[Sequence[tuple[int, ...]]], columns: int = 2) -> _Table:
    """Return the rows of all documents as one array, and their bounds."""
    rows = chain.from_iterable(parts)
    joined = np.fromiter(chain.from_iterable(rows), np.int64).reshape(-1, columns)
    return joined, np.cumsum([0, *map(len, parts)], dtype=np.int64)


def _split(table: _Table) -> Iterator[NDArray[np.int64]]:
    """Yield each document's rows."""
    joined, bounds = table
    return (joined[start:stop] for start, stop in pairwise(bounds.tolist()))


def _parts(
    chats: Sequence[RenderedChat],
    controls: Sequence[int],
    rendered: tuple[TokenBatch, TokenBatch],
    origins: tuple[TokenBatch, TokenBatch],
    spans: Ranges,
) -> Iterator[ChatParts]:
    """Yield each chat's parts besides its tokens, from `rendered` and, in documents, `origins`."""
    student, teacher = origins
    documents = _join([chat.learned for chat in chats])
    said = _join([chat.sides[0].said for chat in chats])
    learned = mark_overlaps(rendered[0].byte_offsets, student.cu_tokens, *said)
    taught = mark_overlaps(teacher.byte_offsets, teacher.cu_tokens, *documents)
    over = mark_overlaps(student.byte_offsets, student.cu_tokens, *documents)
    mark_spans(taught, over, spans, student.cu_tokens, teacher.cu_tokens)
    cu_tokens = student.cu_tokens, teacher.cu_tokens
    offsets = rendered[0].byte_offsets, rendered[1].byte_offsets
    covered = student.byte_offsets, teacher.byte_offsets
    texts = _bytes_of(chats, 0), _bytes_of(chats, 1)
    bounds = _bounds_of(chats, 0), _bounds_of(chats, 1)
    seams = count_seams(offsets, covered, cu_tokens, learned, spans, texts, bounds)
    turns, cu_turns = _join([_turn_ends(chat) for chat in chats])
    cuts = find_turn_cuts(turns, cu_turns, offsets, covered, cu_tokens)
    of_sides = [
        _sides([chat.sides[side] for chat in chats], list_runs(marks, cu_tokens[side]))
        for side, marks in enumerate((learned, taught))
    ]
    for chat, ranges, ours, theirs, places, num_controls, counts in zip(
        chats,
        _split(documents),
        *of_sides,
        _split((cuts, cu_turns)),
        controls,
        seams.tolist(),
        strict=True,
    ):
        found = places[places[:, 0] > 0]
        yield ChatParts(chat.messages, ranges, ours, theirs, found, num_controls, *counts)


def _bytes_of(chats: Sequence[RenderedChat], side: int) -> NDArray[np.uint8]:
    return np.frombuffer(b"".join(_texts(chats, side)), np.uint8)


def _bounds_of(chats: Sequence[RenderedChat], side: int) -> NDArray[np.int64]:
    """Return the start of each rendering in these bytes."""
    return np.cumsum([0, *map(len, _texts(chats, side))], dtype=np.int64)


def _turn_ends(chat: RenderedChat) -> list[tuple[int, int]]:
    student, teacher = (side.turn_ends for side in chat.sides)
    return [(end, teacher[number]) for number, end in student.items() if number in teacher]


def _sides(renderings: Sequence[Rendering], learned: _Table) -> Iterator[RenderedSide]:
    pieces = _join([_pieces(each) for each in renderings], columns=3)
    for each, table, runs in zip(renderings, _split(pieces), _split(learned), strict=True):
        yield RenderedSide(b"".join(each.own), table, runs)


def _pieces(rendering: Rendering) -> list[tuple[int, int, int]]:
    """Return the bytes of each own text, and the document's range after it."""
    end = rendering.ranges[-1][1] if rendering.ranges else 0
    ranges = (*rendering.ranges, (end, end))
    return [(len(own), *behind) for own, behind in zip(rendering.own, ranges, strict=True)]
