"""What is looked at before a job starts."""

import json
from pathlib import Path

import pytest

from beam_jobs.align.inputs.documents import ReadingRules
from beam_jobs.align.inputs.input_files import find_inputs
from beam_jobs.align.inputs.probes import probe_texts, require_fields
from beam_jobs.align.inputs.sampling import FIRST_LOOK, SampledPart, SampleSize, sample_input
from beam_jobs.job_errors import InputError


def look_at(
    folder: Path, rules: ReadingRules | None = None, size: SampleSize = FIRST_LOOK
) -> list[SampledPart]:
    rules = rules or ReadingRules()
    sample = sample_input(find_inputs([f"{folder}/*"], fields=("text",)), rules, size)
    require_fields(sample, rules)
    return sample


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write documents of which the second has an id, and a file of plain text."""
    lines = [{"text": "one"}, {"text": "two", "url": "b"}, {"text": ""}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "b.txt").write_text("three")
    return tmp_path


def test_the_first_documents_of_each_part_are_read(folder: Path) -> None:
    assert probe_texts(look_at(folder)) == [b"one", b"two", b"three"]
    for size in (SampleSize(2, 2, 100), SampleSize(2, 9, 2)):
        assert probe_texts(look_at(folder, size=size)) == [b"one", b"three"]


def test_an_id_field_that_no_document_has_is_an_error(folder: Path) -> None:
    with pytest.raises(InputError, match=r"--id-field ulr: none of the first 2 documents has a f"):
        look_at(folder, ReadingRules(id_field="ulr"))
    for field in ("url", "id", ""):  # one has it; the default; places
        assert look_at(folder, ReadingRules(id_field=field))
    (folder / "a.jsonl").unlink()  # plain text has no fields
    assert look_at(folder, ReadingRules(id_field="ulr"))
