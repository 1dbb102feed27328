"""A device that isn't there is refused before anything is loaded."""

import pytest

pytest.importorskip("torch", reason="needs vocag[torch]")

import torch

from pipeline.command_line.failures import hints_of
from pipeline.models.devices import find_device, lacks_memory


def test_a_device_that_is_there() -> None:
    assert find_device("cpu") == torch.device("cpu")
    assert find_device().type == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("name", [f"cuda:{torch.cuda.device_count()}", "gpu", "cuda:x"])
def test_a_device_that_is_not_there(name: str) -> None:
    with pytest.raises(ValueError, match=f"^device={name}: ") as refused:
        find_device(name)
    assert hints_of(refused.value) == ["hint: device=cpu"]


def test_a_device_without_double_precision_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Apple's: a run ended in torch's TypeError, at its first sum."""

    def empty(*_: int, dtype: torch.dtype = torch.float32, device: torch.device) -> torch.Tensor:
        if dtype == torch.float64:
            raise TypeError(f"{device} doesn't support float64. Please use float32 instead.")
        return torch.zeros(0)

    monkeypatch.setattr(torch, "empty", empty)
    with pytest.raises(ValueError, match=r"^device=mps: mps doesn't support float64\n") as refused:
        find_device("mps")
    assert hints_of(refused.value) == ["hint: device=cpu"]


@pytest.mark.parametrize(
    ("error", "lacks"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        # Where other programs hold nearly all of it; torch has no type of error for these.
        (RuntimeError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation'"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"), True),
        (RuntimeError("CUDA error: device-side assert triggered"), False),
    ],
)
def test_which_errors_say_that_a_gpu_lacks_memory(error: RuntimeError, lacks: bool) -> None:
    assert lacks_memory(error) is lacks


def test_fp32_is_fp32_whatever_a_container_asks_for() -> None:
    torch.set_float32_matmul_precision("high")  # as TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1 does
    find_device("cpu")
    assert torch.get_float32_matmul_precision() == "highest"
