"""A run reads what it was started on, whatever becomes of the dataset meanwhile."""

import json
import logging
from argparse import ArgumentTypeError
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

pytest.importorskip("apache_beam")

from pipeline.packing.reading import LATEST, Generation, parse_generation
from pipeline.streaming import AlignedRows, Reading, StreamConfig, StreamMismatchError, StreamState
from schemas.errors import DatasetError
from tests.support.datasets import build_dataset, make_texts, remove_documents
from tests.support.mixtures import write_mixture

BATCH = 2


def config(path: Path, generation: Generation = None, **changes: object) -> StreamConfig:
    values: dict[str, object] = {"seq_length": 64, "num_epochs": 3, "global_batch_size": BATCH}
    return StreamConfig(Reading(str(path), generation=generation), **(values | changes))  # type: ignore[arg-type]


def read(rows: AlignedRows, start: int = 0, stop: int | None = None) -> torch.Tensor:
    return rows.__getitems__(range(start, len(rows) if stop is None else stop)).buffer


def kept(rows: AlignedRows, consumed: int) -> StreamState:
    """The state of a checkpoint that was written to a file and read again."""
    return StreamState(**json.loads(json.dumps(asdict(rows.state(consumed)))))


def mix_two(folder: Path) -> Path:
    """Write datasets `a` and `b` and a mixture of three epochs of each."""
    for seed, name in enumerate("ab"):
        build_dataset(folder / name, make_texts(24, seed=seed))
    tables = {name: {"path": name, "max_epochs": 3} for name in "ab"}
    return write_mixture(folder / "mixture.toml", **tables)


def test_a_run_goes_on_with_its_rows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "data"
    build_dataset(folder)
    rows = AlignedRows(config(folder))
    whole, saved = read(rows), kept(rows, 3 * BATCH)
    remove_documents(folder, "doc-0-3", "doc-0-5")
    fresh = AlignedRows(config(folder))
    assert fresh.state(0).generations == (1,)
    assert saved.generations == [0]
    remove_documents(folder, "doc-0-7")
    with caplog.at_level(logging.WARNING):
        again = AlignedRows(config(folder), saved)
    assert "is at generation 2 now; the run continues with generation 0" in caplog.text
    consumed = again.restore(saved)
    assert consumed == 3 * BATCH
    assert torch.equal(read(again, consumed), whole[consumed:])
    middle = AlignedRows(config(folder), kept(fresh, BATCH))
    assert torch.equal(read(middle), read(fresh))
    assert not torch.equal(read(AlignedRows(config(folder)), 0, 8), read(middle, 0, 8))


def test_a_run_moves_on_where_it_is_told_to(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "data"
    build_dataset(folder, make_texts(60))
    rows = AlignedRows(config(folder))
    saved = kept(rows, 3 * BATCH)
    remove_documents(folder, *[f"doc-0-{number}" for number in range(20)])
    fresh = AlignedRows(config(folder))
    assert fresh.state(0).samples_per_epoch < saved.samples_per_epoch
    with pytest.raises(StreamMismatchError, match=r"generation 0 of .* generation 1 is open: pass"):
        fresh.restore(saved)
    moved = AlignedRows(config(folder, LATEST), saved)
    with caplog.at_level(logging.WARNING):
        assert moved.restore(saved) == 3 * BATCH
    assert "moves on to generation 1" in caplog.text
    assert torch.equal(read(moved), read(fresh))
    assert moved.state(0) == fresh.state(0)
    assert fresh.restore(kept(moved, 4 * BATCH)) == 4 * BATCH
    with pytest.raises(StreamMismatchError, match="seed"):
        AlignedRows(config(folder, LATEST, seed=1), saved).restore(saved)


def test_another_dataset_is_no_generation(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 1)):
        build_dataset(tmp_path / name, make_texts(24, seed=seed))
    saved = kept(AlignedRows(config(tmp_path / "a")), 0)
    for generation in (None, LATEST, 0):
        other = AlignedRows(config(tmp_path / "b", generation), saved)
        with pytest.raises(StreamMismatchError, match="made with fingerprint"):
            other.restore(saved)


def test_generations_by_number(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    build_dataset(folder)
    rows = AlignedRows(config(folder))
    whole = read(rows)
    remove_documents(folder, "doc-0-3")
    assert AlignedRows(config(folder)).rules == rows.rules, "the length of rows stays"
    assert torch.equal(read(AlignedRows(config(folder, 0))), whole)
    assert AlignedRows(config(folder, 1)).state(0) == AlignedRows(config(folder)).state(0)
    with pytest.raises(DatasetError, match="has no generation 2"):
        AlignedRows(config(folder, 2))
    assert [parse_generation(text) for text in ("latest", "12")] == [LATEST, 12]
    for text in ("newest", "-1", "1.5"):
        with pytest.raises(ArgumentTypeError, match="neither a number"):
            parse_generation(text)


def test_a_mixture_goes_on_with_its_rows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    mixture = mix_two(tmp_path)
    plain = config(mixture, num_epochs=1)
    rows = AlignedRows(plain)
    whole, saved = read(rows), kept(rows, 2 * BATCH)
    remove_documents(tmp_path / "b", "doc-1-3")
    with caplog.at_level(logging.WARNING):
        again = AlignedRows(plain, saved)
    assert "is at generation 0, 1 now; the run continues with generation 0, 0," in caplog.text
    assert torch.equal(read(again, again.restore(saved)), whole[2 * BATCH :])
    fresh = AlignedRows(plain)
    assert fresh.state(0).generations == (0, 1)
    with pytest.raises(StreamMismatchError, match=r"generation 0, 0 of .* generation 0, 1 is open"):
        fresh.restore(saved)
    moved = AlignedRows(config(mixture, LATEST, num_epochs=1), saved)
    assert moved.restore(saved) == 2 * BATCH
    assert torch.equal(read(moved), read(fresh))
    with pytest.raises(ValueError, match="generation 1 is for one dataset"):
        AlignedRows(config(mixture, 1))
    mixture.write_text(mixture.read_text().replace("0.5", "0.25", 1).replace("0.5", "0.75", 1))
    with pytest.raises(StreamMismatchError, match="fingerprint"):
        AlignedRows(config(mixture, LATEST, num_epochs=1), saved).restore(saved)


def test_a_run_opens_each_dataset_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that goes on after its data has grown, and the older generation's manifest."""
    path = mix_two(tmp_path)
    saved = kept(AlignedRows(config(path, num_epochs=1)), BATCH)
    remove_documents(tmp_path / "a", "doc-0-3")
    opened: Counter[str] = Counter()

    def read_whole(url: str) -> bytes:
        opened[url.removeprefix(f"{tmp_path}/")] += 1
        return Path(url).read_bytes()

    monkeypatch.setattr("pipeline.dataset.dataset_reading.read_whole", read_whole)
    assert AlignedRows(config(path, num_epochs=1), saved).restore(saved) == BATCH
    assert opened == {"a/manifest.json": 1, "b/manifest.json": 1, "a/manifests/000.json": 1}
