"""Causal language models of Hugging Face transformers as this project needs them.

The library's own forward pass builds the logits of a whole sequence, in fp32 a gigabyte for 2,048
tokens of a large vocabulary. Here a model is asked for its last hidden states, and
`pipeline.cross_entropy` walks the output layer in chunks.

Packed rows: attention must not cross documents. transformers knows packed rows by `cu_seqlens` for
flash attention only, so a boolean mask [rows, 1, T, T] is passed, which every attention
implementation but flash takes. It costs T**2 bytes a row, and attention over the whole row: fine up
to a few thousand tokens a row, which is what this reference is for.
"""

from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from pipeline.hub import why_silent

# Functions between the output layer's product and the softmax, by their configuration's field.
_LOGIT_CHANGES = ("final_logit_softcapping", "logit_scale", "logits_scaling")


def load_language_model(
    source: str, *, dtype: torch.dtype = torch.float32, attention: str | None = None
) -> PreTrainedModel:
    """Load a causal language model for evaluation.

    Args:
        source: a folder, a Hugging Face repository, or a .gguf file (needs `gguf`).
        dtype: of the weights.
        attention: the library's name of an implementation, such as "sdpa"; None: its own choice.

    Raises:
        ValueError: an output layer that chunked cross entropy does not cover.
        OSError: nothing there.

    Example:
        >>> load_language_model("models/teacher").config.vocab_size
        151936
    """
    path = Path(source)
    arguments: dict[str, Any] = {} if attention is None else {"attn_implementation": attention}
    if path.suffix == ".gguf":
        arguments["gguf_file"] = path.name
        model = AutoModelForCausalLM.from_pretrained(path.parent, dtype=dtype, **arguments)
    else:
        if not path.exists() and why_silent(source) is not None:
            arguments["local_files_only"] = True  # the cache may have it; asking takes minutes
        model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, **arguments)
    output_weight(model)
    model.train(False)
    return cast(PreTrainedModel, model)


def output_weight(model: PreTrainedModel) -> Tensor:
    """Return the output layer's weight, [V, H].

    Raises:
        ValueError: the logits are more than a product with it.
    """
    layer = cast(Any, model).get_output_embeddings()
    if layer is None or getattr(layer, "bias", None) is not None:
        raise ValueError(f"{type(model).__name__} has no output layer, or one with a bias")
    for name in _LOGIT_CHANGES:
        if getattr(model.config, name, None) not in (None, 1, 1.0):
            raise ValueError(
                f"{type(model).__name__} changes its logits ({name} = "
                f"{getattr(model.config, name)}): chunked cross entropy does not cover that"
            )
    weight: Tensor = layer.weight
    return weight


def hidden_states(
    model: PreTrainedModel, input_ids: Tensor, *, position_ids: Tensor, cu_seqlens: Tensor
) -> Tensor:
    """Run a model over packed rows; return the states that enter its output layer.

    Args:
        model: loaded by `load_language_model`, or any whose `base_model` gives hidden states.
        input_ids: int [rows, T].
        position_ids: int [rows, T], from 0 in every segment.
        cu_seqlens: int [rows, segments + 1], segment bounds from 0 to T; equal ones are empty
            segments.

    Returns:
        float [rows, T, H].

    Example:
        >>> hidden_states(model, batch["input_ids"], position_ids=batch["position_ids"],
        ...               cu_seqlens=batch["cu_seqlens"]).shape
        torch.Size([4, 512, 192])
    """
    mask = segment_mask(cu_seqlens, input_ids.shape[1])
    output = model.base_model(
        input_ids=input_ids.long(),
        attention_mask=mask,
        position_ids=position_ids.long(),
        use_cache=False,
    )
    states: Tensor = output.last_hidden_state
    return states


def segment_mask(cu_seqlens: Tensor, seq_length: int) -> Tensor:
    """Return which earlier tokens each token may see: those of its own segment.

    Args:
        cu_seqlens: int [rows, segments + 1].
        seq_length: T.

    Returns:
        bool [rows, 1, T, T], True = visible; every token sees itself.

    Example:
        >>> segment_mask(torch.tensor([[0, 1, 3]]), 3)[0, 0].int().tolist()
        [[1, 0, 0], [0, 1, 0], [0, 1, 1]]
    """
    places = torch.arange(seq_length, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    bounds = cu_seqlens.contiguous()
    segments = torch.searchsorted(bounds, places.expand(len(bounds), -1).contiguous(), right=True)
    same = segments[:, :, None] == segments[:, None, :]
    return (same & (places[:, None] >= places)).unsqueeze(1)
