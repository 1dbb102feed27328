"""Every `vocag align` command that the documents show is one that the program accepts."""

import re
import shlex
from pathlib import Path

import pytest

from beam_jobs.align.options import parse_options
from beam_jobs.running.runners import make_beam_options
from pipeline.training.options import parse_config

ROOT = Path(__file__).parents[2]


def commands() -> list[tuple[str, str]]:
    found = []
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        for block in re.findall(r"```bash\n(.*?)```", path.read_text(), re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                if line.startswith("vocag align"):
                    found.append((path.name, line))
    return found


def train_commands() -> list[str]:
    pages = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    text = "\n".join(page.read_text() for page in pages).replace("\\\n", " ")
    return [
        line.removeprefix("$ ") for line in re.findall(r"^(?:\$ )?vocag train --.+", text, re.M)
    ]


@pytest.mark.parametrize("line", train_commands())
def test_a_documented_training_is_accepted(line: str) -> None:
    arguments = shlex.split(line.replace("…", ""), comments=True)[2:]
    if "--output" not in arguments:
        assert "…" in line
        arguments += ["--student", "s", "--output", "o"]
    assert parse_config(arguments).data in ("aligned", "mixture.toml")


def test_documents_show_trainings() -> None:
    assert len(train_commands()) >= 4


def test_documents_show_commands_for_every_runner() -> None:
    text = " ".join(line for _, line in commands())
    for runner in ("DataflowRunner", "FlinkRunner", "DaskRunner"):
        assert runner in text


@pytest.mark.parametrize(("file", "line"), commands())
def test_a_documented_command_is_accepted(file: str, line: str) -> None:
    options = parse_options(shlex.split(line)[2:])
    beam = make_beam_options(options.beam_arguments)  # refuses what Beam does not know
    named = re.search(r"--runner\s+(\S+)", line)
    assert beam.get_all_options(drop_default=True).get("runner") == (named and named[1])
