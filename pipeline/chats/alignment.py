"""Chats, rendered twice and tokenized, as aligned documents.

A token's offsets are its *origin*: the document's bytes that it covers, and none if it covers only
text of the template. So spans, statistics and distributions need not know of templates.
"""

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from pipeline.alignment.align import align_tokens, find_failures
from pipeline.batches import (
    AlignedBatch,
    ChatParts,
    Ranges,
    RenderedSide,
    SourceDocument,
    TokenBatch,
    without_failures,
)
from pipeline.chats.kernels import (
    count_seams,
    find_origins,
    list_runs,
    mark_overlaps,
    mark_spans,
)
from pipeline.chats.messages import ChatError, decode_chat
from pipeline.chats.rendering import LearnRule, Range, RenderedChat, Rendering, render_chat
from pipeline.chats.turns import Speaker
from pipeline.tokenization import Tokenizer
from schemas.document import tiles_text


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

    Texts of the documents are what `Chat.encode` gives; those of the result are the chats' own
    bytes. If controls are refused, so is a chat with a text that holds a control string.
    """
    speakers = [side.speaker for side in sides]
    rendered: list[RenderedChat] = []
    kept: list[SourceDocument] = []
    refused: list[tuple[SourceDocument, str]] = []
    controls: list[int] = []
    names = tuple(name for speaker in speakers for name in speaker.controls)
    for document in documents:
        try:
            chat = render_chat(decode_chat(document.text), speakers, rule)
            found = count_controls(chat.text, names)
            if found and refuse_controls:
                raise ChatError(
                    f"its texts hold {found} strings of control tokens, which --special-strings "
                    "plain refuses"
                )
        except ChatError as error:
            refused.append((document, str(error)))
            continue
        rendered.append(chat)
        controls.append(found)
        kept.append(replace(document, text=chat.text))
    tokens = _tokenize(sides, rendered)
    failures = find_failures(*tokens)
    failed = [(kept[place], why) for place, why in sorted(failures.items())]
    if failures:
        rest = [place for place in range(len(kept)) if place not in failures]
        tokens = _without(tokens[0], failures), _without(tokens[1], failures)
        rendered, kept = [rendered[n] for n in rest], [kept[n] for n in rest]
        controls = [controls[n] for n in rest]
    sizes = [len(chat.text) for chat in rendered]
    student, teacher = (
        _in_documents(batch, [chat.sides[number] for chat in rendered], sizes)
        for number, batch in enumerate(tokens)
    )
    spans = align_tokens(student, teacher)
    parts = _parts(rendered, controls, tokens, (student, teacher), spans)
    return AlignedBatch(kept, student, teacher, spans, failed, parts, refused)


def count_controls(text: bytes, names: tuple[str, ...]) -> int:
    """Return how many strings of control tokens, which have these names, texts hold."""
    pattern = _controls_of(names)
    return 0 if pattern is None else len(pattern.findall(text))


@lru_cache(maxsize=4)
def _controls_of(names: tuple[str, ...]) -> re.Pattern[bytes] | None:
    longest_first = sorted({*names}, key=lambda name: (-len(name), name))
    return re.compile(b"|".join(re.escape(n.encode()) for n in longest_first)) if names else None


def _tokenize(
    sides: tuple[ChatSide, ChatSide], rendered: Sequence[RenderedChat]
) -> tuple[TokenBatch, TokenBatch]:
    """Return both sides' tokens of their own renderings, offsets in these."""
    texts = [[chat.sides[number].text for chat in rendered] for number in range(2)]
    with ThreadPoolExecutor(max_workers=1) as beside:  # the libraries let other threads run
        pending = beside.submit(sides[1].tokenizer.tokenize_batch, texts[1])
        student = sides[0].tokenizer.tokenize_batch(texts[0])
        return student, pending.result()


def _without(batch: TokenBatch, failures: dict[int, str]) -> TokenBatch:
    """Return the batch without some documents, which have no tokens and no place any more."""
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
    places = np.concatenate([np.empty(0, np.int64), *(each.places for each in renderings)])
    closes = np.concatenate([np.empty(0, np.int64), *(each.closes for each in renderings)])
    origins = find_origins(batch.byte_offsets, batch.cu_tokens, ranges, places, closes, cu_ranges)
    bounds = batch.cu_tokens.tolist()
    tiles = [
        tiles_text(origins[start:stop], size)
        for (start, stop), size in zip(pairwise(bounds), sizes, strict=True)
    ]
    return replace(batch, byte_offsets=origins, tiles=np.array(tiles, np.bool_))


def _join(parts: Sequence[NDArray[np.int64]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the ranges of all documents as one array, and which are whose."""
    joined = np.concatenate([np.empty((0, 2), np.int64), *parts])
    return joined, np.cumsum([0, *map(len, parts)], dtype=np.int64)


def _array(ranges: Sequence[Range]) -> NDArray[np.int64]:
    return np.array(ranges, np.int64).reshape(-1, 2)


def _parts(
    chats: Sequence[RenderedChat],
    controls: Sequence[int],
    rendered: tuple[TokenBatch, TokenBatch],
    origins: tuple[TokenBatch, TokenBatch],
    spans: Ranges,
) -> list[ChatParts]:
    """Return what each chat has besides its tokens: `rendered` and, in documents, `origins`."""
    student, teacher = origins
    documents = [_array(chat.learned) for chat in chats]
    said = _join([_array(chat.sides[0].said) for chat in chats])
    learned = mark_overlaps(rendered[0].byte_offsets, student.cu_tokens, *said)
    taught = mark_overlaps(teacher.byte_offsets, teacher.cu_tokens, *_join(documents))
    over = mark_overlaps(student.byte_offsets, student.cu_tokens, *_join(documents))
    mark_spans(taught, over, spans, student.cu_tokens, teacher.cu_tokens)
    runs = [
        list_runs(marks, batch.cu_tokens)
        for marks, batch in zip((learned, taught), origins, strict=True)
    ]
    texts = [
        np.frombuffer(b"".join(chat.sides[side].text for chat in chats), np.uint8)
        for side in (0, 1)
    ]
    bounds = [
        np.cumsum([0, *(len(chat.sides[side].text) for chat in chats)], dtype=np.int64)
        for side in (0, 1)
    ]
    seams = count_seams(
        (rendered[0].byte_offsets, rendered[1].byte_offsets),
        (student.byte_offsets, teacher.byte_offsets),
        (student.cu_tokens, teacher.cu_tokens),
        learned,
        spans,
        (texts[0], texts[1]),
        (bounds[0], bounds[1]),
    ).tolist()
    return [
        ChatParts(
            chat.messages,
            documents[d],
            _side(chat.sides[0], _own_runs(runs[0], d)),
            _side(chat.sides[1], _own_runs(runs[1], d)),
            _turn_cuts(chat, [_own(each, d) for each in (*rendered, *origins)]),
            controls[d],
            num_seams=seams[d][0],
            num_lone_seams=seams[d][1],
        )
        for d, chat in enumerate(chats)
    ]


def _own_runs(
    runs: tuple[NDArray[np.int64], NDArray[np.int64]], document: int
) -> NDArray[np.int64]:
    """Return a document's of the runs of all."""
    found, cu_runs = runs
    return found[slice(*cu_runs[document : document + 2].tolist())]


def _own(batch: TokenBatch, document: int) -> Ranges:
    """Return the offsets of a document's tokens."""
    return batch.byte_offsets[slice(*batch.cu_tokens[document : document + 2].tolist())]


def _side(rendering: Rendering, learned: NDArray[np.int64]) -> RenderedSide:
    end = int(rendering.ranges[-1, 1]) if len(rendering.ranges) else 0
    pieces = np.empty((len(rendering.own), 3), np.int64)
    pieces[:, 0] = [len(own) for own in rendering.own]
    pieces[:-1, 1:] = rendering.ranges
    pieces[-1, 1:] = end
    return RenderedSide(b"".join(rendering.own), pieces, learned)


def _turn_cuts(chat: RenderedChat, offsets: Sequence[Ranges]) -> NDArray[np.int64]:
    """Return the places between turns where both sides can be cut, int64 [C, 2].

    Offsets are those of student and teacher in their renderings, then in the document.
    """
    cuts = []
    for number, place in chat.sides[0].turn_ends.items():
        other = chat.sides[1].turn_ends.get(number)
        if other is None:
            continue
        i, j = (
            int(np.searchsorted(own[:, 1], end, "left")) + 1
            for own, end in zip(offsets[:2], (place, other), strict=True)
        )
        student, teacher = offsets[2:]
        if not (0 < i < len(student) and 0 < j < len(teacher)):
            continue
        if max(student[i - 1, 1], teacher[j - 1, 1]) <= min(student[i, 0], teacher[j, 0]):
            cuts.append((i, j))
    return np.array(cuts, np.int64).reshape(-1, 2)
