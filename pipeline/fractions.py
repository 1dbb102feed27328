"""How many candidates a fraction keeps, in training and in its predictions."""

from fractions import Fraction
from typing import Any, cast


def floor_of_fraction[Count](counts: Count, fraction: float) -> Count:
    """Return `floor(fraction * counts)` of an int, or a tensor or array of int64.

    The fraction, in 0..1, is read as the nearest quotient of integers up to 10**8: 0.29 of 100 is
    29, not binary floating point's 28.
    """
    # A denominator of at most 10**8 keeps the product of up to 9 * 10**10 tokens inside int64.
    exact = Fraction(fraction).limit_denominator(10**8)
    return cast(Count, cast(Any, counts) * exact.numerator // exact.denominator)
