"""Causal language models of Hugging Face transformers, for packed rows.

A whole sequence's logits take gigabytes, so the loss walks the output layer in chunks.

Masks wouldn't keep attention within documents: under "eager" attention transformers *adds* a
boolean one, so tokens see the future, and sliding windows are lost. Instead positions restart with
every document, see `pipeline.models.packed_check`.
"""

from os.path import expanduser
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from pipeline.dataset.tokenizers import Side
from pipeline.models.gguf_files import GgufFile, read_gguf_config
from pipeline.models.output_layer import require_own_losses
from pipeline.models.packed_attention import packed_arguments
from pipeline.models.packed_check import keep_documents_apart
from pipeline.models.teacher_files import find_folder
from pipeline.models.weights import load_weights, read_config


def load_language_model(
    source: str,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    attention: str | None = None,
    packed: bool = True,
) -> PreTrainedModel:
    """Load a causal language model for evaluation.

    Args:
        source: a folder, a Hugging Face repository, or a .gguf file (needs `gguf`).
        dtype: of the weights.
        device: where it runs and is checked.
        attention: transformers' name of an implementation, such as "flash_attention_2"; None: the
            fastest exact one.
        packed: prepare it for `hidden_states` of packed rows; else for whole documents only.

    Raises:
        ValueError: no such source, broken files, weights that don't fit, losses that differ from
            the model's own, or documents of a packed row that see each other.

    Example:
        >>> load_language_model("models/teacher").config.vocab_size  # doctest: +SKIP
        151936
    """
    path = Path(source)
    arguments: dict[str, Any] = {} if attention is None else {"attn_implementation": attention}
    if path.suffix == ".gguf":
        model = load_weights(path.parent, dtype=dtype, gguf_file=path.name, **arguments)
        # Its weights are plain now; a model marked as quantised can't be saved.
        vars(model).pop("hf_quantizer", None)
        vars(model.config).pop("quantization_config", None)
        model.config.name_or_path = str(path)  # not its folder
    else:
        path = find_folder(source, role="model")
        model = load_weights(path, dtype=dtype, **arguments)
    cast(Any, model).to(device)
    require_own_losses(model)
    if packed:
        keep_documents_apart(model, attention)
    return model


def read_shape(source: str, *, side: Side = "student") -> PretrainedConfig:
    """Return the configuration of a folder, repository or .gguf file, without weights.

    ValueError if there is none, or it is broken.
    """
    path = Path(expanduser(source))
    if path.suffix == ".gguf" and path.is_file():
        shape = read_gguf_config(GgufFile(path))
        shape.name_or_path = str(path)
        return cast(PretrainedConfig, shape)
    folder = find_folder(source, role=side, files=("*.json", "*.model", "*.jinja"))
    return cast(PretrainedConfig, read_config(folder))


def recompute_layers(model: PreTrainedModel) -> None:
    """Keep only each layer's input for the gradient; ValueError if the model can't."""
    if not model.supports_gradient_checkpointing:
        raise ValueError(f"{type(model).__name__} can't compute its layers again: leave out "
                         "gradient_checkpointing")  # fmt: skip
    # The name since transformers 5.24, where the older one warns.
    enable = getattr(model, "activation_checkpointing_enable", None)
    (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})


def hidden_states(
    model: PreTrainedModel,
    input_ids: Tensor,
    *,
    position_ids: Tensor,
    on_host: Tensor | None = None,
) -> Tensor:
    """Run a model over packed rows; return the states that enter its output layer.

    Args:
        model: loaded by `load_language_model`, or prepared by `keep_documents_apart`.
        input_ids: int [rows, T].
        position_ids: int [rows, T], from 0 in every segment.
        on_host: the same in host memory; None: the host waits for the device's.

    Returns:
        float [rows, T, H].

    Example:
        >>> hidden_states(model, batch["input_ids"], position_ids=batch["position_ids"]).shape
        torch.Size([4, 512, 192])
    """
    states: Tensor = model.base_model(
        input_ids=input_ids.long(),
        position_ids=position_ids.long(),
        use_cache=False,
        **packed_arguments(model, position_ids, on_host),
    ).last_hidden_state
    return states
