"""Held-out text is not in the training text, not even in parts."""

import json
from pathlib import Path
from random import Random

import pytest
from hold_out import group_documents, hold_out


def write(path: Path, texts: list[str]) -> None:
    lines = [json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts]
    path.write_text("".join(lines), "utf-8")


def texts_of(path: Path) -> list[str]:
    # Not splitlines, which would end a line at U+2028.
    return [json.loads(line)["text"] for line in path.read_text("utf-8").split("\n") if line]


def runs(text: str) -> set[tuple[str, ...]]:
    words = text.lower().split()
    return {tuple(words[start : start + 13]) for start in range(len(words) - 12)}


def corpus(num_documents: int) -> list[str]:
    """Documents of made-up words, many with a paragraph that others have too."""
    random = Random(0)
    paragraphs = [" ".join(f"w{random.randrange(10**6)}" for _ in range(20)) for _ in range(12)]
    texts = []
    for number in range(num_documents):
        own = " ".join(f"w{random.randrange(10**6)}" for _ in range(random.randint(5, 40)))
        shared = random.choice(paragraphs) if number % 3 == 0 else ""
        texts.append(f"{own} \u2028 {shared}")
    return texts


def test_both_parts_share_no_run_of_13_words(tmp_path: Path) -> None:
    texts = corpus(400)
    write(tmp_path / "all.jsonl", texts)
    counts = hold_out(tmp_path / "all.jsonl", tmp_path, every=10)
    train, heldout = (texts_of(tmp_path / f"{name}.jsonl") for name in ("train", "heldout"))
    assert counts == {"train": len(train), "heldout": len(heldout)}
    assert sorted(train + heldout) == sorted(texts)
    assert 30 <= len(heldout) <= 41
    trained = set().union(*map(runs, train))
    assert not any(runs(text) & trained for text in heldout)
    # Every tenth by number, as it was, shares some.
    others = set().union(*(runs(text) for n, text in enumerate(texts, 1) if n % 10))
    assert any(runs(text) & others for text in texts[9::10])


def test_copies_stay_on_one_side() -> None:
    text = " ".join(f"word{n}" for n in range(30))
    near = text.upper().replace("WORD3 ", "WORD3, ")
    bridge = " ".join(f"word{n}" for n in range(17, 30)) + " and more"
    assert group_documents(["one", text, "two", near, bridge, "two"]) == [0, 1, 2, 1, 1, 2]


def test_nothing_to_hold_out_is_an_error(tmp_path: Path) -> None:
    write(tmp_path / "all.jsonl", ["the same words again and again " * 4] * 25)
    with pytest.raises(ValueError, match=r"--every 26 must lie in 2\.\.25"):
        hold_out(tmp_path / "all.jsonl", tmp_path, every=26)
    with pytest.raises(ValueError, match="its 25 documents share so many runs of 13 words"):
        hold_out(tmp_path / "all.jsonl", tmp_path, every=5)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"{text}", r"all\.jsonl:3 isn't a line of JSON in UTF-8"),
        (b'{"text": "caf\xe9"}', r"all\.jsonl:3 isn't a line of JSON in UTF-8"),
        (b'{"messages": []}', r'all\.jsonl:3 has no text "text"'),
        (b'{"text": 5}', r'all\.jsonl:3 has no text "text"'),
        (b"[1]", r'all\.jsonl:3 has no text "text"'),
    ],
)
def test_a_line_without_a_text_is_named(tmp_path: Path, line: bytes, words: str) -> None:
    (tmp_path / "all.jsonl").write_bytes(b'{"text": "a"}\n\n' + line + b"\n")
    with pytest.raises(ValueError, match=words):
        hold_out(tmp_path / "all.jsonl", tmp_path, every=2)


def test_the_input_is_not_replaced(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", corpus(20))
    before = (tmp_path / "train.jsonl").read_bytes()
    with pytest.raises(ValueError, match=r"would replace .*train\.jsonl: name another folder"):
        hold_out(tmp_path / "train.jsonl", tmp_path / "x/..", every=5)
    assert (tmp_path / "train.jsonl").read_bytes() == before


def test_a_blank_line_and_a_missing_line_end_cost_nothing(tmp_path: Path) -> None:
    texts = corpus(20)
    write(tmp_path / "all.jsonl", texts)
    bare = (tmp_path / "all.jsonl").read_bytes().replace(b"\n", b"\n\n").rstrip()
    (tmp_path / "all.jsonl").write_bytes(bare)
    counts = hold_out(tmp_path / "all.jsonl", tmp_path, every=5)
    assert sum(counts.values()) == len(texts)
    parts = (texts_of(tmp_path / f"{name}.jsonl") for name in counts)
    assert sorted(text for part in parts for text in part) == sorted(texts)
