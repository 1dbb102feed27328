"""Mixtures of datasets in equal shares."""

import json
from collections.abc import Mapping
from pathlib import Path


def write_mixture(file: Path, **datasets: Mapping[str, object]) -> Path:
    """Write a mixture of datasets, each with what its table holds, a path or more."""
    lines = []
    for name, table in datasets.items():
        lines += [f"[datasets.{name}]", *(f"{key} = {json.dumps(v)}" for key, v in table.items())]
    weights = ", ".join(f"{name} = {1 / len(datasets)}" for name in datasets)
    file.write_text("\n".join([*lines, "[[stages]]", f"weights = {{ {weights} }}\n"]))
    return file
