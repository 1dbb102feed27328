"""Pages and links of the site: what mkdocs must know of files outside of docs/.

Pages link to each other by their paths in the repository, so that links work there. On the site
some of these pages have other places, and other files that a page links to come along as they are.
"""

import argparse
import posixpath
import re
from html import escape
from pathlib import Path
from pkgutil import resolve_name

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from pipeline.command_line.option_parsing import add_options

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md",
    "schemas/README.md": "format.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    # docs/evidence.md has the folder's own place.
    "evidence/README.md": "evidence/experiments.md",
    "evidence/records/first/README.md": "evidence/records/first/record.md",
}
PAGES |= {
    page: page
    for path in (ROOT / "evidence").rglob("*.md")
    if (page := path.relative_to(ROOT).as_posix()) not in PAGES
}
_SOURCES = {page: source for source, page in PAGES.items()}
_OPTIONS = re.compile(r"^<!-- options: (\S+) -->$", re.MULTILINE)
_LINK = re.compile(r"(?<=\]\()([^)#\s:]+)(?=[)#])")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that lie outside of docs/."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return a page with links as they are on the site, and with tables of options."""
    here = page.file.src_uri
    source = _SOURCES.get(here, f"docs/{here}")

    def place(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link[1]))
        path = PAGES.get(target, target.removeprefix("docs/"))
        if (ROOT / target).is_file() and files.get_file_from_path(path) is None:
            files.append(File.generated(config, path, abs_src_path=str(ROOT / target)))
        return posixpath.relpath(path, posixpath.dirname(here) or ".")

    return with_options(_LINK.sub(place, markdown))


def with_options(markdown: str) -> str:
    """Return a page with a table of options in the place of each mark."""
    return _OPTIONS.sub(_options_table, markdown)


def _options_table(mark: re.Match[str]) -> str:
    parser = argparse.ArgumentParser(add_help=False)
    add_options(parser, resolve_name(mark[1]))
    rows = ["| option | |", "|---|---|"]
    for action in parser._actions:
        choices = "{" + ",".join(map(str, action.choices)) + "}" if action.choices else ""
        words = [*action.option_strings[:1], choices or action.metavar or action.dest]
        shown = " ".join(map(str, words[: 1 if action.nargs == 0 else 2]))
        help_text = escape((action.help or "").replace("%%", "%"), quote=False)
        rows.append(f"| `{shown}` | {help_text.replace('|', r'\|')} |")
    return "\n".join(rows)
