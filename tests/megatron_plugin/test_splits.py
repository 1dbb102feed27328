"""Splits of a job's ranks: the rule against rows handed out one by one, the manual's table."""

import re
from argparse import Namespace
from dataclasses import replace
from math import lcm

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("megatron.core")

from megatron_plugin import checks
from megatron_plugin.arguments import ArgumentError, read_options
from megatron_plugin.bridge import Pairing
from megatron_plugin.models.shape import shape_of_config
from megatron_plugin.splits import Batch, balance, best_of_each, legal_splits
from tests.megatron_plugin.forked_ranks import ROOT
from tests.megatron_plugin.models import make_model, save_model
from tests.support.datasets import build_dataset

SIZES = st.integers(1, 6)


def can_share(batch, students, teachers):
    """Hand out the rows of a step, and see whether all of them go out evenly."""
    rows = list(range(batch.rows))
    if len(rows) % students:
        return False
    each = len(rows) // students
    of_student = [rows[s * each : (s + 1) * each] for s in range(students)]
    if any(len(own) % batch.micro_batch_size for own in of_student):
        return False
    try:
        pairing = Pairing(students, teachers)
    except ValueError:
        return False
    asked = [0] * teachers
    for student, own in enumerate(of_student):
        serving = pairing.teachers_of(student)
        if len(own) % len(serving) or len(own) // len(serving) % batch.teacher_micro_batch_size:
            return False
        for teacher in serving:
            asked[teacher] += len(own) // len(serving)
    return len(set(asked)) == 1 and sum(asked) == len(rows)


@settings(max_examples=200)
@given(st.integers(1, 96), SIZES, SIZES, SIZES, SIZES)
def test_rows_go_out_evenly_or_are_refused(rows, micro, teacher_micro, students, teachers):
    batch = Batch(rows, micro, teacher_micro)
    refusal = batch.refusal(students, teachers)
    assert (refusal is None) == can_share(batch, students, teachers), refusal
    nearest = batch.fitting_rows(students, teachers)
    assert bool(nearest) == (not students % teachers or not teachers % students)
    if nearest:
        others = range(max(1, rows - nearest[-1]), nearest[-1] + 1)
        fitting = [n for n in others if can_share(replace(batch, rows=n), students, teachers)]
        assert set(nearest) <= set(fitting)
        assert min(nearest, key=lambda n: abs(n - rows)) == min(
            fitting, key=lambda n: abs(n - rows)
        )


def test_copies_of_several_ranks():
    whole = Batch(64, 2, 2, ranks_of_student=2, ranks_of_teacher=4)
    assert whole.refusal(4, 8) == Batch(64, 2, 2).refusal(2, 2) is None
    assert all(
        split.student_ranks % 2 == split.teacher_ranks % 4 == 0
        for split in legal_splits(16, whole, 1.0)
    )


def test_shares_are_those_of_the_slower_side():
    for split in legal_splits(12, Batch(lcm(*range(1, 12)), 1), 2.0):
        # In student passes of one rank: the student's step, the teacher's, and both on all ranks.
        seconds = max(1 / split.student_ranks, 2.0 / split.teacher_ranks)
        assert split.share == pytest.approx((1 + 2.0) / 12 / seconds)
        assert 0 < split.share <= 1 + 1e-9
    assert legal_splits(12, Batch(24, 1), 2.0)[0].share == 1


def test_a_refused_split_names_those_that_work(tmp_path):
    manifest = build_dataset(tmp_path / "data")
    for name, layers in (("student", 2), ("teacher", 8)):
        save_model(tmp_path / name, "llama", num_hidden_layers=layers)
    options = read_options(
        ["--vocag-data", str(tmp_path / "data"), "--vocag-student", str(tmp_path / "student"),
         "--vocag-teacher", str(tmp_path / "teacher"), "--vocag-teacher-world-size", "20",
         "--vocag-method", "teacher"]
    )  # fmt: skip
    sizes = dict.fromkeys(("tensor_model", "pipeline_model", "context"), 1)
    args = Namespace(
        global_batch_size=1024,
        micro_batch_size=8,
        **{f"{kind}_parallel_size": size for kind, size in sizes.items()},
    )
    with pytest.raises(ArgumentError) as refused:
        checks.require_split(args, options, manifest, num_ranks=30)
    said = str(refused.value)
    assert "1024 rows, which 10 student replicas can't share in micro-batches of 8" in said
    assert "--global-batch-size 960 or 1040 fits this split" in said
    student, teacher = (
        shape_of_config(make_model("llama", num_hidden_layers=layers).config.to_dict())
        for layers in (2, 8)
    )
    tokens = manifest.totals["num_teacher_tokens"] / manifest.totals["num_student_tokens"]
    best = best_of_each(legal_splits(30, Batch(1024, 8), balance(student, teacher, tokens)), 4)
    assert said.endswith(", ".join(map(str, best)))
    args.global_batch_size = 960
    checks.require_split(args, options, manifest, num_ranks=30)


ROW = re.compile(r"^\| ([\d.]+) B → ([\d.]+) B \| ([\d.]+) \|(.*)\|$", re.MULTILINE)
COLUMNS = ((8, 1024), (8, 960), (32, 1024), (32, 960))


def test_the_manuals_table_is_computed():
    rows = ROW.findall((ROOT / "docs/guides/megatron.md").read_text())
    assert len(rows) >= 6
    for teacher, student, ratio, splits in rows:
        balanced = float(teacher) / (3 * float(student))
        assert float(ratio) == pytest.approx(balanced, abs=0.006)
        shown = [cell.strip() for cell in splits.split("|")]
        for cell, (num_ranks, global_batch) in zip(shown, COLUMNS, strict=True):
            best = legal_splits(num_ranks, Batch(global_batch, 8, 4), balanced)[0]
            assert cell == str(best), (teacher, student, num_ranks, global_batch)
