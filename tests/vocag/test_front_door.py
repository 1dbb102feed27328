"""What users import: every name is there, is light, and is what documents and examples use."""

import ast
import re
from pathlib import Path
from pkgutil import resolve_name
from textwrap import dedent

import pytest

import vocag
from pipeline.command_line.installed import install

ROOT = Path(__file__).parents[2]
PARTS = {"vocag", "pipeline", "schemas", "beam_jobs", "megatron_plugin"}


def imports(source: str) -> set[tuple[str, str]]:
    """Modules and names of every `from module import name` of ours."""
    return {
        (node.module, alias.name)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
        if node.module.partition(".")[0] in PARTS
    }


def documented() -> list[tuple[str, str, str]]:
    """Page, module and name of every import in a Python block of a page."""
    pages = [ROOT / "README.md", ROOT / "schemas/README.md", *sorted(ROOT.glob("docs/**/*.md"))]
    return [
        (page.name, module, name)
        for page in pages
        for block in re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL)
        for module, name in sorted(imports(dedent(block)))
    ]


@pytest.mark.parametrize("name", vocag.__all__)
def test_a_name_is_what_it_is_where_it_is_written(name: str) -> None:
    found = getattr(vocag, name)
    assert found.__name__ == name
    assert found.__doc__
    assert found.__module__.partition(".")[0] in PARTS - {"vocag"}
    assert vars(vocag)[name] is found  # kept


def test_type_checkers_see_what_the_interpreter_finds() -> None:
    declared = imports((ROOT / "vocag/__init__.py").read_text("utf-8"))
    seen = {name: module for module, name in declared if name in vocag.__all__}
    assert seen == vocag._HOMES
    assert set(vocag.__all__) <= set(dir(vocag))


def test_the_reference_has_every_name() -> None:
    """The site reads the page's paths without importing them: each must be the name's object."""
    page = (ROOT / "docs/reference/python.md").read_text("utf-8")
    shown = re.findall(r"^::: (\S+)$", page, re.MULTILINE)
    assert sorted(path.rpartition(".")[2] for path in shown) == vocag.__all__
    for path in shown:
        assert resolve_name(path) is getattr(vocag, path.rpartition(".")[2])


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(AttributeError, match="no attribute 'align_batches'"):
        vocag.align_batches  # noqa: B018


def test_a_library_that_is_missing_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(module: str) -> None:
        raise ModuleNotFoundError(f"no {module}", name="torch")

    monkeypatch.setattr(vocag, "import_module", missing)
    monkeypatch.delitem(vars(vocag), "AlignedRows", raising=False)
    with pytest.raises(ModuleNotFoundError) as caught:
        vocag.AlignedRows  # noqa: B018
    assert caught.value.__notes__ == [f"hint: {install('torch')}"]


def test_documents_import_by_the_front_door() -> None:
    shown = documented()
    assert {module for _, module, _ in shown} == {"vocag", "megatron_plugin"}
    assert {name for _, module, name in shown if module == "vocag"} <= set(vocag.__all__)
    assert len({page for page, _, _ in shown}) >= 4


@pytest.mark.parametrize(
    "path",
    [*sorted((ROOT / "examples").rglob("*.py")), *sorted((ROOT / "evidence").rglob("*.py"))],
    ids=lambda p: p.stem,
)
def test_examples_import_by_the_front_door(path: Path) -> None:
    text = path.read_text("utf-8")
    found = imports(text)
    assert not [name for module, name in found if name in vocag.__all__ and module != "vocag"]
    if path.stem in ("accelerate_loop", "fsdp2_loop"):  # which users copy
        assert not found
        named = re.findall(r"\bvocag\.(\w+)", text)
        assert len(named) >= 5
        assert set(named) <= set(vocag.__all__)
