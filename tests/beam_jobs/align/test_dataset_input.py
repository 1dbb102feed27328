"""`align --input DATASET` gives what aligning the dataset's texts afresh gives, byte for byte."""

import json
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from beam_jobs.align import dataset_making
from beam_jobs.align.__main__ import main
from beam_jobs.align.command import align, describe
from beam_jobs.align.inputs.datasets import open_dataset_as_input, read_texts
from beam_jobs.align.inputs.document_reading import read_part
from beam_jobs.align.inputs.documents import PlacedDocument, ReadingRules
from beam_jobs.align.inputs.input_identity import InputChangedError
from beam_jobs.align.inputs.parts import decode_task, plan_tasks
from beam_jobs.align.options import AlignOptions, parse_options
from beam_jobs.job_errors import OptionsError
from beam_jobs.running.run_options import RunOptions
from pipeline.dataset.conditions import WhereError
from pipeline.dataset.files import open_dataset
from pipeline.validate.dataset_checks import validate_dataset
from tests.support.datasets import flip, make_texts, remove_documents, seen_ids
from tests.support.growing import QUIET, documents, grow, options, write_input
from tests.support.killing import run_killed
from tests.support.shelf import SCHEME
from tests.support.tokenizer_zoo import MISTRAL_DATA, shared, source

OF_THE_INPUT = {
    *("format", "input_files", "input_bytes", "input_sha256"),
    *("input_dataset", "input_generation", "input_where"),
}
FIRST = [f"{'web'[n % 3]}{n}" for n in range(90)]
GONE = ["w0", "e40", "b41", "w63"]
RULES = ReadingRules()
LARGE = {"repeat": 40, "shard_bytes": 1 << 16}
TEKKEN = str(MISTRAL_DATA / "tekken_240718.json")


def content(folder: Path) -> dict[str, Any]:
    """Return every file but those that tell of a run, and the manifest less its input's names."""
    files: dict[str, Any] = {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in ("report.html", "inputs.json", "manifest.json")
    }
    manifest = json.loads((folder / "manifest.json").read_text("utf-8"))
    made, _ = manifest["configuration"], manifest.pop("digest")
    manifest["configuration"] = {n: v for n, v in made.items() if n not in OF_THE_INPUT}
    return {**files, "manifest.json": manifest}


def assert_same(found: Path, expected: Path) -> None:
    theirs, ours = content(expected), content(found)
    assert ours.keys() == theirs.keys()
    assert [name for name in theirs if ours[name] != theirs[name]] == []
    assert not list(found.glob(".*"))


def from_dataset(data: Path, output: Path, **changes: Any) -> AlignOptions:
    values = {"input": (str(data),), "output": str(output), "run": QUIET}
    return AlignOptions(**(values | changes))  # type: ignore[arg-type]


def write_texts(path: Path, texts: Iterable[tuple[str, str]]) -> Path:
    lines = [json.dumps({"id": name, "text": text}, ensure_ascii=False) for name, text in texts]
    path.write_text("".join(f"{line}\n" for line in lines), "utf-8")
    return path


def tokenizer(name: str) -> str:
    return name if name == TEKKEN else str(source(name))


@pytest.mark.parametrize(
    ("old", "keep_text", "anew"),
    [
        ("llama_like", False, {"student": "word_pieces"}),
        ("sentencepiece_bpe", False, {"teacher": "nfc"}),
        ("word_pieces", True, {"student": "qwen_like", "teacher": "unigram"}),
        pytest.param("gpt2_like", False, {"student": TEKKEN}, marks=pytest.mark.slow),
        shared("llama2", False, {"student": "gpt2_like"}),
        shared("deepseek_llm", False, {"teacher": "qwen2_5"}),
    ],
)
def test_equal_to_aligning_afresh(
    tmp_path: Path, old: str, keep_text: bool, anew: dict[str, str]
) -> None:
    """Whatever the tokenizers are; a text that the old ones don't spell must have been kept."""
    texts = write_texts(tmp_path / "texts.jsonl", make_texts(24))
    made = AlignOptions(
        (str(texts),), str(tmp_path / "data"), tokenizer(old), tokenizer(old), run=QUIET,
        keep_text=keep_text, shard_bytes=1 << 14,
    )  # fmt: skip
    align(made)
    others = {side: tokenizer(name) for side, name in anew.items()}
    align(from_dataset(tmp_path / "data", tmp_path / "new", **others))
    align(replace(made, output=str(tmp_path / "fresh"), **others))
    assert_same(tmp_path / "new", tmp_path / "fresh")
    assert len(open_dataset(tmp_path / "new").manifest.shards) > 1


def test_it_leaves_removed_documents_out(tmp_path: Path, grown: tuple[Path, Path]) -> None:
    old, new = grown
    inputs = write_input(tmp_path / "in/rest.jsonl", [n for n in FIRST if n not in GONE], repeat=40)
    size = {"shard_bytes": LARGE["shard_bytes"]}
    align(options(old.parent, inputs, output=str(tmp_path / "rest"), **size))
    assert_same(new, tmp_path / "rest")
    assert len(open_dataset(new).manifest.shards) > 2
    assert validate_dataset(str(new)).findings == ()
    assert b'"e40"' not in b"".join(path.read_bytes() for path in new.glob("*.tar"))


def test_a_chosen_part_is_a_dataset_of_its_own(tmp_path: Path) -> None:
    grow(tmp_path, "a", FIRST, **LARGE)
    align(from_dataset(tmp_path / "aligned", tmp_path / "new", where="source == 'w'"))
    inputs = write_input(tmp_path / "in/w.jsonl", FIRST[::3], repeat=40)
    output = str(tmp_path / "fresh")
    align(options(tmp_path, inputs, output=output, shard_bytes=LARGE["shard_bytes"]))
    assert_same(tmp_path / "new", tmp_path / "fresh")
    made = open_dataset(tmp_path / "new").manifest.configuration
    assert made["input_where"] == "source == 'w'"
    with pytest.raises(OptionsError, match="n: --where is"):
        align(from_dataset(tmp_path / "aligned", tmp_path / "new", where="source == 'e'"))
    with pytest.raises(WhereError, match="no document of"):
        align(from_dataset(tmp_path / "aligned", tmp_path / "no", where="source == 'x'"))
    assert not (tmp_path / "no").exists()


def test_generations_become_one(tmp_path: Path) -> None:
    grow(tmp_path, "a", FIRST[:30])
    grow(tmp_path, "b", ["b0", "w1"])
    remove_documents(tmp_path / "aligned", "w3", "b0")
    expected = documents(tmp_path / "aligned")
    wanted = from_dataset(tmp_path / "aligned", tmp_path / "new")
    manifest = align(wanted)
    assert documents(tmp_path / "new") == expected
    assert (manifest.generation, manifest.generations, manifest.removed) == (0, (), None)
    assert manifest.dead_letters.count == 0
    assert align(wanted) == manifest
    remove_documents(tmp_path / "aligned", "e1")
    with pytest.raises(OptionsError, match=r"--input is generation 2 of .* there and gen.* 3 "):
        align(wanted)
    # It grows as the old one would, with nothing but its input named anew; removed ids are free.
    inputs = write_input(tmp_path / "in/c.jsonl", ["w3", "c1"])
    align(replace(options(tmp_path, inputs, append=True), output=str(tmp_path / "new")))
    assert documents(tmp_path / "new").keys() == {*expected, "w3", "c1"}


def test_what_is_not_given_is_the_datasets(tmp_path: Path) -> None:
    made = {"keep_text": True, "name": "web", "student_bos": "none", "teacher_context": "7"}
    inputs = write_input(tmp_path / "in/a.jsonl", FIRST[:9])
    old = align(options(tmp_path, inputs, **made))
    new = align(from_dataset(tmp_path / "aligned", tmp_path / "new"))
    assert_same(tmp_path / "new", tmp_path / "aligned")
    assert new.student.around_text.first_token_id is None
    assert new.teacher.around_text.first_token_id == 7
    changes = {"keep_text": False, "teacher_context": "none", "name": "other"}
    other = align(from_dataset(tmp_path / "aligned", tmp_path / "other", **changes))
    assert other.student == old.student
    assert other.teacher.around_text.first_token_id is None
    assert other.configuration["keep_text"] is False
    assert other.shards[0].file.startswith("other-")
    assert documents(tmp_path / "other") == documents(tmp_path / "aligned")
    # Of another tokenizer the old one's tokens around a text mean nothing.
    gpt2 = align(from_dataset(tmp_path / "new", tmp_path / "gpt2", student=tokenizer("gpt2_like")))
    assert gpt2.student.around_text.first_token_id == gpt2.student.eos_token_id


def test_one_dataset_is_added_to_another(tmp_path: Path) -> None:
    grow(tmp_path / "one", "a", FIRST[:20], student_bos="none")
    grow(tmp_path / "two", "b", FIRST[15:40], keep_text=True)
    one, two = tmp_path / "one/aligned", tmp_path / "two/aligned"
    grown = align(from_dataset(two, one, append=True, max_dead_letters=1.0))
    assert (grown.generation, grown.dead_letters.by_reason) == (1, {"known_id": 5})
    grow(tmp_path / "all", "c", FIRST[:40])
    assert documents(one) == documents(tmp_path / "all/aligned")


def lossy(root: Path, num_lost: int) -> Path:
    """Return a dataset some of whose texts neither tokenizer spells: an accent is recomposed."""
    path = root / "nfc.json"
    path.write_bytes(source("qwen_like").read_bytes())
    texts = [
        (f"d{n:03d}", f"{n}: a {'cafe\u0301' if n < num_lost else 'tea'} and more")
        for n in range(100)
    ]
    inputs = write_texts(root / "texts.jsonl", texts)
    sides = {"student": str(path), "teacher": str(path)}
    align(AlignOptions((str(inputs),), str(root / "data"), **sides, run=QUIET))
    return root / "data"


def test_lost_texts_are_named_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data, new = lossy(tmp_path, 7), tmp_path / "new"
    arguments = ["--input", str(data), "--output", str(new)]
    monkeypatch.setattr(dataset_making, "build_pipeline", None)  # nothing comes as far as that
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert "7 of 100 documents (7.00 %) of" in said
    assert '"d000", "d001", "d002", "d003", "d004", …. Align the files' in said
    assert not new.exists()
    monkeypatch.undo()
    assert main([*arguments, "--max-dead-letters", "0.07"]) == 0
    assert "note: 7 of 100 documents" in capsys.readouterr().out
    letters = [json.loads(line) for line in (new / "dead_letters.jsonl").open(encoding="utf-8")]
    (shard,) = open_dataset(data).manifest.shards
    assert {letter["source"] for letter in letters} == {shard.file}
    index = open_dataset(data).read_index(0, with_names=True)
    for letter in letters:
        assert index.document_id[letter["position"]] == letter["document_id"]
    assert {letter["document_id"] for letter in letters} == {f"d{n:03d}" for n in range(7)}
    assert seen_ids(new) == {f"d{n:03d}" for n in range(7, 100)}


def test_damage_is_a_dead_letter_with_shard_and_document(tmp_path: Path) -> None:
    grow(tmp_path, "a", FIRST[:9])
    (record,) = open_dataset(tmp_path / "aligned").manifest.shards
    index = open_dataset(tmp_path / "aligned").read_index(0, with_names=True)
    tar = tmp_path / "aligned" / record.file
    flip(tar, int(index.payload_offset[4]) + int(index.payload_bytes[4]) - 1)
    wanted = from_dataset(tmp_path / "aligned", tmp_path / "new", max_dead_letters=1.0)
    assert align(wanted).dead_letters.by_reason == {"unreadable_input": 1}
    (letter,) = map(json.loads, (tmp_path / "new/dead_letters.jsonl").open(encoding="utf-8"))
    place = (letter["source"], letter["position"], letter["document_id"])
    assert place == (record.file, 4, index.document_id[4])
    assert "CRC-32" in letter["detail"]
    tar.write_bytes(tar.read_bytes()[:-512])
    with pytest.raises(OptionsError, match=r"1 files of .* are gone or cut"):
        align(from_dataset(tmp_path / "aligned", tmp_path / "other"))


def test_parts_of_one_shard_hold_each_document_once(tmp_path: Path) -> None:
    grow(tmp_path, "a", FIRST, shard_bytes=1 << 26)
    remove_documents(tmp_path / "aligned", *GONE)
    opened = open_dataset_as_input(str(tmp_path / "aligned"), "source != 'b'")
    assert len(opened.files) == 1
    tasks = plan_tasks(opened.files, task_bytes=opened.files[0].num_bytes // 4)
    assert len(tasks) == 5
    found = [d for t in tasks for part in decode_task(t) for d in read_part(part, RULES)]
    placed = [document for document in found if isinstance(document, PlacedDocument)]
    expected = [n for n in FIRST if n[0] != "b" and n not in GONE]
    assert len(found) == len(placed) == len(expected)
    assert {document.document_id for document in placed} == set(expected)
    assert sum(len(document.text) for document in placed) == opened.files[0].num_bytes


def test_a_dataset_that_changes_while_it_is_read(tmp_path: Path) -> None:
    """One that grows gives what it held; another one in its place is none."""
    grow(tmp_path, "a", FIRST[:9])
    folder = tmp_path / "aligned"
    (task,) = plan_tasks(open_dataset_as_input(str(folder), "").files)
    (part,) = decode_task(task)
    remove_documents(tmp_path / "aligned", "w3")
    grow(tmp_path, "b", ["b99"])
    assert len(list(read_texts(part, RULES))) == 9
    another = replace(part, file=replace(part.file, content=f"dataset:{'0' * 64}"))
    with pytest.raises(InputChangedError, match="isn't the dataset for which"):
        list(read_texts(another, RULES))


def test_dry_run(grown: tuple[Path, Path], tmp_path: Path) -> None:
    said, _ = describe(from_dataset(grown[0], tmp_path / "new", where="source = 'w'"))
    assert "dataset), " in said
    assert "source string" in said
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("arguments", "refusal"),
    [
        (["--text-field", "body"], "--text-field body: --input {data} is a dataset, whose"),
        (["--id-field", ""], "--id-field : --input {data} is a dataset, whose"),
        (["--text-template", "{a}"], "--text-template {a}: --input {data} is a dataset, whose"),
        (["--metadata", "a"], "--metadata a: --input {data} is a dataset, whose"),
        (["--format", "jsonl"], "--format jsonl: --input {data} is a dataset; leave it out"),
        (["--input", "a.jsonl"], "{data} is a dataset, which is read alone"),
        (["--output", "{data}"], "can't be written over itself"),
        (["--output", "{data}/new"], "can't be written over itself"),
        (["--where", "price > 3"], "where 'price > 3':"),
    ],
)
def test_what_makes_no_sense_for_a_dataset_is_refused(
    tmp_path: Path, grown: tuple[Path, Path], arguments: list[str], refusal: str
) -> None:
    data, _ = map(str, grown)
    arguments = [argument.replace("{data}", data) for argument in arguments]
    given = ["--input", data, "--output", str(tmp_path / "new"), *arguments]
    with pytest.raises(ValueError, match=re.escape(refusal.replace("{data}", data))):
        align(parse_options(given))
    assert not list(tmp_path.iterdir())


def test_a_column_s_likely_name_comes_as_the_option(
    tmp_path: Path, grown: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--input", str(grown[0]), "--output", str(tmp_path / "new")]
    assert main([*asked, "--where", "num_student_tokenz > 5"]) == 2
    assert capsys.readouterr().err.endswith("\nhint: --where 'num_student_tokens > 5'\n")


def test_what_needs_a_dataset_is_refused_without_one(tmp_path: Path) -> None:
    plain = options(tmp_path, write_input(tmp_path / "in/a.jsonl", FIRST[:3]))
    for changes, message in (
        ({"where": "a = 1"}, "--where a = 1: only documents of a dataset"),
        ({"teacher": ""}, "--teacher is not given: name the teacher's tokenizer"),
        ({"format": "dataset"}, r"--format dataset: .* holds no manifest\.json"),
        ({"input": ("mix.toml",)}, r"mix\.toml is a mixture: align its datasets one by one"),
        ({"input": ("-",), "format": "dataset"}, "--format dataset: a dataset is a folder"),
    ):
        with pytest.raises(ValueError, match=message):
            align(replace(plain, **changes))


def test_a_dataset_is_named_by_its_folder_manifest_or_url(tmp_path: Path) -> None:
    """Files are read by Beam's clients alone: no other library knows this store."""
    grow(tmp_path, "a", FIRST[:30])
    remove_documents(tmp_path / "aligned", *GONE[:1])
    data = tmp_path / "aligned"
    align(from_dataset(data, tmp_path / "by-folder"))
    align(from_dataset(data / "manifest.json", tmp_path / "by-manifest", format="dataset"))
    assert_same(tmp_path / "by-manifest", tmp_path / "by-folder")
    url = f"{SCHEME}://{data}"
    where = "source == 'w'"
    align(replace(from_dataset(data, tmp_path / "by-url", where=where), input=(url,)))
    align(from_dataset(data, tmp_path / "part", where=where))
    assert_same(tmp_path / "by-url", tmp_path / "part")


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A dataset without some of its documents, and what is made of it."""
    root = tmp_path_factory.mktemp("grown")
    grow(root, "a", FIRST, **LARGE)
    remove_documents(root / "aligned", *GONE)
    align(from_dataset(root / "aligned", root / "new"))
    return root / "aligned", root / "new"


@pytest.mark.slow
def test_killed_and_run_again(tmp_path: Path, grown: tuple[Path, Path]) -> None:
    data, whole = grown
    arguments = ["--input", str(data), "--output", str(tmp_path / "new"), "--quiet"]
    functions = ["beam_jobs.align.buckets.shard_record"]
    run_killed("beam_jobs.align.__main__", arguments, functions, call=3)
    assert main(arguments) == 0
    assert_same(tmp_path / "new", whole)


@pytest.mark.slow
def test_worker_processes_give_the_same_bytes(tmp_path: Path, grown: tuple[Path, Path]) -> None:
    data, whole = grown
    run = RunOptions(workers=2, quiet=True)
    align(from_dataset(data, tmp_path / "new", run=run, shuffle="runner"))
    assert_same(tmp_path / "new", whole)
