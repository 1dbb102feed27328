"""Noise of named kinds: texts that nobody should learn from, some of them easy to predict."""

import base64
import random

FROM_TEXT = ("shuffled", "ocr")
FROM_NOTHING = ("base64", "table", "boilerplate")
KINDS = (*FROM_TEXT, *FROM_NOTHING)

_MISREAD = "abcdefghijklmnopqrstuvwxyz ,.-1l0O"
_PAGE = """\
Home | About | Contact | Login | Register | Forum | FAQ | Terms of use | Privacy policy | Cookies
Share on Facebook Tweet Pin it Email Print
Copyright 2019 All rights reserved. Powered by phpBB
"""


def spoil(kind: str, text: str, order: random.Random) -> str:
    """Return a text with its words shuffled, or with one character in eight misread.

    Example:
        >>> sorted(spoil("shuffled", "a b c", random.Random(0)).split())
        ['a', 'b', 'c']
    """
    if kind == "shuffled":
        words = text.split()
        order.shuffle(words)
        return " ".join(words)
    return "".join(order.choice(_MISREAD) if order.random() < 0.12 else c for c in text)


def make_noise(kind: str, order: random.Random) -> str:
    """Return some hundred bytes of base64, of a table of numbers, or of a page's boilerplate.

    Example:
        >>> len(make_noise("base64", random.Random(0)))
        600
    """
    if kind == "base64":
        return base64.b64encode(order.randbytes(450)).decode()
    if kind == "table":
        return "\n".join(" ".join(f"{order.gauss(0, 1):.6f}" for _ in range(6)) for _ in range(10))
    day = f"{order.randint(1, 28)}.{order.randint(1, 12)}.20{order.randint(10, 23)}"
    time = f"{order.randrange(24)}:{order.randrange(60):02d}"
    counts = f"{order.randrange(900)} views - {order.randrange(90)} replies"
    return f"{_PAGE}Posted by user{order.randrange(10**6)} on {day} {time} - {counts}\n"
