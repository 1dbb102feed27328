"""What gives a teacher's losses: transformers here, or servers of completions.

One interface, `pipeline.scoring.engines.interface.Engine`: documents' tokens and pieces in, one
loss a token out. `load_engine` takes the settings of one of the two; each is imported only where
it is used, for a machine that asks a server needs no torch.
"""

from __future__ import annotations

from pipeline.dataset.files import Dataset
from pipeline.scoring.contexts import ContextRule
from pipeline.scoring.engines.interface import Engine
from pipeline.scoring.engines.settings import (
    EngineSettings,
    ServedSettings,
    TransformersSettings,
)

__all__ = ["load_engine"]


def load_engine(
    settings: EngineSettings,
    rule: ContextRule,
    *,
    source: str,
    dtype: str,
    dataset: Dataset,
    api_key: str = "",
) -> Engine:
    """Return a teacher that is ready to score.

    Args:
        settings: of the engine, which they choose.
        rule: with which context.
        source: the model's folder or .gguf file; of no use to a server.
        dtype: "float32", "bfloat16" or "float16"; a server has its own.
        dataset: whose teacher's tokenizer gives the text that a server is tried with.
        api_key: for servers that ask for one.

    Raises:
        ValueError: a model that can't be scored with.
        EngineError: no server that can be scored with.

    Example:
        >>> load_engine(TransformersSettings(), rule, source="models/teacher", dtype="float32",
        ...     dataset=open_dataset("aligned")).score(tokens, pieces)
    """
    match settings:
        case TransformersSettings():
            from pipeline.scoring.engines.transformers import load_scorer

            return load_scorer(
                source,
                rule,
                dtype=dtype,
                device=settings.device,
                batch_tokens=settings.batch_tokens,
                threads=settings.threads,
            )
        case ServedSettings():
            from pipeline.scoring.engines.openai import connect

            return connect(settings, rule, dataset=dataset, api_key=api_key)
