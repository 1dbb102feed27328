"""Disks that are too small for a view, or a dataset anew, are found out before they are full."""

from pathlib import Path
from typing import Any

import pytest

from beam_jobs import shortages
from beam_jobs.edit.carried import find_carried
from beam_jobs.edit.compact import CompactOptions, compact
from beam_jobs.edit.disk import estimate_disk
from beam_jobs.errors import OptionsError
from beam_jobs.shortages import require_room
from beam_jobs.views import command as view_command
from pipeline.dataset.files import open_dataset
from schemas.view_file import view_file_names
from tests.support.growing import grow, take_out
from tests.support.views import add, write_dataset


def test_room_is_compared_with_what_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shortages, "free_bytes", lambda folder: 1000)
    told: Any = {"message": "{room} is free", "remedy": "free some"}
    require_room(str(tmp_path), 1000, **told)
    require_room(str(tmp_path), 1500, **told, there=500)
    require_room("gs://bucket/data", 10**15, **told)
    assert caplog.text == ""
    for need, shares in ((2000, {"least": 0.5}), (1000, {"ample": 1.05})):
        caplog.clear()
        require_room(str(tmp_path / "not" / "there"), need, **told, **shares)
        assert "1.00 kB is free; it may run out of space" in caplog.text
    for need, least in ((1001, 1.0), (2001, 0.5)):
        with pytest.raises(OptionsError, match=r"^1.00 kB is free; free some$"):
            require_room(str(tmp_path), need, **told, least=least)


@pytest.mark.parametrize("side", ["teacher", "student"])
def test_a_view_is_estimated_by_some_of_its_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, side: str
) -> None:
    """A tenth of a shard's: what the rest takes is told to a fifth."""
    monkeypatch.setattr(view_command, "_PROBED_DOCUMENTS", 24)
    write_dataset(tmp_path, num_documents=300)
    told: list[int] = []
    require = view_command.require_disk

    def note(output: str, view: str, need: int, **more: object) -> None:
        told.append(need)
        require(output, view, need, **more)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(view_command, "require_disk", note)
        (view,) = add(tmp_path, "qwen_like", side=side).views  # type: ignore[arg-type]
    written = sum(file.num_bytes + file.index_num_bytes for file in view.files)
    assert told == [pytest.approx(written, rel=0.2)]


def test_a_view_for_which_the_disk_is_too_small_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = write_dataset(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with monkeypatch.context() as patch:
        patch.setattr(shortages, "free_bytes", lambda folder: 100)
        message = r'has 100 B of free disk, and view "other" will take about .* judged by \d+ docu'
        with pytest.raises(OptionsError, match=message):
            add(tmp_path, "qwen_like")
        assert sorted(tmp_path.rglob("*")) == before
        for name in view_file_names(manifest.shards[0].file, "other"):
            (tmp_path / name).write_bytes(bytes(1 << 20))  # of an earlier attempt
        assert add(tmp_path, "qwen_like").views


def test_a_compacted_dataset_is_estimated_and_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grow(tmp_path, "a", [f"a{number}" for number in range(120)])
    take_out(tmp_path, [f"a{number}" for number in range(0, 120, 3)])
    source, new = tmp_path / "aligned", tmp_path / "new"
    need = estimate_disk(find_carried(open_dataset(str(source))))
    wanted = CompactOptions(str(source), str(new), quiet=True)
    with monkeypatch.context() as patch:
        patch.setattr(shortages, "free_bytes", lambda folder: need // 2)
        with pytest.raises(OptionsError, match=r"--output .* of free disk, and the dataset will"):
            compact(wanted)
    assert not list(new.glob("*.tar"))
    made = compact(wanted)
    tars = sum(shard.num_bytes for shard in made.shards)
    indices = sum(shard.index_num_bytes for shard in made.shards)
    assert tars < need
    assert need - tars == pytest.approx(indices, rel=0.35)  # small ones have much that stays
