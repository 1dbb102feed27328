"""Conditions that a stranger wrote take neither this machine's memory nor its day."""

import os
import signal
import threading
from pathlib import Path

import pyarrow as pa
import pytest

from pipeline.command_line.failures import hints_of
from pipeline.dataset import condition_process
from pipeline.dataset.condition_process import LimitedQuery
from pipeline.dataset.conditions import WhereError

pytest.importorskip("duckdb")
TABLE = pa.table({"number": [1, 2, None], "source": ["a", "b", "c"]})


def test_it_answers_as_the_library_does() -> None:
    query = LimitedQuery(TABLE)
    assert query.require_condition("number > 1 and source <> 'é'") == {"number", "source"}
    assert query.find_paths("number > 1 and qwen.rank < 1") == [(15, "qwen", "rank")]
    true, null = query.decide("number > 1")
    assert (true.tolist(), null.tolist()) == ([False, True, False], [False, False, True])
    with pytest.raises(WhereError, match='column "numbr" not found') as caught:
        query.require_condition("numbr > 1")
    assert hints_of(caught.value) == ["hint: where='number > 1'"]


def test_what_takes_too_long_is_refused_and_the_next_is_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    query = LimitedQuery(TABLE)
    query.decide("number > 1")
    with monkeypatch.context() as patch:
        patch.setattr(condition_process, "LIMIT_SECONDS", 0.5)
        with pytest.raises(WhereError, match=r"levenshtein.*: it takes more than 0\.5 s or 409"):
            query.decide("levenshtein(repeat('ab', 40000 + number), repeat('ba', 40000)) > 1")
    assert query.decide("number > 1")[0].tolist() == [False, True, False]


def test_a_question_that_is_interrupted_leaves_no_answer_to_the_next() -> None:
    """A signal to the parent alone, as `kill -INT` sends it: the next got the earlier's answer."""
    query = LimitedQuery(TABLE)
    query.decide("number > 1")
    threads = threading.active_count()
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    # A job in the background is started with this signal ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            query.decide("levenshtein(repeat('ab', 40000 + number), repeat('ba', 40000)) > 1")
        timer.join()
    finally:
        signal.signal(signal.SIGINT, before)
    assert query.decide("number > 1")[0].tolist() == [False, True, False]
    assert threading.active_count() <= threads, "no limit of the first question is left"


def test_a_process_that_ctrl_c_ended_is_started_again() -> None:
    query = LimitedQuery(TABLE)
    query.decide("number > 1")
    child = condition_process._children[os.getpid()]
    child.send_signal(signal.SIGINT)  # a terminal sends it to all of its processes
    assert child.wait(60) == -signal.SIGINT
    assert query.decide("number > 1")[0].tolist() == [False, True, False]


def test_a_file_of_the_current_folder_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    end_child()
    (tmp_path / "json.py").write_text("raise SystemExit('of a stranger')")
    monkeypatch.chdir(tmp_path)
    assert LimitedQuery(TABLE).decide("number > 1")[0].tolist() == [False, True, False]
    end_child()


def end_child() -> None:
    if child := condition_process._children.pop(os.getpid(), None):
        child.kill()
        child.communicate()


def test_what_takes_too_much_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(condition_process, "LIMIT_BYTES", 3 << 29)
    end_child()
    with pytest.raises(WhereError, match=r"where 'len\(list_resize"):
        LimitedQuery(TABLE).decide("len(list_resize([number], 1000000000)) > 1")
    end_child()


def test_bytes_that_are_not_utf_8_are_named() -> None:
    with pytest.raises(WhereError, match=r"where 'source = \\udcff': it is not valid UTF-8"):
        LimitedQuery(TABLE).find_paths("source = \udcff")
