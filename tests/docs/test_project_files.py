"""What GitHub reads: workflows that run what is there, and a bug report that asks for the facts."""

import configparser
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]


def load(name: str) -> Any:
    return yaml.safe_load((ROOT / ".github" / name).read_text("utf-8"))


def commands_of(job: Any) -> list[str]:
    matrix = job.get("strategy", {}).get("matrix", {})
    return matrix.get("command", []) + [more["command"] for more in matrix.get("include", [])]


@pytest.mark.parametrize(
    ("workflow", "expected"),
    [("ci", {"make test", "make demo"}), ("weekly", {"make test-services", "make test-served"})],
)
def test_workflows_run_commands_that_exist(workflow: str, expected: set[str]) -> None:
    [job] = [job for job in load(f"workflows/{workflow}.yml")["jobs"].values() if commands_of(job)]
    commands = commands_of(job)
    assert set(commands) >= expected
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for command in commands:
        tool, *named = command.split()
        assert tool == "make"
        assert named
        assert targets.issuperset(named)


def test_checks_run_in_parallel_jobs() -> None:
    wanted = re.findall(r"^make ([a-z-]+)$", (ROOT / ".ci/run").read_text(), re.MULTILINE)
    job = load("workflows/ci.yml")["jobs"]["checks"]
    assert len(wanted) == 5
    assert set(wanted) <= set(" ".join(commands_of(job)).split())
    assert os.access(ROOT / ".ci/run", os.X_OK)


def test_images_that_are_built_exist_and_the_pythons_are_declared() -> None:
    jobs = load("workflows/ci.yml")["jobs"]
    built = set(jobs["images"]["strategy"]["matrix"]["file"])
    assert built == {"Dockerfile"} | {f"docker/{p.name}" for p in ROOT.glob("docker/*.Dockerfile")}
    matrix = jobs["checks"]["strategy"]["matrix"]
    tried = {*matrix["python"], *(more["python"] for more in matrix["include"])}
    declared = re.findall(r":: Python :: (3\.\d+)$", (ROOT / "setup.cfg").read_text(), re.MULTILINE)
    assert set(declared) <= tried
    assert f"python_requires = >={declared[0]}\n" in (ROOT / "setup.cfg").read_text()


def test_constraints_pin_what_setup_cfg_asks_for_and_allows() -> None:
    """All but energon's narrow pins, which have an environment of their own."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = {name: pin for name, _, pin in (re.split("(==)", line, maxsplit=1) for line in lines)}
    assert not [name for name in pins if name.startswith(("nvidia", "cuda", "triton", "vocag"))]
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    extras = {k: v for k, v in setup["options.extras_require"].items() if k != "energon"}
    asked = "\n".join([setup["options"]["install_requires"], *extras.values()])
    kept = [line for line in asked.splitlines() if line and not line.startswith("#")]
    wanted = [Requirement(line) for line in kept if not line.startswith("vocag[")]
    assert len(wanted) > 50
    for requirement in wanted:
        pin = pins[canonicalize_name(requirement.name)].partition(";")[0].strip()
        assert requirement.specifier.contains(pin), requirement


@pytest.mark.parametrize("target", ["demo", "test", "train-demo"])
def test_make_says_what_it_fetches_before_it_does(target: str, tmp_path: Path) -> None:
    command = ["make", "--dry-run", target, f"VENV={tmp_path}/none"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    said = next(place for place, line in enumerate(lines) if "GB to download" in line)
    installed = next(place for place, line in enumerate(lines) if "pip install" in line)
    assert said < installed
    assert "GB on disk" in lines[said]
    assert ("PIP_EXTRA_INDEX_URL=" in done.stdout) == (target != "demo"), "torch without CUDA"
    assert "--constraint constraints.txt" in lines[installed]


def test_what_old_releases_leave_out_are_tests() -> None:
    """A test that was renamed would be run, and fail there."""
    named = re.findall(r"--deselect '(\S+)::(\w+)", (ROOT / "Makefile").read_text())
    assert named
    for path, name in named:
        assert f"def {name}(" in (ROOT / path).read_text(), name


def test_a_tag_s_version_has_one_place_to_go_to() -> None:
    steps = load("workflows/release.yml")["jobs"]["build"]["steps"]
    [line] = [step["run"] for step in steps if "setup.cfg" in step.get("run", "")]
    script = line.replace("sed -i ", "sed -n ").replace('/" setup.cfg', '/p" setup.cfg')
    done = subprocess.run(script, shell=True, cwd=ROOT, capture_output=True, text=True, check=True,
                          env={**os.environ, "GITHUB_REF_NAME": "v1.2.3"})  # fmt: skip
    assert done.stdout == "version = 1.2.3\n"


def test_a_bug_report_asks_for_the_doctor() -> None:
    fields = load("ISSUE_TEMPLATE/bug.yml")["body"]
    asked = {field["attributes"]["label"] for field in fields if field["validations"]["required"]}
    assert "vocag doctor --json" in asked
    for template in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"):
        assert load(f"ISSUE_TEMPLATE/{template.name}")


def test_no_address_is_made_up() -> None:
    """The project's own address is declared nowhere, so nothing may ask to fetch it."""
    pages = [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("evidence/**/*.md"),
        *ROOT.glob(".github/**/*.yml"),
    ]
    texts = {path: path.read_text("utf-8") for path in (*pages, ROOT / "mkdocs.yml")}
    assert len(texts) > 20
    made_up = re.compile(r"git clone|(?<!hf://datasets)/OWNER/|/vocag\.git")
    assert not [path for path, text in texts.items() if made_up.search(text)]
    declared = (ROOT / "setup.cfg").read_text("utf-8") + texts[ROOT / "mkdocs.yml"]
    assert not re.findall(r"^(?:url|project_urls|site_url|repo_url)\b", declared, re.MULTILINE)


def test_the_changelog_starts_at_the_release() -> None:
    """Its newest section is the version that setup.cfg has, but for what is not released yet."""
    sections = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    [own] = re.findall(r"^version = (\S+)$", (ROOT / "setup.cfg").read_text(), re.MULTILINE)
    assert sections[sections[0] == "Unreleased"] == own
    assert sections[-1] == "0.1.0"
