"""How commands fail: the message, a hint on the last line, a traceback with --debug only."""

import errno
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from runpy import run_module
from types import SimpleNamespace

import pytest

from pipeline.command_line import failures
from pipeline.command_line.commands import COMMANDS, main
from pipeline.command_line.failures import hinted, hints_of, naming, report
from pipeline.command_line.folder_lock import hold_folder
from pipeline.command_line.installed import install
from pipeline.dataset.chosen_documents import WhereError  # type: ignore[attr-defined]
from pipeline.dataset.dataset_reading import read_manifest
from pipeline.dataset.score_files import find_scores, list_scores
from pipeline.methods.method import WHICH_METHOD, Method
from pipeline.scoring.teaching import Teaching
from pipeline.streaming import AlignedRows, Reading, StreamConfig
from pipeline.tokenization import TokenizerError, load_tokenizer
from pipeline.training.config import TrainConfig
from schemas.errors import DatasetError


def run(*arguments: str) -> int:
    """Run the command as a process would, and return its status."""
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    return int(ended.value.code or 0)


@pytest.fixture(autouse=True)
def _no_debug(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "with_traceback", False)


@pytest.mark.parametrize("name", COMMANDS)
def test_no_command_shows_a_traceback_unless_asked(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of an error that nobody expected, too; the hint runs the same with a traceback."""

    def broken(_: list[str]) -> int:
        raise KeyError("odd")

    monkeypatch.setattr(
        "pipeline.command_line.commands.import_module", lambda _: SimpleNamespace(main=broken)
    )
    assert run(name, "a b", "--x", "1") == 1
    message, hint = capsys.readouterr().err.splitlines()
    assert message == f"vocag {name}: unexpected KeyError: 'odd'"
    assert hint.startswith(f"hint: vocag --debug {name} 'a b' --x 1 ")
    assert run("--debug", name, "a b", "--x", "1") == 1
    lines = capsys.readouterr().err.splitlines()
    assert "Traceback (most recent call last):" in lines
    assert lines[-2:] == [message, hint]


def test_debug_shows_where_an_expected_error_arose(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo" / "aligned").mkdir(parents=True)
    (tmp_path / "demo" / "aligned" / "manifest.json").touch()
    assert run("explore", "info", "demo") == 2
    message, hint = capsys.readouterr().err.splitlines()
    assert message.startswith("vocag explore: demo/manifest.json does not exist")
    assert hint == "hint: demo/aligned  # a dataset"
    assert run("explore", "info", "demo", "--debug") == 2
    lines = capsys.readouterr().err.splitlines()
    assert "Traceback (most recent call last):" in lines
    assert lines[-2:] == [message, hint]


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("train --data a --studnt s --student s --output o --method full", "--student"),
        ("train --data a --method full", "vocag train --help"),
        ("train --data a --studnt s --output o --method full", "--student"),
        ("align --input a --runner x --student s --outptu=o", "--output"),
        ("explore inof aligned", "info"),
        ("explore scatter aligned", "vocag explore --help"),
        ("train --data a --student s --output o --method full --schedule cosin", "cosine"),
        ("train --data a --student s --output o --method taecher", "teacher"),
        ("evaluate s --output o --tasks gsm8", "gsm8k"),
        ("validate aligned --workers many", "vocag validate --help"),
        ("doctor --jsn", "--json"),
        ("explore info aligned --bi source", "--by"),
    ],
)
def test_an_option_that_is_not_there(
    line: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two lines and what is missing, not a page of options."""
    assert run(*line.split()) == 2
    message, *missing, last = capsys.readouterr().err.splitlines()
    required = message.partition("; ")[0] if "are required" in message else ""
    assert len(missing) == required.count(" --")
    assert re.match(rf"vocag {line.split()[0]}( info)?: ", message)
    assert last == f"hint: {hint}"


@pytest.mark.parametrize(
    ("line", "named", "hint"),
    [
        ("transfer m --text t --output o --tokeniser x", "--tokeniser", "--tokenizer"),
        ("transfer m --text t --tokenizer x --text-feild=y", "--text-feild", "--text-field"),
        ("transfer m --tokeniser x --outptu o", "--tokeniser --outptu", "--tokenizer --output"),
        ("transfer m --text t --output o --zoo", "--zoo", "vocag transfer --help"),
        ("validate --tokenizer", "--tokenizer", "--tokenizers"),
        ("explore info --bi=source", "--bi", "--by"),
        ("align --input a --runner x --student s --outptu=o", "--outptu", "--output"),
        ("align --input a --runner x --student s", "", "vocag align --help"),
        ("explore --id=x", "", "vocag explore --help"),
    ],
)
def test_an_unknown_option_beside_a_missing_one_is_named_too(
    line: str, named: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not where it may be another parser's: Beam's, or a subcommand's."""
    assert run(*line.split()) == 2
    message, *lines, last = capsys.readouterr().err.splitlines()
    required, _, unknown = message.partition("; unrecognized arguments: ")
    assert "the following arguments are required: " in required
    assert (unknown, last) == (named, f"hint: {hint}")
    assert [line.split()[0].rstrip(":") for line in lines] == re.findall(r"--[\w-]+", required)


def test_a_method_is_chosen_not_taken(capsys: pytest.CaptureFixture[str]) -> None:
    """None is right for all, so none is the default: three lines say what each is for."""
    assert run("train", "--data", "a", "--student", "s", "--output", "o") == 2
    message, *lines, hint = capsys.readouterr().err.splitlines()
    assert message.endswith("the following arguments are required: --method")
    assert lines == [f"  {line}" for line in WHICH_METHOD.splitlines()]
    assert (len(lines), hint) == (3, "hint: vocag train --help")


@pytest.mark.parametrize(
    ("module", "command", "mistake"),
    [
        ("beam_jobs.align", "align", ["--input", "a", "--output", "b", "--shard-bytes", "1"]),
        ("beam_jobs.score", "score", ["a", "--seq-length", "8", "--threads", "-1"]),
        ("pipeline.training", "train", ["--data=a", "--student=s", "--output=o", "--method=alm"]),
        ("megatron_plugin.export_command", "export", ["nowhere", "student"]),
    ],
)
def test_a_command_s_module_is_the_command(
    module: str,
    command: str,
    mistake: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`python -m beam_jobs.align`, such as clusters start: no traceback, but with --debug."""

    def error_of(*arguments: str) -> str:
        monkeypatch.setattr("sys.argv", [module, *arguments])
        started = module if module.endswith("_command") else f"{module}.__main__"
        monkeypatch.delitem(sys.modules, started, raising=False)  # as in a process of its own
        with pytest.raises(SystemExit) as ended:
            run_module(module, run_name="__main__")
        assert ended.value.code == 2
        return capsys.readouterr().err

    message = error_of(*mistake)
    assert message.startswith(f"vocag {command}: ")
    assert "Traceback" not in message
    for place in (0, len(mistake)):
        debugged = error_of(*mistake[:place], "--debug", *mistake[place:])
        assert debugged.startswith("Traceback (most recent call last):")
        assert debugged.endswith(message)


@pytest.mark.parametrize("command", ["align", "score", "train", "remove"])
def test_a_path_that_is_not_utf_8_is_refused_before_any_work(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--output=caf\udce9"])
    assert ended.value.code == 2
    message, hint = capsys.readouterr().err.splitlines()
    assert message == f'vocag {command}: "--output=caf\\udce9" isn\'t UTF-8: rename what it names'
    assert hint.startswith("hint: locale")


def test_a_name_that_no_command_has(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("trian") == 2
    assert capsys.readouterr().err.splitlines()[-1] == "hint: vocag train --help"
    assert run("xyzzy") == 2
    assert capsys.readouterr().err.splitlines()[-1] == "hint: vocag --help"


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("align --input dta.jsonl --output o --student bytes --teacher bytes", "data.jsonl"),
        ("align --input fodler/*.x --output o --student bytes --teacher bytes", "folder"),
        ("align --input data.jsonl --output o --student ./toknizer --teacher bytes", "./tokenizer"),
        ("remove dta --ids data.jsonl", "data  # a dataset"),
        ("remove data --ids dta.jsonl", "data.jsonl"),
        ("validate dta", "data  # a dataset"),
        ("validate data/manifest.jsn", "data  # a dataset"),
        ("validate data/manifest.json/x", "data  # a dataset"),
        ("explore plan mixtur.toml --seq-length 8", "mixture.toml"),
        ("overlap dta --output o", "data  # a dataset"),
        ("overlap data --data fodler --output o", "folder"),
        ("score dta --teacher a --seq-length 8", "data  # a dataset"),
        ("train --data dta --student a --output o --method full", "data  # a dataset"),
        ("compare-scores dta a b", "data  # a dataset"),
        ("export fodler new", "folder"),
    ],
)
def test_what_is_missing_has_neighbours(
    copied: Path,
    line: str,
    hint: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The nearest name, or else `ls` of a folder, in every command that reads a path."""
    monkeypatch.chdir(copied)
    for name in ("data.jsonl", "mixture.toml"):
        (copied / name).write_text('{"id": "a", "text": "b"}')
    for name in ("folder", "tokenizer"):
        (copied / name).mkdir()
    assert run(*line.split()) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    expected = hint if "#" in hint else f"{hint}  # the nearest name"
    assert last in (f"hint: {expected}", f"hint: {copied}/{expected}")


def test_a_page_in_a_missing_folder_names_the_folder(
    copied: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(copied)
    assert run("explore", "preview", "data", "--html", "pages/a.html") == 2
    said = capsys.readouterr().err.splitlines()
    assert said == ["vocag explore: pages/a.html: there is no folder pages", "hint: ls ."]


def test_a_hint_outlives_what_wraps_its_error() -> None:
    error = hinted(ValueError("inner"), "vocag x\nrm \x1b[0m")
    outer, another = DatasetError("outer"), DatasetError("another")
    outer.__cause__ = another.__context__ = error
    assert hints_of(outer) == hints_of(another) == ["hint: vocag x rm \\x1b[0m"]
    another.__suppress_context__ = True  # raised "from None"
    assert hints_of(another) == []


ROWS = " --seq-length 2048  # student tokens per row in training"


def slow_tokenizer(root: Path) -> object:
    (root / "slow").mkdir()
    (root / "slow" / "vocab.txt").touch()
    return load_tokenizer(str(root / "slow"))


def where(root: Path) -> object:
    reading = Reading(str(root / "data"), where="num_student_tokenz > 5")
    return AlignedRows(StreamConfig(reading, seq_length=64))


def untaught(root: Path, method: str = "teacher") -> object:
    data = Reading(str(root / "data"))
    return TrainConfig(data=data, student="s", output=root, method=Method(method), seq_length=96)


def untaught_without_scores(root: Path) -> object:
    for path in (root / "data").glob("teacher-*.json"):
        path.unlink()
    return untaught(root)


def rows_without_scores(root: Path) -> object:
    reading, teaching = Reading(str(root / "data")), Teaching(stored_losses="qwen")
    return AlignedRows(StreamConfig(reading, seq_length=96, teaching=teaching))


def untaught_without_data(root: Path) -> object:
    data = Reading(str(root / "dat"))
    return TrainConfig(data=data, student="s", output=root, method=Method("teacher"))


@pytest.mark.parametrize(
    ("act", "kind", "hint"),
    [
        (lambda root: read_manifest(str(root / "dat")), DatasetError, "{}/data  # a dataset"),
        (
            lambda root: find_scores("qwen", str(root / "data")),
            DatasetError,
            "vocag score {}/data --teacher qwen" + ROWS,
        ),
        (
            lambda root: find_scores("-it's", str(root / "data")),
            DatasetError,
            "vocag score {}/data --teacher './-it'\"'\"'s'" + ROWS,
        ),
        (
            lambda root: find_scores("", str(root / "data"), with_distributions=True),
            DatasetError,
            "vocag score {}/data --teacher MODEL --top-k 8" + ROWS,
        ),
        (
            slow_tokenizer,
            TokenizerError,
            "python -c 'from transformers import AutoTokenizer; AutoTokenizer.from_pretrained("
            "'\"'\"'{0}/slow'\"'\"').save_pretrained('\"'\"'{0}/slow-fast'\"'\"')'",
        ),
        (where, WhereError, "where='num_student_tokens > 5'"),
        (untaught, ValueError, 'stored_losses=""'),
        (
            partial(untaught, method="distill"),  # the scores have no distributions
            ValueError,
            "vocag score {}/data --teacher MODEL --top-k 8 --seq-length 96",
        ),
        (
            untaught_without_scores,
            ValueError,
            "vocag score {}/data --teacher MODEL --seq-length 96",
        ),
        (
            rows_without_scores,
            DatasetError,
            "vocag score {}/data --teacher qwen --seq-length 96",
        ),
        (untaught_without_data, DatasetError, "{}/data  # a dataset"),
    ],
    ids=[
        "dataset",
        "losses",
        "a leading dash",
        "distributions",
        "tokenizer",
        "column",
        "teacher",
        "no distributions",
        "no scores",
        "rows",
        "no data",
    ],
)
def test_what_users_meet_most_ends_in_something_to_paste(
    copied: Path, act: Callable[[Path], object], kind: type[Exception], hint: str
) -> None:
    with pytest.raises(kind) as caught:
        act(copied)
    assert hints_of(caught.value) == ["hint: " + hint.format(copied)]


def test_a_teacher_of_another_path_is_not_scored_again(world: Path) -> None:
    location = str(world / "data")
    (scored,) = list_scores(location)
    name = scored.manifest.source.rpartition("/")[2]
    with pytest.raises(DatasetError, match="there are no scores by teacher") as refused:
        find_scores(f"../{name}/", location)
    fingerprint = scored.manifest.rule.fingerprint[:16]
    assert hints_of(refused.value) == [f"hint: stored_losses={fingerprint}  # if it is that one"]


def test_a_file_where_an_output_is_to_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file/below"):
        with pytest.raises(
            NotADirectoryError, match="file is a file, where a folder is to be"
        ) as e:
            hold_folder(str(folder / ".lock"), str(folder)).__enter__()
        assert hints_of(e.value) == [f"hint: --output {tmp_path}/file-2"]


def test_an_install_line_names_the_checkout(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert install("beam,hf") == f"pip install -e '{repository}[beam,hf]'"
    assert install("") == f"pip install -e {repository}"
    (tmp_path / "site/pipeline/command_line").mkdir(parents=True)
    monkeypatch.setattr(
        "pipeline.command_line.installed.__file__",
        str(tmp_path / "site/pipeline/command_line/installed.py"),
    )
    assert install("hf") == "pip install 'vocag[hf]'"


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.EROFS, "is on a file system that can only be read: name a folder"),
        (errno.ENOSPC, "can't be written, for its disk is full: free some space"),
        (errno.EFBIG, "would be larger than ulimit -f, or its file system, allows: raise it"),
        (errno.EACCES, "is closed to you by its permissions: change them, or name another"),
    ],
)
def test_what_the_system_refuses_is_said_in_words(
    number: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    report("vocag x", OSError(number, os.strerror(number), "data/a.tar"))
    assert capsys.readouterr().err.startswith(f"vocag x: data/a.tar {words}")


def test_a_folder_that_is_gone_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As that of a run that was removed: it was "[Errno 2] No such file or directory"."""
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(FileNotFoundError) as raised:
        Path("output").absolute()
    report("vocag x", raised.value)
    told = "vocag x: the folder where this was started is gone: cd to another\n"
    assert capsys.readouterr().err == told


@pytest.mark.parametrize("where", [(), ("data/a.tar",)])
def test_too_many_open_files_have_a_remedy(
    where: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """As a mapped shard's and a new process's, which name no file."""
    report("vocag x", OSError(errno.EMFILE, os.strerror(errno.EMFILE), *where))
    assert capsys.readouterr().err.endswith(": raise ulimit -n\n")


def test_a_lack_of_temporary_folders_has_a_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/proc/self/nowhere"])
    with pytest.raises(FileNotFoundError) as caught:
        tempfile.gettempdir()
    report("vocag x", caught.value)
    told = "vocag x: No usable temporary directory found in ['/proc/self/nowhere']: free some"
    remedy = " space there, or let TMPDIR name another folder\n"
    assert capsys.readouterr().err == told + remedy


def test_an_error_of_a_write_names_its_file() -> None:
    with (
        pytest.raises(OSError, match=r"No space left on device: 'data/a\.tar'"),
        naming("data/a.tar"),
        open("/dev/full", "w") as full,
    ):
        full.write("a")
    with pytest.raises(FileNotFoundError, match=r": 'nowhere/a'"), naming("data/a.tar"):
        Path("nowhere/a").read_text()


def test_no_error_moves_the_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    escapes = "\x1b]0;pwned\x07\nhint: rm -r /"
    report("vocag x", hinted(ValueError(f"document {escapes}"), f"ls {escapes}"))
    message, hint = capsys.readouterr().err.splitlines()
    assert message == r"vocag x: document \x1b]0;pwned\x07\nhint: rm -r /"
    assert hint == r"hint: ls \x1b]0;pwned\x07 hint: rm -r /"


@pytest.mark.parametrize(
    ("command", "status", "who"),
    [
        ("prints('vocag doctor')(lambda _: ['a', 'b'])", 2, "vocag doctor"),
        ("lambda _: print('a')", 1, "vocag"),  # what is left to the end
        # argparse's own
        ("lambda _: Parser(prog='vocag doctor').parse_args(['-h'])", 1, "vocag doctor"),
        ("lambda _: Parser('vocag doctor', 'a' * 9999).parse_args(['-h'])", 1, "vocag doctor"),
    ],
)
def test_a_full_standard_output_is_said_once(command: str, status: int, who: str) -> None:
    script = (
        "import types\n"
        "from pipeline.command_line import commands\n"
        "from pipeline.command_line.option_parsing import Parser\n"
        "from pipeline.drawing.printing import prints\n"
        f"main = {command}\n"
        "commands.import_module = lambda _: types.SimpleNamespace(main=main)\n"
        "commands.main(['doctor'])\n"
    )
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", script],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    said = "standard output can't be written, for its disk is full: free some space"
    assert (done.returncode, done.stderr) == (status, f"{who}: {said}\n")


@pytest.mark.slow
def test_a_command_outlives_its_readers() -> None:
    """What it says later, logs included, is for nobody, and its status is its own."""
    script = (
        "import logging, sys, types\n"
        "from pipeline.command_line import commands\n"
        "def main(_):\n"
        "    for _ in range(3):\n"
        "        print('a' * 9999, flush=True)\n"
        "        logging.error('b\\x1b')\n"
        "        sys.stderr.write('c')\n"
        "    return 7\n"
        "commands.import_module = lambda _: types.SimpleNamespace(main=main)\n"
        "commands.main(['explore'])\n"
    )
    for stdout, stderr, shown in ((1, 0, r"vocag explore: b\x1b"), (0, 1, "aaa"), (1, 1, None)):
        pipes = [os.pipe(), os.pipe()]
        for (reader, _), is_closed in zip(pipes, (stdout, stderr), strict=True):
            if is_closed:
                os.close(reader)
        process = subprocess.Popen(
            [sys.executable, "-c", script], stdout=pipes[0][1], stderr=pipes[1][1]
        )
        for _, writer in pipes:
            os.close(writer)
        for (reader, _), is_closed in zip(pipes, (stdout, stderr), strict=True):
            if not is_closed:
                with open(reader, encoding="utf-8") as read:
                    assert shown is not None
                    assert shown in read.read()
        assert process.wait() == 7
