"""Eight-bit numbers, which no test uses."""

from contextlib import nullcontext


class FP8GlobalStateManager:
    """Says that they are off."""

    @staticmethod
    def is_fp8_enabled():
        """Whether layers compute in eight bits."""
        return False


fp8_autocast = fp8_model_init = nullcontext
