"""The site is built without a warning, and every link on it leads somewhere."""

import os
import re
import subprocess
import sys
from html import unescape
from pathlib import Path
from runpy import run_path
from urllib.parse import unquote, urlsplit

import pytest

from pipeline.command_line.commands import COMMANDS
from pipeline.command_line.option_parsing import option_names
from pipeline.training.config import TrainConfig

pytest.importorskip("mkdocs")
ROOT = Path(__file__).parents[2]


def test_no_cell_of_an_option_is_cut() -> None:
    page = (ROOT / "docs/reference/options.md").read_text("utf-8")
    rows = run_path(str(ROOT / "docs/site_pages.py"))["with_options"](page).splitlines()
    options = [row for row in rows if row.startswith("| `--")]
    assert len(options) > 100
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in options} == {3}
    assert any(r"&lt;\|endoftext\|&gt; in a text is plain text or its" in row for row in options)


def test_the_page_of_options_says_where_they_are_before_it_is_built() -> None:
    opening, *_ = (ROOT / "docs/reference/options.md").read_text("utf-8").partition("\n## ")
    assert {"`make docs`", "`vocag COMMAND --help`"} <= {*re.findall("`[^`]+`", opening)}
    assert [name for name in COMMANDS if f"`{name}`" not in opening] == []


@pytest.mark.slow
def test_every_link_of_the_site_leads_somewhere(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    built = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    pages = {path.resolve(): path.read_text("utf-8") for path in tmp_path.rglob("*.html")}
    pages.pop((tmp_path / "404.html").resolve())  # its links are absolute, for any place
    anchors = {path: set(re.findall(r'\bid="?([^"\s>]+)', text)) for path, text in pages.items()}
    checked, dead = 0, []
    for path, text in pages.items():
        for link in re.findall(r'\b(?:href|src)="([^"]*)"', text):
            parts = urlsplit(unescape(link))
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            fragment = unquote(parts.fragment)
            known = target.exists() and (not fragment or fragment in anchors.get(target, ()))
            checked += 1
            if not known:
                dead.append(f"{path.relative_to(tmp_path)}: {link}")
    assert not dead
    assert checked > 1000
    assert 'class="md-search' in pages[(tmp_path / "index.html").resolve()]
    options = pages[(tmp_path / "reference/options/index.html").resolve()]
    missing = [name for name in option_names(TrainConfig) if f"<code>{name}" not in options]
    assert not missing
