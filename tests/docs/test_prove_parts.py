"""The experiments of evidence/: numbers, cells, costs, published records, new students."""

import json
import math
import subprocess
import sys
from configparser import ConfigParser
from dataclasses import replace
from importlib.metadata import packages_distributions, requires
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from prove import cells, code, falling, random_weights, transfer, where
from prove.chain import Chain
from prove.numerals import Numbers, find_odd, write_on
from prove.texts import HEALING_PACKAGES, HELD_OUT_PACKAGES, read_questions

from pipeline.training.config import TrainConfig
from pipeline.transfer.acceptance import TokenizedModel
from pipeline.transfer.measure import context_of
from tests.support.datasets import byte_level
from tests.support.experiments import make_record, make_words, write_benchmarks
from tests.support.hf_folders import write_model
from vocag import Method, Reading, Teaching, Tokenizer, load_language_model, load_tokenizer

PAGES = Path(__file__).parents[2] / "evidence"


def _brought_by(extra: str) -> set[str]:
    """Return the distributions that an extra of this project installs, and what they need."""
    settings = ConfigParser()
    settings.read(PAGES.parent / "setup.cfg")
    own, extras = settings["options"]["install_requires"], settings["options.extras_require"]
    wanted = [("vocag", frozenset({extra}))]
    seen = set(wanted)
    while wanted:
        name, chosen = wanted.pop()
        if name == "vocag":
            lines = "\n".join([own, *(extras[each] for each in chosen)]).splitlines()
        else:
            lines = requires(name) or []
        for line in lines:
            if not line or line.startswith("#"):
                continue
            need = Requirement(line)
            if need.marker is None or any(
                need.marker.evaluate({"extra": e}) for e in ("", *chosen)
            ):
                found = str(canonicalize_name(need.name)), frozenset(need.extras)
                wanted += {found} - seen
                seen.add(found)
    return {name for name, _ in seen}


def _packing_tokenizer(folder: Path) -> Tokenizer:
    """Return a byte-level BPE that writes 2015 and four spaces as one token each."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        special_tokens=["<|end|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["in 2015\n     x"] * 20, trainer)
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    return load_tokenizer(str(folder))


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    found: list[int] = tokenizer.tokenize_batch([text.encode()]).input_ids.tolist()
    return found


def test_numbers_and_indents_are_odd_if_split_elsewhere(tmp_path: Path) -> None:
    tokenizer = _packing_tokenizer(tmp_path / "tokenizer")
    usual = _ids(tokenizer, " 2015\n     x 2015")
    assert find_odd(tokenizer, b"in", usual) == {"numbers": [1, 0], "indents": [1, 0]}
    digits = [token for digit in "2015" for token in _ids(tokenizer, digit)]
    space, line = _ids(tokenizer, " "), _ids(tokenizer, "\n")
    odd = [*space, *digits, *line, *5 * space, *_ids(tokenizer, "x")]
    assert find_odd(tokenizer, b"in", odd) == {"numbers": [1, 1], "indents": [1, 1]}
    begun_before = [*digits, *_ids(tokenizer, "x")]
    assert find_odd(tokenizer, b"in 20", begun_before) == {"numbers": [0, 0], "indents": [0, 0]}


def test_packed_numbers_are_summed_with_what_is_expected_there(tmp_path: Path) -> None:
    tokenizer = _packing_tokenizer(tmp_path / "tokenizer")
    numbers = Numbers(tokenizer, tokenizer.vocab_size)
    ids = torch.tensor(_ids(tokenizer, "in 2015 x 7"))
    (place,) = [n for n, i in enumerate(ids.tolist()) if b"2015" in tokenizer.token_bytes(i)]
    chances = torch.rand(len(ids), tokenizer.vocab_size, dtype=torch.float64)
    chances /= chances.sum(1, keepdim=True)
    spelt = [tokenizer.token_bytes(token).strip() for token in range(tokenizer.vocab_size)]
    lone = [tokenizer.token_bytes(token) == b" " for token in range(tokenizer.vocab_size)]
    sizes = [len(own) * own.isdigit() for own in spelt]
    groups = [[size > 1 for size in sizes], [size == 1 for size in sizes]]
    expected = [float(chances[place][torch.tensor(own)].sum()) for own in (*groups, lone)]
    nats = -math.log(float(chances[place, ids[place]]))
    assert numbers.sums(ids, chances.log()) == pytest.approx([1, 4, nats, *expected])


@pytest.mark.parametrize(
    ("domain", "elsewhere", "rule"),
    [
        (1.0, 0.0, "for cells"),
        (1.0, -1.0, "undecided"),
        (0.0, 1.0, "for cells"),
        (-1.0, 0.0, "against cells"),
    ],
)
def test_cells_win_if_they_are_ahead_somewhere_and_behind_nowhere(
    domain: float, elsewhere: float, rule: str
) -> None:
    def record(arm: str, seed: int, gains: tuple[float, float]) -> dict[str, Any]:
        made = make_record(arm, seed, [0.0] * 3, ())
        for names, gain in zip((transfer.DOMAIN, transfer.ELSEWHERE), gains, strict=True):
            for name in names:
                nats = [26 - gain + 0.01 * seed] * 3
                numbers = [[1, 4, 8 - gain, 0.5, 0.25, 0.125]] * 3
                sums = {"bytes": [10, 20, 30], "nats": nats, "numbers": numbers}
                made["measured"]["2"][name] = sums
        odd = {"numbers": [4, 3 if arm == "prefix" else 1], "indents": [0, 0]}
        made["measured"]["2"] |= {name: {"odd": [odd] * 5} for name in cells.PROMPTS}
        return made

    records = {
        name: {0: record(name, 0, own)}
        for name, own in (("original", (16.0, 16.0)), ("start", (-4.0, -4.0)))
    }
    gains = {"plain": (0.0, 0.0), "prefix": (0.0, 0.0), "cells": (domain, elsewhere)}
    for arm, own in gains.items():
        records[arm] = {seed: record(arm, seed, own) for seed in range(3)}
    said = cells.verdict(records)
    assert f"By the rules: **{rule}**" in said
    assert ("elsewhere it helps" in said) == (elsewhere > 0)
    packed = cells.packed_bits(records, "cells", "prefix")
    assert packed is not None
    gain = (2 * domain + 3 * elsewhere) / 5
    assert packed.mean == pytest.approx(-gain / 4 / math.log(2))
    assert set(cells.odd_shares(records, "prefix", "numbers").values()) == {0.75}
    row = next(r for r in cells.number_table(records).splitlines() if r.startswith("| `plain`"))
    assert "| 25.0 % ± 0.0 | – |" in row
    assert "| 0.500 | 0.250 | 0.125 |" in row
    del records["cells"][2]
    assert cells.verdict(records) == "Not finished: cells 2 of 3."


def test_every_command_says_what_it_took(tmp_path: Path) -> None:
    chain = Chain(cells.SCALES["tiny"], tmp_path, tmp_path / "prove", tmp_path / "records")
    chain.call("busy", ["-c", "import time\nwhile time.process_time() < 0.3: pass"])
    with pytest.raises(RuntimeError, match=r"ended with 3: see .*failed\.log"):
        chain.call("failed", ["-c", "raise SystemExit(3)"])
    for folder in (chain.own, tmp_path / "records"):
        (found,) = map(json.loads, (folder / "costs.jsonl").read_text().splitlines())
        assert found["command"] == "busy"
        assert 0.3 <= found["cpu_seconds"] < 5


def test_what_is_published_is_taken_over_and_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[tuple[float, int]] = []

    def train(self: Chain, arm: Any, rate: float, seed: int, units: int) -> None:
        trained.append((rate, seed))

    def development(self: Chain, arm: Any, rate: float, seed: int) -> list[float]:
        return [abs(math.log2(rate / 4e-4))] * self.experiment.units

    monkeypatch.setattr(Chain, "train", train)
    monkeypatch.setattr(Chain, "development", development)
    published = tmp_path / "records"
    published.mkdir()
    # A search that was stopped, and a run that was finished, on another machine.
    (published / "rate-plain.json").write_text('{"searched": {"0.0004": 0.0, "0.0008": 1.0}}')
    (published / "plain-1.json").write_text('{"arm": "plain"}')
    experiment = replace(cells.SCALES["tiny"], tokenizer=tmp_path)
    chain, plain = Chain(experiment, tmp_path, tmp_path / "prove", published), cells.ARMS[0]
    chain._search_rate(plain)
    assert trained == [(2e-4, 0)]
    expected = {"searched": {"0.0002": 1.0, "0.0004": 0.0, "0.0008": 1.0}, "best": 4e-4}
    for place in (published / "rate-plain.json", chain.kept.rate("plain")):
        assert json.loads(place.read_text()) == expected
    chain.run(plain, 1)
    assert trained == [(2e-4, 0)]
    assert json.loads(chain.kept.record("plain", 1).read_text()) == {"arm": "plain"}


def test_the_teachers_weight_falls_with_the_rate(tmp_path: Path) -> None:
    config = TrainConfig(
        data=Reading("data"),
        student="student",
        output=tmp_path,
        teaching=Teaching(stored_losses="teacher"),
        method=Method("distill", weight=0.5),
        num_steps=40,
        warmup_steps=10,
        learning_rate=1e-3,
        min_lr_fraction=0.1,
    )
    weights = [falling.weight_at(config, step) for step in range(40)]
    assert weights[:11] == [0.5] * 11
    assert weights[10:] == sorted(weights[10:], reverse=True)
    assert weights[25] == pytest.approx(0.25)  # half of a cosine
    assert 0 < weights[-1] < 0.002


@pytest.mark.slow
def test_a_new_model_has_the_sizes_and_the_tokens_that_it_should(tmp_path: Path) -> None:
    write_model(tmp_path / "like", byte_level(400))
    words = ["--like", tmp_path / "like", "--layers", 2, "--hidden", 192]
    program = [sys.executable, PAGES / "prove" / "new_model.py", *words, "--output"]
    subprocess.run(list(map(str, [*program, tmp_path / "made"])), check=True)
    model = load_language_model(str(tmp_path / "made"))
    config = model.config
    assert (config.num_hidden_layers, config.hidden_size, config.intermediate_size) == (2, 192, 512)
    assert (config.num_attention_heads, config.num_key_value_heads) == (3, 1)
    own, like = (load_tokenizer(str(tmp_path / name)) for name in ("made", "like"))
    assert own.sha256 == like.sha256
    assert model.get_input_embeddings().weight.shape == (like.vocab_size, 192)


def test_pieces_of_sources_are_whole_lines_each_once() -> None:
    pieces = list(random_weights._windows(["tqdm", "tqdm"]))
    assert len(pieces) > 5
    assert len({own.text for own in pieces}) == len(pieces)
    root = Path(find_spec("tqdm").origin).parent
    files = ["\n" + path.read_text("utf-8") for path in sorted(root.rglob("*.py"))]
    assert all(any(f"\n{own.text}" in file for file in files) for own in pieces)
    assert all(3000 <= len(own.text) < 3400 for own in pieces)


def test_the_extra_brings_every_package_that_is_text() -> None:
    named = {
        *(*random_weights.PACKAGES, *random_weights.HELD_OUT, *code.PACKAGES, *code.OTHERS),
        *(*HEALING_PACKAGES, *HELD_OUT_PACKAGES),
    }
    providers = packages_distributions()
    brought = _brought_by("prove")
    for package in named:
        assert brought & {canonicalize_name(name) for name in providers[package]}, package


def test_tokens_to_reach_are_counted_along_the_curve() -> None:
    curve = [3.0, 2.5, 2.4, 2.0]
    assert random_weights.tokens_to_reach(curve, 2.45, 10) == pytest.approx(25)
    assert random_weights.tokens_to_reach(curve, 2.0, 10) == 40
    assert random_weights.tokens_to_reach(curve, 1.9, 10) is None


def test_where_a_teacher_helps_is_what_the_records_say(tmp_path: Path) -> None:
    records = PAGES / "records"
    sources = [source for source in where.SOURCES if source.folder == "distributions"]
    found = list(where.places(records, sources))
    assert [own.held_out for own in found] == list(transfer.SETS)
    for own in found:
        bits: dict[str, list[float]] = {}
        for arm in ("start", "original", "plain", "drawn-plain"):
            for path in sorted((records / "distributions").glob(f"{arm}-[0-9].json")):
                record = json.loads(path.read_text("utf-8"))
                sums = record["measured"][str(record["units"])][own.held_out]
                bits.setdefault(arm, []).append(math.fsum(sums["nats"]) / math.fsum(sums["bytes"]))
        mean = {arm: math.fsum(values) / len(values) / math.log(2) for arm, values in bits.items()}
        assert own.gap == pytest.approx(mean["start"] - mean["original"])
        assert own.less.mean == pytest.approx(mean["drawn-plain"] - mean["plain"])
    assert not list(where.places(tmp_path, sources))
    where.draw(found, tmp_path / "where.svg")
    assert "Llama 2" in (tmp_path / "where.svg").read_text("utf-8")


def test_continuations_of_many_prompts_are_those_of_each(tmp_path: Path) -> None:
    write_model(tmp_path / "model", byte_level(400))
    model, tokenizer = (
        load(str(tmp_path / "model")) for load in (load_language_model, load_tokenizer)
    )
    # So sure of everything that sampling is choosing the likeliest.
    model.get_output_embeddings().weight.data *= 1e4
    context = context_of(tokenizer)
    prompts = [b"one", b"a longer prompt of many tokens", b"two words"] * 9
    together = write_on(model, tokenizer, prompts, context=context, num_tokens=6)
    found = [list(own) for own in together]
    side = TokenizedModel(model, tokenizer)
    for prompt, own in zip(prompts[:3], found, strict=False):
        ids = side.encode(prompt)
        assert ids is not None
        alone = side.write(ids, 6, sampled=False)
        end = tokenizer.eos_token_id
        assert own == (alone[: alone.index(end)] if end in alone else alone)
    assert found == found[:3] * 9


@pytest.mark.slow
def test_prompts_are_beginnings_of_texts_that_are_not_measured(tmp_path: Path) -> None:
    write_benchmarks(tmp_path / "data")
    asked = {"table_title": "", "table": "", "solution": ""}
    lines = [json.dumps(asked | {"question": " ".join(make_words(9, n))}) for n in range(20)]
    (tmp_path / "data" / "tabmwp.jsonl").write_text("\n".join(lines) + "\n", "utf-8")
    sizes = {"train": 30, "development": 4, "held": 5, "prompts": 8}
    texts = cells.build(tmp_path / "data", [], **sizes, packages=("tqdm",))
    assert [len(texts[name]) for name in ("train", "dev")] == [30, 4]
    assert all(len(texts[f"held_{name}"]) == 5 for name in transfer.SETS)
    measured = {(own.source, own.number) for name in transfer.SETS for own in texts[f"held_{name}"]}
    read = {(own.source, own.number) for name in ("train", "dev") for own in texts[name]}
    mathematics, sources = (texts[name] for name in cells.PROMPTS)
    assert [len(mathematics), len(sources)] == [8, 8]
    begun = {(own.source, own.number) for own in mathematics}
    assert begun.isdisjoint(measured | read)
    problems = {own.text for own in read_questions(tmp_path / "data", "gsm8k")}
    for own in mathematics:
        if own.source == "gsm8k":
            assert any(text.startswith(f"{own.text} ") for text in problems)
    windows = [own.text for own in code.source_windows(code.OTHERS)]
    for own in sources:
        assert any(text.startswith(f"{own.text}\n") for text in windows)
