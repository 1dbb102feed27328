"""Rows through a view are those of a fresh alignment."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pipeline.streaming import StreamConfig, StreamMismatchError, open_rows
from pipeline.streaming.rows import AlignedRows
from schemas.errors import (
    DamagedSampleError,
    DamagedShardError,
    DatasetError,
    ForeignTokenizerError,
)
from schemas.view_file import Side
from tests.support.views import STUDENT, write_dataset, write_pair

LENGTHS = {"seq_length": 48, "teacher_seq_length": 64}


def open_both(root: Path, **more: object) -> tuple[AlignedRows, AlignedRows]:
    viewed = StreamConfig(path=str(root / "data"), view="other", **LENGTHS, **more)  # type: ignore[arg-type]
    fresh = StreamConfig(path=str(root / "fresh"), **LENGTHS, **more)  # type: ignore[arg-type]
    return AlignedRows(viewed), AlignedRows(fresh)


def rows_by_plan(rows: AlignedRows) -> np.ndarray:
    """Return the rows of an epoch in the plan's order, which no fingerprint shuffles."""
    places = [rows.order.row_index(0, position) for position in range(len(rows))]
    read = rows.__getitems__(range(len(rows))).buffer.numpy()
    return read[np.argsort(places)]


@pytest.mark.parametrize("side", ["teacher", "student"])
@pytest.mark.parametrize("other", ["qwen_like", "nfc"])
def test_rows_are_those_of_a_fresh_alignment(tmp_path: Path, side: Side, other: str) -> None:
    write_pair(tmp_path, side, other)
    viewed, fresh = open_both(tmp_path)
    assert len(viewed) == len(fresh) > 20
    assert viewed.rules == fresh.rules
    np.testing.assert_array_equal(viewed.plan.segments, fresh.plan.segments)
    flags = viewed.plan.segments["flags"]
    assert len(set(flags.tolist())) > 2, "some documents are split"
    np.testing.assert_array_equal(rows_by_plan(viewed), rows_by_plan(fresh))


def test_a_run_on_a_view_is_a_run_of_its_own(tmp_path: Path) -> None:
    write_pair(tmp_path, "teacher", "qwen_like")
    viewed, fresh = open_both(tmp_path)
    plain = AlignedRows(StreamConfig(path=str(tmp_path / "data"), **LENGTHS))
    states = [rows.state(0) for rows in (viewed, fresh, plain)]
    assert len({state.fingerprint for state in states}) == 3
    assert viewed.restore(viewed.state(8)) == 8
    with pytest.raises(StreamMismatchError, match="seen through the same view"):
        viewed.restore(replace(plain.state(8), rules=viewed.rules.fingerprint))


def test_a_missing_view_lists_those_there_are(tmp_path: Path) -> None:
    write_pair(tmp_path, "teacher", "qwen_like")
    with pytest.raises(DatasetError, match=r'no view "x": it has "other" \(teacher: .*tokenizer'):
        AlignedRows(StreamConfig(path=str(tmp_path / "data"), view="x", **LENGTHS))
    with pytest.raises(DatasetError, match='no view "x": it has none'):
        AlignedRows(StreamConfig(path=str(tmp_path / "fresh"), view="x", **LENGTHS))


def test_damage_is_found_and_can_be_left_out(tmp_path: Path) -> None:
    write_pair(tmp_path, "teacher", "qwen_like")
    (path, *_) = sorted((tmp_path / "data").glob("*.bin"))
    data = bytearray(path.read_bytes())
    data[40] ^= 1
    path.write_bytes(bytes(data))
    viewed, _ = open_both(tmp_path)
    with pytest.raises(DamagedSampleError, match=r'document "doc-.*view-other\.bin have CRC-32'):
        rows_by_plan(viewed)
    viewed, _ = open_both(tmp_path, on_damage="quarantine")
    rows_by_plan(viewed)
    assert len(viewed.damage.samples) == 1
    path.write_bytes(bytes(data[:-1]))
    with pytest.raises(DamagedShardError, match=r"view-other\.bin has \d+ bytes, the manifest"):
        open_both(tmp_path)
    path.unlink()
    with pytest.raises(DamagedShardError, match=r"view-other\.bin is missing"):
        open_both(tmp_path)


def write_mixture(root: Path, *entries: str) -> Path:
    names = [f"d{number}" for number in range(len(entries))]
    sections = [f"[datasets.{name}]\n{entry}" for name, entry in zip(names, entries, strict=True)]
    weights = ", ".join(f"{name} = {1 / len(names)}" for name in names)
    path = root / "mixture.toml"
    path.write_text("\n".join([*sections, "[[stages]]", f"weights = {{ {weights} }}"]))
    return path


def test_a_mixture_names_the_view_of_each_dataset(tmp_path: Path) -> None:
    write_pair(tmp_path, "teacher", "qwen_like")
    write_dataset(tmp_path / "more", student=STUDENT, teacher="qwen_like", seed=1)
    viewed, more = 'path = "data"\nview = "other"', 'path = "more"'
    rows = open_rows(StreamConfig(path=str(write_mixture(tmp_path, viewed, more)), **LENGTHS))
    of_view, _ = open_both(tmp_path)
    own = rows.datasets[0]  # type: ignore[union-attr]
    for name in ("input_ids", "teacher_input_ids", "teacher_spans"):
        np.testing.assert_array_equal(own[0][name].numpy(), of_view[0][name].numpy())
    with_view = rows.state(0).fingerprint
    path = write_mixture(tmp_path, 'path = "fresh"', more)
    assert open_rows(StreamConfig(path=str(path), **LENGTHS)).state(0).fingerprint != with_view
    plain = write_mixture(tmp_path, 'path = "data"', more)
    with pytest.raises(ForeignTokenizerError, match='"d1" was made with teacher tokenizer'):
        open_rows(StreamConfig(path=str(plain), **LENGTHS))
    with pytest.raises(ValueError, match=r"view other is of one dataset, and .* a mixture"):
        StreamConfig(path=str(plain), view="other", **LENGTHS)


def test_a_dataset_and_its_view_are_one_dataset(tmp_path: Path) -> None:
    write_pair(tmp_path, "teacher", "qwen_like")
    twice = write_mixture(tmp_path, 'path = "data"', 'path = "data"\nview = "other"')
    with pytest.raises(DatasetError, match='"d0" and "d1" are one dataset'):
        open_rows(StreamConfig(path=str(twice), **LENGTHS))
