"""Where each row of a new vocabulary's embeddings comes from: the first of `RULES` that applies.

`vocag transfer --help` explains them. Tokens without known bytes (WordPiece) are never copied or
segmented.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pipeline.batches import AlignedBatch
from pipeline.tokenization import Tokenizer
from pipeline.tokenization.definition import PAD_NAMES


@dataclass(frozen=True, eq=False)
class TokenPairs:
    """How often tokens of two vocabularies cover the same text, for P pairs of ids.

    A new token's occurrence counts once, shared by its old tokens.
    """

    new_ids: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    old_ids: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    weights: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))

    def joined(self, other: "TokenPairs") -> "TokenPairs":
        """Merge the pairs of both."""
        return _each_once(
            np.concatenate((self.new_ids, other.new_ids)),
            np.concatenate((self.old_ids, other.old_ids)),
            np.concatenate((self.weights, other.weights)),
        )


def count_pairs(batches: Iterable[AlignedBatch]) -> TokenPairs:
    """Count the old tokens that cover each new one.

    Batches are `align_batch(documents, new_tokenizer, old_tokenizer)`.
    """
    pairs = TokenPairs()
    for batch in batches:
        spans = batch.teacher_spans.astype(np.int64)
        widths = spans[:, 1] - spans[:, 0]
        document = np.repeat(
            np.arange(batch.student.num_documents), np.diff(batch.student.cu_tokens)
        )
        first = batch.teacher.cu_tokens[document] + spans[:, 0]
        # Every token of every span: its span's first place, and its distance from it.
        behind = np.arange(widths.sum()) - np.repeat(np.cumsum(widths) - widths, widths)
        old = batch.teacher.input_ids[np.repeat(first, widths) + behind].astype(np.int64)
        new = np.repeat(batch.student.input_ids.astype(np.int64), widths)
        pairs = pairs.joined(_each_once(new, old, np.repeat(1 / np.maximum(widths, 1), widths)))
    return pairs


def _each_once(
    new_ids: NDArray[np.int64], old_ids: NDArray[np.int64], weights: NDArray[np.float64]
) -> TokenPairs:
    width = int(old_ids.max(initial=0)) + 1
    keys, place = np.unique(new_ids * width + old_ids, return_inverse=True)
    totals = np.bincount(place, weights, len(keys)).astype(np.float64)
    return TokenPairs(keys // width, keys % width, totals)


SPECIAL, COPIED, SEEN, SEGMENTED, MEAN = range(5)
RULES = ("special", "copied", "seen", "segmented", "mean")

# Names of control tokens whose role a tokenizer's file doesn't name.
_NAMES_OF_ROLES = {"unk": ("<unk>", "[UNK]", "<|unk|>"), "pad": PAD_NAMES}
# The role that replaces one that the old vocabulary lacks.
_INSTEAD = {"bos": "eos", "pad": "eos", "eos": "bos"}
# No tokenizer joins a line's end with the text after it, so that is segmented as amid a text.
_BEFORE = b"\n"


@dataclass(frozen=True, eq=False)
class Origins:
    """The old rows from which each new row is made.

    Attributes:
        rules: uint8 [V_new], places in `RULES`.
        new_ids: int64 [P]; tokens of rule "mean" have no pair.
        old_ids: int64 [P].
        shares: float64 [P], summing to 1 for each new token.
        num_old: old tokens with a row.
    """

    rules: NDArray[np.uint8]
    new_ids: NDArray[np.int64]
    old_ids: NDArray[np.int64]
    shares: NDArray[np.float64]
    num_old: int

    def counts(self, *, num_rows: int | None = None) -> dict[str, int]:
        """Count the tokens made by each rule, those with one of `num_rows` if given."""
        counts = np.bincount(self.rules[:num_rows], minlength=len(RULES))
        return dict(zip(RULES, counts.tolist(), strict=True))


def find_origins(
    new: Tokenizer, old: Tokenizer, pairs: TokenPairs, *, num_rows: int | None = None
) -> Origins:
    """Find the origin of each row of a new vocabulary; `pairs` cover the same text.

    The old model has `num_rows`, maybe fewer than its tokenizer names (Gemma 3 1B); None: enough.

    Raises:
        ValueError: other tokenizers' pairs.
    """
    num_old = min(old.vocab_size, num_rows or old.vocab_size)
    for side, ids, count in (
        ("new", pairs.new_ids, new.vocab_size),
        ("old", pairs.old_ids, num_old),
    ):
        if ids.max(initial=-1) >= count:
            raise ValueError(
                f"{side} token {ids.max()} exceeds the {side} vocabulary's {count} rows: the text "
                "must be aligned with the tokenizer that the model was trained with"
            )
    rules = np.full(new.vocab_size, MEAN, np.uint8)
    found: dict[int, Sequence[int]] = {}

    def take(rule: int, sources: Mapping[int, Sequence[int]]) -> None:
        known = {token: [i for i in ids if i < num_old] for token, ids in sources.items()}
        free = {token: ids for token, ids in known.items() if ids and rules[token] == MEAN}
        found.update(free)
        rules[list(free)] = rule

    take(SPECIAL, _same_names(new, old))
    take(SPECIAL, _same_roles(new, old))
    by_bytes = _tokens_by_bytes(old)
    take(COPIED, _same_bytes(new, by_bytes))
    seen = np.zeros(new.vocab_size, np.bool_)
    seen[pairs.new_ids] = True
    rules[seen & (rules == MEAN)] = SEEN
    rest = np.flatnonzero(rules == MEAN).tolist()
    take(SEGMENTED, _segmented(new, old, by_bytes, rest))
    of_seen = rules[pairs.new_ids] == SEEN
    totals = np.bincount(pairs.new_ids, pairs.weights, new.vocab_size)
    counts = np.array([len(ids) for ids in found.values()], np.int64)
    return Origins(
        rules,
        np.concatenate([np.repeat(np.array([*found], np.int64), counts), pairs.new_ids[of_seen]]),
        np.concatenate(
            [np.array([i for ids in found.values() for i in ids], np.int64), pairs.old_ids[of_seen]]
        ),
        np.concatenate(
            [np.repeat(1 / counts, counts), (pairs.weights / totals[pairs.new_ids])[of_seen]]
        ),
        num_old,
    )


def _same_names(new: Tokenizer, old: Tokenizer) -> dict[int, Sequence[int]]:
    named = old.named_tokens
    return {
        token: [named[name]]
        for name, token in new.named_tokens.items()
        if not new.token_bytes(token) and name in named
    }


def _same_roles(new: Tokenizer, old: Tokenizer) -> dict[int, Sequence[int]]:
    roles = _roles(old)
    for role, other in _INSTEAD.items():
        if role not in roles and other in roles:
            roles[role] = roles[other]
    return {token: [roles[role]] for role, token in _roles(new).items() if role in roles}


def _roles(tokenizer: Tokenizer) -> dict[str, int]:
    named = tokenizer.named_tokens
    found = {
        role: next((named[name] for name in names if name in named), None)
        for role, names in _NAMES_OF_ROLES.items()
    }
    found |= {"bos": tokenizer.bos_token_id, "eos": tokenizer.eos_token_id}
    return {role: token for role, token in found.items() if token is not None}


def _same_bytes(new: Tokenizer, ids: Mapping[bytes, int]) -> dict[int, Sequence[int]]:
    return {
        token: [ids[content]]
        for token in range(new.vocab_size)
        if (content := new.token_bytes(token)) in ids
    }


def _tokens_by_bytes(tokenizer: Tokenizer) -> dict[bytes, int]:
    """Map bytes to their token; of several (Llama 2's `<0x41>` and `A`) to the one in texts."""
    found: dict[bytes, int] = {}
    several = set()
    for token in range(tokenizer.vocab_size):
        content = tokenizer.token_bytes(token)
        if found.setdefault(content, token) != token:
            several.add(content)
    found.pop(b"", None)
    doubtful = sorted(several - {b""})
    for content, ids in zip(doubtful, _amid_text(tokenizer, doubtful), strict=True):
        if ids is not None and len(ids) == 1:
            found[content] = ids[0]
    return found


def _segmented(
    new: Tokenizer, old: Tokenizer, by_bytes: Mapping[bytes, int], tokens: list[int]
) -> dict[int, Sequence[int]]:
    """Return the old tokens of new tokens' bytes; those of no character are taken one by one."""
    contents = [new.token_bytes(token) for token in tokens]
    sources: dict[int, Sequence[int]] = {}
    for token, content, ids in zip(tokens, contents, _amid_text(old, contents), strict=True):
        each = [by_bytes.get(bytes([byte])) for byte in content]
        sources[token] = [found for found in each if found is not None] if ids is None else ids
    return sources


def _amid_text(tokenizer: Tokenizer, contents: Sequence[bytes]) -> list[list[int] | None]:
    """Return the tokens of some bytes within a text; None if these don't spell them."""
    batch = tokenizer.tokenize_batch([_BEFORE + content for content in contents])
    found: list[list[int] | None] = []
    for place, content in enumerate(contents):
        own = slice(*batch.cu_tokens[place : place + 2])
        # A dummy prefix has no bytes; the line's end is ours.
        start, end = batch.byte_offsets[own].T
        inside = (end > start) & (start >= len(_BEFORE))
        ids = batch.input_ids[own][inside].tolist()
        spelled = b"".join(map(tokenizer.token_bytes, ids))
        found.append(ids if spelled == content and place not in batch.failures else None)
    return found
