"""JSON that isn't JSON everywhere: what else the file holds is read."""

import json
from pathlib import Path

import pytest

from beam_jobs.align.inputs import json_values
from beam_jobs.align.inputs.document_reading import read_part
from beam_jobs.align.inputs.documents import PlacedDocument, ReadingRules, Reason
from beam_jobs.align.inputs.input_files import find_inputs
from beam_jobs.align.inputs.parts import cut_files

RECORDS = [{"id": f"d{n}", "text": f"text {n}: {{[,", "m": [{"id": n}, {}]} for n in range(60)]
LINES = [json.dumps({"id": f"d{n}", "text": f"text {n}"}) for n in range(60)]


def read(
    path: Path, data: str | bytes, *, rules: ReadingRules | None = None, task_bytes: int = 1 << 20
) -> tuple[list[str], list[Reason]]:
    """Return ids and reasons."""
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    parts = cut_files(find_inputs([str(path)]), task_bytes=task_bytes)
    outcomes = [o for part, _ in parts for o in read_part(part, rules or ReadingRules())]
    letters = [o.reason for o in outcomes if not isinstance(o, PlacedDocument)]
    return [o.document_id for o in outcomes if isinstance(o, PlacedDocument)], letters


def ids(*left_out: int) -> list[str]:
    return [f"d{n}" for n in range(60) if n not in left_out]


BROKEN = [
    ('{"id": "d30", "text": "x"', Reason.BAD_JSON),
    ('{"id": "d30", "text": "it"s"}', Reason.BAD_JSON),
    ('{"id": "d30", "text": "he said "hi" to me"}', Reason.BAD_JSON),
    ('{"id": "d30", "text": tru}', Reason.BAD_JSON),
    ('{"id": "d30", "text": "x"}}', None),
    ('{"id": "d30", "text": "it"s", "m": [{"id": 1}, {"k": 2}]}', Reason.UNREADABLE_INPUT),
    ('{"id": "d30", "text": "big ' + "x" * 500 + '"}', Reason.TOO_LARGE),
    ('{"id": "d30", "text": "big it"s ' + "x" * 500 + '"}', Reason.BAD_JSON),
]


@pytest.mark.parametrize(("broken", "reason"), BROKEN)
@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("chunk", [64, 1 << 20])
@pytest.mark.parametrize("place", [0, 30])
def test_an_array_continues_at_its_next_element(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    broken: str,
    reason: Reason | None,
    indent: int | None,
    chunk: int,
    place: int,
) -> None:
    monkeypatch.setattr(json_values, "_CHUNK_BYTES", chunk)
    elements = [json.dumps(record, indent=indent) for record in RECORDS]
    elements[place] = broken.replace("d30", f"d{place}").replace("{", "{\n " if indent else "{", 1)
    data = f"[{', '.join(elements)}]"
    found, letters = read(tmp_path / "a.json", data, rules=ReadingRules(max_document_bytes=100))
    assert found == (ids(place) if reason else ids())
    assert letters == ([reason] if reason else [])


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("torn", ["[" * 1500 + "]" * 1499, "9" * 4400 + '"'])
def test_a_broken_element_with_what_no_library_takes_costs_itself(
    tmp_path: Path, indent: int | None, torn: str
) -> None:
    elements = [json.dumps(record, indent=indent) for record in RECORDS]
    elements[30] = elements[30].rstrip("}") + f', "odd": {torn}}}'
    found = read(tmp_path / "a.json", "[" + ", ".join(elements) + "]")
    assert found == (ids(30), [Reason.BAD_JSON])


def test_an_array_that_gives_no_hint_says_from_where_on(tmp_path: Path) -> None:
    elements = [json.dumps({f"k{n}": n, "id": f"d{n}", "text": "x"}) for n in range(60)]
    elements[30] = '{"k30": 30, "id": "d30", "text": "it"s"}'
    path = tmp_path / "a.json"
    found, letters = read(path, data := f"[{', '.join(elements)}]")
    assert (found, letters) == (ids(*range(30, 60)), [Reason.UNREADABLE_INPUT])
    (part, _), *_ = cut_files(find_inputs([str(path)]))
    *_, letter = read_part(part, ReadingRules())
    error = data.index('s"}')
    assert f"not valid JSON from byte {error} to its end, byte {len(data)}" in letter.detail
    assert f"of {len(data)} bytes can't be read" in letter.detail


def test_an_element_lost_behind_an_open_string_is_said(tmp_path: Path) -> None:
    data = '[{"ad": "d0", "text": "x"},\n{"id": "d1", "text": "y },\n{"id": "d2", "text": "\\" z"}]'
    found, letters = read(tmp_path / "a.json", data)  # no opening as the first one's is there
    assert (found, letters) == (["a.json#1"], [Reason.UNREADABLE_INPUT])


def test_elements_lost_behind_a_stray_quote_in_one_too_deep_are_said(tmp_path: Path) -> None:
    """What is too deep for parsers tells by its brackets alone where it stops being JSON."""
    texts = ["one line", "{[}", "it's", "a\tb"]
    elements = [json.dumps({"id": f"d{n}", "text": texts[n % 4]}) for n in range(60)]
    for place in range(0, 3000, 150):
        deep = "[" * 1500 + "]" * 1500
        deep = f'{deep[:place]}"{deep[place:]}'
        elements[30] = f'{{"id": "d30", "text": "x", "m": {deep}}}'
        found, reasons = read(tmp_path / "a.json", f"[{', '.join(elements)}]")
        assert found == ids(30) or Reason.UNREADABLE_INPUT in reasons, place


@pytest.mark.parametrize("between", [", ", ",\n"])
def test_a_stray_quote_between_elements_costs_none(tmp_path: Path, between: str) -> None:
    data = f"[{between.join(LINES)}]".replace('}, {"id": "d30"', '}", {"id": "d30"')
    data = data.replace('},\n{"id": "d30"', '}",\n{"id": "d30"')
    assert read(tmp_path / "a.json", data) == (ids(), [Reason.BAD_JSON])
    strings = json.dumps(["a", ", {", '{"id": 1}', ""])
    assert read(tmp_path / "a.json", f"[{strings[1:-1]}, {LINES[0]}]")[1] == [Reason.BAD_JSON] * 4


@pytest.mark.parametrize("last", ['{"id": "d59", "text": "it"s"}', '{"id": "d59", "text": "x"'])
def test_a_last_element_that_is_broken_is_one(tmp_path: Path, last: str) -> None:
    data = f"[{', '.join([*LINES[:-1], last])}]\n"
    assert read(tmp_path / "a.json", data) == (ids(59), [Reason.BAD_JSON])


@pytest.mark.parametrize("task_bytes", [1, 100, 1 << 20])
def test_objects_without_a_newline_between_are_documents(tmp_path: Path, task_bytes: int) -> None:
    path, whole = tmp_path / "a.jsonl", {"task_bytes": task_bytes}
    few = [*LINES[:3], "".join(LINES[3:6]), *LINES[6:]]
    assert read(path, "\n".join(few), **whole) == (ids(), [])  # type: ignore[arg-type]
    assert read(path, "".join(LINES), **whole) == (ids(), [])  # type: ignore[arg-type]
    assert read(path, ",\n".join(LINES), **whole) == (ids(), [])  # type: ignore[arg-type]
    torn = [*LINES[:30], LINES[30][:20] + LINES[31], *LINES[32:]]
    expected = (ids(30), [Reason.BAD_JSON])
    assert read(path, "\n".join(torn), **whole) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize("task_bytes", [7, 1 << 20])
def test_marks_zeros_and_large_numbers_cost_nothing(tmp_path: Path, task_bytes: int) -> None:
    lines = list(LINES)
    lines[10], lines[20] = "\ufeff" + lines[10], "\0" * 600 + lines[20]
    lines[30] = lines[30].replace("}", ', "score": 1e400, "n": ' + "9" * 400 + "}")
    data = "\n".join(lines) + "\n" + "\0" * 512
    assert read(tmp_path / "a.jsonl", data, task_bytes=task_bytes) == (ids(), [])
