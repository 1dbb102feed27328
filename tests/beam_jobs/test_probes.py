"""What is looked at before a job starts."""

import json
from pathlib import Path

import pytest

from beam_jobs.align.inputs.files import find_inputs
from beam_jobs.align.inputs.listing import InputError
from beam_jobs.align.inputs.pieces import plan_tasks
from beam_jobs.align.inputs.probes import probe_documents, usable_texts
from beam_jobs.align.inputs.reading import ReadingRules


def tasks_of(folder: Path) -> list[str]:
    """Return the reading tasks of a folder's files."""
    return plan_tasks(find_inputs([f"{folder}/*"], fields=("text",)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write documents of which the second has an id, and a file of plain text."""
    lines = [{"text": "one"}, {"text": "two", "url": "b"}, {"text": ""}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "b.txt").write_text("three")
    return tmp_path


def test_the_first_documents_of_each_task_are_read(folder: Path) -> None:
    outcomes = probe_documents(tasks_of(folder), ReadingRules())
    assert usable_texts(outcomes) == [b"one", b"two"]
    assert len(outcomes) == 3
    assert len(probe_documents(tasks_of(folder), ReadingRules(), num_documents=1)) == 1
    assert len(probe_documents(tasks_of(folder), ReadingRules(), num_bytes=4)) == 1


def test_an_id_field_that_no_document_has_is_an_error(folder: Path) -> None:
    tasks = tasks_of(folder)
    with pytest.raises(InputError, match=r"--id-field ulr: none of the first 2 documents has a f"):
        probe_documents(tasks, ReadingRules(id_field="ulr"))
    for field in ("url", "id", ""):  # one has it; the default; places
        assert len(probe_documents(tasks, ReadingRules(id_field=field))) == 3
    (folder / "a.jsonl").unlink()  # plain text has no fields
    assert len(probe_documents(tasks_of(folder), ReadingRules(id_field="ulr"))) == 1


def test_a_text_field_that_no_document_has_is_an_error(folder: Path) -> None:
    (folder / "b.txt").unlink()
    with pytest.raises(InputError, match=r'none of the first 3 documents has a field "content"'):
        probe_documents(tasks_of(folder), ReadingRules(text_field="content"))
