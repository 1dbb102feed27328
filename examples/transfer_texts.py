"""Texts of three domains from what is already installed; two of them nobody trains on.

    python examples/transfer_texts.py --output transfer-demo/texts

train.jsonl has docstrings of scipy, docstrings.jsonl docstrings of networkx to measure on,
code.jsonl functions of Python's own library, readmes.jsonl the descriptions of installed packages.
"""

import argparse
import ast
import json
import random
import sys
import sysconfig
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path

sys.path.append(str(Path(__file__).parent))

from docstring_corpus import docstrings

NUM_TRAINED, NUM_MEASURED = 220, 10
SHORTEST, LONGEST = 300, 1500
README_CHARACTERS = 800


def code() -> Iterator[tuple[str, str]]:
    """Yield (id, source) of functions of Python's standard library."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.glob("*.py")):
        source = path.read_text("utf-8")
        for node in ast.parse(source).body:
            if isinstance(node, ast.FunctionDef):
                text = ast.get_source_segment(source, node) or ""
                yield f"{path.name}:{node.lineno}:{node.name}", text


def readmes() -> Iterator[tuple[str, str]]:
    """Yield (name, beginning) of installed packages' descriptions."""
    for one in sorted(distributions(), key=lambda each: each.name or ""):
        text = str(one.metadata.json.get("description", ""))
        yield f"{one.name}", text[:README_CHARACTERS]


def write(path: Path, texts: Iterator[tuple[str, str]], *, limit: int) -> None:
    """Write some of the texts as JSON lines, each once, the same ones each time."""
    fitting = {text: name for name, text in texts if SHORTEST <= len(text) <= LONGEST}
    chosen = random.Random(0).sample(sorted(fitting), min(limit, len(fitting)))
    lines = [json.dumps({"id": fitting[text], "text": text}) + "\n" for text in chosen]
    path.write_text("".join(lines), "utf-8")
    print(f"{path}: {len(lines)} texts")


def main() -> None:
    """Write all of them."""
    parser = argparse.ArgumentParser(description="Texts to train on, and texts of three domains.")
    parser.add_argument("--output", type=Path, required=True)
    output = parser.parse_args().output
    output.mkdir(parents=True, exist_ok=True)
    write(output / "train.jsonl", docstrings("scipy"), limit=NUM_TRAINED)
    for name, texts in (
        ("docstrings", docstrings("networkx")),
        ("code", code()),
        ("readmes", readmes()),
    ):
        write(output / f"{name}.jsonl", texts, limit=NUM_MEASURED)


if __name__ == "__main__":
    main()
