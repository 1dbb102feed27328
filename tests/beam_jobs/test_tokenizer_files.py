from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from beam_jobs import tokenizer_files
from beam_jobs.tokenizer_files import load_stored, store_tokenizer
from pipeline.recent import Recent
from pipeline.tokenization import PROBES, Tokenizer, load_tokenizer
from tests.support.corpus import STUDENT, TEACHER

TEXTS = [probe.encode() for probe in PROBES]


@pytest.mark.parametrize("source", [STUDENT, TEACHER])
def test_a_proven_tokenizer_tries_nothing_and_gives_the_same(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = load_tokenizer(source).tokenize_batch(TEXTS)
    monkeypatch.setattr(Tokenizer, "check_fast_path", None)  # fails where it is called
    monkeypatch.setattr("pipeline.tokenization.tokenizer.require_usable", None)
    tokenizer = load_tokenizer(source, proven=True)
    assert tokenizer.fast
    found = tokenizer.tokenize_batch(TEXTS)
    for name in ("input_ids", "byte_offsets", "cu_tokens", "tiles"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))


def test_a_worker_with_the_same_libraries_checks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / Path(TEACHER).name)
    stored = store_tokenizer(load_tokenizer(TEACHER), path, scratch=str(tmp_path))
    checked: list[str] = []
    monkeypatch.setattr(
        Tokenizer, "check_fast_path", lambda tokenizer, texts: checked.append(tokenizer.sha256)
    )
    monkeypatch.setattr(tokenizer_files, "_loaded", Recent(4))
    load_stored(replace(stored, versions=("0.1", *stored.versions[1:])))
    assert checked == [stored.sha256]
    # Fails where it is called.
    monkeypatch.setattr("pipeline.tokenization.tokenizer.why_unlike", None)
    assert load_stored(stored).fast
    assert checked == [stored.sha256]


def test_a_process_that_serves_job_after_job_forgets_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_files, "_loaded", Recent(4))
    tokenizer = load_tokenizer(STUDENT)
    jobs = [
        store_tokenizer(tokenizer, str(tmp_path / f"job-{n}" / "a.model"), scratch=str(tmp_path))
        for n in range(4)
    ]
    kept = load_stored(jobs[0])  # it is at work
    fifth = store_tokenizer(tokenizer, str(tmp_path / "job-4" / "a.model"), scratch=str(tmp_path))
    assert list(tokenizer_files._loaded._kept) == [*jobs[2:], jobs[0], fifth]
    assert kept is tokenizer
    assert load_stored(jobs[1]).sha256 == tokenizer.sha256, "loaded again from its file"
