"""No model, configuration or tokenizer is loaded with code from its own folder."""

import ast
from pathlib import Path

import pytest

FOLDERS = (
    "vocag",
    "pipeline",
    "beam_jobs",
    "megatron_plugin",
    "examples",
    "benchmarks",
    "evidence",
)
LOADERS = {"from_pretrained", "from_config"}


def trusting_calls(source: str) -> list[int]:
    """Return the lines of calls that load something of transformers and may run its code."""
    tree = ast.parse(source)
    own = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call) and _safe(node)}
    named = (n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr in LOADERS)
    return sorted(node.lineno for node in named if id(node) not in own)


def _safe(call: ast.Call) -> bool:
    given = {one.arg: one.value for one in call.keywords}
    trusted = given.get("trust_remote_code")
    return isinstance(trusted, ast.Constant) and trusted.value is False


def test_nothing_is_loaded_with_its_own_code(repository: Path) -> None:
    """Pass trust_remote_code=False, or use `pipeline.models.weights`."""
    sources = [path for folder in FOLDERS for path in sorted((repository / folder).rglob("*.py"))]
    assert sources
    found = {str(path): trusting_calls(path.read_text("utf-8")) for path in sources}
    assert {path: lines for path, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    ("call", "found"),
    [
        ("AutoConfig.from_pretrained(x)", [1]),
        ("AutoConfig.from_pretrained(x, trust_remote_code=True)", [1]),
        ("cast(Any, AutoModelForCausalLM).from_config(x, **more)", [1]),
        ("load = AutoTokenizer.from_pretrained", [1]),
        ("AutoConfig.from_pretrained(x, trust_remote_code=False)", []),
    ],
)
def test_such_a_call_is_found(call: str, found: list[int]) -> None:
    assert trusting_calls(call) == found
