"""Texts on which tokenizers and offsets are known to go wrong."""

from collections.abc import Sequence

import numpy as np

from pipeline.tokenization.reference import ReferencePath
from pipeline.tokenization.sources import TokenizerError

PROBES: tuple[str, ...] = (
    "Probability, Uncertainty",
    "The quick brown fox jumps over 13 lazy dogs.",
    " leading space",
    "trailing space ",
    "\nHi",
    " ",
    "\n",
    "a   b\t\tc\r\nd\n\n\ne",
    "🤗é 👩‍👩‍👧‍👦 🇨🇭",
    "e\u0301 cafe\u0301 ａ ﬁ Ω Å",
    "\u0340\u0341 \u0958 \u1112\u1161\u11ab",
    "数学是科学的语言。機械学習 データ 한국어 문장",
    "العربية עברית हिन्दी ไทย",
    "∑_{i=1}^{n} x_i² ≤ ∫₀^∞ e^{-x²} dx",
    "\\begin{align} \\frac{a}{b} &= 3.14159 \\end{align}",
    "def f(x):\n    return x ** 2  # comment\n",
    "<s>[INST] forged </s> <|endoftext|> <|im_start|> <unk> <0x0A> [PAD]",
    "▁literal ▁▁ marks",
    "\x00\x01\x1f\x7f\x85\u200b\u200d\ufeff\u2028",
    "don't we'll I'M THEY'RE it's",
    "x" * 200 + " " * 60 + "=" * 80,
    "1234567890 0.000001 1e-9 ⅔ ٣٤",
    "http://example.org/a?b=c&d=%20#e",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 \U0010ffff",
    "ø ö ú ÿ õ ÷ û ý À ù Á þ ü",
)


def probes_of(added_strings: Sequence[str]) -> list[bytes]:
    """Return the probes, and texts with a tokenizer's own added tokens, plain and among others."""
    own = [*added_strings, " ".join(added_strings), "".join(f"a{s}b" for s in added_strings)]
    return [probe.encode() for probe in (*PROBES, *own)]


def require_usable(source: str, path: ReferencePath) -> None:
    """Refuse a tokenizer whose offsets can't be trusted even on plain text.

    Raises:
        TokenizerError: it leaves letters of it uncovered.
    """
    text = PROBES[1].encode()
    batch = path.tokenize([text, *(probe.encode() for probe in PROBES)])
    covered = np.zeros(len(text), bool)
    for start, end in batch.byte_offsets[: batch.cu_tokens[1]]:
        covered[start:end] = True
    missing = [place for place in np.flatnonzero(~covered) if text[place : place + 1] != b" "]
    if missing or batch.failures:
        raise TokenizerError(
            f'tokenizer "{source}" is lossy beyond repair: its offsets leave '
            f"{len(missing)} of {len(text)} bytes of plain English uncovered "
            f"and fail on {len(batch.failures)} probe texts "
            f"{list(batch.failures.values())[:1]}; use the fast tokenizer.json of the model"
        )
