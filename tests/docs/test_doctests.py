"""The examples of the docstrings: those that stand alone are run, the others' calls must fit.

An example stands alone if it or its module defines every name that it uses. Where one speaks of
things that only the reader has (`student_losses`, `manifest`), and where its line ends with
`# doctest: +SKIP` because it needs a dataset, a file or the hub, it shows a call: nothing is run,
but the call must be one that the function takes.
"""

import ast
import builtins
import importlib
import inspect
from collections.abc import Iterator
from doctest import ELLIPSIS, SKIP, DocTest, DocTestFinder, DocTestRunner
from functools import cache
from pathlib import Path

import pytest

PACKAGES = ("schemas", "vocag", "pipeline", "beam_jobs")
ROOT = Path(__file__).parents[2]
MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for package in PACKAGES
    for path in sorted((ROOT / package).rglob("*.py"))
    if ">>> " in path.read_text("utf-8")
]


@pytest.mark.parametrize("module", MODULES)
def test_examples_that_stand_alone_do_what_they_say(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # some write files
    for test in find_examples(module)[True]:
        told: list[str] = []
        result = DocTestRunner(optionflags=ELLIPSIS).run(test, out=told.append)
        assert result.failed == 0, "".join(told)
        assert result.attempted == len(test.examples)


@pytest.mark.parametrize("module", MODULES)
def test_calls_that_are_only_shown_fit_what_they_call(module: str) -> None:
    for test in find_examples(module)[False]:
        name = name_in_use(test)
        assert name in {last_name(node) for node in walk(test)}, f"{test.name} does not show it"
        for call in walk(test):
            if isinstance(call, ast.Call) and last_name(call.func) == name:
                require_fit(find_object(test), call, test.name)


def test_most_examples_are_run() -> None:
    found = [find_examples(module) for module in MODULES]
    assert sum(len(examples[True]) for examples in found) >= 60
    assert any(examples[False] for examples in found)


@cache
def find_examples(module: str) -> dict[bool, list[DocTest]]:
    """Import a module, and divide its docstrings by whether their examples stand alone."""
    try:
        imported = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] in PACKAGES:
            raise
        pytest.skip(f"{module} needs {error.name}")
    # Not what torch.compile leaves in a module where another test has used it.
    found = (t for t in DocTestFinder().find(imported, module) if "__resume_at_" not in t.name)
    tests = [test for test in found if test.examples]
    return {alone: [t for t in tests if stands_alone(t) is alone] for alone in (True, False)}


def stands_alone(test: DocTest) -> bool:
    """Return whether a docstring's examples use only names that they or their module define."""
    if any(example.options.get(SKIP) for example in test.examples):
        return False
    nodes = list(walk(test))
    names = [node for node in nodes if isinstance(node, ast.Name)]
    arguments = {node.arg for node in nodes if isinstance(node, ast.arg)}
    imported = {
        (alias.asname or alias.name).split(".")[0]
        for node in nodes
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    defined = {name.id for name in names if isinstance(name.ctx, ast.Store)} | arguments | imported
    return {name.id for name in names} <= defined | test.globs.keys() | vars(builtins).keys()


def find_object(test: DocTest) -> object:
    """Return what a docstring documents."""
    value: object = importlib.import_module(str(test.globs["__name__"]))
    for part in test.name.removeprefix(f"{test.globs['__name__']}.").split("."):
        value = inspect.getattr_static(value, part)
    return value.__func__ if isinstance(value, classmethod | staticmethod) else value


def name_in_use(test: DocTest) -> str:
    """Return the name under which an example shows what it documents."""
    *_, owner, name = test.name.split(".")
    return owner if name in ("__init__", "forward") else name


def walk(test: DocTest) -> Iterator[ast.AST]:
    for example in test.examples:
        yield from ast.walk(ast.parse(example.source))


def last_name(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def require_fit(documented: object, call: ast.Call, name: str) -> None:
    """Fail where a function does not take the arguments that a call gives it."""
    assert callable(documented), f"{name} is called, but isn't a function"
    signature = inspect.signature(documented)
    bound = next(iter(signature.parameters), "") in ("self", "cls")
    given = [*([None] if bound else []), *call.args]
    named = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
    open_ended = len(named) < len(call.keywords) or any(isinstance(a, ast.Starred) for a in given)
    try:
        (signature.bind_partial if open_ended else signature.bind)(*given, **named)
    except TypeError as error:
        raise AssertionError(f"{name} is shown as {ast.unparse(call)}: {error}") from error
