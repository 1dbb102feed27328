"""Find a device before anything is loaded."""

import torch

from pipeline.command_line.failures import first_line, hinted

_LACKS_MEMORY = "allocate memory", "out of memory", "_ALLOC_FAILED"


def lacks_memory(error: BaseException) -> bool:
    """Whether an error says that a device, or this machine, has too little memory."""
    # Plain RuntimeErrors: a CPU's, a mapped file's, and those of CUDA and its libraries where other
    # programs hold a GPU's memory.
    told, kinds = str(error), (MemoryError, torch.OutOfMemoryError)
    return isinstance(error, kinds) or any(words in told for words in _LACKS_MEMORY)


def find_device(name: str = "") -> torch.device:
    """Return a device by its name, or raise ValueError; "" is the GPU, if any.

    Its products in fp32 are then no longer TF32's, which NVIDIA's containers ask for by
    TORCH_ALLOW_TF32_CUBLAS_OVERRIDE: they have 10 bits, and would be stored as fp32's.
    """
    torch.set_float32_matmul_precision("highest")
    if not name:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise hinted(ValueError(f"device={name}: {first_line(error)}"), "device=cpu") from error
    # Counted without a CUDA context, which forked processes couldn't use.
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        refusal = ValueError(
            f"device={name}: torch {torch.__version__} sees {torch.cuda.device_count()} GPUs "
            "here; see vocag doctor"
        )
        raise hinted(refusal, "device=cpu")
    if device.type not in ("cpu", "cuda", "meta"):
        try:
            torch.empty(0, dtype=torch.float64, device=device)  # sums; Apple's mps has none
        except (RuntimeError, NotImplementedError, TypeError) as error:
            reason = str(error).partition(". ")[0]  # a list of all others follows
            raise hinted(ValueError(f"device={name}: {reason}"), "device=cpu") from error
    return device
