"""The library: tokenize, align, pack, stream, guide, validate."""

from pipeline.kernel_cache import provide_kernel_cache

provide_kernel_cache()  # before anything here imports numba, which looks for one then
