"""The checks as a pytest module: the documented command, run from another directory."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.validate import shard_tests
from pipeline.validate.findings import DATASET_CHECKS, SHARD_CHECKS
from tests.support.datasets import build_dataset

REPOSITORY = Path(shard_tests.__file__).parents[2]


def run_command(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the module docstring's command from `folder`, as a user with the package would."""
    documented = (shard_tests.__doc__ or "").replace("\\\n", "")
    found = re.search(r"^    pytest (.*) --shards DATASET$", documented, re.M)
    assert found
    return subprocess.run(
        [sys.executable, "-m", "pytest", *found[1].split(), "-p", "no:cacheprovider", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_one_test_per_check_and_shard(tmp_path: Path) -> None:
    build_dataset(tmp_path / "data", num_shards=2)
    result = run_command(tmp_path, "--shards", "data", "--shards-tokenizers")
    num_tests = len(DATASET_CHECKS) + 2 * len(SHARD_CHECKS)
    assert f"{num_tests} passed" in result.stdout, result.stdout + result.stderr
    assert result.returncode == 0


def test_damage_fails_the_tests_that_it_should(tmp_path: Path) -> None:
    build_dataset(tmp_path / "data", num_shards=2)
    tar = tmp_path / "data" / "docs-000001-of-000002.tar"
    data = bytearray(tar.read_bytes())
    data[600] ^= 1
    tar.write_bytes(data)
    result = run_command(tmp_path, "--shards", "data", "-rf", "--tb=short")
    failed = re.findall(r"^FAILED \S*::(\S+)", result.stdout, re.M)
    assert sorted(failed) == [f"test_shard[{tar.name}-{check}]" for check in ("crc32", "sha256")]
    assert "payload has CRC-32" in result.stdout
    assert result.returncode == 1


@pytest.mark.parametrize("arguments", [(), ("--shards", "nowhere")])
def test_no_dataset_is_an_error_not_a_pass(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    result = run_command(tmp_path, *arguments)
    assert result.returncode not in (0, 5)
    words = "nowhere/manifest.json does not exist" if arguments else "--shards DATASET"
    assert words in result.stdout + result.stderr
