"""Check the device that an option names, before anything is loaded."""

import torch

from pipeline.command_line.failures import hinted


def find_device(name: str = "") -> torch.device:
    """Return the device that `--device` names; "" is the GPU if there is one.

    ValueError if torch doesn't know the name, or has no such GPU.

    Example:
        >>> find_device("cpu")
        device(type='cpu')
    """
    if not name:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise hinted(ValueError(f"--device {name}: {reason}"), "--device cpu") from error
    # Counted without a context of CUDA's, which processes that are forked later could not use.
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        refusal = ValueError(
            f"--device {name}: torch {torch.__version__} sees {torch.cuda.device_count()} GPUs "
            "here; see vocag doctor"
        )
        raise hinted(refusal, "--device cpu")
    return device
