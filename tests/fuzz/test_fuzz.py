"""The fuzzer's own parts: planted defects are found and made small."""

import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from pipeline.batches import TokenBatch
from tests.fuzz import bits, files
from tests.fuzz.commands import draw_step, predict
from tests.fuzz.oracle import Oracle
from tests.fuzz.reader import DamageError, read_dataset
from tests.fuzz.report import Fault, Report
from tests.fuzz.rounds import Target, hunt, replay, shrink_fault
from tests.fuzz.texts import make_text
from tests.fuzz.tokenizers import write_fresh
from tests.support.datasets import build_dataset, make_texts
from tests.support.tokenizer_zoo import definition, load, source, write_definition

TRIGGER = "\u0301("


class Planted:
    """A tokenizer with a defect where a text holds `TRIGGER`."""

    def __init__(self, what: str) -> None:
        self.what = what

    def __getattr__(self, name: str) -> Any:
        return getattr(load("qwen_like"), name)

    def tokenize_batch(self, texts: Sequence[bytes]) -> TokenBatch:
        batch = load("qwen_like").tokenize_batch(texts)
        hurt = [d for d, text in enumerate(texts) if TRIGGER.encode() in text]
        if hurt and self.what == "raises":
            raise BaseException("a panic")
        for d in hurt:
            start, stop = batch.cu_tokens[d : d + 2]
            if self.what == "ids":
                input_ids = batch.input_ids.copy()
                input_ids[stop - 1] += 1
                batch = replace(batch, input_ids=input_ids)
            if self.what == "paths":
                own = batch.byte_offsets[start:stop]
                own[:] = np.maximum(own - 1, 0)
        return batch


@pytest.mark.parametrize("what", ["ids", "raises", "paths"])
def test_a_planted_defect_is_found_and_shrunk(what: str) -> None:
    oracle = Oracle(Planted(what), load("qwen_like", fast=False))  # type: ignore[arg-type]
    texts = [make_text(random.Random(f"{n}")) for n in range(20)]
    texts[7] += "the sum" + TRIGGER + "x) of " + texts[3]
    fault = next(iter(oracle.find_faults(texts).values()))
    assert fault.kind == what
    assert shrink_fault(oracle, fault, texts, 7) == [TRIGGER]


def test_a_sound_tokenizer_passes_what_is_drawn() -> None:
    told: list[Any] = []
    oracle = Oracle(load("llama_like"), load("llama_like", fast=False))
    hunt(oracle, random.Random(1), 0.0, told.append)
    assert [kind for kind, *_ in told] == ["trying"]
    assert oracle.counts["texts"] == len(told[0][1]) > 0
    assert oracle.counts["ranges of tokens that spell the text"] > 0


@pytest.mark.parametrize(
    ("name", "added", "text"),
    [("strip_accents", "\u0301", "e\u0301"), ("xlm_roberta_like", "\n\n", "\n\n x")],
)
def test_what_an_added_token_left_blank_by_the_normaliser_covers_nobody_says(
    tmp_path: Path, name: str, added: str, text: str
) -> None:
    library = tokenizers.Tokenizer.from_str(json.dumps(definition(name)))
    library.add_tokens([tokenizers.AddedToken(added, normalized=added.isspace())])
    path = write_definition(json.loads(library.to_str()), tmp_path)
    oracle = Target("fresh", str(path), "honoured", fast=False).load()
    assert oracle.find_faults([text]) == {}
    assert oracle.counts["ranges proven by content"] == 1


def test_a_failure_is_a_file_and_a_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = Report(tmp_path)
    target = asdict(Target("qwen_like", str(source("qwen_like"))))
    body = {"target": target, "texts": ["a\u0301"]}
    report.add(Fault("ids", "1, not 2"), "qwen_like", body)
    (path,) = tmp_path.glob("*.json")
    assert f"python -m tests.fuzz --replay {path}" in capsys.readouterr().out
    assert report.failures == {("ids", "qwen_like"): 1}
    assert json.loads(path.read_bytes()) == body
    assert replay(body) == 0


def test_a_seed_says_everything(tmp_path: Path) -> None:
    assert make_text(random.Random("1")) == make_text(random.Random("1"))
    assert draw_step(random.Random("1"), 3) == draw_step(random.Random("1"), 3)
    for n in range(6):
        first, second = (write_fresh(str(n), tmp_path / f"{n}{place}") for place in "ab")
        assert first.read_bytes() == second.read_bytes()
    assert make_text(random.Random("1")) != make_text(random.Random("2"))


def test_the_reader_sees_what_is_there_and_any_damage(tmp_path: Path) -> None:
    build_dataset(tmp_path, metadata={"source": "string"}, values=lambda _: ("web",))
    seen = read_dataset(tmp_path)
    assert {name: content[0] for name, content in seen.documents.items()} == dict(make_texts(24))
    for path in (p for p in sorted(tmp_path.rglob("*")) if p.is_file()):
        whole = path.read_bytes()
        path.write_bytes(whole[:-40])
        with pytest.raises((DamageError, ValueError)):
            read_dataset(tmp_path)
        path.write_bytes(whole)


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "tsv", "parquet", "arrow", "avro"])
def test_a_planted_loss_in_files_is_found(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trial = files.Trial(kind, "", list(files.TEXTS), 0, ["none"], [0.5], ["x"], False)
    assert files.try_file(trial) is None
    whole = files.read_whole
    monkeypatch.setattr(files, "read_whole", lambda *place, **size: whole(*place, **size)[1:])
    fault = files.try_file(trial)
    assert fault
    assert fault.kind == "lost"
    monkeypatch.setattr(
        files, "read_whole", lambda path, task_bytes: whole(path, 1)[task_bytes % 2 :]
    )
    fault = files.try_file(trial)
    assert fault
    assert fault.kind == "parts"


def test_what_commands_must_leave() -> None:
    documents = [["a", "x", "web"], ["b", "", None], ["a", "y", None]]
    first = {"command": "align", "documents": documents}
    state = predict(first, None)
    assert (state.generation, state.documents.keys()) == (0, {"a"})
    assert state.letters == {"empty_text": 1, "duplicate_id": 1}
    assert state.documents["a"] == ("x", "web")
    gone = predict({"command": "remove", "ids": ["a", "z"]}, state)
    assert (gone.generation, gone.documents, gone.removed) == (1, {}, {"a"})
    assert predict(first, gone) == gone, "the id stays taken"


@pytest.mark.slow
def test_a_flipped_bit_of_a_plan_changes_no_row(tmp_path: Path) -> None:
    good = bits.write_sound(tmp_path / "sound")
    (plan,) = (tmp_path / "sound/plans").glob("*-v1*/segments.npy")
    name, counts = str(plan.relative_to(tmp_path / "sound")), Counter[str]()
    drawn = {"file": name, "flip": [8 * 128], "hashed": False}  # the lowest bit of a document
    assert bits.take(drawn, tmp_path, good, counts) is None
    assert counts == {"files with flipped bits, same rows": 1}
