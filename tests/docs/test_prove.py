"""The experiments of evidence/: parts against slow counts, a chain with a real teacher."""

import json
import math
import os
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from numpy.typing import NDArray
from packaged_model import find_gguf
from prove import cells, code, distributions, few, fresh, kinds, random_weights, tokens, transfer
from prove import filter as filtering
from prove.chain import Chain
from prove.compare import Difference, bits_per_byte, bootstrap, compare, paired
from prove.counted import count_only
from prove.filter import ranks
from prove.kept import search_rate
from prove.noise import KINDS
from prove.texts import NOISE_SHARE, with_noise, without_overlap

from pipeline.streaming.dataset_rows import DatasetRows
from tests.support.datasets import build_dataset, byte_level
from tests.support.experiments import make_document, make_record, make_words, write_benchmarks
from tests.support.hf_folders import write_model
from vocag import AlignedRows, Reading, Rows, StreamConfig

EXAMPLES = Path(__file__).parents[2] / "examples"
PAGES = EXAMPLES.parent / "evidence"
MODULES: tuple[Any, ...] = (
    *(few, filtering, tokens, transfer, distributions, cells, code),
    *(fresh, random_weights),
)


def test_texts_with_a_common_run_or_near_copies_are_taken_out() -> None:
    held = make_document(" ".join(make_words(40, 0)))
    run, shorter = make_words(40, 0)[3:16], make_words(40, 0)[3:15]
    question = "Tom buys 3 apples for 2 dollars each and pays with a note. How much is left of it?"
    cases = {
        "with a run of 13": make_document(" ".join([*make_words(30, 1), *run, *make_words(30, 2)])),
        "with a run of 12": make_document(
            " ".join([*make_words(30, 3), *shorter, *make_words(30, 4)])
        ),
        "other numbers": make_document(question.replace("3", "17").replace("2", "5")),
        "another question": make_document("Ann buys three pears. How much does she pay for them?"),
    }
    left = without_overlap(list(cases.values()), [held, make_document(question)])
    names = [name for name, text in cases.items() if text in left]
    assert names == ["with a run of 12", "another question"]


def test_noise_is_a_share_of_the_bytes_in_equal_kinds() -> None:
    clean = [make_document(" ".join(make_words(60, number)), number) for number in range(800)]
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


def test_an_interval_over_seeds_is_students() -> None:
    order = random.Random(3)
    for count in (2, 3, 5):
        values = [order.gauss(0.1, 1) for _ in range(count)]
        mean, half = paired(values)
        expected = scipy.stats.ttest_1samp(values, 0).confidence_interval(0.95)
        assert (mean - half, mean + half) == pytest.approx(tuple(expected))
    assert math.isnan(paired([1.0])[1])
    assert math.isnan(paired([])[0])


def test_documents_and_seeds_are_drawn_again() -> None:
    order = random.Random(1)
    sets = []
    for count in (5, 8):
        gains = [[order.gauss(1, 1) + seed for _ in range(count)] for seed in range(3)]
        sets.append((gains, [order.uniform(5, 9) for _ in range(count)]))
    drawn = []
    for _ in range(20_000):
        seeds, ratios = order.choices(range(3), k=3), []
        for gains, wholes in sets:
            picked = order.choices(range(len(wholes)), k=len(wholes))
            gained = sum(gains[seed][place] for seed in seeds for place in picked) / 3
            ratios.append(gained / sum(wholes[place] for place in picked))
        drawn.append(sum(ratios) / 2)
    drawn.sort()
    assert bootstrap(sets) == pytest.approx((drawn[500], drawn[-500]), abs=0.01)
    # One seed and one set: scipy's own paired bootstrap, by its percentiles.
    (own, *_), wholes = sets[0]

    def ratio(places: NDArray[np.intp], axis: int) -> NDArray[np.float64]:
        found = np.array(own)[places].sum(axis) / np.array(wholes)[places].sum(axis)
        return np.asarray(found, np.float64)

    places = (np.arange(len(wholes)),)
    other = scipy.stats.bootstrap(places, ratio, method="percentile", rng=np.random.default_rng(5))
    interval = other.confidence_interval
    assert bootstrap([([own], wholes)]) == pytest.approx((interval.low, interval.high), abs=0.01)
    nothing = np.zeros((3, 4))
    assert bootstrap([(nothing, [1.0] * 4)]) == (0.0, 0.0)


def test_arms_are_compared_over_the_seeds_that_both_have() -> None:
    own = {seed: make_record("a", seed, (3.0, 5.0 + seed, 9.0), ["x"]) for seed in range(3)}
    other = {seed: make_record("b", seed, (4.0, 9.0, 9.5), ["x"]) for seed in range(4)}
    found = compare({"a": own, "b": other}, "a", "b", "x")
    assert found.values.keys() == {0, 1, 2}
    for seed, value in found.values.items():
        bits = bits_per_byte(own[seed], "x") - bits_per_byte(other[seed], "x")
        assert value == pytest.approx(bits)
    wholes = [length * math.log(2) for length in (10.0, 20.0, 30.0)]
    gains = [[-1.0, -4.0 + seed, -0.5] for seed in range(3)]
    assert (found.low, found.high) == pytest.approx(bootstrap([(gains, wholes)]))
    assert math.isnan(compare({"a": own}, "a", "b", "x").low)


@pytest.mark.parametrize(
    ("values", "half", "high", "below"),
    [
        ([-3, -2, -1], 1.0, -0.1, True),
        ([-3, -2, 1], 1.0, -0.1, False),
        ([-3, -2, -1], 3.0, -0.1, False),
        ([-3, -2, -1], 1.0, 0.1, False),
        ([-2], math.nan, -0.1, False),
    ],
)
def test_a_win_needs_every_seed_and_both_intervals(
    values: list[float], half: float, high: float, below: bool
) -> None:
    by_seed = dict(enumerate(values))
    mean = sum(values) / len(values)
    assert Difference(by_seed, mean, half, -9.0, high).is_below_zero is below


@pytest.mark.parametrize(
    ("nats", "num_seeds", "rule"),
    [
        ({"distill": 50.0}, 3, "for distributions"),
        ({"distill-kept": 50.0}, 3, "for distributions"),
        ({"full-dropout": 50.0}, 3, "against"),
        ({"distill": 50.0, "full-decay-3": 49.0}, 3, "against"),
        ({"distill": 50.0}, 2, "Not finished"),
        ({}, 3, "against"),
    ],
)
def test_few_is_judged_by_the_rules_that_were_written_down(
    nats: dict[str, float], num_seeds: int, rule: str
) -> None:
    sets = (*few.DECIDING, *few.KNOWN)
    records = {
        arm: {
            seed: make_record(arm, seed, [nats.get(arm, 60.0) / 3 + 0.01 * seed] * 3, sets)
            for seed in range(num_seeds)
        }
        for arm in (*few.PLAIN, *few.DISTILL)
    }
    assert rule in few.verdict(records)
    del records["full-decay-3"]
    assert "Not finished" in few.verdict(records)


@pytest.mark.parametrize(
    ("gap", "spread", "clean_gap", "rule", "matters"),
    [
        (3.0, 0.1, 3.0, "knowledge", "does not matter"),
        (3.0, 3.0, 9.0, "calibration", "matters"),
        (-3.0, 0.1, 3.0, "calibration", "does not matter"),
    ],
)
def test_last_stages_are_judged_by_the_rules_that_were_added(
    gap: float, spread: float, clean_gap: float, rule: str, matters: str
) -> None:
    def record(arm: str, seed: int) -> dict[str, Any]:
        made = make_record(arm, seed, [20.0] * 3, tokens.SETS)
        own = gap + spread * (seed - 1) if arm == "teacher-0.4" else 0.0
        for stage in tokens.STAGES:
            clean = (clean_gap if stage.name == tokens.AFTER_CLEAN else 3.0) + 0.1 * seed
            own_nats = 20 + (clean if arm == "clean-teacher-0.4" else own)
            sums = {"bytes": [10.0, 20.0, 30.0], "nats": [own_nats] * 3}
            made["measured"][stage.name] = dict.fromkeys(tokens.SETS, sums)
        return made

    arms = ("full", "random-0.4", "teacher-0.4", "clean-full", "clean-random-0.4")
    records = {
        arm: {seed: record(arm, seed) for seed in range(3)} for arm in (*arms, "clean-teacher-0.4")
    }
    said = tokens.last_stages(records)
    assert f"By the rules: **{rule}**" in said
    assert f"A clean last stage {matters}:" in said
    del records["full"][0]
    fewer = tokens.last_stages(records)
    assert "Seeds that are there: full 2 of 3." in fewer
    assert "By the rules" not in fewer
    assert "`teacher-0.4` less `random-0.4`" in fewer


def test_seeds_with_different_documents_are_compared_by_their_own_bytes() -> None:
    order = np.random.default_rng(4)
    records: dict[str, dict[int, Any]] = {"own": {}, "other": {}}
    expected = {}
    for seed in range(3):
        num_bytes = order.integers(10, 900, 5).astype(float).tolist()
        nats = {arm: (order.random(5) * num_bytes).tolist() for arm in records}
        for arm, values in nats.items():
            made = make_record(arm, seed, [0.0], ("x",))
            made["measured"]["1"] = {"x": {"bytes": num_bytes, "nats": values}}
            records[arm][seed] = made
        less = math.fsum(nats["own"]) - math.fsum(nats["other"])
        expected[seed] = less / math.log(2) / math.fsum(num_bytes)
    found = compare(records, "own", "other", "x")
    assert found.values == pytest.approx(expected)
    assert found.low < found.mean < found.high
    twice = {arm: dict.fromkeys(range(3), own[0]) for arm, own in records.items()}
    assert set(compare(twice, "own", "other", "x").values.values()) == {found.values[0]}


def test_the_share_that_came_back_is_of_what_was_lost() -> None:
    nats = {"original": 10, "start": 30, "plain": 25, "other": 20}
    records = {arm: {0: make_record(arm, 0, [n] * 3, transfer.SETS)} for arm, n in nats.items()}
    expected = dict.fromkeys((*transfer.SETS, "elsewhere"), 0.25)
    assert transfer.shares(records, "plain")[0] == pytest.approx(expected)
    more = transfer.compare_shares(records, "other", "plain", transfer.ELSEWHERE)
    assert (more.mean, more.low, more.high) == pytest.approx((0.25, 0.25, 0.25))


@pytest.mark.parametrize(
    ("drawn", "rule"), [(20.0, "draws"), (24.0, "a bin"), (25.0, "a bin"), (None, "undecided")]
)
def test_draws_win_if_they_are_ahead_in_every_seed(drawn: float | None, rule: str) -> None:
    def record(arm: str, seed: int, nats: float) -> dict[str, Any]:
        return make_record(arm, seed, [nats] * 3, transfer.SETS)

    records = {"original": {0: record("o", 0, 10)}, "start": {0: record("s", 0, 30)}}
    nats = {"plain": (26, 26, 26), "binned": (27, 27, 27), "binned-plain": (24, 24, 24)}
    nats |= {"drawn": (28, 28, 28), "drawn-plain": (drawn,) * 3 if drawn else (20, 20, 25)}
    for arm, values in nats.items():
        records[arm] = {seed: record(arm, seed, value) for seed, value in enumerate(values)}
        for made in records[arm].values():
            made["development"] = [made["measured"]["2"]["math"]["nats"][0]] * 2
    said = distributions.verdict(records)
    assert "`drawn-plain` less `binned-plain` elsewhere: " in said
    assert f"By the rules: **{rule}**" in said
    assert "With a bin, `binned-plain` less plain elsewhere: +0.100" in said
    assert said.count("**for distributions**") == 2 - (drawn is None)


def test_windows_of_sources_are_whole_lines_of_different_files() -> None:
    windows = code.source_windows(["tqdm"])
    assert len(windows) > 5
    assert len({window.number for window in windows}) == len(windows)
    root = Path(find_spec("tqdm").origin).parent  # type: ignore[union-attr,arg-type]
    files = [path.read_text("utf-8") for path in sorted(root.rglob("*.py"))]
    for window in windows:
        assert f"\n{window.text}\n" in files[window.number]
        assert 1200 < len(window.text) <= 1500


@pytest.mark.parametrize(("ahead", "rule"), [(2.0, "for"), (-1.0, "against"), (None, "undecided")])
def test_a_method_wins_in_every_draw(ahead: float | None, rule: str, tmp_path: Path) -> None:
    for draw in range(3):
        folder = tmp_path / f"code-small-{draw}" / "records"
        folder.mkdir(parents=True)
        for arm in (*code.PLAIN, *code.METHODS):
            nats = [20.0] * 3
            if arm == "distill":
                nats = [20.0 - (ahead if ahead is not None else (3, 3, -1)[draw])] * 3
            record = make_record(arm, 0, nats, code.SETS)
            (folder / f"{arm}-0.json").write_text(json.dumps(record))
    said = code.judge(tmp_path / "code-small-1" / "records")
    line = next(line for line in said.splitlines() if line.startswith("- `distill`"))
    assert f": **{rule}**; others" in line
    (folder / "distill-0.json").unlink()
    assert "Not finished: distill 2 of 3." in code.judge(folder)


@pytest.mark.parametrize("best", [2.5e-4, 1e-3, 8e-3])
def test_a_rate_is_better_than_both_neighbours(best: float) -> None:
    found = search_rate(lambda rate: abs(math.log2(rate / best)), 1e-3)
    assert min(found, key=found.__getitem__) == best
    assert {2 * best, best / 2} <= found.keys()
    assert len(found) == len({*found, 5e-4, 2e-3})


def test_ranks_are_shares_of_bytes() -> None:
    sizes = {f"d{n}": n % 7 + 1 for n in range(50)}
    values = {name: (n * 31 % 17) / 3 for n, name in enumerate(sizes)}
    found = ranks(sizes, values)
    for name in sizes:
        key = (values[name], name)
        below = sum(size for other, size in sizes.items() if (values[other], other) <= key)
        assert found[name] == pytest.approx(below / sum(sizes.values()))


def test_what_thresholds_keep_is_counted_by_kind() -> None:
    order = np.random.default_rng(2)
    rows: list[dict[str, float | str]] = []
    for kind in ("clean", *kinds.KINDS):
        # Few values, so that many are equal.
        numbers = order.integers(1, 12, (40, 2)) / 4
        rows += [{"kind": kind, "bits_per_byte": b, "largest_window": w} for b, w in numbers]
    clean = [row for row in rows if row["kind"] == "clean"]

    def of_clean(name: str, share: float) -> float:
        values = sorted(float(row[name]) for row in clean)
        return values[math.ceil(share * len(values)) - 1]

    low, high, widest = (
        *(of_clean("bits_per_byte", share) for share in (0.05, 0.95)),
        of_clean("largest_window", 0.95),
    )
    shown = kinds.overview(rows).splitlines()[3:]
    for kind, line in zip(kinds.KINDS, shown, strict=True):
        own = [row for row in rows if row["kind"] == kind]
        below = [row for row in own if float(row["bits_per_byte"]) <= high]
        narrow = [row for row in below if float(row["largest_window"]) <= widest]
        both = [row for row in narrow if float(row["bits_per_byte"]) >= low]
        areas = [
            scipy.stats.mannwhitneyu([r[n] for r in own], [r[n] for r in clean]).statistic / 1600
            for n in ("bits_per_byte", "largest_window")
        ]
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert cells[0] == kind
        assert cells[2:4] == [f"{area:.3f}" for area in areas]
        assert cells[4:] == [f"{100 * len(kept) / 40:.0f} %" for kept in (below, narrow, both)]


def test_each_kind_of_noise_is_what_it_is_called(tmp_path: Path) -> None:
    write_benchmarks(tmp_path / "data")
    made = list(kinds.documents(tmp_path / "data"))
    assert made == list(kinds.documents(tmp_path / "data"))
    assert len({found["id"] for found in made}) == len(made)
    assert {found["kind"] for found in made} <= {"clean", *kinds.KINDS}
    text = r"It's \frac{1}{2} and 30 of them. Then there are 12 more of the same kind."
    texts = {kind: spoil(text, random.Random(1)) for kind, spoil in kinds.KINDS.items()}
    before, after = texts["last number wrong"].split(" are ")
    assert before in text
    assert re.fullmatch(r"(?!12 )\d+ more of the same kind\.", after)
    assert texts["LaTeX without backslashes"] == text.replace("\\", "")
    assert texts["a paragraph five times"].count(text) == 5
    assert "â€™" in texts["mojibake"]
    assert len(texts["keyword spam"].split()) == 90
    for kind, share in (("3 % of letters mistyped", 0.03), ("10 % of letters mistyped", 0.1)):
        typed = kinds.KINDS[kind]("a" * 20_000, random.Random(2))
        assert 1 - typed.count("a") / len(typed) == pytest.approx(share, abs=0.01)


@pytest.mark.parametrize(
    ("module", "scale"), [(module, scale) for module in MODULES for scale in module.SCALES]
)
def test_every_task_needs_what_an_earlier_one_makes(
    module: Any, scale: str, tmp_path: Path
) -> None:
    tokenizer = (
        tmp_path / "tokenizer"
        if module in (transfer, distributions, cells, random_weights)
        else None
    )
    experiment = replace(module.SCALES[scale], scale=scale, tokenizer=tokenizer, teacher="t.gguf")
    made: set[str] = set()
    tasks = {task["name"]: task for task in Chain(experiment, tmp_path, tmp_path).tasks()}
    if tokenizer:  # made of the text, which comes later
        needed = {tasks["text"]["targets"][0], *tasks["source"]["targets"]}
        assert set(tasks["student"]["file_dep"]) == needed
    written = {Path(path).stem for path in tasks["text"]["targets"]}
    assert set(experiment.aligned) < written, "a text that is new is written to an old folder, too"
    for task in tasks.values():
        assert made.isdisjoint(task["targets"]), "a reference and an arm share a record"
        made |= set(task["targets"])
        inside = {path for path in task["file_dep"] if path.startswith(str(tmp_path))}
        assert task["name"] == "student" or inside <= made | set(task["targets"])
    records = [path for path in made if "/records/" in path]
    assert len(records) >= len(experiment.arms)
    assert {arm.data for arm in experiment.arms} <= set(experiment.aligned)
    names = {arm.name for arm in experiment.arms}
    assert {arm.rate for arm in experiment.arms if isinstance(arm.rate, str)} <= names


@pytest.mark.slow
def test_dropout_is_in_training_alone(tmp_path: Path) -> None:
    write_model(tmp_path / "model", byte_level(400))
    program = """
import sys, torch
sys.path[:0] = sys.argv[2:]
from prove.dropout import drop_out
from vocag import load_language_model
model = load_language_model(sys.argv[1]); ids = torch.arange(1, 60)[None]
plain = model(ids).logits; layer = model.model.layers[0].mlp; seen = []
drop_out(0.1); layer.register_forward_hook(lambda *_: seen.append(_[-1]))
assert torch.equal(model.eval()(ids).logits, plain)
model.train()(ids); share = (seen[-1] == 0).float().mean()
assert 0.05 < share < 0.15, share
assert model.model.layers[0].self_attn.attention_dropout == 0.1
"""
    words = [sys.executable, "-c", program, tmp_path / "model", PAGES, EXAMPLES.parent]
    subprocess.run(list(map(str, words)), check=True)


@pytest.mark.slow
def test_other_documents_are_read_and_only_named_ones_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_dataset(tmp_path / "data")
    condition = "num_student_tokens % 2 = 0"

    def read(where: str = "") -> list[Rows]:
        reading = Reading(str(tmp_path / "data"), where=where)
        rows = AlignedRows(StreamConfig(reading, seq_length=1024, global_batch_size=1))
        return [rows[place] for place in range(rows.samples_per_epoch)]

    def learned(rows: Iterable[Rows]) -> Counter[tuple[int, int]]:
        pairs = [torch.stack((r["input_ids"], r["labels"]))[:, r["loss_mask"] == 1] for r in rows]
        return Counter(map(tuple, torch.cat(pairs, 1).T.tolist()))

    plain, chosen = read(), read(condition)
    monkeypatch.setattr(DatasetRows, "write_row", DatasetRows.write_row)
    count_only(condition)
    counted = read()
    assert learned(counted) == learned(chosen) < learned(plain)
    for own, other in zip(counted, plain, strict=True):
        assert all(torch.equal(own[name], other[name]) for name in own if name != "loss_mask")


@pytest.mark.parametrize(
    ("nats", "num_seeds", "rules"),
    [
        ({"oracle-tokens": 50.0}, 3, ["a selection can win", "against the selection"]),
        ({"oracle-tokens": 50.0, "teacher-0.85": 55.0}, 3, ["can win", "for the selection"]),
        ({"oracle-tokens": 60.0}, 3, ["no selection can", "against the selection"]),
        ({"oracle-tokens": 50.0}, 2, ["not finished"]),
    ],
)
def test_selections_are_judged_by_the_rules_that_were_added(
    nats: dict[str, float], num_seeds: int, rules: list[str]
) -> None:
    arms = ("all", *(arm.name for arm in filtering.SELECTIONS))
    records = {
        arm: {
            seed: make_record(
                arm, seed, [nats.get(arm, 60.0) / 3 + 0.01 * seed] * 3, filtering.SETS
            )
            for seed in range(num_seeds)
        }
        for arm in arms
    }
    said = filtering.selections(records)
    assert all(rule in line for rule, line in zip(rules, said.splitlines(), strict=False)), said


@pytest.mark.chain
@pytest.mark.slow
def test_a_whole_chain_makes_a_table_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    if find_gguf() is None:
        pytest.skip("make test installs the model")
    write_benchmarks(tmp_path / "data")
    words = [sys.executable, PAGES / "prove" / "run.py", "few", "--data", tmp_path / "data"]
    words += ["--output", tmp_path / "prove", "--scale", "tiny", "--jobs", 2]

    def run(*tasks: str) -> None:
        only = ["--tasks", *tasks] if tasks else []
        subprocess.run([*map(str, words), *only], check=True, env=os.environ | {"NO_COLOR": "1"})

    own = tmp_path / "prove" / "few-tiny"
    run("rate:full", "run:distill:0")
    before = (own / "records" / "distill-0.json").stat().st_mtime_ns
    run()
    assert (own / "records" / "distill-0.json").stat().st_mtime_ns == before
    names = {path.stem for path in (own / "records").glob("*.json")}
    assert names == {"start-0", "original-0", *(f"{arm.name}-0" for arm in few.ARMS)}
    for arm in few.ARMS:
        path = own / "records" / f"{arm.name}-0.json"
        record = json.loads(path.read_text("utf-8"))
        assert len(record["development"]) == record["units"] == len(record["measured"])
        assert set(record["measured"]["1"]) == {*few.DECIDING, *few.KNOWN}
    assert "Not finished" in (own / "table.md").read_text("utf-8")
    assert not list((own / "runs").rglob("*.safetensors"))
