"""Texts on which tokenizers and offsets go wrong, for hypothesis."""

from hypothesis import strategies as st

HARD_STRINGS = (
    *("e\u0301", "\u0340\u0341", "a\u0323\u0301", "\u1112\u1161\u11ab", "\u0958"),
    *("Å", "Ω", "ﬁ", "½", "é", "ß", "数学", "데이터", "العربية", "हिन्दी", "𝔘", "\U0010ffff"),
    *("🤗", "👩\u200d👩\u200d👧\u200d👦", "🇨🇭"),
    *"\x00\x01\x04\x1f\x7f\x85\u200b\u200d\ufeff\u2028\ufffd\u3000\xa0",
    *("▁", "▁▁", "▁a", "Ġ", "##s", " ", "  ", "   ", "\t", "\n", "\r\n", "\n\n\n"),
    *("<s>", "</s>", "<unk>", "<0x0A>", "<|endoftext|>", "<|fim_prefix|>", "<tool_call>", "[UNK]"),
    *("Probability", " Uncertainty", "don't", "I'M", "x", "==", "1234567890", "\\frac{a}{b}", "."),
)


def texts(max_pieces: int = 12) -> st.SearchStrategy[str]:
    """Hard strings, words and arbitrary characters of Unicode (no surrogates), joined at random."""
    anything = st.text(st.characters(exclude_categories=["Cs"]), max_size=4)
    words = st.sampled_from(["the", " the", " theorem", "Natalia", " 48", "sum", " of", "a", " b"])
    pieces = st.one_of(st.sampled_from(HARD_STRINGS), words, anything)
    return st.lists(pieces, max_size=max_pieces).map("".join)
