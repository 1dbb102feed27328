"""Every command that the documentation shows is run on small data, or at least read.

A page's blocks run in their order, in a folder that has what the documents speak of: tiny models
under the names of large ones, a dataset, a corpus. A block that can't run here comes after a
comment that readers don't see, `<!-- not run: REASON -->`; then the real command reads its options.
"""

import argparse
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from packaged_model import find_gguf
from transformers import AutoModelForCausalLM, AutoTokenizer

from beam_jobs.align.inputs.decompression import zstd
from beam_jobs.running.runners import make_beam_options
from pipeline.command_line.commands import COMMANDS, run_command
from tests.support.chats import TWO_TURNS, chat_tokenizer, write_chats, write_tokenizer
from tests.support.datasets import byte_level, make_texts
from tests.support.hf_folders import write_model
from tests.support.options import Accepted, stop_after_options

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES += sorted((ROOT / "evidence").rglob("*.md"))
OTHERS_TEST = ("ten_minutes.md", "evidence.md", "megatron.md", "transfer.md")
"""The first page's commands have a test below, the others' have tests of their own."""

_BLOCK = re.compile(
    r"(?:^<!-- not run: (?P<reason>[^>]+) -->\n)?^```(?:bash|console)\n(?P<text>.*?)^```",
    re.MULTILINE | re.DOTALL,
)
SMALL = {
    **{"--seq-length": "64", "--global-batch-size": "2", "--micro-batch-size": "1"},
    **{"--num-steps": "2", "--evaluate-every": "1", "--checkpoint-every": "1"},
    **{"--export-every": "1", "--warmup-steps": "1"},
}
"""What makes a documented command small; everything else stays as it is written."""
EASIER = {
    "bits_per_byte between 0.66 and 1.26": "rank < 0.9",
    "largest_window <= 1.78": "largest_window > 0",
    "bits_per_byte between 0.66 and 1.0": "rank < 0.5",
    "bits_per_byte > 1.0": "rank > 0.5",
    "bits_per_byte <= 1.26": "rank < 0.9",
}
TINY_RUN = (
    *("--seq-length", "--global-batch-size", "--micro-batch-size"),
    *("--num-steps", "--warmup-steps"),
)
MODELS = {
    **{"TinyLlama/TinyLlama_v1.1": 400, "models/student": 400, "models/smollm2": 480},
    **{"HuggingFaceTB/SmolLM2-135M": 420, "Qwen/Qwen2.5-Math-7B": 480},
    **{"Qwen/Qwen2.5-Math-1.5B": 480, "models/llama2": 400},
}
CHAT_MODELS = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": (420, "chatml"),
    "Qwen/Qwen2.5-1.5B-Instruct": (480, "qwen2_5"),
}
"""Their vocabularies and templates."""


@dataclass(frozen=True)
class Command:
    """One command line of a page."""

    page: Path
    words: tuple[str, ...]

    def makes(self, dataset: str) -> bool:
        """Say whether it is the command that makes a dataset."""
        return ("--output", dataset) in pairwise(self.words) and "--append" not in self.words

    def __str__(self) -> str:
        return f"{self.page.name}: {' '.join(self.words)[:60]}"


def commands_of(page: Path, block: str) -> list[Command]:
    """Return a block's commands in their order, without comments and what is left out (…)."""
    lines = block.replace("\\\n", " ").splitlines()
    words = [shlex.split(line.removeprefix("$ "), comments=True) for line in lines]
    return [Command(page, tuple(w for w in line if w != "…")) for line in words if line]


COMMANDS_SHOWN = [
    command
    for page in PAGES
    for block in _BLOCK.finditer(page.read_text("utf-8"))
    for command in commands_of(page, block["text"])
]
OURS = [command for command in COMMANDS_SHOWN if command.words[0] == "vocag"]


@pytest.mark.parametrize("command", OURS, ids=str)
def test_a_shown_command_is_accepted(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """By Beam, too, which refuses what it doesn't know."""
    stop_after_options(
        monkeypatch, lambda found: make_beam_options(getattr(found, "beam_arguments", ()))
    )
    with pytest.raises(Accepted):
        run_command(completed(command))


FOLDERS = ("examples/", "evidence/")
SCRIPTS = [c for c in COMMANDS_SHOWN if any(w.startswith(FOLDERS) for w in c.words)]


@pytest.mark.parametrize("command", SCRIPTS, ids=str)
def test_a_shown_script_is_accepted(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    script, *arguments = command.words[[w.startswith(FOLDERS) for w in command.words].index(1) :]
    read = argparse.ArgumentParser.parse_known_args

    def stop(self: Any, *given: Any, **more: Any) -> None:
        _, unknown = read(self, *given, **more)
        assert not unknown
        raise Accepted

    if not script.endswith(".py"):
        assert (ROOT / script).exists()
        return
    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", stop)
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    with pytest.raises(Accepted):
        runpy.run_path(str(ROOT / script), run_name="__main__")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_is_shown_whole_on_the_site(page: Path) -> None:
    """At 1280 px it shows 96 columns of code, and a list needs an empty line before it."""
    text = page.read_text("utf-8")
    blocks = [block["text"] for block in _BLOCK.finditer(text)]
    assert not [line for block in blocks for line in block.splitlines() if len(line) > 96]
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    assert not re.findall(r"^(?!- |\d+\. |[\s#|<]).+\n(?:- |1\. ).*", prose, re.MULTILINE)


def test_targets_and_extras_that_are_shown_exist() -> None:
    text = "\n".join(page.read_text("utf-8") for page in PAGES)
    makefile, setup = (
        (ROOT / "Makefile").read_text("utf-8"),
        (ROOT / "setup.cfg").read_text("utf-8"),
    )
    for target in {c.words[1] for c in COMMANDS_SHOWN if c.words[0] == "make"}:
        assert re.search(rf"^[a-z -]*\b{target}\b[a-z -]*:", makefile, re.MULTILINE), target
    for extra in set(re.findall(r"'\.\[([a-z-]+)\]'", text)):
        assert re.search(rf"^{extra} =$", setup, re.MULTILINE), extra


def test_the_help_of_transfer_trains_as_its_page_does() -> None:
    from pipeline.transfer import command

    [shown] = re.findall(r"^  (vocag train .*)", command._EPILOG.replace("\\\n", " "), re.MULTILINE)
    page = (ROOT / "docs/guides/transfer.md").read_text("utf-8").replace("\\\n", " ")
    assert " ".join(shown.split()) in " ".join(page.split())


@pytest.mark.parametrize("name", ["chats.md", "transfer.md"])
def test_what_is_added_for_few_texts_suits_any_that_fill_a_step(name: str) -> None:
    page = (ROOT / "docs/guides" / name).read_text("utf-8")
    [added] = re.findall(r"add `(--num-steps .*?)`", page)
    options = dict(re.findall(r"(--\S+) (\d+)", added))
    assert options["--num-epochs"] == options["--num-steps"]  # a step may need all rows


def test_every_command_and_runner_is_shown() -> None:
    assert {command.words[1] for command in OURS} >= COMMANDS.keys() - {"compare-scores", "doctor"}
    for runner in ("DataflowRunner", "FlinkRunner", "DaskRunner"):
        assert any(runner in " ".join(command.words) for command in OURS)


def completed(command: Command) -> list[str]:
    """Return a command's arguments, with those that … means."""
    words, left_out = list(command.words[1:]), {}
    if words[0] == "train":
        output = f"runs/{COMMANDS_SHOWN.index(command)}"
        left_out = {"--student": "TinyLlama/TinyLlama_v1.1", "--output": output}
    return [*words, *(w for name in left_out if name not in words for w in (name, left_out[name]))]


def small(command: Command) -> list[str]:
    """Return a command's arguments, with sizes that suit tiny models."""
    words = completed(command)
    for place, word in enumerate(words[:-1]):
        if word in SMALL:
            words[place + 1] = SMALL[word]
    if words[0] == "train":
        words += [w for name in TINY_RUN if name not in words for w in (name, SMALL[name])]
    return words


RUN_HERE = [
    page for page in PAGES if page.name not in OTHERS_TEST and "\nvocag " in page.read_text()
]


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the documents speak of, small."""
    root = tmp_path_factory.mktemp("shelf")
    for seed, (name, size) in enumerate(MODELS.items()):
        write_model(root / name, byte_level(size), seed=seed)
    for seed, (name, (size, template)) in enumerate(CHAT_MODELS.items()):
        write_model(root / name, chat_tokenizer(size), seed=seed)
        write_tokenizer(root / name, chat_tokenizer(size), template)
    write_chats(root / "chats.jsonl", [TWO_TURNS[2 * n : 2 * n + 2] for n in (0, 1) * 8])
    lines = [
        {"id": i, "text": t, "source": "forum", "language": "en", "score": 0.9, "solution": t}
        for i, t in make_texts(40)
    ]
    data = "".join(json.dumps(line) + "\n" for line in lines).encode()
    for folder in ("corpus", "corpus/web", "corpus/math", "corpus/code", "crawl", "new"):
        (root / folder).mkdir()
        own = data.replace(b"doc-0-", f"{folder}-".encode())
        (root / folder / "part.jsonl.zst").write_bytes(zstd.compress(own))
    for name in ("corpus.jsonl", "math.jsonl"):
        (root / name).write_bytes(data)
    (root / "text.txt").write_text("Two even numbers have an even sum.")
    (root / "takedowns.txt").write_text("corpus-3\n")
    models = ("--student", "TinyLlama/TinyLlama_v1.1", "--teacher", "Qwen/Qwen2.5-Math-7B")
    metadata = ("--metadata", "source,language,score", "--keep-text")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        patch.setattr("pipeline.scoring.engines.interface.require_trained", lambda *_, **__: None)
        for name, more in {"plain": (), "described": metadata}.items():
            source = ("--input", "corpus/*.jsonl.zst", "--output", name)
            run(["align", *source, *models, *more, "--quiet"])
            run(["score", name, *models[2:], "--seq-length", "64"])
        for name in ("heldout", "heldout/math", "heldout/gsm8k"):
            shutil.copytree("plain", name, dirs_exist_ok=True)
    return root


def run(line: list[str]) -> None:
    """Run one command in this process; it must end well."""
    try:
        status: object = run_command(line)
    except SystemExit as ended:
        status = ended.code
    assert not status, line


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN_HERE, ids=lambda page: page.name)
def test_a_pages_commands_run(
    page: Path,
    shelf: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Teachers are untrained here: what asks whether one is, accepts them."""
    root = shutil.copytree(shelf, tmp_path / "work")
    monkeypatch.chdir(root)
    for module in ("pipeline.models.running_teacher", "pipeline.scoring.engines.interface"):
        monkeypatch.setattr(f"{module}.require_trained", lambda *_, **__: None)
    text = page.read_text("utf-8")
    for mixture in re.findall(r"^```toml\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        (root / "mixture.toml").write_text(easier(mixture.replace("_000_000_000", "0")))
    for block in _BLOCK.finditer(text):
        commands = [c for c in commands_of(page, block["text"]) if c.words[0] == "vocag"]
        if block["reason"] or not commands:
            continue
        if page.name != "mix.md":  # its blocks go on with what the first one makes
            shutil.rmtree(root / "aligned", ignore_errors=True)
        if page.name != "mix.md" and not commands[0].makes("aligned"):
            described = "source" in block["text"]
            shutil.copytree(root / ("described" if described else "plain"), root / "aligned")
        for command in commands:
            run([easier(word) for word in small(command)])
    if page.name == "chats.md":
        require_an_answer(root / "runs/chats/model")
        [asked] = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
        capsys.readouterr()
        exec(asked, {})
        assert capsys.readouterr().out


def require_an_answer(model: Path) -> None:
    """Ask a trained model as its users do: by its own template, to the end of its turn."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    student = AutoModelForCausalLM.from_pretrained(model)
    chat = [{"role": "user", "content": "What is 2+2?"}]
    asked = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    start = "<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(asked["input_ids"][0]) == start
    assert student.generation_config.eos_token_id is not None
    assert len(student.generate(**asked, max_new_tokens=4)[0]) > asked["input_ids"].shape[1]


@pytest.mark.long
@pytest.mark.slow
def test_the_first_ten_minutes_leave_a_student(tmp_path: Path) -> None:
    """As it is pasted, but for the environment, which is this one, and `make demo`'s corpus."""
    if find_gguf() is None:
        pytest.skip("make test installs the model")
    text = (ROOT / "docs/start/ten_minutes.md").read_text("utf-8").partition("## A teacher")[2]
    blocks = [block["text"] for block in _BLOCK.finditer(text)]
    lines = "".join(blocks).splitlines(keepends=True)
    pasted = "".join(line for line in lines if not line.startswith(("pip ", ". .venv")))
    corpus = "python examples/docstring_corpus.py --packages networkx --output demo/corpus.jsonl\n"
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    program = f'#!/bin/sh\nexec "{sys.executable}" %s "$@"\n'
    for name, start in {"python": "", "vocag": "-m vocag"}.items():
        (tmp_path / name).write_text(program % start)
        (tmp_path / name).chmod(0o755)
    paths = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    command = ["bash", "-euc", corpus + pasted]
    subprocess.run(command, cwd=tmp_path, env=os.environ | paths, check=True)
    assert (tmp_path / "demo/run/model/tokenizer.json").exists()
    assert (tmp_path / "demo/preview.html").stat().st_size > 10_000


def easier(condition: str) -> str:
    """Return a condition that untrained teachers can meet."""
    for asked, met in EASIER.items():
        condition = condition.replace(asked, met)
    return condition
