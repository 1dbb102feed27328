"""The align job end to end: every document accounted for, the same bytes on every runner."""

import hashlib
import json
import pickle
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import apache_beam as beam
import pytest
from apache_beam.coders import coders
from apache_beam.options.pipeline_options import PipelineOptions

from beam_jobs.align import dataset_making
from beam_jobs.align.__main__ import main
from beam_jobs.align.command import align
from beam_jobs.align.inputs.parts import plan_tasks
from beam_jobs.align.options import AlignOptions, parse_size
from beam_jobs.job_errors import InputError, OptionsError
from beam_jobs.running.runners import make_beam_options
from pipeline.command_line.failures import hints_of
from pipeline.dataset.dataset_reading import read_manifest
from pipeline.dataset.files import open_dataset
from pipeline.packing.reading import Reading
from pipeline.validate.dataset_checks import validate_dataset
from schemas.document import AlignedDocument, decode_document, document_key
from schemas.index import decode_index
from schemas.manifest import ConventionRecord
from tests.support.corpus import (
    PATTERN,
    align_options,
    command_line,
    digests,
    json_line,
    reference_dataset,
    small_corpus,
)

TWO_PROCESSES = ("--direct_num_workers=2", "--direct_running_mode=multi_processing")
BUNDLES_TWICE = "--direct_runner_bundle_repeat=1"
SLOW = pytest.mark.slow


def read_documents(output: Path) -> Iterator[AlignedDocument]:
    """Read every sample as the manifest and the indices place it."""
    for shard in read_manifest(str(output)).shards:
        tar = (output / shard.file).read_bytes()
        index = decode_index((output / shard.index_file).read_bytes())
        for start, size in zip(index.payload_offset, index.payload_bytes, strict=True):
            yield decode_document(tar[start : start + size])


def test_every_document_is_a_sample_or_a_dead_letter() -> None:
    corpus, output = reference_dataset()
    documents = {document.document_id: document for document in read_documents(output)}
    assert documents.keys() == corpus.texts.keys()
    for name, document in documents.items():
        text = corpus.texts[name].encode()
        assert document.text_sha256 == hashlib.sha256(text).hexdigest()
        assert document.num_text_bytes == len(text)
        assert document.student.byte_offsets[-1, 1] == len(text)
        assert len(document.teacher_spans) == len(document.student)
    manifest = read_manifest(str(output))
    assert manifest.totals["num_documents"] == len(documents) == len(corpus.texts)
    assert manifest.statistics["num_documents"] == len(documents)
    assert manifest.dead_letters.by_reason == dict(corpus.dead)
    assert manifest.totals["num_documents"] + manifest.dead_letters.count == corpus.num_documents


def test_dead_letters_name_places_and_reasons_but_no_text() -> None:
    corpus, output = reference_dataset()
    lines = (output / "dead_letters.jsonl").read_text().splitlines()
    letters = [json.loads(line) for line in lines]
    assert Counter(letter["reason"] for letter in letters) == corpus.dead
    places = [(letter["source"], letter["position"]) for letter in letters]
    assert places == sorted(places)
    (later,) = (x for x in letters if x["document_id"] == "doc-399")
    assert later["source"] == "d.parquet"
    assert "the id was first used at a.jsonl line " in later["detail"]
    assert "the same id" not in "".join(lines)


def test_the_manifest_names_what_is_there_and_nothing_else_is() -> None:
    _, output = reference_dataset()
    manifest = read_manifest(str(output))
    expected = {
        manifest.student.file: manifest.student.sha256,
        manifest.teacher.file: manifest.teacher.sha256,
        manifest.dead_letters.file: manifest.dead_letters.sha256,
    }
    for number, shard in enumerate(manifest.shards):
        assert shard.file == f"corpus-{number:06d}-of-{len(manifest.shards):06d}.tar"
        expected |= {shard.file: shard.sha256, shard.index_file: shard.index_sha256}
    assert len(manifest.shards) > 5
    found = digests(output)
    assert found.pop("manifest.json")
    assert found == expected
    assert 'class="block"' in (output / "report.html").read_text("utf-8"), "no aligned text"
    for side in (manifest.student, manifest.teacher):
        assert side.source.startswith("/")
        for page in ("report.html", "README.md"):
            shown = (output / page).read_text("utf-8")
            assert str(Path(side.source).parents[1]) not in shown, "it names somebody's disk"
            assert Path(side.source).stem in shown


def test_named_tokens_stand_around_texts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are in the manifest; another choice is another dataset."""
    corpus = small_corpus(tmp_path / "corpus", a=[json_line("a", "a text of a few words")])
    command = command_line(align_options(corpus, tmp_path / "out"))
    named = ["--student-bos", "none", "--student-eos", "5", "--teacher-context", "7"]
    assert main([*command, *named]) == 0
    manifest = read_manifest(str(tmp_path / "out"))
    assert manifest.student.convention == ConventionRecord(None, None, 5)
    assert manifest.teacher.convention == ConventionRecord(7, 7, None)
    assert main(command) == 2
    assert "the token of --student-bos or --student-eos is" in capsys.readouterr().err
    assert main([*command, *named]) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert main([*command, "--teacher-context", "<nothing>"]) == 2
    assert 'has no token "<nothing>"' in capsys.readouterr().err


def test_shards_are_sorted_by_key_and_about_as_large_as_asked() -> None:
    _, output = reference_dataset()
    manifest = read_manifest(str(output))
    keys = []
    for shard in manifest.shards:
        index = decode_index((output / shard.index_file).read_bytes())
        assert list(index.key) == [document_key(name) for name in index.document_id]
        keys += index.key
    assert keys == sorted(keys)
    shard_bytes = manifest.configuration["shard_bytes"]
    assert all(shard.num_bytes < 2 * shard_bytes for shard in manifest.shards)


@pytest.mark.parametrize(
    ("beam_arguments", "changes"),
    [
        ((), {"shuffle": "runner"}),
        ((BUNDLES_TWICE,), {}),
        (("--runner=BundleBasedDirectRunner",), {}),
        (("--runner=DirectRunner",), {"no_fast_path": True}),
        pytest.param((*TWO_PROCESSES, BUNDLES_TWICE), {"shuffle": "runner"}, marks=SLOW),
    ],
)
def test_every_runner_gives_the_same_bytes(
    tmp_path: Path, beam_arguments: tuple[str, ...], changes: dict[str, Any]
) -> None:
    corpus, reference = reference_dataset()
    align(align_options(corpus, tmp_path, *beam_arguments, **changes))
    assert digests(tmp_path) == digests(reference)


def test_how_files_are_cut_into_tasks_does_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus, reference = reference_dataset()
    num_tasks = []

    def plan_small_tasks(files: Any) -> list[str]:
        tasks = plan_tasks(files, task_bytes=3000)
        num_tasks.append(len(tasks))
        return tasks

    monkeypatch.setattr(dataset_making, "plan_tasks", plan_small_tasks)
    align(align_options(corpus, tmp_path))
    assert num_tasks[0] > 50
    assert digests(tmp_path) == digests(reference)


def test_no_pickle_in_the_data_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(value: object, *_: object) -> bytes:
        raise AssertionError(f"pickled {type(value)}")

    trap = SimpleNamespace(**{**vars(pickle), "dumps": refuse, "loads": refuse})
    monkeypatch.setattr(coders, "pickle", trap)
    with pytest.raises(AssertionError, match="pickled"):  # the trap works
        _group_a_path()
    corpus, reference = reference_dataset()
    align(align_options(corpus, tmp_path, shuffle="runner"))
    assert digests(tmp_path) == digests(reference)


@pytest.mark.slow
def test_the_command_runs_by_itself_and_does_nothing_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus, reference = reference_dataset()
    arguments = command_line(align_options(corpus, tmp_path / "out"))
    command = [sys.executable, "-m", "beam_jobs.align", *arguments, "--workers=2"]
    first = subprocess.run(command, capture_output=True, text=True, check=True)
    assert f"aligned {len(corpus.texts)} documents" in first.stdout
    assert digests(tmp_path / "out") == digests(reference)
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert "is finished: the same input and options made it; nothing to do" in shown
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == times


def test_the_output_of_another_configuration_is_not_touched(tmp_path: Path) -> None:
    corpus, _ = reference_dataset()
    small = small_corpus(tmp_path / "corpus", a=[json_line("a", "some text")])
    output = tmp_path / "out"
    align(align_options(small, output))
    before = digests(output)
    for changes, difference in {
        ("keep_text", True): "--keep-text is not given there and true here;",
        ("input", (str(corpus.folder / PATTERN),)): "--input is 1 file of 33 B .* and 9 files of ",
        ("student", "bytes"): f"--student is {output}/tokenizers/student .* and bytes .SHA-256 ",
        ("student_bos", "none"): "the token of --student-bos or .* is not given there and {",
    }.items():
        with pytest.raises(
            OptionsError, match=f"with a different configuration: {difference}"
        ) as caught:
            align(align_options(small, output, **dict([changes])))
        assert ";" not in str(caught.value).split("configuration: ")[1].partition("; add")[0]
        (hint,) = hints_of(caught.value)
        assert hint == f"hint: mv {output} {output}.old  # then run the same command again"
    assert digests(output) == before
    (output / "manifest.json").unlink()
    with pytest.raises(OptionsError, match="holds 2 files such as corpus-000000-of-000001"):
        align(align_options(small, output))


@pytest.mark.parametrize("name", ["data.json", "data.toml", "manifest.json"])
def test_a_folder_is_a_folder_whatever_its_name(tmp_path: Path, name: str) -> None:
    corpus = small_corpus(tmp_path / "corpus", a=[json_line("a", "some text")])
    output = tmp_path / name
    made = align(align_options(corpus, output, student="bytes", teacher="bytes"))
    for named in (output, output / "manifest.json"):
        assert open_dataset(named).location == str(output)
        assert not validate_dataset(str(named)).findings
    assert [entry.path for entry in Reading(str(output)).mixture().datasets] == [str(output)]
    again = AlignOptions((str(output),), str(tmp_path / "again"))
    assert align(again).totals == made.totals


def test_a_corpus_without_documents(tmp_path: Path) -> None:
    blank = small_corpus(tmp_path / "corpus", a=[b"\n", b"  \n"])
    with pytest.raises(InputError, match="the input holds no document"):
        align(align_options(blank, tmp_path / "blank"))
    assert [path.name for path in (tmp_path / "blank").iterdir()] == ["tokenizers"]


def test_the_output_must_not_be_read_as_input(tmp_path: Path) -> None:
    corpus = small_corpus(tmp_path / "corpus", a=[json_line("a", "text")])
    link = tmp_path / "link"
    link.symlink_to(corpus.folder)
    for output in (corpus.folder, link):
        with pytest.raises(InputError, match="lie in --output"):
            align(align_options(corpus, output))
    dataset = tmp_path / "dataset"
    align(align_options(corpus, dataset, student="bytes", teacher="bytes"))
    link.unlink()
    link.symlink_to(dataset)
    for read, written in ((dataset, link), (link, dataset), (link, dataset / "inside")):
        with pytest.raises(InputError, match="can't be written over itself"):
            align(AlignOptions((str(read),), str(written)))


def test_control_strings_in_texts_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The student's is `<s>`, the teacher's `<|endoftext|>`; of one text the first counts."""
    texts = ["plain", "a <s> b", "<s>", "<|endoftext|> <s>", "< s > |endoftext|"]
    lines = [json_line(n, text) for n, text in enumerate(texts)]
    given = align_options(small_corpus(tmp_path / "c", a=lines[:3], b=lines[3:]), tmp_path / "out")
    assert main(command_line(given)) == 0
    told = "control strings 3 texts with one, most often <s>, read as plain characters"
    assert told in capsys.readouterr().out
    plain = align_options(small_corpus(tmp_path / "p", a=lines[:1]), tmp_path / "plain")
    honoured = command_line(replace(given, output=str(tmp_path / "h"), student="bytes"))
    for command in (command_line(plain), [*honoured, "--special-strings=honoured"]):
        assert main(command) == 0
        assert "control strings" not in capsys.readouterr().out


def test_options_of_clusters_do_nothing_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    corpus = small_corpus(tmp_path / "c", a=[json_line("a", "text")])
    given = command_line(align_options(corpus, tmp_path / "out"))
    assert main([*given, "--num-workers", "2"]) == 2
    assert "hint: --workers " in capsys.readouterr().err
    assert main([*given, "--num_workers=2", "--region", "x", "--s3_region_name=y"]) == 0
    assert "--num_workers, --region: no effect on this machine" in caplog.text
    assert "for processes here, --workers N" in caplog.text


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--input=none-*.jsonl", "--input .*none-.* matches no file"),
        ("--student=no/such/folder", "no/such/folder"),
        ("--shard-bytes=1", "--shard-bytes 1 is below"),
        ("--name=a/b", '--name "a/b" must be letters'),
        ("--max-document-bytes=4GiB", "--max-document-bytes 4294967296 is not in"),
        (
            "--text-field=body",
            r'none of the first 1 documents has a field "body" \(name it with --text-field or '
            r"--text-template\); the first one is a.jsonl#0: no "
            '"body" in the record, which has "id" and "text": --text-field text has the longest',
        ),
        ("--output=", "--output is empty; name the dataset's folder"),
        ("--input=", "--input names no file; give a path or a glob"),
        ("--dry_run=true", "--dry_run isn't an option of vocag align"),
        ("--runner=NoSuchRunner", "NoSuchRunner"),
        ("--no-such-thing", "neither align nor Beam knows --no-such-thing"),
        ("stray.jsonl", "neither align nor Beam knows stray.jsonl; quote globs"),
    ],
)
def test_a_wrong_command_is_one_line_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], argument: str, message: str
) -> None:
    corpus = small_corpus(tmp_path / "corpus", a=[json_line("a", "text")])
    given = command_line(align_options(corpus, tmp_path / "out"))
    given = [each for each in given if not each.startswith(argument.partition("=")[0] + "=")]
    assert main([*given, argument]) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if "vocag align:" in line]
    assert len(errors) == 1
    assert re.search(message, errors[0])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("argument", "hint"),
    [
        ("--shard-byte=7", "--shard-bytes  # or see vocag align --help"),
        ("--keep_text", "--keep-text  # or see vocag align --help"),
        ("--runnr=DirectRunner", "--runner  # or see vocag align --help"),
        ("--xyzzy", "vocag align --help"),
        ("--direct_num_workers=many", "vocag align --help"),
    ],
)
def test_an_unknown_option_or_value_ends_in_a_hint(
    capsys: pytest.CaptureFixture[str], argument: str, hint: str
) -> None:
    arguments = ["--input=a", "--output=b", "--student=s", "--teacher=t", argument]
    assert main(arguments) == 2
    message, last = capsys.readouterr().err.splitlines()
    assert message.startswith("vocag align: error: ")
    assert argument.partition("=")[0] in message
    assert last == f"hint: {hint}"


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("7", 7), ("256MiB", 256 << 20), ("1.5 GB", 1_500_000_000), ("2k", 2000)],
)
def test_sizes(text: str, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes


def test_the_main_session_is_never_saved() -> None:
    options = make_beam_options(["--save_main_session", "--runner=DirectRunner"])
    assert options.get_all_options()["save_main_session"] is False


def _group_a_path() -> None:
    pipeline = beam.Pipeline(runner="FnApiRunner", options=PipelineOptions([]))
    _ = pipeline | beam.Create([(0, Path())]) | beam.GroupByKey()
    pipeline.run()
