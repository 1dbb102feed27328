"""`vocag train` with dropout in attention and after each block's two parts.

    python evidence/prove/dropout.py 0.1 --data aligned --student model --method full …

Hugging Face's Llama has dropout of attention weights alone. Hooks add the other one, before a
part's output is added to what flows past it. `vocag train` seeds random numbers at every step, so
a run that was stopped goes on bit for bit.
"""

import sys
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from pipeline.training.command import main


def drop_out(share: float) -> None:
    """Set a share of attention weights, and of what attention and MLP add, to 0 in training."""

    def before(module: nn.Module, arguments: Any) -> None:
        if hasattr(module, "attention_dropout"):
            module.__dict__["attention_dropout"] = share

    def after(module: nn.Module, arguments: Any, output: Any) -> Any:
        if not module.training or not type(module).__name__.endswith(("Attention", "MLP")):
            return None
        if isinstance(output, Tensor):
            return nn.functional.dropout(output, share)
        return (nn.functional.dropout(output[0], share), *output[1:])

    register_module_forward_pre_hook(before)
    register_module_forward_hook(after)


if __name__ == "__main__":
    drop_out(float(sys.argv[1]))
    sys.exit(main(sys.argv[2:]))
