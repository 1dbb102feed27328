"""Documents counted by a field of fractions."""

import math
from pathlib import Path

from pipeline.dataset.files import open_dataset
from pipeline.dataset.groups import count_by
from tests.support.datasets import build_dataset

RANGES = {
    2024.0: "2000.0 to 3000.0",
    0.3: "0.3 to 0.4",
    0.7999999999999999: "0.7 to 0.8",
    -0.25: "-0.3 to -0.2",
    9.99: "9.0 to 10.0",
    5e-324: "5e-324 to 5e-324",
    0.0: 0.0,
    -math.inf: -math.inf,
    None: None,
}


def test_fractions_are_counted_by_range(tmp_path: Path) -> None:
    """2024.0 was shown as 2000.0, a value that no document has."""
    texts = [(f"doc-{place}", "a text") for place in range(len(RANGES))]
    build_dataset(
        tmp_path,
        texts,
        metadata={"year": "float64"},
        values=lambda name: (list(RANGES)[int(name[4:])],),
    )
    groups = count_by(open_dataset(str(tmp_path)), "year")
    assert {group.value for group in groups} == set(RANGES.values())
    assert [group.num_documents for group in groups] == [1] * len(RANGES)
