"""Slow, obvious distributions for a student's labels, found by byte offsets alone."""

import math
from functools import lru_cache
from types import MappingProxyType, SimpleNamespace

import numpy as np

from pipeline.packing.kernels import ENDS, STARTS
from schemas.distribution_rule import EntryShape


class ByteTokenizer:
    """As much of a tokenizer as a `VocabularyMap` asks for: any entries, longest match first."""

    source = "bytes"
    named_tokens = MappingProxyType({})

    def __init__(self, entries, eos_token_id=None):
        self.entries, self.eos_token_id = list(entries), eos_token_id
        self.vocab_size = len(entries)

    def token_bytes(self, token_id):
        return self.entries[token_id]

    def base_vocabulary(self):
        return {}

    def keeps_text(self, text):
        return True

    def segment(self, text):
        ids = []
        while text:
            ids.append(longest_prefix(self.entries, text))
            text = text[len(self.entries[ids[-1]]) :]
        return ids

    def tokenize_batch(self, texts):
        return type("Batch", (), {"input_ids": np.empty(0, int), "cu_tokens": [0, 0, 0]})


class SeededLosses:
    """Stored losses whose entries at a position are drawn by document and position."""

    def __init__(self, vocab_size, top_k=5):
        self.rule = SimpleNamespace(rules=(1,), weights=(), shape=EntryShape(top_k + 1))
        self.apart = [self]
        self.vocab_size = vocab_size

    def entries(self, document, position):
        rng = np.random.default_rng([document, position])
        top_k = self.rule.shape.exact - 1
        ids = rng.choice(self.vocab_size, top_k, replace=False).astype(np.int32)
        probs = -np.sort(-rng.dirichlet(np.ones(top_k + 1)))[:top_k]
        ids[rng.integers(1, top_k + 1) :] = -1
        return ids, np.where(ids < 0, 0, probs)

    def read(self, document_index, start, stop):
        rng = np.random.default_rng([document_index])
        return rng.exponential(1.0, stop).astype(np.float16)[start:]

    def read_entries(self, document_index, start, *, ids, log_probs):
        for place in range(len(ids)):
            own, probs = self.entries(document_index, start + place)
            ids[place], log_probs[place] = -1, -np.inf
            ids[place, : len(own)] = own
            with np.errstate(divide="ignore"):
                log_probs[place, : len(own)] = np.log(probs)


def longest_prefix(entries, text):
    """Return the first of the longest entries that a text begins with, -1 where none does."""
    ids = _first_ids(tuple(entries))
    return next((ids[text[:n]] for n in range(len(text), 0, -1) if text[:n] in ids), -1)


@lru_cache(maxsize=4)
def _first_ids(entries):
    return {entry: number for number, entry in reversed(list(enumerate(entries)))}


def readable_entries(student, teacher):
    """Return two tokenizers' bytes by id, without those that the naive mapping must not find.

    A student's byte token where a piece spells the same, a piece where an added token does; a
    teacher's token that the student's tokens would rewrite, put between two letters.
    """
    own = [student.token_bytes(i) for i in range(student.vocab_size)]
    names = [student.token_name(i) for i in range(student.vocab_size)]
    for i, name in enumerate(names):
        if name.startswith("<0x") and own.count(own[i]) > 1:
            own[i] = b""
    written = set(student.named_tokens.values())
    spelled = {own[i] for i in written}
    own = [b"" if text in spelled and i not in written else text for i, text in enumerate(own)]
    other = [teacher.token_bytes(i) for i in range(teacher.vocab_size)]
    other = [text if student.keeps_text(b"a" + text + b"a") else b"" for text in other]
    return own, other


def naive_boundary(student, teacher, ends, ids, probs, *, before=""):
    """Return mass by student id at a boundary, from a teacher's exact entries.

    `ends` is the teacher's end ids and the student's; `before` names the side whose tokens begin
    with a space that isn't in the text ("unspaced": the student's, if the text doesn't either).
    """
    found = {}
    for token, mass in zip(ids.tolist(), probs.tolist(), strict=True):
        to = -1 if token < 0 else naive_target(student, teacher, ends, token, before=before)
        if to >= 0 and mass > 0:
            found[to] = found.get(to, 0.0) + mass
    whole = max(1.0, sum(found.values()))
    return {to: mass / whole for to, mass in found.items()}


def naive_target(student, teacher, ends, token, *, before=""):
    """Return the student token that a teacher's token gives its mass to, -1 for none."""
    text = teacher[token]
    if before == "teacher":
        text = text[1:] if text.startswith(b" ") else b""
    if (before == "student" and text) or (before == "unspaced" and text[:1] not in b" "):
        text = b" " + text
    return ends[1] if token in ends[0] else longest_prefix(student, text)


def with_own(ids, probs, own):
    """Return exact entries with the text's own next token added by its loss, if it has one.

    `own` is the token and its loss in nats; None: there is none.
    """
    ids, probs = np.asarray(ids), np.asarray(probs, np.float64)
    if own is None or math.isnan(own[1]) or own[0] in ids[ids >= 0]:
        return ids, probs
    return np.append(ids, own[0]), np.append(probs, math.exp(-own[1]))


def next_token(document, token, j, state, teacher_losses):
    """Return `own` of `with_own` for a student token of a document, None for its end.

    It is the teacher's token `j`, which comes after the place `state` of the row.
    """
    if token is None:
        return None
    return int(document.teacher.input_ids[j]), float(teacher_losses[state + 1])


def naive_inside(student, teacher, prefix, ids, probs):
    """Return mass by student id behind bytes that teacher tokens begin with; {}: too little."""
    found, extending, ending = {}, 0.0, 0.0
    for token, mass in zip(ids.tolist(), probs.tolist(), strict=True):
        if token < 0 or not teacher[token].startswith(prefix):
            continue
        if teacher[token] == prefix:
            ending += mass
            continue
        extending += mass
        to = longest_prefix(student, teacher[token][len(prefix) :])
        if to >= 0:
            found[to] = found.get(to, 0.0) + mass
    if extending < 0.05 or ending >= 0.1 * (extending + ending):
        return {}
    return {to: mass / extending for to, mass in found.items()}


def mapped_by_label(rows, batch, documents, stored, entries, ends):
    """Yield (student token, kind of label, what its row holds, and must hold) of all rows' labels.

    `stored` gives a document's exact entries at a position; `entries` are both sides' bytes by id.
    What a row holds is None where nothing says where a label is.
    """
    plan, order = rows.datasets[0].plan, rows.datasets[0].order
    for position in range(len(rows)):
        ids, probs = (batch[f"next_token_{name}"][position].numpy() for name in ("ids", "probs"))
        losses, left = batch["teacher_losses"][position].numpy(), ids[:, 0] >= 0
        places = label_places(plan, order.row_index(0, position), documents)
        for at, document, token, state, j, boundary in places:
            given = stored(document, len(document.teacher) if token is None else j)
            given = with_own(*given, next_token(document, token, j, state, losses))
            if boundary:
                expected = naive_boundary(*entries, ends, *given)
            else:
                spelled = entries[1][document.teacher.input_ids[j]]
                start = document.teacher.byte_offsets[j, 0]
                read = spelled[: document.student.byte_offsets[token, 0] - start]
                expected = naive_inside(*entries, read, *given)
            kept = ids[at] >= 0
            found = dict(zip(ids[at, kept].tolist(), probs[at, kept].tolist(), strict=True))
            kind = "end" if token is None else "boundary" if boundary else "inside"
            yield token, kind, found or None, expected
            left[at] = False
        assert not left.any(), "nothing where the offsets say nothing"


def label_places(plan, number, documents):
    """Yield what the offsets say of each label of a row of a plan.

    (place, document, student token, teacher state's place, teacher token, is at its boundary);
    the student token is None for the end of a document, the teacher token -1 where there is none.
    """
    place, teacher_place = 0, 0
    start, stop = plan.row_starts[number : number + 2]
    for name, s0, s1, t0, t1, flags in plan.segments[start:stop].tolist():
        document = documents[name]
        context = "first_token_id" if flags & STARTS else "continued_token_id"
        s_first = place + (getattr(plan.rules.student, context) is not None)
        t_first = teacher_place + (getattr(plan.rules.teacher, context) is not None)
        starts = document.teacher.byte_offsets[:, 0].tolist()
        ends = document.teacher.byte_offsets[:, 1].tolist()
        for token in range(s0, s1):
            byte = document.student.byte_offsets[token, 0]
            over = [j for j in range(t0, t1) if starts[j] <= byte < ends[j]]
            j = over[0] if over else -1  # of a forced cut it may be in another segment
            at = s_first + token - s0 - 1
            state = t_first + j - t0 - 1
            if at >= place and state >= teacher_place:
                yield at, document, token, state, j, j >= 0 and starts[j] == byte
        place = s_first + s1 - s0
        teacher_place = t_first + t1 - t0
        if flags & ENDS and plan.rules.student.end_token_id is not None:
            yield place - 1, document, None, teacher_place - 1, t1 - 1, True
            place += 1
        teacher_place += bool(flags & ENDS and plan.rules.teacher.end_token_id is not None)
