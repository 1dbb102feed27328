"""`vocag align`: documents in, verified aligned shards out."""

from beam_jobs.align.command import align, build_pipeline, main

__all__ = ["align", "build_pipeline", "main"]
