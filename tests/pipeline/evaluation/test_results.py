"""Intervals: what they should be, by slow and obvious ways."""

import math
import random
from pathlib import Path
from statistics import fmean, stdev

import pytest

from pipeline.evaluation.results import bits_per_byte, read_samples, share
from pipeline.evaluation.results_table import format_range, format_value


@pytest.mark.parametrize(("right", "num"), [(0, 20), (1, 20), (10, 20), (20, 20), (300, 1000)])
def test_a_shares_interval_holds_what_could_have_given_it(right: int, num: int) -> None:
    """Wilson's ends are the shares from which the observed one is 1.96 deviations away."""
    made = share([1.0] * right + [0.0] * (num - right))
    assert made.value == right / num
    for end in (made.low, made.high):
        if end not in (0.0, 1.0):
            deviation = math.sqrt(end * (1 - end) / num)
            assert abs(made.value - end) / deviation == pytest.approx(1.959964, rel=1e-6)
    assert made.low <= made.value <= made.high


def test_bits_per_byte_vary_as_resampled_items_do() -> None:
    chance = random.Random(0)
    pairs = []
    for _ in range(200):
        length = chance.randint(20, 400)
        pairs.append((-length * chance.uniform(0.3, 1.2), length))
    made = bits_per_byte(pairs)
    assert made.value == pytest.approx(
        sum(-nats for nats, _ in pairs) / math.log(2) / sum(length for _, length in pairs)
    )
    draws = sorted(bits_per_byte(chance.choices(pairs, k=len(pairs))).value for _ in range(2000))
    near = (made.high - made.low) / 20
    assert (made.low, made.high) == pytest.approx((draws[50], draws[-51]), abs=near)


@pytest.mark.parametrize(("num", "quantile"), [(2, 12.706), (3, 4.303), (5, 2.776), (61, 2.000)])
def test_few_items_have_wide_intervals(num: int, quantile: float) -> None:
    """Texts of one length: the interval of a mean, by a table of Student's t."""
    chance = random.Random(num)
    bits = [chance.uniform(0.5, 2.0) for _ in range(num)]
    made = bits_per_byte([(-10 * each * math.log(2), 10) for each in bits])
    half = quantile * stdev(bits) / math.sqrt(num)
    assert (made.low, made.high) == pytest.approx(
        (fmean(bits) - half, fmean(bits) + half), rel=1e-3
    )


def test_one_item_has_no_interval() -> None:
    made = bits_per_byte([(-20 * math.log(2), 10)])
    assert format_value(made, "bits_per_byte") == "2.000 ± –"
    assert format_range(made, "bits_per_byte", sign="+", to=" to ") == "+2.000 (–)"


def test_damaged_samples_are_named(tmp_path: Path) -> None:
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples" / "gsm8k.text.jsonl").write_text("garbled")
    with pytest.raises(ValueError, match=r"gsm8k\.text\.jsonl is damaged .*: evaluate that"):
        read_samples(tmp_path, "gsm8k", "text")
