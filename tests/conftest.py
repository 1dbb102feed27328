import os
from pathlib import Path

import pytest
from hypothesis import settings

os.environ.setdefault(
    "HF_HUB_OFFLINE", "1"
)  # read when huggingface_hub is imported; no test downloads
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

settings.register_profile("tests", deadline=None, derandomize=True, print_blob=True)
settings.register_profile("search", deadline=None)  # other examples each time: for finding bugs
settings.load_profile("tests")


@pytest.fixture(scope="session")
def repository() -> Path:
    return Path(__file__).parents[1]
