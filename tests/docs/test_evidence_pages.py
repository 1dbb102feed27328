"""What the pages of evidence/ and the README claim is in the records, by the rules as code."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prove import cells as mapping
from prove import code, distributions, few, fresh, kinds, random_weights, tokens, transfer
from prove import filter as filtering
from prove.compare import Difference, bits_per_byte, compare, overview, paired, read_records

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "evidence"
RECORDS = PAGES / "records"
MODULES: tuple[Any, ...] = (few, filtering, tokens, transfer, distributions, fresh, random_weights)
"""All but code, whose draws have folders of their own."""


def _page(name: str) -> str:
    """Return an experiment's page, with its whole record if that is apart."""
    pages = [PAGES / f"{name}.md"] + [RECORDS / "first" / "README.md"] * (name == "tokens")
    return "\n".join(page.read_text("utf-8") for page in pages)


def test_the_pages_table_of_noise_is_of_the_stored_scores() -> None:
    rows = [json.loads(line) for line in (RECORDS / "kinds.jsonl").read_text("utf-8").splitlines()]
    page = (ROOT / "docs" / "guides" / "filter.md").read_text("utf-8")
    assert kinds.overview(rows) in page
    kept = {
        kind: np.mean([row["bits_per_byte"] < 1.5 for row in rows if row["kind"] == kind])
        for kind in kinds.KINDS
    }
    whole = ("keyword spam", "40 % of numbers wrong", "last number wrong")
    assert all(kept[kind] == 1 for kind in whole)
    said = ("lines of code between sentences", "mojibake", "HTML remnants")
    assert [f"{100 * kept[kind]:.0f} %" for kind in said] == ["95 %", "75 %", "55 %"]
    assert "95 % of the mixed code, 75 % of the mojibake and 55 % of the HTML" in page


def test_the_pages_intervals_are_those_of_the_kept_table() -> None:
    """Student's t over three seeds, from the standard errors that the first experiment kept."""
    arms = json.loads((RECORDS / "first" / "table.json").read_text("utf-8"))["arms"]
    checked = 0
    for row in _page("tokens").splitlines():
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        found = re.match(r"`(\w+)`(?:, k = ([\d.]+))?$", cells[0])
        shown = [re.search(r"\(([+-][\d.]+) ± ([\d.]+)\)", cell) for cell in cells[2:5]]
        if found is None or cells[1:2] != ["3"] or not all(shown):
            continue
        name = "-".join(filter(None, found.groups()))
        bits = [
            [own[name]["last"][of]["bits_per_byte"] for of in ("gsm8k", "math", "docstrings")]
            for own in arms.values()
            if name in own
        ]
        values = [[(b["difference"], 4.302653 * b["error"]) for b in own] for own in bits]
        pairs = [tuple(map(float, match.groups())) for match in shown if match]
        assert any(
            all(p == pytest.approx(v, abs=6e-4) for p, v in zip(pairs, own, strict=True))
            for own in values
        ), row
        checked += 1
    assert checked == 8


def test_the_short_pages_numbers_are_in_the_whole_record() -> None:
    page = (PAGES / "tokens.md").read_text("utf-8")
    record = (RECORDS / "first" / "README.md").read_text("utf-8")
    shown = re.findall(r"\d\.\d{3} \([^)]+\)|[+-]\d\.\d{3} ± [^|]+\]", page)
    assert len(shown) == 29
    assert [number for number in shown if number not in record] == []


@pytest.mark.parametrize(
    ("module", "runs"),
    [
        *((module, "") for module in MODULES),
        (few, "-cells"),
        (filtering, "-once"),
        (mapping, "-gpt_neox"),
        (mapping, "-llama2"),
    ],
)
def test_the_published_runs_are_what_the_page_says(module: Any, runs: str) -> None:
    name = module.__name__.rpartition(".")[2]
    page = _page(name)
    judge = module.SCALES["cells"].judge if runs == "-cells" else module.judge
    judged = judge(RECORDS / f"{name}{runs}")
    if "Not finished" in judged:
        assert "## Results\n\nNot yet" in page or "'s tokens: not run to the end" in page
        return
    rows = [line for line in judged.splitlines() if line.startswith("| ")]
    assert len(rows) > len(module.ARMS)
    assert [row for row in rows if row not in page] == []
    if module in (fresh, random_weights):  # a rule for each method
        told = [line for line in judged.splitlines() if line.startswith("- `")]
        assert [line for line in told if line not in page] == []
        rules = re.findall(r": \*\*([a-z]+)\*\*;", "\n".join(told))
        rule = " and ".join(dict.fromkeys(rules))
    else:
        (rule,) = re.findall(r"By the rules: \*\*([^*]+)\*\*", judged)
    assert f"by the rules: {rule}" in page.lower()


@pytest.mark.parametrize(
    ("scale", "draws", "rules"), [("small-numba", "small-*", 6), ("fresh-all", "fresh-*", 3)]
)
def test_the_page_of_code_is_what_its_draws_say(scale: str, draws: str, rules: int) -> None:
    page, folders = _page("code"), [*(RECORDS / "code").glob(draws)]
    judged = code.judge_draws(folders, **getattr(code.SCALES[scale].judge, "keywords", {}))
    (best,) = re.findall(r"The best plain arm is `[^`]+`", judged)
    told = [line for line in judged.splitlines() if line.startswith(("| ", "- `"))]
    assert [line for line in (best, *told) if line not in page] == []
    assert judged.count(": **against**;") == rules, "or the page's first sentence is wrong"
    records = code.read_draws(folders)
    start = np.mean([bits_per_byte(record, "package") for record in records["start"].values()])
    assert f"{start:.3f}" in page
    of_teacher = json.loads((RECORDS / "code" / "teacher.json").read_text("utf-8"))
    found = [own for name, own in of_teacher.items() if name.startswith(draws[:-1])]
    sizes, bits = (
        np.concatenate([own[key] for own in found]) for key in ("bytes", "bits_per_byte")
    )
    assert f"{np.average(bits, weights=sizes):.3f} bits per byte" in page


@pytest.mark.parametrize(
    ("own", "other", "at"),
    [
        ("drawn-plain", "distill-plain", "best"),
        ("drawn", "distill", "best"),
        ("full-kept", "full", "best"),
        ("drawn-plain", "full-dropout", "last"),
    ],
)
def test_what_the_page_of_code_compares_is_in_the_records(own: str, other: str, at: str) -> None:
    records = code.read_draws([*(RECORDS / "code").glob("small-*")])
    assert str(compare(records, own, other, "package", at)) in _page("code")


def test_the_page_says_what_the_rules_say_of_selections() -> None:
    page, records = _page("filter"), read_records(RECORDS / "filter-selections")
    said = page[page.index("## Results of selections") : page.index("## Results of one pass")]
    table = overview(records, filtering.SETS, "all", "last", "at the end")
    assert [row for row in table.splitlines() if row.startswith("| ") and row not in said] == []
    told = filtering.selections(records)
    rules = re.findall(r"\*\*([^*]+)\*\*", told)
    assert len(rules) == 2
    assert [rule for rule in rules if f"**{rule}**" not in said.lower()] == []
    numbers = re.findall(r"[+-]\d\.\d{3} ± [^\]]+\]", told)
    assert len(numbers) == 6
    assert [number for number in numbers if number not in said] == []


def test_what_the_page_says_of_one_pass_is_in_the_records() -> None:
    page = _page("filter")
    said = page[page.index("## Results of one pass") : page.index("## Results of the small scale")]
    records = read_records(RECORDS / "filter-once")
    for other in ("zlib", "oracle", "difference"):
        for name in filtering.DECIDING:
            less = compare(records, "teacher", other, name, "last")
            assert str(less) in said
    for name in filtering.DECIDING:
        own, most = (compare(records, arm, "all", name, "last") for arm in ("teacher", "oracle"))
        assert f"{own.mean / most.mean:.2f}" in said
    ahead, behind = (
        [records[arm][seed]["development"][unit] for seed in range(3)]
        for arm, unit in (("teacher", 2), ("all", 3))
    )
    assert all(few_steps < all_steps for few_steps, all_steps in zip(ahead, behind, strict=True))
    shown = [", ".join(f"{value:.3f}" for value in values) for values in (ahead, behind)]
    assert " against ".join(shown) in said


@pytest.mark.parametrize(
    ("runs", "own", "other", "sets", "at"),
    [
        ("few-cells", "cells", "full-decay-3", ("gsm8k", "math", "docstrings"), "best"),
        ("few-cells", "cells", "full-dropout", ("gsm8k", "math", "docstrings"), "last"),
        ("filter-once", "teacher", "all", filtering.DECIDING, "last"),
        ("filter", "teacher", "all", filtering.DECIDING, "last"),
        ("tokens", "teacher-0.4", "full", ("gsm8k",), "after-56"),
        ("fresh", "cells", "full", ("package",), "last"),
        ("fresh", "falling", "full", ("package",), "last"),
    ],
)
def test_which_method_has_the_records_intervals(
    runs: str, own: str, other: str, sets: tuple[str, ...], at: str
) -> None:
    pages = (ROOT / "docs" / "evidence.md", PAGES / "README.md")
    said = "".join(page.read_text("utf-8") for page in pages).replace("−", "-")
    records = read_records(RECORDS / runs)
    for name in sets:
        assert str(compare(records, own, other, name, at)) in said


@pytest.mark.parametrize(("other", "at"), [("full-decay-3", "best"), ("full-dropout", "last")])
def test_the_pages_intervals_of_cells_are_the_records(other: str, at: str) -> None:
    records = read_records(RECORDS / "few-cells")
    sets = (*few.DECIDING, *few.KNOWN)  # type: ignore[attr-defined]
    row = " | ".join(str(compare(records, "cells", other, name, at)) for name in sets)
    assert f"| {row} |" in _page("few")


def test_the_readme_has_both_intervals_of_what_it_claims() -> None:
    """Its brackets are the lower of both lower ends, the higher of both higher ones."""
    said = (ROOT / "README.md").read_text("utf-8")

    def hull(found: Difference, places: int, factor: int = 1) -> str:
        ends = (
            min(found.low, found.mean - found.half_width),
            max(found.high, found.mean + found.half_width),
        )
        low, high = sorted(abs(factor * end) for end in ends)
        return f"[{low:.{places}f}, {high:.{places}f}]"

    back = read_records(RECORDS / "cells-gpt_neox")
    gain = transfer.compare_shares(back, "cells", "plain", transfer.ELSEWHERE)
    assert f"{100 * gain.mean:.1f} points {hull(gain, 1, 100)}" in said
    code_lost = compare(read_records(RECORDS / "fresh"), "cells", "full", "package")
    assert f"**{code_lost.mean:.3f} {hull(code_lost, 3)} better**" in said
    for runs, own, other, name, at in (
        ("few-cells", "cells", "full-decay-3", "math", "best"),
        ("filter-once", "teacher", "all", "gsm8k", "last"),
    ):
        found = compare(read_records(RECORDS / runs), own, other, name, at)
        assert f"{-found.mean:.2f} {hull(found, 2)}" in said


def test_the_readme_says_what_the_teacher_loses() -> None:
    said = (ROOT / "README.md").read_text("utf-8")
    fallen = compare(read_records(RECORDS / "fresh"), "falling", "full", "package")
    assert fallen.low < 0 < fallen.high
    assert "level](evidence/fresh.md#results) if faded out" in said
    few_runs = read_records(RECORDS / "few-cells")
    assert few.best_arm(few_runs, few.CELLS_PLAIN) == "full-decay-3"  # type: ignore[attr-defined]
    math, *level = (
        compare(few_runs, "cells", "full-decay-3", name) for name in ("math", "gsm8k", "docstrings")
    )
    assert math.is_below_zero
    assert not any(found.is_below_zero or found.is_above_zero for found in level)
    assert "| GSM8K, docstrings level |" in said
    back = read_records(RECORDS / "cells-gpt_neox")
    shares = {arm: list(transfer.shares(back, arm).values()) for arm in ("plain", "cells")}

    def share(arm: str, sets: Sequence[str]) -> str:
        return f"{100 * np.mean([own[name] for own in shares[arm] for name in sets]):.0f} %"

    domain, elsewhere = transfer.DOMAIN, transfer.ELSEWHERE
    assert (
        f"| unseen domains {share('plain', elsewhere)}, its own {share('plain', domain)} |" in said
    )
    assert f"**{share('cells', elsewhere)}** (" in said
    assert f"more), {share('cells', domain)} |" in said
    zlib = compare(read_records(RECORDS / "filter-once"), "zlib", "all", "gsm8k", "last")
    assert f"by zlib, free: GSM8K {-zlib.mean:.2f} better" in said
    assert f"{zlib}".replace("-", "−") in (ROOT / "docs" / "evidence.md").read_text("utf-8")


def test_the_pages_acceptance_is_what_the_command_printed() -> None:
    page = _page("transfer")
    drafts = [("as it is cut", "–", "start")]
    for words, name in (("plain training", "plain"), ("`distill` and plain", "distill-plain")):
        drafts += [(words, str(seed), f"{name}-{seed}") for seed in range(3)]
    greedy = dict[tuple[str, str], float]()
    for words, seed, name in drafts:
        cells = [words, seed]
        for held_out in ("gsm8k", "docstrings"):
            printed = (RECORDS / "transfer" / "acceptance" / f"{name}-{held_out}.txt").read_text()
            cells += re.findall(r"\((\d+ of \d+) proposed", printed)
            accepted, proposed = map(int, cells[-2].split(" of "))
            greedy[name, held_out] = accepted / proposed
        assert f"| {' | '.join(cells)} |" in page
    for held_out in ("gsm8k", "docstrings"):
        gains = [
            100 * (greedy[f"distill-plain-{seed}", held_out] - greedy[f"plain-{seed}", held_out])
            for seed in range(3)
        ]
        mean, half = paired(gains)
        assert f"{mean:+.1f} ± {half:.1f}" in page
