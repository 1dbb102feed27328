"""Two tokenizations of a text as blocks that begin and end together."""

import unicodedata
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pipeline.drawing.formatting import format_count, format_plural, format_share


@dataclass(frozen=True)
class PreviewToken:
    """One token, with its visible text.

    `byte_range` and `mapped`, the other side's tokens, are half-open; the latter is empty if
    unmapped. Only chats have tokens `of_template` and `learned` ones.
    """

    index: int
    token_id: int
    text: str
    byte_range: tuple[int, int]
    mapped: tuple[int, int]
    of_template: bool = False
    learned: bool = False


class DrawnTokens(Protocol):
    """One side's tokens."""

    @property
    def input_ids(self) -> NDArray[np.integer]:
        """Integers [T]."""

    @property
    def byte_offsets(self) -> NDArray[np.integer]:
        """Integers [T, 2], half-open."""


@dataclass(frozen=True, eq=False)
class ChatView:
    """Names of a chat's template tokens by both sides' ids; what is learned, bool [T_student]."""

    names: tuple[Callable[[int], str], Callable[[int], str]]
    learned: NDArray[np.bool_]


@dataclass(frozen=True)
class Block:
    """Student and teacher tokens that belong together; one side may be empty."""

    student: tuple[PreviewToken, ...]
    teacher: tuple[PreviewToken, ...]


@dataclass(frozen=True)
class PreviewDocument:
    """One document, or its beginning, with counts of the whole.

    `title` is its id or another name. Without text, tokens are shown by their ids.
    """

    title: str
    place: str
    num_student_tokens: int
    num_teacher_tokens: int
    num_unmapped: int
    num_text_bytes: int
    blocks: tuple[Block, ...]
    has_text: bool = True

    @property
    def num_shown(self) -> int:
        """Student tokens shown."""
        return sum(len(block.student) for block in self.blocks)

    @property
    def facts(self) -> str:
        """Its sizes, in words."""
        unmapped = format_share(self.num_unmapped, self.num_student_tokens)
        counts = (
            f"{format_count(self.num_student_tokens)} student tokens",
            f"{format_count(self.num_teacher_tokens)} teacher tokens",
            f"{format_count(self.num_unmapped)} unmapped ({unmapped})",
            format_plural(self.num_text_bytes, "byte"),
        )
        return ", ".join([*counts, *([self.place] if self.place else [])])


def lay_out(
    title: str,
    text: bytes | None,
    student: DrawnTokens,
    teacher: DrawnTokens,
    teacher_spans: NDArray[np.int64],
    *,
    num_text_bytes: int,
    place: str = "",
    max_tokens: int | None = None,
    chat: ChatView | None = None,
) -> PreviewDocument:
    """Lay out one aligned text, UTF-8 or None if unknown, for drawing.

    `teacher_spans` are int64 [T_student, 2]; `max_tokens` limits the student tokens shown.
    """
    num_student, num_teacher = len(student.input_ids), len(teacher.input_ids)
    spans = teacher_spans[:max_tokens]
    shown = num_teacher if len(spans) == num_student else int(spans[:, 1].max(initial=0))
    students = _preview_tokens(text, student, spans)
    teachers = _preview_tokens(text, teacher, _invert(spans, shown))
    if chat is not None:
        students = [
            replace(_of_chat(token, chat.names[0]), learned=bool(chat.learned[token.index]))
            for token in students
        ]
        teachers = [_of_chat(token, chat.names[1]) for token in teachers]
    return PreviewDocument(
        title=title,
        place=place,
        num_student_tokens=num_student,
        num_teacher_tokens=num_teacher,
        num_unmapped=int((teacher_spans[:, 0] == teacher_spans[:, 1]).sum()),
        num_text_bytes=num_text_bytes,
        blocks=tuple(
            Block(tuple(students[slice(*s)]), tuple(teachers[slice(*t)]))
            for s, t in find_blocks(spans, shown)
        ),
        has_text=text is not None,
    )


def find_blocks(
    teacher_spans: NDArray[np.int64], num_teacher_tokens: int
) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Divide two aligned token sequences into the smallest runs that belong together.

    `teacher_spans` are int64 [T_student, 2]. Returns half-open ranges of student and teacher
    tokens, in order. An unmapped token is its own block unless inside another.

    Example:
        >>> find_blocks(np.array([[0, 1], [0, 1], [1, 3]]), 3)
        [((0, 2), (0, 1)), ((2, 3), (1, 3))]
    """
    blocks: list[tuple[tuple[int, int], tuple[int, int]]] = []
    reach = 0
    for i, (start, end) in enumerate(teacher_spans.tolist()):
        if start == end:
            blocks.append(((i, i + 1), (reach, reach)))
            continue
        blocks += [((i, i), (t, t + 1)) for t in range(reach, start)]
        first = i
        while blocks and start < reach:
            (first, _), (begin, _) = blocks.pop()
            if begin <= start:
                start = begin
                break
        blocks.append(((first, i + 1), (start, max(reach, end))))
        reach = max(reach, end)
    num_student = len(teacher_spans)
    return blocks + [((num_student,) * 2, (t, t + 1)) for t in range(reach, num_teacher_tokens)]


def show_bytes(data: bytes) -> str:
    r"""Return bytes for people: white space visible, broken characters as `<0xF0>`.

    Example:
        >>> show_bytes(b" the\n\xf0\x9f")
        '·the⏎<0xF0><0x9F>'
    """
    text = data.decode("utf-8", "surrogateescape")
    # A mark that combines with the token before it needs something to sit on.
    base = "◌" if text and unicodedata.category(text[0]).startswith("M") else ""
    return base + "".join(_show_character(character) for character in text)


def _show_character(character: str) -> str:
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:
        return f"<0x{code - 0xDC00:02X}>"
    if character in _VISIBLE:
        return _VISIBLE[character]
    return character if character.isprintable() else f"<U+{code:04X}>"


def _preview_tokens(
    text: bytes | None, tokens: DrawnTokens, mapped: NDArray[np.int64]
) -> list[PreviewToken]:
    # Cut first: of a long document, lists of all tokens take 100 times the text's memory.
    shown = slice(len(mapped))
    columns = (
        tokens.input_ids[shown].tolist(),
        tokens.byte_offsets[shown].tolist(),
        mapped.tolist(),
    )
    return [
        PreviewToken(
            index, token_id, _describe(text, token_id, start, end), (start, end), (first, last)
        )
        for index, (token_id, (start, end), (first, last)) in enumerate(zip(*columns, strict=False))
    ]


def _of_chat(token: PreviewToken, name: Callable[[int], str]) -> PreviewToken:
    if token.byte_range[0] < token.byte_range[1]:
        return token
    return replace(token, text=name(token.token_id), of_template=True)


def _describe(text: bytes | None, token_id: int, start: int, end: int) -> str:
    if start == end:
        return "∅"
    return f"#{token_id}" if text is None else show_bytes(text[start:end])


def _invert(teacher_spans: NDArray[np.int64], num_teacher: int) -> NDArray[np.int64]:
    ranges = np.zeros((num_teacher, 2), np.int64)
    for i, (start, end) in enumerate(teacher_spans.tolist()):
        for t in range(start, end):
            ranges[t] = (ranges[t, 0] if ranges[t, 1] else i, i + 1)
    return ranges


_VISIBLE = {" ": "·", "\n": "⏎", "\t": "→", "\r": "␍"}
