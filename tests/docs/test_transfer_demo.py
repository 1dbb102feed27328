"""The demo of another tokenizer: its texts, its table, and its whole chain with a tiny model."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transfer_table
import transfer_texts
from transformers import AutoModelForCausalLM

from pipeline.tokenization import load_tokenizer
from tests.support.datasets import byte_level, make_texts
from tests.support.hf_folders import write_model

EXAMPLES = Path(transfer_table.__file__).parent
FOUND = {
    "original": {"code": 1.0, "docs": 1.0, "readmes": 2.0},
    "transplanted": {"code": 2.0, "docs": 3.0, "readmes": 4.0},
    "plain": {"code": 2.5, "docs": 1.5, "readmes": 3.0},
}


def test_the_table_sets_the_domain_that_was_trained_on_apart() -> None:
    lines = [line.split("  ") for line in transfer_table.table(FOUND, "docs")]
    rows = [[cell.strip() for cell in line if cell] for line in lines]
    assert rows[0][1:] == [
        *("docs (trained on)", "back", "code", "back", "readmes", "back"),
        "mean back, not trained on",
    ]
    assert rows[2] == ["transplanted", "3.000", "2.000", "4.000"]
    assert rows[3] == ["plain", "1.500", "75 %", "2.500", "-50 %", "3.000", "50 %", "0 %"]
    nothing_lost = transfer_table.shares({"a": 1.0}, {"a": 1.0}, {"a": 0.5})
    assert math.isnan(nothing_lost["a"])


def test_texts_are_the_same_each_time_and_none_comes_twice(tmp_path: Path) -> None:
    texts = [(str(n), f"{n % 30} " * n) for n in range(400)]
    for name in ("one", "two"):
        transfer_texts.write(tmp_path / name, iter(texts), limit=12)
    assert (tmp_path / "one").read_text() == (tmp_path / "two").read_text()
    found = [json.loads(line)["text"] for line in (tmp_path / "one").read_text().splitlines()]
    assert len(found) == len(set(found)) == 12
    assert all(300 <= len(text) <= 1500 for text in found)


def slow_bits(folder: Path, texts: list[str]) -> float:
    """Bits per byte, a token at a time."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), load_tokenizer(str(folder))
    bits = 0.0
    for text in texts:
        own = tokenizer.tokenize_batch([text.encode()]).input_ids.tolist()
        ids = [tokenizer.around_text.first_token_id, *own]
        with torch.inference_mode():
            for place in range(1, len(ids)):
                logits = model(input_ids=torch.tensor([ids[:place]])).logits[0, -1].double()
                bits -= float(logits.log_softmax(-1)[ids[place]]) / math.log(2)
    return bits / sum(len(text.encode()) for text in texts)


@pytest.mark.long
@pytest.mark.slow
def test_the_chain_from_the_texts_to_the_table(tmp_path: Path) -> None:
    """The demo's own script, where model and texts are there already."""
    write_model(tmp_path / "smollm2", byte_level(400))
    (tmp_path / "texts").mkdir()
    parts = {"train": make_texts(60), "docstrings": make_texts(2, seed=1), "code": [("c", "x = 1")]}
    for name, texts in parts.items():
        lines = [json.dumps({"id": i, "text": text}) + "\n" for i, text in texts]
        (tmp_path / "texts" / f"{name}.jsonl").write_text("".join(lines))
    settings = {"PYTHON": sys.executable, "STEPS": "6", "SCORE": "--allow-untrained-teacher"}
    done = subprocess.run(
        ["bash", str(EXAMPLES / "transfer_demo.sh"), str(tmp_path)],
        env=os.environ | settings,
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads((tmp_path / "texts" / "table.json").read_text())
    assert list(found) == ["original", "transplanted", "plain training", "distributions"]
    assert done.stdout.splitlines()[-5:] == transfer_table.table(found, "docstrings")
    for name, folder in (("original", "smollm2"), ("distributions", "runs/distill/model")):
        for domain, bits in found[name].items():
            slow = slow_bits(tmp_path / folder, [text for _, text in parts[domain]])
            assert bits == pytest.approx(slow, rel=1e-4)
    assert found["plain training"] != found["transplanted"]
