"""The program accepts every `vocag align` and `vocag train` that the documents show."""

import re
import shlex
from pathlib import Path

import pytest

from beam_jobs.align.options import parse_options
from beam_jobs.running.runners import make_beam_options
from pipeline.training.command import parse_config
from pipeline.transfer.acceptance_command import AcceptanceOptions
from pipeline.transfer.options import TransferOptions
from vocag.options import parse_options as parse_fields

ROOT = Path(__file__).parents[2]


def documented(command: str) -> list[str]:
    """Every command line of README and docs that begins so, on one line each."""
    pages = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    text = "\n".join(page.read_text("utf-8") for page in pages).replace("\\\n", " ")
    return re.findall(rf"^(?:\$ )?({command} +--.+)", text, re.MULTILINE)


TRAININGS, ALIGNMENTS = documented("vocag train"), documented("vocag align")


@pytest.mark.parametrize("line", TRAININGS)
def test_a_documented_training_is_accepted(line: str) -> None:
    arguments = shlex.split(line.replace("…", ""), comments=True)[2:]
    if "--output" not in arguments:
        assert "…" in line
        arguments += ["--student", "s", "--output", "o"]
    assert parse_config(arguments).data.path in ("aligned", "mixture.toml", "demo/few")


@pytest.mark.parametrize("line", ALIGNMENTS)
def test_a_documented_alignment_is_accepted(line: str) -> None:
    options = parse_options(shlex.split(line, comments=True)[2:])
    beam = make_beam_options(options.beam_arguments)  # refuses what Beam does not know
    named = re.search(r"--runner\s+(\S+)", line)
    assert beam.get_all_options(drop_default=True).get("runner") == (named and named[1])


def test_documents_show_trainings_and_every_runner() -> None:
    assert len(TRAININGS) >= 4
    for runner in ("DataflowRunner", "FlinkRunner", "DaskRunner"):
        assert runner in " ".join(ALIGNMENTS)


@pytest.mark.parametrize(
    ("name", "kind"), [("transfer", TransferOptions), ("acceptance", AcceptanceOptions)]
)
def test_documented_transfers_are_accepted(name: str, kind: type) -> None:
    lines = documented(rf"vocag {name} [^\n-]+")
    assert lines
    for line in lines:
        parse_fields(kind, shlex.split(line, comments=True)[2:], prog=name, epilog="")
