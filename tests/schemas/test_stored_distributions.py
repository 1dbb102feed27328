"""Stored distributions: bits come back exactly, rounding is as stated, and damage is named."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load

from pipeline.scoring.entries import fill_entries, require_sound
from schemas.distribution_rule import DistributionRule
from schemas.errors import DamagedShardError
from schemas.sidecar import ShardLosses, decode_sidecar, encode_sidecar
from schemas.stored_distributions import TopTokens, position_starts, stored_values, to_stored
from tests.data.make_golden_scores import DISTRIBUTIONS, FOLDER, golden_scores

RULE = DistributionRule(4, 1.0, 1000, "uint8")


def slow_values(rule: DistributionRule, stored: np.ndarray) -> list[float]:
    if rule.log_probs == "float16":
        return [float(value) for value in stored]
    return [float(np.float32(-20 * (int(code) / 255) ** 2)) for code in stored]


def slow_read(data: bytes, rule: DistributionRule) -> list[list[tuple[int, float]]]:
    """Every position's entries, by whole numbers and the safetensors library alone."""
    tensors = load(data)
    bits = int.from_bytes(tensors["entry_ids"].tobytes(), "little")
    width = max(1, len(f"{rule.vocab_size - 1:b}"))
    values, found, entry = slow_values(rule, tensors["entry_log_probs"]), [], 0
    for count in tensors["entry_counts"].tolist():
        own = range(entry, entry + count)
        found.append([((bits >> (e * width)) % (1 << width), values[e]) for e in own])
        entry += count
    return found


def read_all(losses: ShardLosses) -> list[list[tuple[int, float]]]:
    """Return every position's entries, the same from wherever a document is read."""
    entries = losses.entries
    assert entries is not None
    found = []
    for document, (start, stop) in enumerate(pairwise(entries.position_starts.tolist())):
        shape = stop - start, entries.rule.top_k
        ids, values = np.empty(shape, np.int32), np.empty(shape, np.float32)
        fill_entries(entries, document, 0, ids=ids, log_probs=values, at="x")
        assert ((ids < 0) == np.isneginf(values)).all()
        for place in (shape[0] // 3, shape[0] * 2 // 3):
            part = np.empty_like(ids[place:]), np.empty_like(values[place:])
            fill_entries(entries, document, place, ids=part[0], log_probs=part[1], at="x")
            assert (part[0] == ids[place:]).all()
            assert (part[1] == values[place:]).all()
        rows = zip(ids.tolist(), values.tolist(), strict=True)
        found += [[(i, v) for i, v in zip(*row, strict=True) if i >= 0] for row in rows]
    return found


def sidecar(starts: np.ndarray, top: TopTokens | None) -> ShardLosses:
    losses = np.ones(starts[-1], np.float16)
    return ShardLosses(losses, starts, "f" * 64, "0" * 64, top and top.pack(starts))


@st.composite
def shards(draw: Any) -> tuple[np.ndarray, DistributionRule, np.ndarray, np.ndarray]:
    """Documents of some tokens or none, and the likeliest tokens of their positions."""
    lengths = draw(st.lists(st.integers(0, 9), min_size=1, max_size=6))
    starts = np.append(0, np.cumsum(lengths)).astype(np.int64)
    rule = DistributionRule(
        draw(st.integers(1, 7)),
        draw(st.sampled_from([1e-6, 0.5, 0.9, 1.0])),
        draw(st.sampled_from([7, 8, 9, 255, 257, 49152, 151_936, 1 << 24, (1 << 24) + 1, 1 << 31])),
        draw(st.sampled_from(["uint8", "float16"])),
    )
    random = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    shape = int(position_starts(starts)[-1]), rule.top_k
    ids = np.stack(
        [
            random.choice(min(rule.vocab_size, 99), rule.top_k, replace=False)
            for _ in range(shape[0])
        ]
        or [np.empty(0, int)]
    ).reshape(shape)
    ids = np.where(random.random(shape) < 0.5, ids, rule.vocab_size - 1 - ids)
    logits = random.normal(size=(shape[0], rule.top_k + 1)) * draw(st.sampled_from([0, 1, 9, 40]))
    logits -= np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1, keepdims=True))
    logits -= logits.max(1, keepdims=True)
    log_probs = -np.sort(-logits, axis=1) - np.log(np.exp(logits).sum(1, keepdims=True))
    log_probs[random.random(shape[0]) < 0.1, 1:] = -np.inf
    return starts, rule, ids, log_probs[:, : rule.top_k].astype(np.float32)


@given(shards())
def test_entries_come_back_as_an_obvious_reader_reads_them(shard: Any) -> None:
    starts, rule, ids, log_probs = shard
    top = TopTokens.empty(starts, rule)
    top.put(np.arange(len(ids)), ids, log_probs)
    scores = sidecar(starts, top)
    data = encode_sidecar(scores)
    decoded = decode_sidecar(data, at="x")
    found = read_all(decoded)
    assert found == slow_read(data, rule)
    assert decoded.entries is not None
    assert scores.entries is not None
    num_entries = 0
    for own, own_ids, own_log_probs in zip(found, ids, log_probs, strict=True):
        count = 1
        while (
            count < rule.top_k
            and (
                rule.top_mass == 1
                or np.exp(own_log_probs[:count].astype(np.float64)).sum() < rule.top_mass
            )
            and own_log_probs[count] > -np.inf
        ):
            count += 1
        assert [token for token, _ in own] == own_ids[:count].tolist()
        num_entries += count
    assert encode_sidecar(decoded) == data
    about = decoded.entries.describe()
    assert (about.num_positions, about.num_entries) == (len(found), num_entries)
    mass = sum(np.exp(value) for own in found for _, value in own)
    assert about.mass_sum == pytest.approx(mass)


@pytest.mark.parametrize("likeliest", [0.0, -(2.0**-23)])
def test_a_certain_token_leaves_room_for_others(likeliest: float) -> None:
    """Whether one engine's log-probability rounds to 0 and another's not, both store the same."""
    for mass, expected in ((1.0, [5, 3, 9]), (0.9, [5, -1, -1])):
        top = TopTokens.empty(np.array([0, 1]), DistributionRule(3, mass, 10, "uint8"))
        own = np.array([[likeliest, -17.0, -18.0]], np.float32)
        top.put(np.array([0]), np.array([[5, 3, 9]]), own)
        assert top.ids[0].tolist() == expected


@given(st.floats(0, 70_000, width=32))
def test_log_probabilities_are_rounded_as_stated(nats: float) -> None:
    log_prob = np.array([-nats], np.float32)
    for kind, allowed in {
        "uint8": np.sqrt(20 * min(nats, 20)) / 255 + 20 / (4 * 255**2) + max(0, nats - 20),
        "float16": nats * 2**-11 + 2**-25 + max(0, nats - 65504),
    }.items():
        code = to_stored(log_prob, kind)
        values, least = stored_values(kind)
        place = code if kind == "uint8" else code.view(np.uint16)
        assert abs(float(values[place[0]]) + nats) <= allowed * 1.001 + 1e-6
        assert least[place[0]] <= np.exp(-nats) * 1.001


def example(rule: DistributionRule = RULE) -> ShardLosses:
    starts = np.array([0, 2, 2, 3])
    top = TopTokens.empty(starts, rule)
    log_probs = np.log(np.array([[0.5, 0.25, 0.125, 0.0625]] * 5, np.float32))
    top.put(np.arange(5), np.arange(20).reshape(5, 4), log_probs)
    return sidecar(starts, top)


def test_every_cut_and_every_contradiction_is_noticed() -> None:
    data = encode_sidecar(example())
    for length in range(len(data)):
        with pytest.raises(DamagedShardError, match=r"x isn't a complete sidecar"):
            decode_sidecar(data[:length], at="x")
    scores = example()
    entries = scores.entries
    assert entries is not None
    counts, starts = entries.counts.copy(), entries.starts.copy()
    counts[3] -= 1
    starts[1] -= 1
    for change, message in [
        ({"counts": counts}, r"document 2: entry_starts has 20, but entry_counts add up to 19"),
        ({"starts": starts}, r"document 0: entry_starts has 11, but entry_counts add up to 12"),
        ({"counts": entries.counts[1:]}, r"4 entry_counts and 4 entry_starts of 5 positions of 3"),
        ({"ids": entries.ids[1:]}, r"24 bytes of entry_ids, 10 bits each, of 20 entries"),
        ({"log_probs": entries.log_probs[1:]}, r"19 entry_log_probs and 25 bytes"),
        ({"rule": replace(RULE, top_k=3)}, r"document 0: a position has 4 entries, 3 at most"),
        ({"rule": replace(RULE, log_probs="float16")}, r"is not a vector of F16"),
        ({"rule": replace(RULE, top_k=256)}, r"Expected `int` <= 255"),
    ]:
        bad = replace(scores, entries=replace(entries, **change))
        with pytest.raises(DamagedShardError, match=message):
            decode_sidecar(encode_sidecar(bad), at="x")


@pytest.mark.parametrize(
    ("kind", "place", "value", "message"),
    [
        ("uint8", 13, 0, r"position 0 of document 2 has a log-probability that rises"),
        ("uint8", 12, 0, r"position 0 of document 2 has probabilities that add up to more than 1"),
        ("float16", 5, np.nan, r"position 1 of document 0 has a log-probability that .* a number"),
        ("float16", 5, np.inf, r"position 1 of document 0 has a log-probability that .* a number"),
        ("float16", 4, 0.5, r"position 1 of document 0 has a log-probability that .* a number"),
        ("float16", 7, -np.inf, r"position 1 of document 0 has a log-probability that .* a number"),
        ("ids", 19, 1001, r"position 1 of document 2 has a token id beyond the vocabulary of 1000"),
        ("ids", 19, 17, r"position 1 of document 2 has a token twice"),
    ],
)
def test_entries_that_no_teacher_gives_are_named(
    kind: str, place: int, value: float, message: str
) -> None:
    rule = replace(RULE, log_probs="float16" if kind == "float16" else "uint8")
    scores = example(rule)
    assert scores.entries is not None
    require_sound(scores.entries, at="x")
    top = TopTokens.empty(scores.starts, rule)
    top.ids[:] = np.arange(20).reshape(5, 4)
    top.log_probs[:] = scores.entries.log_probs.reshape(5, 4)
    (top.ids if kind == "ids" else top.log_probs).reshape(-1)[place] = value
    entries = decode_sidecar(encode_sidecar(sidecar(scores.starts, top)), at="x").entries
    assert entries is not None
    with pytest.raises(DamagedShardError, match=rf"^x: {message}"):
        require_sound(entries, at="x")


@pytest.mark.parametrize("rule", [rule for rule in DISTRIBUTIONS if rule])
def test_golden_entries_are_read_as_they_first_were(rule: DistributionRule) -> None:
    data = (FOLDER / golden_scores(rule)[1].sidecars[0].file).read_bytes()
    decoded = decode_sidecar(data, at="x")
    assert decoded.entries is not None
    require_sound(decoded.entries, at="x")
    found = read_all(decoded)
    assert found == slow_read(data, rule)
    assert [len(own) for own in found][:6] == [0, 1, rule.top_k, 2, rule.top_k, 0]
    assert found[1] == [(rule.vocab_size - 1, 0.0)]


def test_losses_without_distributions_are_written_as_before() -> None:
    data = encode_sidecar(sidecar(np.array([0, 3]), None))
    assert b"distributions" not in data
    assert decode_sidecar(data, at="x").entries is None


@pytest.mark.parametrize("vocab_size", [7, 255, 257, 49152, 151_936, (1 << 24) + 1, 1 << 31])
def test_draws_come_back_from_any_position(vocab_size: int) -> None:
    """Positions without entries, the first and one amid a document, take no room."""
    rule = DistributionRule(2, 1.0, vocab_size, "uint8", draws=3)
    starts = np.array([0, 3, 3, 5])
    top = TopTokens.empty(starts, rule)
    places = np.array([1, 3, 4, 5, 6])
    top.put(places, np.full((5, 2), [1, 0]), np.full((5, 2), np.log([0.5, 0.25])))
    drawn = np.random.default_rng(0).integers(2, vocab_size, (5, 3)).astype(np.int32)
    top.draws[places] = drawn
    decoded = decode_sidecar(encode_sidecar(sidecar(starts, top)), at="x")
    assert decoded.entries is not None
    require_sound(decoded.entries, at="x")
    assert len(decoded.entries.draw_ids) == -(-5 * 3 * rule.id_bits // 8)
    none = np.full(3, -1)
    expected = {0: np.array([none, drawn[0], none, drawn[1]]), 2: drawn[2:]}
    for document, draws in expected.items():
        for start in range(len(draws)):
            ids = np.empty((len(draws) - start, 6), np.int32)  # one more for the text's own
            log_probs = np.empty(ids.shape, np.float32)
            fill_entries(decoded.entries, document, start, ids=ids, log_probs=log_probs, at="x")
            is_there = draws[start:, :1] >= 0
            assert (ids == np.hstack([np.where(is_there, [1, 0, -1], -1), draws[start:]])).all()
            assert (
                (log_probs > -np.inf) == np.hstack([is_there, is_there, [[False] * 4] * len(ids)])
            ).all()
