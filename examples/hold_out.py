"""Split JSON lines into documents to train on and documents to measure on.

    python examples/hold_out.py --input demo/corpus.jsonl --output demo/train --every 100

Writes train.jsonl and heldout.jsonl. Every N-th document is held out, so that both hold the same
mixture; a document is never in both.
"""

import argparse
from pathlib import Path


def hold_out(corpus: Path, output: Path, *, every: int) -> dict[str, int]:
    """Write both files; return their numbers of documents.

    Raises:
        ValueError: nothing would be held out.
    """
    # Not splitlines: a JSON string may hold U+2028, which it takes for a line's end.
    with corpus.open(encoding="utf-8", newline="\n") as file:
        lines = file.readlines()
    if not 1 < every <= len(lines):
        raise ValueError(f"--every {every} must lie in 2..{len(lines)}, the documents of {corpus}")
    parts = {"heldout": lines[every - 1 :: every]}
    parts["train"] = [line for n, line in enumerate(lines, start=1) if n % every]
    output.mkdir(parents=True, exist_ok=True)
    for name, part in parts.items():
        (output / f"{name}.jsonl").write_text("".join(part), "utf-8")
    return {name: len(part) for name, part in parts.items()}


def main() -> None:
    """Split one file and say how."""
    parser = argparse.ArgumentParser(description="Split JSON lines into train and held-out.")
    parser.add_argument("--input", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--every", type=int, default=100, help="one of so many is held out (100)")
    options = parser.parse_args()
    print(hold_out(options.input, options.output, every=options.every))


if __name__ == "__main__":
    main()
