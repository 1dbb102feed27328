"""Who may import whom: read from the syntax trees, function bodies included."""

import ast
import subprocess
import sys
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import vocag

PARTS = ("schemas", "vocag", "pipeline", "beam_jobs", "megatron_plugin")
# What each wing may import besides itself, `schemas` and `pipeline.command_line`; the longest name
# that fits a module says which wing it belongs to. docs/architecture.md says what each is.
ALLOWED = {
    "schemas": "",
    "vocag": "",
    # The front door: what users import, by name. Nobody inside the library comes in by it.
    "vocag.__init__": "vocag pipeline.alignment pipeline.batches pipeline.dataset"
    " pipeline.guidance pipeline.losses pipeline.models pipeline.selection_rule"
    " pipeline.streaming pipeline.tokenization pipeline.training pipeline.methods"
    " pipeline.scoring.teaching",
    "pipeline": "",
    "pipeline.command_line": "",
    "pipeline.drawing": "",
    "pipeline.remote": "",
    # What both models' tokens lose: below the choice of tokens, which reads it.
    "pipeline.losses": "",
    "pipeline.guidance": "pipeline.losses pipeline.fractions pipeline.selection_rule",
    "pipeline.tokenization": "pipeline.batches pipeline.compiled pipeline.remote",
    "pipeline.alignment": "pipeline.tokenization pipeline.batches pipeline.compiled",
    "pipeline.chats": "pipeline.tokenization pipeline.alignment pipeline.batches pipeline.compiled",
    "pipeline.distributions": "pipeline.tokenization pipeline.batches pipeline.compiled"
    " pipeline.dataset",
    "pipeline.dataset": "pipeline.chats pipeline.alignment pipeline.tokenization pipeline.batches"
    " pipeline.compiled pipeline.remote",
    "pipeline.dataset.cache": "",
    "pipeline.dataset.dataset_reading": "pipeline.remote",
    "pipeline.dataset.files": "pipeline.dataset.cache pipeline.dataset.dataset_reading",
    "pipeline.packing": "pipeline.compiled pipeline.recent",
    "pipeline.packing.mixture_file": "",
    "pipeline.packing.reading": "pipeline.packing",
    "pipeline.packing.saved_plans": "pipeline.packing pipeline.dataset",
    "pipeline.packing.opening": "pipeline.packing pipeline.dataset",
    "pipeline.models": "pipeline.dataset pipeline.losses pipeline.tokenization pipeline.remote"
    " pipeline.chats.habits pipeline.packing.opening pipeline.packing.rules",
    "pipeline.models.probe": "pipeline.dataset",
    "pipeline.models.teacher_files": "pipeline.models pipeline.remote",
    "pipeline.scoring": "pipeline.models pipeline.packing pipeline.dataset pipeline.losses"
    " pipeline.tokenization pipeline.fractions pipeline.compiled pipeline.recent pipeline.remote",
    "pipeline.scoring.contexts": "pipeline.packing",
    "pipeline.streaming": "pipeline.scoring pipeline.packing pipeline.dataset pipeline.compiled"
    " pipeline.recent pipeline.distributions pipeline.losses.loss_checks pipeline.losses.spans",
    # The loss of every trainer: those of Hugging Face's models and Megatron's lie above it.
    "pipeline.methods": "pipeline.models pipeline.streaming pipeline.scoring.teaching"
    " pipeline.packing.reading pipeline.dataset.score_files pipeline.distributions"
    " pipeline.guidance pipeline.losses pipeline.selection_rule",
    "pipeline.training": "pipeline.methods pipeline.models pipeline.streaming"
    " pipeline.scoring pipeline.guidance pipeline.losses"
    " pipeline.packing pipeline.dataset pipeline.tokenization pipeline.batches pipeline.drawing"
    " pipeline.selection_rule pipeline.distributions",
    "pipeline.transfer": "pipeline.models pipeline.training.disk pipeline.dataset"
    " pipeline.alignment"
    " pipeline.tokenization pipeline.batches pipeline.drawing",
    "pipeline.evaluation": "pipeline.models pipeline.dataset pipeline.chats"
    " pipeline.tokenization pipeline.batches pipeline.remote pipeline.drawing",
    "pipeline.validate": "pipeline.models pipeline.scoring pipeline.packing pipeline.dataset"
    " pipeline.chats"
    " pipeline.alignment pipeline.tokenization pipeline.batches pipeline.drawing",
    "pipeline.doctor": "pipeline.tokenization pipeline.drawing pipeline.remote"
    " pipeline.models.varlen",
    "pipeline.explore": "pipeline.packing pipeline.dataset pipeline.alignment"
    " pipeline.tokenization pipeline.distributions pipeline.drawing",
    "pipeline.figures": "pipeline.models pipeline.scoring pipeline.packing pipeline.dataset"
    " pipeline.guidance pipeline.losses pipeline.alignment pipeline.tokenization"
    " pipeline.batches pipeline.drawing",
    "beam_jobs.__init__": "vocag.own_packages",
    "megatron_plugin.__init__": "vocag.own_packages",
    "beam_jobs": "pipeline.tokenization pipeline.dataset pipeline.drawing pipeline.recent"
    " pipeline.remote",
    "beam_jobs.align": "beam_jobs beam_jobs.align.inputs beam_jobs.running beam_jobs.report"
    " pipeline.chats pipeline.models.generation_defaults"
    " pipeline.tokenization pipeline.alignment pipeline.dataset pipeline.distributions.pair"
    " pipeline.batches pipeline.compiled pipeline.drawing",
    "beam_jobs.align.inputs": "beam_jobs beam_jobs.running pipeline.tokenization pipeline.dataset"
    " pipeline.chats.messages"
    " pipeline.batches pipeline.compiled pipeline.drawing",
    "beam_jobs.report": "beam_jobs pipeline.alignment pipeline.dataset pipeline.drawing"
    " pipeline.explore.preview",
    "beam_jobs.running": "beam_jobs pipeline.dataset pipeline.drawing",
    "beam_jobs.remove": "beam_jobs beam_jobs.running beam_jobs.report pipeline.dataset"
    " pipeline.drawing",
    "beam_jobs.score": "beam_jobs beam_jobs.running pipeline.scoring pipeline.models"
    " pipeline.packing.opening pipeline.packing.reading pipeline.packing.rules"
    " pipeline.dataset"
    " pipeline.drawing",
    "megatron_plugin": "pipeline.models pipeline.methods pipeline.scoring.teaching"
    " megatron_plugin.models"
    " megatron_plugin.teacher"
    " megatron_plugin.student"
    " pipeline.streaming pipeline.packing pipeline.dataset pipeline.guidance pipeline.losses"
    " pipeline.training.disk",
    "megatron_plugin.models": "megatron_plugin.arguments megatron_plugin.upstream"
    " pipeline.models.teacher_files pipeline.models.varlen pipeline.models.weights"
    " pipeline.models.broken_files pipeline.losses",
    "megatron_plugin.teacher": "megatron_plugin.models megatron_plugin.checks"
    " megatron_plugin.upstream"
    " megatron_plugin.bridge megatron_plugin.worlds megatron_plugin.arguments"
    " pipeline.models pipeline.packing pipeline.dataset pipeline.losses",
    "megatron_plugin.student": "megatron_plugin.teacher megatron_plugin.models"
    " pipeline.models"
    " megatron_plugin.checks megatron_plugin.bridge megatron_plugin.worlds"
    " megatron_plugin.upstream megatron_plugin.arguments"
    " pipeline.streaming pipeline.packing pipeline.dataset pipeline.losses"
    " pipeline.distributions pipeline.methods",
}
NEVER_IMPORTED = {"tests", "benchmarks", "examples", "evidence", "prove"}
OWNERS = {
    "apache_beam": "beam_jobs/*",
    "megatron": "megatron_plugin/upstream.py",
    "tokenizers": "pipeline/tokenization/*.py",
    "fastokens": "pipeline/tokenization/*.py",
    "sentencepiece": "pipeline/tokenization/*.py",
}
# Loads what it exports as users will, and compares ids; converts the tokenizer of a .gguf file.
TOKENIZER_READERS = {
    "pipeline/models/exported_tokenizer.py",
    "pipeline/tokenization/sources.py",
}
SCHEMA_LIBRARIES = {"msgspec", "numpy", "orjson", "pyarrow", "safetensors"}
PICKLERS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
_TOKENIZERS = "tokenizers fastokens sentencepiece"
_FRAMEWORKS = "torch transformers apache_beam megatron"
# What must not be loaded where some modules are imported, one after another.
LOADS_NO = {
    "vocag vocag.command": f"{_FRAMEWORKS} {_TOKENIZERS} numpy pipeline schemas",
    "pipeline.command_line.option_parsing pipeline.command_line.commands": f"{_FRAMEWORKS}"
    f" {_TOKENIZERS} numpy schemas",
    "schemas.document schemas.index schemas.manifest schemas.errors": "tokenizers fastokens numba"
    " pipeline",
    "pipeline.dataset.dataset_reading pipeline.scoring.contexts pipeline.packing.plan"
    " pipeline.packing.saved_plans": f"{_TOKENIZERS} torch",
    # What Beam's workers import: each module more is paid by every worker.
    "pipeline pipeline.alignment pipeline.dataset.writing pipeline.tokenization pipeline.validate"
    " pipeline.models.probe pipeline.models.teacher_files pipeline.command_line.option_parsing"
    " schemas.document schemas.manifest": _FRAMEWORKS,
    "beam_jobs.align.steps": "beam_jobs.align.command torch",
    "beam_jobs.align.command": "torch transformers megatron",
    "beam_jobs.score.job beam_jobs.score.summary": "httpx2 tenacity duckdb matplotlib",
    # Only what draws needs the extra `figures`.
    "beam_jobs.report.page pipeline.figures.command": "matplotlib",
    "pipeline.streaming": _TOKENIZERS,
    "megatron_plugin.arguments": f"{_FRAMEWORKS} numba",
    "pipeline.transfer.command pipeline.transfer.acceptance_command": "torch transformers",
    "pipeline.training.run_rows": "transformers",  # too few rows are refused before it is loaded
    "pipeline.training.command": "torch transformers",  # its --help needs no model code
}


def imported(source: str) -> Iterator[str]:
    """Full names of what a module imports: `from a import b` gives `a.b`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{'.' * node.level}{node.module or ''}.{a.name}" for a in node.names)


def wing_of(module: str) -> str:
    """The wing that a module belongs to."""
    while module not in ALLOWED:
        module = module.rpartition(".")[0]
    return module


def reaches(permission: str, name: str) -> bool:
    """Whether a permission covers an import; that of a part does not cover the part's wings."""
    inside = name == permission or name.startswith(f"{permission}.")
    return inside and ("." in permission or wing_of(name) == permission)


def violations(path: str, source: str) -> list[str]:
    """What a file of one of the parts imports against the rules; `path` is below the repository."""
    part = path.split("/")[0]
    wing = wing_of(path.removesuffix(".py").replace("/", "."))
    allowed = (wing, "schemas", "pipeline.command_line", *ALLOWED[wing].split())
    found = []
    for name in imported(source):
        top = name.split(".")[0]
        ours = top in PARTS or top in NEVER_IMPORTED
        known = any(reaches(permission, name) for permission in allowed)
        if ours and not known:
            found.append(f"{path}: {wing} must not import {name}")
        if top in OWNERS and not fnmatch(path, OWNERS[top]):
            found.append(f"{path}: only {OWNERS[top]} may import {name}")
        if top == "":
            found.append(f"{path}: imports are absolute, {name} is not")
        if top == "transformers" and "Tokenizer" in name and path not in TOKENIZER_READERS:
            found.append(f"{path}: {name} changes some tokenizers; use pipeline.tokenization")
        if top == "vocag" and name.removeprefix("vocag.") in vocag.__all__:
            found.append(f"{path}: {name} is for users; import it from where it is written")
        if top in PICKLERS:
            found.append(f"{path}: {name} runs code from data")
        known = top in sys.stdlib_module_names | SCHEMA_LIBRARIES | {"schemas"}
        if part == "schemas" and not known:
            found.append(f"{path}: schemas must not import {name}")
    return found


def sources(repository: Path) -> dict[str, str]:
    return {
        path.relative_to(repository).as_posix(): path.read_text("utf-8")
        for part in PARTS
        for path in sorted((repository / part).rglob("*.py"))
    }


def test_every_import_points_down(repository: Path) -> None:
    files = sources(repository)
    assert len(files) > 40
    assert not [line for path, source in files.items() for line in violations(path, source)]


def module_of(path: str) -> str:
    """The dotted name of a file: a folder's own is that of its `__init__`."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def module_graph(files: Mapping[str, str]) -> dict[str, set[str]]:
    """By module, the modules of ours that it imports, wherever in the file it does."""
    modules = {module_of(path) for path in files}
    graph: dict[str, set[str]] = {}
    for path, source in files.items():
        own = module_of(path)
        # `from a import b` imports module a.b where there is one, else a.
        named = {name if name in modules else name.rpartition(".")[0] for name in imported(source)}
        graph[own] = (named & modules) - {own}
    return graph


def cycles(files: Mapping[str, str]) -> list[str]:
    """Modules that import each other, directly or through others."""
    try:
        tuple(TopologicalSorter(module_graph(files)).static_order())
    except CycleError as error:
        return [" → ".join(reversed(error.args[1]))]
    return []


def borrowed_private_names(path: str, source: str) -> list[str]:
    """Names with a leading underscore that a file imports from another folder."""
    folder = module_of(path) if path.endswith("__init__.py") else module_of(path).rpartition(".")[0]
    found = []
    for name in imported(source):
        home, _, last = name.rpartition(".")
        is_ours = name.split(".")[0] in PARTS
        if is_ours and last.startswith("_") and home.rpartition(".")[0] != folder:
            found.append(f"{path}: {name} is private to {home.rpartition('.')[0]}")
    return found


def test_no_module_imports_itself_through_others(repository: Path) -> None:
    assert cycles(sources(repository)) == []


def test_private_names_stay_in_their_folder(repository: Path) -> None:
    files = sources(repository)
    found = [
        line for path, source in files.items() for line in borrowed_private_names(path, source)
    ]
    assert found == []


def test_cycles_and_borrowed_names_are_found() -> None:
    there_and_back = {
        "schemas/a.py": "from schemas.b import name",
        "schemas/b.py": "def f():\n    from schemas import a",
        "schemas/c.py": "from schemas.a import name",
    }
    assert cycles(there_and_back) in (
        [f"schemas.{a} → schemas.{b} → schemas.{a}"] for a, b in (("a", "b"), ("b", "a"))
    )
    assert cycles({**there_and_back, "schemas/b.py": "import json"}) == []
    line = "from pipeline.dataset.files import _open"
    assert len(borrowed_private_names("pipeline/packing/plan.py", line)) == 1
    assert borrowed_private_names("pipeline/dataset/dataset_reading.py", line) == []


def test_owned_libraries_are_used_by_their_owners(repository: Path) -> None:
    used = {
        name.split(".")[0] for source in sources(repository).values() for name in imported(source)
    }
    assert used >= set(OWNERS)


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("schemas/x.py", "from pipeline import shards"),
        ("schemas/x.py", "import torch"),
        ("vocag/x.py", "from pipeline.validate import command"),
        ("pipeline/x.py", "import beam_jobs.align"),
        ("pipeline/x.py", "def f():\n    import apache_beam as beam"),
        ("pipeline/x.py", "from tests import corpus"),
        ("pipeline/x.py", "from . import shards"),
        ("pipeline/x.py", "from transformers import AutoTokenizer"),
        ("pipeline/x.py", "import pickle"),
        ("pipeline/training/x.py", "from vocag import load_tokenizer"),
        ("pipeline/guidance/baselines.py", "from fastokens import Tokenizer"),
        ("megatron_plugin/x.py", "import apache_beam"),
        ("megatron_plugin/teacher/x.py", "from megatron.core import parallel_state"),
        (
            "pipeline/dataset/dataset_reading.py",
            "from pipeline.dataset.encoding import encode_batch",
        ),
        ("pipeline/guidance/x.py", "from pipeline.scoring import contexts"),
        ("pipeline/losses/x.py", "from pipeline.guidance import select_tokens"),
        ("beam_jobs/align/x.py", "from beam_jobs.score.steps import ScoreJob"),
        ("megatron_plugin/teacher/x.py", "from megatron_plugin.student import run"),
    ],
)
def test_violations_are_found(path: str, line: str) -> None:
    assert len(violations(path, line)) >= 1


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("pipeline/tokenization/backends.py", "import tokenizers, fastokens, sentencepiece"),
        ("beam_jobs/x.py", "import apache_beam\nfrom pipeline.dataset.writing import ShardWriter"),
        ("megatron_plugin/upstream.py", "from megatron.core import parallel_state"),
        ("pipeline/x.py", "import torch\nfrom transformers import AutoModelForCausalLM"),
        ("schemas/x.py", "import json\nfrom pyarrow import parquet\nfrom schemas import errors"),
    ],
)
def test_what_is_allowed_is_no_violation(path: str, line: str) -> None:
    assert violations(path, line) == []


@pytest.mark.slow
@pytest.mark.parametrize("modules", LOADS_NO)
def test_what_modules_must_not_load(modules: str, repository: Path) -> None:
    script = (
        "import importlib, sys\n"
        f"for module in {modules.split()!r}:\n"
        "    importlib.import_module(module)\n"
        f"    loaded = [name for name in {LOADS_NO[modules].split()!r} if name in sys.modules]\n"
        "    if loaded: sys.exit(f'{module} loads {loaded}')"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=repository, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr


# A room's part of one thing, and so of one name in every room that has it. Else a name is one
# module's: `selection` was four things.
ROLES = {
    "__init__": "a room",
    "__main__": "what `python -m` runs",
    "command": "a command's function `main`",
    "dry_run": "what `--dry-run` prints",
    "job": "what a Beam job is, in its launcher",
    "kernels": "loops that numba compiles",
    "models": "a room of models: of transformers, and next to Megatron",
    "options": "a command's frozen dataclass",
    "steps": "what a Beam job's workers run",
}


def shared_names(files: Mapping[str, str]) -> dict[str, list[str]]:
    """Names of modules and rooms, and of public classes, that mean more than one thing."""
    found: dict[str, list[str]] = {}
    for path, source in files.items():
        found.setdefault(Path(path).stem, []).append(path)
        if path.endswith("/__init__.py"):
            found.setdefault(Path(path).parent.name, []).append(path)
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(f"{path}:{node.lineno}")
    return {name: sorted(places) for name, places in found.items() if len(places) > 1}


def test_a_name_of_a_module_or_a_class_means_one_thing(repository: Path) -> None:
    shared = shared_names(sources(repository))
    assert {name: places for name, places in shared.items() if name not in ROLES} == {}
    assert shared.keys() == ROLES.keys(), "a role that one room alone has needs no exception"


def test_shared_names_are_found() -> None:
    files = {
        "schemas/a.py": "class Piece: ...",
        "pipeline/x/a.py": "def f():\n    class Piece: ...",
        "pipeline/a/__init__.py": "class _Own: ...",
        "pipeline/x/b.py": "class _Own: ...",
    }
    assert shared_names(files) == {
        "Piece": ["pipeline/x/a.py:2", "schemas/a.py:1"],
        "a": ["pipeline/a/__init__.py", "pipeline/x/a.py", "schemas/a.py"],
    }
