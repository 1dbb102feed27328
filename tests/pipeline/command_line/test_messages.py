"""Every message of the library that names a command or an option names one that there is."""

import argparse
import ast
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from pipeline.command_line.commands import COMMANDS, run_command
from tests.support.options import Accepted, stop_after_options

ROOT = Path(__file__).parents[3]
FILES = [
    path
    for part in ("schemas", "vocag", "pipeline", "beam_jobs", "megatron_plugin")
    for path in sorted((ROOT / part).rglob("*.py"))
]
OTHERS = {
    *("--force-reinstall", "--no-deps"),  # pip's
    *("--debug", "--version"),  # vocag's own
    *("--include", "--local-dir", "--private", "--revision", "--search", "--type"),  # hf
    *("--nproc-per-node", "--max-restarts"),  # torchrun
    *("--logprobs-mode", "--max-logprobs", "--max-model-len", "--served-model-name"),  # vLLM
    "--shm-size",  # Docker's
    "--dask_client_address",  # Beam's, if its Dask runner is imported
    *("--direct_num", "--direct_running", "--vocag", "--no"),  # how several options begin
    "--no-NAME",
}
"""Options that no parser of ours or of the trainers knows."""


NOTHING: Mapping[str, str] = {}


def texts() -> Iterator[tuple[str, str]]:
    """Yield each text but docstrings, with 1 for what is put into it, and its place."""
    for path in FILES:
        tree = ast.parse(path.read_text("utf-8"))
        inner = {id(part) for node in ast.walk(tree) for part in _parts_of(node)}
        named = {
            node.targets[0].id: rendered(node.value)
            for node in tree.body
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        }
        for node in ast.walk(tree):
            # Not a page's style, in which colours are named like options.
            if id(node) not in inner and (text := rendered(node, named)) and "var(--" not in text:
                yield text, f"{path.relative_to(ROOT)}:{node.lineno}"  # type: ignore[attr-defined]


def _parts_of(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what isn't a text of its own: docstrings, and the parts of f-strings."""
    if isinstance(node, ast.Expr):
        yield node.value
    if isinstance(node, ast.JoinedStr):
        yield from (part for part in ast.walk(node) if part is not node)


def rendered(node: ast.AST, named: Mapping[str, str] = NOTHING) -> str:
    """Return a text with a module's own texts put in, and 1 for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value.replace("{}", "1")
    if isinstance(node, ast.JoinedStr):
        return "".join(rendered(part, named) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return rendered(node.value, named) or "1"
    if isinstance(node, ast.Name):
        return named.get(node.id, "")
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "quote":
        return shlex.quote(rendered(node.args[0], named) or "1")
    return ""


TEXTS = list(texts())
COMMANDS_TO_PASTE = sorted({text for text, _ in TEXTS if re.match(r"vocag [a-z-]+ (1|--)", text)})
_OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*\w")


def test_the_walk_finds_what_is_there() -> None:
    assert len(COMMANDS_TO_PASTE) >= 3
    assert any("vocag score 1 --teacher" in text for text in COMMANDS_TO_PASTE)
    assert sum(bool(_OPTION.search(text)) for text, _ in TEXTS) > 150


@pytest.mark.parametrize("line", COMMANDS_TO_PASTE)
def test_a_command_to_paste_is_accepted(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stop_after_options(monkeypatch)
    with pytest.raises((Accepted, SystemExit)) as ended:
        run_command(shlex.split(line, comments=True)[1:])
    assert getattr(ended.value, "code", 0) == 0  # --help ends the process


def test_a_command_that_is_named_is_one() -> None:
    named = [(name, at) for text, at in TEXTS for name in re.findall(r"run vocag ([\w-]+)", text)]
    assert len(named) > 20
    assert [(name, at) for name, at in named if name not in COMMANDS] == []
    assert [at for text, at in TEXTS if re.search(r"run (python -m )?beam_jobs", text)] == []


@pytest.fixture(scope="module")
def known() -> dict[str, set[str]]:
    """Each command's options, by its name."""
    return {name: options_of(name) for name in COMMANDS}


def options_of(name: str) -> set[str]:
    found: set[str] = set()

    def stop(parser: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        parsers = [parser]
        for each in parsers:
            found.update(each._option_string_actions)
            for action in each._actions:
                if isinstance(action, argparse._SubParsersAction):
                    parsers += action.choices.values()
        raise Accepted

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_known_args", stop)
        with pytest.raises(Accepted):
            run_command([name])
    return found


def test_an_option_of_a_command_is_one(known: dict[str, set[str]]) -> None:
    wrong = []
    for text, at in TEXTS:
        for name, words in re.findall(r"vocag ([a-z-]+)((?: [^\s,;:.()]+)+)", text):
            if name in known:
                own = known[name] | (_beams_options() if name in ("align", "score") else set())
                wrong += [(o, name, at) for o in _OPTION.findall(words) if o not in own]
    assert wrong == []


def test_an_option_that_is_named_is_one(known: dict[str, set[str]]) -> None:
    pytest.importorskip("megatron.training", reason="needs vocag[megatron]")
    if sys.version_info >= (3, 14):
        pytest.skip("Python 3.14's argparse refuses options of Megatron-Core 0.19")
    own = {*OTHERS, *_beams_options(), *_megatrons_options()}.union(*known.values())
    assert [(o, at) for text, at in TEXTS for o in _OPTION.findall(text) if o not in own] == []


def test_what_a_library_refuses_is_named_by_fields() -> None:
    """Commands make options of them; a server's options, and commands to run, stay."""
    parts = ("pipeline/evaluation/", "pipeline/scoring/engines/", "pipeline/models/devices.py")
    parts += ("pipeline/dataset/conditions.py", "pipeline/training/ranks.py")
    told = [(text, at) for text, at in TEXTS if at.startswith(parts) and "command.py" not in at]
    assert len(told) > 300
    named = [(set(_OPTION.findall(text)) - OTHERS, at) for text, at in told if "vocag " not in text]
    assert [(options, at) for options, at in named if options] == []


def _beams_options() -> set[str]:
    from apache_beam.options.pipeline_options import PipelineOptions

    parsers: list[argparse.ArgumentParser] = []
    PipelineOptions([]).get_all_options(add_extra_args_fn=parsers.append)
    return set(parsers[0]._option_string_actions)


def _megatrons_options() -> set[str]:
    from megatron.training.arguments import add_megatron_arguments

    from megatron_plugin.arguments import add_arguments

    parser = argparse.ArgumentParser(allow_abbrev=False)
    return set(add_arguments(add_megatron_arguments(parser))._option_string_actions)
