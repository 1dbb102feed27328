"""Read the parts of a model's .gguf file that transformers ignores.

Keys and tensors that change logits, such as scaled positions, are read, or refused by name.
llama.cpp defines them.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedModel

FAMILIES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3")
"""Architectures whose files were compared with their original models."""

_ROPE_FACTORS = "rope_freqs.weight"
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
# Keys that transformers reads, or that don't change logits.
_KNOWN = {
    *("context_length", "embedding_length", "block_count", "feed_forward_length", "vocab_size"),
    *("attention.head_count", "attention.head_count_kv", "attention.layer_norm_rms_epsilon"),
    *("rope.scaling.original_context_length", "rope.scaling.finetuned", "pooling_type"),
}
_GEMMA_HEAD, _GEMMA_LOCAL_BASE = 256, 1e4


class UnreadGgufError(ValueError):
    """A .gguf file has a property that isn't read."""


@dataclass(frozen=True)
class GgufFile:
    """A model's .gguf file."""

    path: Path

    @cached_property
    def _reader(self) -> Any:
        from gguf import GGUFReader

        return GGUFReader(self.path)

    @cached_property
    def family(self) -> str:
        """Its architecture."""
        field = self._reader.get_field("general.architecture")
        return "" if field is None else str(field.contents())

    @cached_property
    def keys(self) -> Mapping[str, Any]:
        """Its architecture's keys, without that prefix."""
        start = f"{self.family}."
        fields = self._reader.fields.items()
        return {n.removeprefix(start): f.contents() for n, f in fields if n.startswith(start)}

    @cached_property
    def tensors(self) -> list[str]:
        """Its tensors' names."""
        return [tensor.name for tensor in self._reader.tensors]

    def refuse(self, what: str, value: Any, why: str) -> UnreadGgufError:
        """Make the error for an unread property."""
        return UnreadGgufError(
            f"{self.path}: {what} {value} {why}: name the model's folder or repository in the "
            "layout of Hugging Face"
        )

    def rope_factors(self) -> list[float]:
        """Divisors of the positions' frequencies, if any."""
        from gguf import dequantize

        for tensor in self._reader.tensors:
            if tensor.name == _ROPE_FACTORS:
                factors: list[float] = dequantize(tensor.data, tensor.tensor_type).tolist()
                return factors
        return []


def read_gguf_config(file: GgufFile) -> Any:
    """Return a file's model configuration; UnreadGgufError for unknown properties."""
    if file.family not in FAMILIES:
        raise file.refuse("architecture", file.family, f"isn't one of {', '.join(FAMILIES)}")
    config = AutoConfig.from_pretrained(
        file.path.parent, gguf_file=file.path.name, trust_remote_code=False
    )
    read = _set_heads(file, config) | _set_rope(file, config)
    if file.family in ("gemma2", "gemma3"):
        read |= _set_gemma(file, config)
    elif config.model_type == "mistral":  # "llama" to llama.cpp, which gives it no window
        config.sliding_window = None
    for name in file.keys.keys() - _KNOWN - read:
        raise file.refuse(f"{file.family}.{name}", file.keys[name], "isn't read")
    return config


def require_tensors_read(file: GgufFile, model: PreTrainedModel) -> None:
    """Raise UnreadGgufError unless all tensors are weights of the model."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    architecture = next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == file.family)
    names = get_tensor_name_map(architecture, model.config.num_hidden_layers)
    known = {_ROPE_FACTORS}
    for name in model.state_dict():
        part, _, kind = name.rpartition(".")
        known.add(f"{names.get_name(part)}.{kind}")
    unread = [name for name in file.tensors if name not in known]
    if unread:
        raise file.refuse("tensor", f"{unread[0]} (of {len(unread)})", "is none of its model's")


def _set_heads(file: GgufFile, config: Any) -> set[str]:
    names = ("attention.key_length", "attention.value_length", "rope.dimension_count")
    found = {name: file.keys[name] for name in names if name in file.keys}
    if found:
        size = next(iter(found.values()))
        for name, value in found.items():
            if value != size:  # rotated in part, or values of a different width
                raise file.refuse(f"{file.family}.{name}", value, f"differs from {size}")
        config.head_dim = size
    return {*found}


def _set_rope(file: GgufFile, config: Any) -> set[str]:
    base = float(file.keys.get("rope.freq_base", 1e4))
    rope = {"rope_type": "default", "rope_theta": base}
    kind, factor = file.keys.get("rope.scaling.type", "none"), file.keys.get("rope.scaling.factor")
    if kind == "linear" and factor is not None:
        rope |= {"rope_type": "linear", "factor": float(factor)}
    elif kind != "none" or factor not in (None, 0, 1):
        raise file.refuse(f"{file.family}.rope.scaling.type", kind, f"by {factor} isn't read")
    if factors := file.rope_factors():
        rope = _llama3_rope(file, rope, factors)
    read = {"rope.freq_base", "rope.scaling.type", "rope.scaling.factor"}
    if file.family != "gemma3":
        config.rope_parameters = rope
        return read
    local = float(file.keys.get("rope.freq_base_swa", _GEMMA_LOCAL_BASE))
    config.rope_parameters = {
        "sliding_attention": {"rope_type": "default", "rope_theta": local},
        "full_attention": rope,
    }
    return read | {"rope.freq_base_swa"}


def _llama3_rope(file: GgufFile, rope: Mapping[str, Any], factors: list[float]) -> dict[str, Any]:
    """Scaling of Llama 3.1 to 3.3 with these factors of frequencies.

    Source: `_compute_llama3_parameters` of transformers, solved for the original length.
    """
    largest, count = max(factors), len(factors)
    waves = [2 * math.pi * rope["rope_theta"] ** (i / count) for i in range(count)]
    between = [
        wave * (1 + 3 * (1 / own - 1 / largest) / (1 - 1 / largest))
        for wave, own in zip(waves, factors, strict=True)
        if 1 < own < largest
    ]
    # Without any between, every length that separates the others gives the same.
    unscaled = [4 * wave for wave, own in zip(waves, factors, strict=True) if own == 1]
    length = round(between[0]) if between else math.ceil(max(unscaled, default=1.0) + 1)

    def factor_of(wave: float) -> float:
        smooth = min(max((length / wave - 1) / 3, 0.0), 1.0)
        return 1 / ((1 - smooth) / largest + smooth)

    if rope["rope_type"] != "default" or not all(
        math.isclose(factor_of(wave), own, rel_tol=1e-4)
        for wave, own in zip(waves, factors, strict=True)
    ):
        raise file.refuse("tensor", _ROPE_FACTORS, "holds another scaling than Llama 3's")
    scaled = {"rope_type": "llama3", "factor": largest, **_LLAMA3}
    return {**rope, **scaled, "original_max_position_embeddings": length}


def _set_gemma(file: GgufFile, config: Any) -> set[str]:
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if name in file.keys:
            setattr(config, name, file.keys[name] or None)
    layers, heads = config.num_hidden_layers, config.num_attention_heads
    if (file.family, layers) in (("gemma2", 46), ("gemma3", 62)):
        # Only the 27B models scale queries differently, without a key for it.
        config.query_pre_attn_scalar = config.hidden_size // heads
    elif config.head_dim != _GEMMA_HEAD:
        why = f"isn't {_GEMMA_HEAD}, with which published files scale queries"
        raise file.refuse(f"{file.family}.attention.key_length", config.head_dim, why)
    if "attention.sliding_window" not in file.keys:
        raise file.refuse("key", f"{file.family}.attention.sliding_window", "is missing")
    return {"attn_logit_softcapping", "final_logit_softcapping", "attention.sliding_window"}
