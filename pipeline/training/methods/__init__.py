"""The methods of `vocag train`: each file gives what its methods need and their loss of a batch.

A new method is a file, its constant in `METHODS` and its name in `pipeline.training.method`. A new
way to rank tokens is a selector of `pipeline.guidance.selection`, and with it a method of both
trainers.
"""

from pipeline.training.methods.alm import ALM
from pipeline.training.methods.chunks import CHUNKS, CHUNKS_RANDOM
from pipeline.training.methods.interface import MethodKind
from pipeline.training.methods.kld import KLD
from pipeline.training.methods.rho1 import RHO1, RHO1_SELF
from pipeline.training.methods.selecting import SELECTING
from pipeline.training.methods.uld import ULD

METHODS: dict[str, MethodKind] = {
    kind.name: kind for kind in (*SELECTING, ALM, KLD, ULD, RHO1, RHO1_SELF, CHUNKS, CHUNKS_RANDOM)
}
"""By its name what each method is."""
