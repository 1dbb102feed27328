"""Make a small corpus of mathematical English from what is already installed: docstrings.

    python examples/docstring_corpus.py --output demo/corpus.jsonl

One document per docstring of 200 characters or more, in the packages' file order; equal ones are
kept once. Nothing is imported or executed: sources are only parsed.
"""

import argparse
import ast
import json
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

PACKAGES = ("numpy", "scipy", "sympy", "networkx")
MIN_CHARACTERS = 200


def find_sources(package: str) -> Path:
    """Return the folder of an installed package; SystemExit if there is none."""
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise SystemExit(
            f"package {package}, whose sources are the text, is not installed: pip install -e "
            "'.[demo]', or '.[prove]' for the experiments of evidence/"
        )
    return Path(spec.origin).parent


def docstrings(package: str) -> Iterator[tuple[str, str]]:
    """Yield (id, docstring) for every module, class and function of an installed package."""
    root = find_sources(package)
    for path in sorted(root.rglob("*.py")):
        try:
            tree = ast.parse(path.read_bytes())
        except SyntaxError:
            print(f"skipped {path}: not Python 3.12 source", file=sys.stderr)
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node) or ""
                if len(text) >= MIN_CHARACTERS:
                    name = getattr(node, "name", "module")
                    place = path.relative_to(root.parent)
                    yield f"{place}:{getattr(node, 'lineno', 1)}:{name}", text


def write_corpus(packages: tuple[str, ...], output: Path) -> tuple[int, int]:
    """Write the corpus as JSON lines; return its documents and UTF-8 bytes."""
    output.parent.mkdir(parents=True, exist_ok=True)
    seen: set[str] = set()
    num_bytes = 0
    with output.open("w", encoding="utf-8") as file:
        for package in packages:
            for document_id, text in docstrings(package):
                if text not in seen:
                    seen.add(text)
                    num_bytes += len(text.encode())
                    record = {"id": document_id, "text": text}
                    file.write(json.dumps(record, ensure_ascii=False) + "\n")
    return len(seen), num_bytes


def main() -> None:
    """Write the corpus and say how large it is."""
    parser = argparse.ArgumentParser(description="Collect docstrings as JSON lines.")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--packages", nargs="+", default=PACKAGES)
    options = parser.parse_args()
    count, num_bytes = write_corpus(tuple(options.packages), options.output)
    print(f"{options.output}: {count:,} docstrings, {num_bytes / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
