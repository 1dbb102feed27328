from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.completions_server import CompletionsServer, serve


@pytest.fixture
def server(unscored: Path) -> Iterator[CompletionsServer]:
    """A server of the world's teacher."""
    with serve(unscored / "teacher") as running:
        yield running
