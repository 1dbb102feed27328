"""Options for `pipeline.validate.shard_tests`, a pytest plugin.

Load it with `-p pipeline.validate.pytest_plugin`.
"""

import pytest

from pipeline.dataset.reading import read_manifest
from pipeline.validate.dataset import ValidationReport, validate_dataset
from pipeline.validate.findings import DATASET_CHECKS, SHARD_CHECKS


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--shards` and `--shards-tokenizers`."""
    group = parser.getgroup("vocag", "aligned datasets")
    group.addoption("--shards", metavar="DATASET", help="dataset to check: folder, URL or manifest")
    group.addoption(
        "--shards-tokenizers",
        action="store_true",
        help="tokenize kept text again with the dataset's own tokenizers",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make one test per check of the dataset, and one per shard and check."""
    if "dataset_check" in metafunc.fixturenames:
        metafunc.parametrize("dataset_check", DATASET_CHECKS)
    if "shard_check" in metafunc.fixturenames:
        cases = [(shard, check) for shard in _shards(metafunc.config) for check in SHARD_CHECKS]
        metafunc.parametrize(("shard", "shard_check"), cases)


@pytest.fixture(scope="session")
def shard_validation(request: pytest.FixtureRequest) -> ValidationReport:
    """The whole dataset's findings: every file is read once, whatever the number of tests."""
    return validate_dataset(
        dataset_option(request.config),
        with_tokenizers=request.config.getoption("--shards-tokenizers"),
    )


def dataset_option(config: pytest.Config) -> str:
    """Return the dataset to check.

    Raises:
        pytest.UsageError: none was named.
    """
    dataset = config.getoption("--shards")
    if not dataset:
        raise pytest.UsageError("name a dataset to check: --shards DATASET")
    return str(dataset)


def _shards(config: pytest.Config) -> list[str]:
    """Return the shards' names; none where the manifest is damaged, which another test reports."""
    try:
        manifest = read_manifest(dataset_option(config))
    except (ValueError, TypeError):
        return []
    return list(dict.fromkeys(shard.file for shard in manifest.shards))
