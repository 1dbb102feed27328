"""Test-only: Transformer Engine's names and signatures, as Megatron calls them, over torch's own.

What Megatron-Core imports and builds for `--transformer-impl transformer_engine`, with the
parameters of release 2.6: a call that the real package would refuse fails here, too. No kernels.
"""

from transformer_engine import common, pytorch  # noqa: F401  Megatron reads both off the package

__version__ = "2.6.0"
