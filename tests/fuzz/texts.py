"""Texts built to hurt tokenizers, drawn from a generator: a seed says which."""

import random
import unicodedata
from collections.abc import Sequence

from tests.support.text_strategies import HARD_STRINGS

# Assigned in Unicode 15.1, 16 and 17: libraries' tables differ in age.
NEW = (
    *((0x088F, 0x0890), (0x0897, 0x0898), (0x0C5C, 0x0C5D), (0x0CDC, 0x0CDD), (0x1ACF, 0x1AEC)),
    *((0x1C89, 0x1C8B), (0x20C1, 0x20C2), (0x2FFC, 0x3000), (0xA7CB, 0xA7DD), (0xA7F1, 0xA7F2)),
    *((0x105C0, 0x105F4), (0x10940, 0x1095A), (0x10D40, 0x10D90), (0x10EC2, 0x10EC8)),
    *((0x11380, 0x113E3), (0x116D0, 0x116E4), (0x11B60, 0x11B68), (0x11BC0, 0x11BFA)),
    *((0x11DB0, 0x11DEA), (0x13460, 0x143FB), (0x16100, 0x1613A), (0x16D40, 0x16D7A)),
    *((0x16EA0, 0x16ED4), (0x16FF4, 0x16FF7), (0x18CFF, 0x18D00), (0x18D80, 0x18DF3)),
    *((0x1CC00, 0x1CCFA), (0x1E5D0, 0x1E600), (0x1E6C0, 0x1E6FF), (0x1FA89, 0x1FA90)),
    *((0x2EBF0, 0x2EE5E), (0x323B0, 0x3347A)),
)
MARKS = "\u0301\u0323\u0345\u031b\u0651\u064e\u05b0\u05bc\u103a\u0f71\u0f72\u3099\u20dd\ufe0f\u0903"
BASES = "aeDoAßıİΣǅشאကחक한를ｶﬁ½①㌔ \t"
JAMO = "\u1100\u1112\u1161\u1175\u11a8\u11af\ud7b0\ud7cb\u3131\uffa1\uac00"
BIDI = "\u200e\u200f\u061c\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
SPACES = " \t\n\r\x0b\x0c\x1c\x1f\x85\xa0\u1680\u2003\u2028\u202f\u205f\u3000\u200b\ufeff"
# A character stands where a library's classes decide how ASCII around it is divided.
CONTEXTS = (
    *("{0}<u", "<b>{0}<u>old</u></b>", "{0}(a) b", "{0}'s", "{0}’ll be", "  {0}", "{0}34", "a{0}"),
    *(" {0}the", "{0}\n\n{0}", "1{0}2", "'{0}", ".{0}.", "{0}{0}", "{0} ", "\t{0}x"),
)
WORDS = ("the", " theorem", "Natalia", " 48", "sum", "don't", "I'M", "==", "def f(x):\n    ", "://")
MARKUP = ("<", ">", "|", "｜", "▁", "Ġ", "##", "<0x", "0A>", "[", "]", "</s>", "<s>")


def make_text(choose: random.Random, strings: Sequence[str] = ()) -> str:
    """Return pieces that tokenizers are known to get wrong, and strings of the one at hand."""
    pieces = [_piece(choose, strings) for _ in range(choose.randint(1, 10))]
    return "".join(pieces).encode("utf-8", "ignore").decode()  # no lone surrogates


def _piece(choose: random.Random, strings: Sequence[str]) -> str:
    new = chr(choose.randrange(*choose.choice(NEW)))
    string = choose.choice(strings or WORDS)
    form = choose.choice(["NFD", "NFKD", "NFKC"])
    drawn = (
        choose.choice(CONTEXTS).format(choose.choice([new, chr(choose.randrange(1, 0x33480))])),
        choose.choice(BASES) + "".join(choose.choices(MARKS, k=choose.randint(1, 4))),
        "".join(choose.choices(choose.choice((JAMO, BIDI + SPACES)), k=choose.randint(1, 5))),
        choose.choice([*SPACES, *"ax1=.'é数", new, string]) * int(2 ** choose.uniform(1, 8)),
        string,
        choose.choice([" ", "  ", "\n"]) + string + " " * choose.randrange(4),
        choose.choice([string.upper(), string.lower(), string[: choose.randint(0, len(string))]]),
        unicodedata.normalize(form, string),
        choose.choice(choose.choice((HARD_STRINGS, WORDS, MARKUP))),
    )
    return choose.choice(drawn)
