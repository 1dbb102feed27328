"""Whatever is added and removed in whatever order: what remains is as if it alone was aligned."""

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from beam_jobs.score.command import main as score
from pipeline.dataset.files import open_dataset
from pipeline.scoring.sidecars import DocumentTokens, ShardToScore
from pipeline.scoring.teaching import Teaching
from pipeline.streaming import AlignedRows, Reading, StreamConfig
from pipeline.validate.dataset_checks import validate_dataset
from tests.support.datasets import byte_level, remove_documents
from tests.support.growing import documents, grow
from tests.support.hf_folders import write_model

FIRST = [f"a{number}" for number in range(30)]
IDS = st.sets(st.sampled_from([f"d{number}" for number in range(12)]), min_size=1)


@pytest.mark.slow
@settings(max_examples=3, deadline=None, derandomize=True)
@given(first=IDS, steps=st.lists(st.tuples(st.booleans(), IDS), min_size=1, max_size=5))
def test_what_remains_is_as_if_it_alone_was_aligned(
    first: set[str], steps: list[tuple[bool, set[str]]]
) -> None:
    with TemporaryDirectory() as folder:
        root = Path(folder)
        grow(root / "grown", "0", sorted(first))
        taken, left, generation = set(first), set(first), 0
        for number, (is_append, ids) in enumerate(steps, 1):
            if is_append and ids <= taken:
                grow(root / "grown", str(number), sorted(ids))  # nothing new, nothing to do
                continue
            known = ids & taken
            if is_append:
                grow(root / "grown", str(number), sorted(ids))
                taken, left = taken | ids, left | (ids - taken)
            elif known:
                remove_documents(root / "grown" / "aligned", *sorted(known))
            generation += is_append or bool(known & left)
            left -= set() if is_append else known
        aligned = root / "grown/aligned"
        assert open_dataset(str(aligned)).manifest.generation == generation
        assert validate_dataset(str(aligned)).findings == ()
        if left:
            grow(root / "alone", "all", sorted(left))
        assert documents(aligned) == (documents(root / "alone/aligned") if left else {})


def test_only_what_is_new_is_scored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "aligned"
    grow(tmp_path, "a", FIRST)
    write_model(tmp_path / "teacher", byte_level(340), seed=1)
    command = [str(folder), "--teacher", str(tmp_path / "teacher"), "--seq-length", "64"]
    command += ["--dtype", "float32", "--allow-untrained-teacher"]
    assert score(command) == 0
    before = {path: path.read_bytes() for path in folder.glob("*.teacher-*.safetensors")}
    config = StreamConfig(
        Reading(str(folder)), seq_length=64, teaching=Teaching(stored_losses="teacher")
    )
    rows = AlignedRows(config)
    whole = rows.__getitems__(range(len(rows))).buffer
    remove_documents(tmp_path / "aligned", "a3")
    assert len(AlignedRows(config)) > 0, "the shards are those that were scored"
    manifest = grow(tmp_path, "b", [f"b{number}" for number in range(10)], repeat=9)
    report = validate_dataset(str(folder))
    assert report.findings == ()
    shards = f"{len(before)} of {len(manifest.shards)} shards: run vocag score again"
    assert any(shards in note for note in report.notes)
    with pytest.raises(ValueError, match=r"-g002-.* is missing: run vocag score again"):
        AlignedRows(config)
    scored: list[int] = []
    original = ShardToScore.read_tokens

    def read(shard: ShardToScore) -> DocumentTokens:
        scored.append(shard.number)
        return original(shard)

    monkeypatch.setattr(ShardToScore, "read_tokens", read)
    assert score(command) == 0
    assert sorted(scored) == list(range(len(before), len(manifest.shards)))
    assert {path: path.read_bytes() for path in before} == before
    assert validate_dataset(str(folder)).notes == ()
    assert len(AlignedRows(config)) > len(rows)
    again = AlignedRows(config, rows.state(0))
    assert torch.equal(again.__getitems__(range(len(again))).buffer, whole)
    assert score(command) == 0
    assert "nothing to do" in capsys.readouterr().out
