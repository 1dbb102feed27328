"""Align chats, rendered with both templates.

A token's offsets are its *origin*: the document's bytes that it covers, none for a template's text.
"""

from collections.abc import Container, Iterator, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from pipeline.alignment.token_spans import align_tokens, find_failures
from pipeline.batches import (
    AlignedBatch,
    ChatParts,
    PerDocument,
    Ranges,
    RenderedSide,
    SourceDocument,
    TokenBatch,
    join_batches,
    without_failures,
)
from pipeline.chats.habits import Speaker
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
from pipeline.tokenization import Tokenizer
from pipeline.tokenization.definition import any_of

_PART_BYTES = 1 << 18
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

    Texts given are from `Chat.encode`; those of the result are the chats' own bytes.
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
        rendered = [join_batches([each[side].result() for each in pending]) for side in (0, 1)]
    failures = find_failures(*rendered)
    failed = [(found.documents[place], why) for place, why in sorted(failures.items())]
    if failures:
        found.leave_out(failures)
        rendered = [_without(batch, failures) for batch in rendered]
    student, teacher = (
        _side_of([chat.sides[number] for chat in found.chats], batch, found.documents)
        for number, batch in enumerate(rendered)
    )
    spans = align_tokens(student.tokens, teacher.tokens)
    parts = _parts(found, student, teacher, spans)
    return AlignedBatch(
        found.documents, student.tokens, teacher.tokens, spans, failed, parts, found.refused
    )


@dataclass
class _Found:
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
        """Yield chats in parts: one is tokenized while the next is rendered."""
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


@dataclass(frozen=True, eq=False)
class _Side:
    """One side of a batch of chats: `offsets` in the renderings, `tokens` with origins."""

    renderings: Sequence[Rendering]
    offsets: Ranges
    tokens: TokenBatch
    pieces: PerDocument


def count_controls(text: bytes, names: tuple[str, ...]) -> int:
    """Count the control tokens that a text spells."""
    pattern = any_of(names)
    return 0 if pattern is None else len(pattern.findall(text))


def _without(batch: TokenBatch, failures: dict[int, str]) -> TokenBatch:
    bare = without_failures(replace(batch, failures=failures))
    kept = np.array([n for n in range(batch.num_documents) if n not in failures], np.int64)
    counts = np.diff(bare.cu_tokens)[kept]
    return TokenBatch(
        bare.input_ids,
        bare.byte_offsets,
        np.cumsum(np.append(0, counts), dtype=np.int64),
        bare.tiles[kept],
    )


def _side_of(
    renderings: Sequence[Rendering], rendered: TokenBatch, documents: Sequence[SourceDocument]
) -> _Side:
    pieces = _join([each.pieces for each in renderings], columns=3)
    closes = np.fromiter(chain.from_iterable(each.closes for each in renderings), np.int64)
    origins = find_origins(rendered.byte_offsets, rendered.cu_tokens, *pieces, closes)
    sizes = np.array([len(document.text) for document in documents], np.int64)
    tiles = find_tiled(origins, rendered.cu_tokens, sizes)
    tokens = replace(rendered, byte_offsets=origins, tiles=tiles)
    return _Side(renderings, rendered.byte_offsets, tokens, pieces)


def _parts(found: _Found, student: _Side, teacher: _Side, spans: Ranges) -> ChatParts:
    chats = found.chats
    documents = _join([chat.learned for chat in chats])
    cu_tokens = student.tokens.cu_tokens, teacher.tokens.cu_tokens
    rendered = student.offsets, teacher.offsets
    origins = student.tokens.byte_offsets, teacher.tokens.byte_offsets
    said = _join([each.said for each in student.renderings])
    learned = mark_overlaps(rendered[0], cu_tokens[0], *said)
    taught = mark_overlaps(origins[1], cu_tokens[1], *documents)
    over = mark_overlaps(origins[0], cu_tokens[0], *documents)
    mark_spans(taught, over, spans, *cu_tokens)
    (first, cu_first), (second, cu_second) = (
        _join_bytes([each.text for each in side.renderings]) for side in (student, teacher)
    )
    seams = count_seams(
        rendered, origins, cu_tokens, learned, spans, (first, second), (cu_first, cu_second)
    )
    turns = _join([_turn_ends(chat) for chat in chats])
    return ChatParts(
        _join_bytes([chat.messages for chat in chats]),
        documents,
        _stored(student, learned),
        _stored(teacher, taught),
        _found_cuts(PerDocument(find_turn_cuts(*turns, rendered, origins, cu_tokens), turns.cu)),
        np.array(found.num_controls, np.int64),
        seams[:, 0],
        seams[:, 1],
    )


def _stored(side: _Side, learned: NDArray[np.bool_]) -> RenderedSide:
    own_text = _join_bytes([each.own_text for each in side.renderings])
    return RenderedSide(
        own_text, side.pieces, PerDocument(*list_runs(learned, side.tokens.cu_tokens))
    )


def _turn_ends(chat: RenderedChat) -> list[tuple[int, int]]:
    student, teacher = (side.turn_ends for side in chat.sides)
    return [(end, teacher[number]) for number, end in student.items() if number in teacher]


def _found_cuts(cuts: PerDocument) -> PerDocument:
    """Leave out turns that can't be cut before their end."""
    found = cuts.values[:, 0] > 0
    return PerDocument(cuts.values[found], np.append(0, np.cumsum(found))[cuts.cu])


def _join(parts: Sequence[Sequence[tuple[int, ...]]], columns: int = 2) -> PerDocument:
    values = np.fromiter(chain.from_iterable(chain.from_iterable(parts)), np.int64)
    return PerDocument(values.reshape(-1, columns), _bounds(parts))


def _join_bytes(parts: Sequence[bytes]) -> PerDocument:
    return PerDocument(np.frombuffer(b"".join(parts), np.uint8), _bounds(parts))


def _bounds(parts: Sequence[Sized]) -> NDArray[np.int64]:
    return np.cumsum([0, *map(len, parts)], dtype=np.int64)
