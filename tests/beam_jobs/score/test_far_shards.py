"""Shards far from the rest are found, and no shard of mixed or short text is."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import pytest

from beam_jobs.score.far_shards import find_far_shards, refuse_far_shards
from pipeline.scoring.engines.interface import EngineError
from schemas.sidecar import SidecarRecord


def records(*means: float, num_losses: int = 100_000) -> list[SidecarRecord]:
    return [
        SidecarRecord(
            file=f"c-{place}.safetensors",
            num_bytes=1,
            sha256="ab12" * 16,
            shard=f"c-{place}.tar",
            num_tokens=num_losses,
            num_losses=num_losses,
            loss_sum=mean * num_losses,
            num_split_documents=0,
            context_sha256="ab12" * 16,
        )
        for place, mean in enumerate(means)
    ]


def far(*means: float, num_losses: int = 100_000) -> list[str]:
    return [f.record.shard for f in find_far_shards(records(*means, num_losses=num_losses))]


def test_one_that_is_off_is_found_among_any_number() -> None:
    assert far(2.3, 2.2, 5.3, 2.4) == ["c-2.tar"]
    assert far(2.3, 2.2, 2.4, 0.0) == ["c-3.tar"]
    assert far(2.3, 5.3) == ["c-0.tar", "c-1.tar"], "either may be wrong"


def test_mixed_and_short_text_are_no_reason() -> None:
    assert not far()
    assert not far(2.3)
    assert not far(2.3, 1.5, 2.9, 2.1)
    assert not far(2.4, 2.2, 0.8, 0.7, 2.5, 0.9), "code and prose, sorted"
    assert not far(2.3, 2.2, 5.3, 2.4, num_losses=60)
    assert not far(2.3, num_losses=0)


def test_a_step_that_runs_twice_accepts_nothing(tmp_path: Path) -> None:
    output, run_folder = tmp_path, tmp_path / "run"
    run_folder.mkdir()

    def refuse(*means: float, started: float, accepted: Collection[str] = ()) -> None:
        for record in records(*means):
            (output / record.file).write_bytes(b"1")
        refuse_far_shards(
            records(*means),
            accepted=accepted,
            dataset=str(output),
            run_folder=str(run_folder),
            started=started,
        )

    for _ in range(2):
        with pytest.raises(EngineError, match=r"1 of 4 shards.*: c-2.tar 5.30 \(the others 2.3"):
            refuse(2.3, 2.2, 5.3, 2.4, started=1.0)
        assert not (output / "c-2.safetensors").exists()
        assert (output / "c-1.safetensors").exists()
    with pytest.raises(EngineError, match=r"c-2.tar 5.90"):
        refuse(2.3, 2.2, 5.9, 2.4, started=2.0)
    refuse(2.3, 2.2, 5.9, 2.4, started=3.0)
    refuse(2.3, 2.2, 5.9, 2.4, started=3.0)
    with pytest.raises(EngineError, match=r"1 of 4 shards.*c-3.tar 0.00"):
        refuse(2.3, 2.2, 5.9, 0.0, started=4.0)
    refuse(2.3, 2.2, 5.9, 2.4, started=5.0)
    refuse(2.3, 2.2, 5.9, 0.0, started=6.0, accepted=["ab12" * 16])  # of finished scores
