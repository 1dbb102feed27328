"""Tensors of few bits, which no test uses."""


class QuantizedTensor:
    """A name to ask for."""
