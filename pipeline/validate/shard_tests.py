r"""The checks of `pipeline.validate` as tests, for your own shards and your own CI.

    pytest --noconftest -p pipeline.validate.pytest_plugin \
      --pyargs pipeline.validate.shard_tests --shards DATASET

One test per check of the dataset, and one per shard and check; `-k spans` or
`-k "docs-000001 and crc32"` picks some. Add `--shards-tokenizers` to tokenize kept text again.
"""

from collections.abc import Iterable

import pytest

from pipeline.drawing.formatting import printable
from pipeline.validate.dataset import ValidationReport
from pipeline.validate.findings import SHARD_CHECKS, Finding

MAX_SHOWN = 20


def test_dataset(dataset_check: str, shard_validation: ValidationReport) -> None:
    """The dataset as a whole keeps a rule."""
    _require_none(
        finding
        for finding in shard_validation.findings
        if finding.check == dataset_check
        and (finding.shard == "" or dataset_check not in SHARD_CHECKS)
    )


def test_shard(shard: str, shard_check: str, shard_validation: ValidationReport) -> None:
    """A shard keeps a rule."""
    _require_none(
        finding
        for finding in shard_validation.findings
        if finding.check == shard_check and finding.shard == shard
    )


def _require_none(findings: Iterable[Finding]) -> None:
    lines = [" ".join(filter(None, (f.shard, f.key, f.message))) for f in findings]
    if len(lines) > MAX_SHOWN:
        lines[MAX_SHOWN:] = [f"and {len(lines) - MAX_SHOWN} more"]
    if lines:
        pytest.fail("\n".join(map(printable, lines)), pytrace=False)
