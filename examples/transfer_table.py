r"""What a model lost by its new vocabulary, and what healing brought back, domain by domain.

    python examples/transfer_table.py --texts texts --trained-on docstrings \
      original=smollm2 transplanted=student plain=runs/full/model

The first model is the one before, the second the one that lost something. Each other model gets its
share of the loss that came back: (transplanted - it) / (transplanted - original), in bits per byte.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean

from tqdm import tqdm

from pipeline.dataset.texts import read_texts
from pipeline.drawing.formatting import format_table
from pipeline.transfer.measure import bits_per_byte
from vocag import load_language_model, load_tokenizer

Bits = dict[str, float]
"""Bits per byte by domain."""


def measure(folder: Path, domains: Mapping[str, list[bytes]]) -> Bits:
    """Return a model's bits per byte of each domain."""
    model = load_language_model(str(folder), packed=False)
    tokenizer = load_tokenizer(str(folder))
    bar = tqdm(domains.items(), desc=str(folder), disable=None)
    return {name: bits_per_byte(model, tokenizer, texts) for name, texts in bar}


def shares(original: Bits, transplanted: Bits, healed: Bits) -> Bits:
    """Return which share of the loss came back, by domain; nan where nothing was lost.

    Example:
        >>> shares({"code": 1.0}, {"code": 3.0}, {"code": 1.5})
        {'code': 0.75}
    """
    lost = {name: transplanted[name] - original[name] for name in original}
    return {
        name: (transplanted[name] - healed[name]) / lost[name] if lost[name] > 0 else float("nan")
        for name in original
    }


def table(found: Mapping[str, Bits], trained_on: str) -> list[str]:
    """Return the table's lines, the domain that was trained on first.

    Example:
        >>> rows = {"original": {"a": 1.0, "b": 1.0}, "transplanted": {"a": 2.0, "b": 3.0}}
        >>> table(rows | {"plain": {"a": 1.5, "b": 2.5}}, "a")[-1].split()
        ['plain', '1.500', '50', '%', '2.500', '25', '%', '25', '%']
    """
    first, second, *healed = found
    others = sorted(set(found[first]) - {trained_on})
    heads = [f"{trained_on} (trained on)", "back", *(head for o in others for head in (o, "back"))]
    rows = [["bits per byte", *heads, "mean back, not trained on"]]
    for name, bits in found.items():
        back = shares(found[first], found[second], bits) if name in healed else {}
        cells = [
            cell
            for domain in (trained_on, *others)
            for cell in (f"{bits[domain]:.3f}", f"{100 * back[domain]:.0f} %" if back else "")
        ]
        mean = f"{100 * fmean(back[domain] for domain in others):.0f} %" if back else ""
        rows.append([name, *cells, mean])
    return format_table(rows, align="<" + ">" * (len(rows[0]) - 1))


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description="Compare a model before and after healing.")
    parser.add_argument("models", nargs="+", metavar="NAME=FOLDER")
    parser.add_argument("--texts", type=Path, required=True, help="folder of the domains' .jsonl")
    parser.add_argument("--trained-on", required=True, help="domain like the training text")
    options = parser.parse_args()
    domains = {
        path.stem: [document.text for document in read_texts([str(path)])]
        for path in sorted(options.texts.glob("*.jsonl"))
        if path.stem != "train"
    }
    pairs = (model.split("=", 1) for model in options.models)
    found = {name: measure(Path(folder), domains) for name, folder in pairs}
    (options.texts / "table.json").write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    print("\n".join(table(found, options.trained_on)))


if __name__ == "__main__":
    main()
