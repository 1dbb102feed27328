"""Texts on which tokenizers and offsets are known to fail."""

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
    """Return the probes, and a tokenizer's added tokens alone and within text."""
    own = [*added_strings, " ".join(added_strings), "".join(f"a{s}b" for s in added_strings)]
    own += ["".join(f"{s}{s} é{s}  9{s}\nb " for s in added_strings)]
    return [probe.encode() for probe in (*PROBES, *own)]


def require_usable(source: str, path: ReferencePath) -> None:
    """Raise TokenizerError if plain text fails, or has letters uncovered."""
    plain = PROBES[:2]
    batch = path.tokenize([text.encode() for text in plain])
    for d, text in enumerate(plain):
        covered = np.array([character.isspace() for character in text])
        for start, end in batch.byte_offsets[batch.cu_tokens[d] : batch.cu_tokens[d + 1]]:
            covered[start:end] = True
        missing = f"its offsets leave {np.sum(~covered)} of {len(text)} bytes uncovered"
        if d in batch.failures or not covered.all():
            raise TokenizerError(
                f'tokenizer "{source}" is lossy beyond repair: on the plain text "{text}" '
                f"{batch.failures.get(d, missing)}; use the fast tokenizer.json of the model"
            )
