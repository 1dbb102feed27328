"""A device that isn't there is refused before anything is loaded."""

import pytest

pytest.importorskip("torch", reason="needs vocag[torch]")

import torch

from pipeline.command_line.failures import hints_of
from pipeline.models.devices import find_device


def test_a_device_that_is_there() -> None:
    assert find_device("cpu") == torch.device("cpu")
    assert find_device().type == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("name", [f"cuda:{torch.cuda.device_count()}", "gpu", "cuda:x"])
def test_a_device_that_is_not_there(name: str) -> None:
    with pytest.raises(ValueError, match=f"^device={name}: ") as refused:
        find_device(name)
    assert hints_of(refused.value) == ["hint: device=cpu"]
