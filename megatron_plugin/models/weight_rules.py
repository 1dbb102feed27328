"""Hugging Face weights as Megatron parameters, and back: bit-exact both ways.

A full parameter, as in a distributed checkpoint, is the slice of a group of one rank. Differences:

    linear_qkv      rows [group][q heads of the group, k, v] interleaved, instead of three tensors
    linear_fc1      gate and up projection in one, both halves cut separately
    embeddings      rows of zeros appended up to the padded vocabulary
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_plugin.models.shape import ModelShape
from pipeline.command_line.failures import hinted

_NORMS = ("input", "post_attention")
_EXPERT = "local_experts"  # the name of a layer's list of experts


class Sliceable(Protocol):
    """A tensor in memory or on disk, read by slices."""

    @property
    def shape(self) -> Sequence[int]:
        """Sizes of its dimensions."""

    def __getitem__(self, index: Any, /) -> Tensor:
        """Return a slice."""


@dataclass(frozen=True)
class Rule:
    """How named Hugging Face tensors make a Megatron parameter.

    `shard` makes a rank's slice from (full tensors, rank, ranks), `merge` full tensors from all
    slices.
    """

    names: tuple[str, ...]
    shard: Callable[[Sequence[Sliceable], int, int], Tensor]
    merge: Callable[[Sequence[Tensor]], list[Tensor]]


def rule_for(name: str, shape: ModelShape, *, padded_vocab_size: int) -> Rule:
    """Return the rule of a parameter, named as in the whole model; KeyError if unknown.

    Knows local layers and Transformer Engine's fused ones.
    """
    embedding = "model.embed_tokens.weight"
    output = embedding if shape.tied_embeddings else "lm_head.weight"
    if name == "embedding.word_embeddings.weight":
        return _vocabulary(embedding, shape, padded_vocab_size)
    if name == "output_layer.weight":
        return _vocabulary(output, shape, padded_vocab_size)
    if name == "decoder.final_layernorm.weight":
        return _replicated("model.norm.weight")
    _, _, layer, rest = name.split(".", 3)
    return _layer_rule(f"model.layers.{layer}.", rest, shape)


def load_weights(
    model: torch.nn.Module,
    open_tensor: Callable[[str], Sliceable],
    shape: ModelShape,
    *,
    rank: int,
    num_ranks: int,
) -> None:
    """Fill a GPTModel chunk with its rank's part of the tensors."""
    for name, parameter in whole_model_names(model).items():
        padded = parameter.shape[0] * num_ranks
        rule = rule_for(name, shape, padded_vocab_size=padded)
        tensors = [open_tensor(tensor_name) for tensor_name in rule.names]
        num_tokens = tensors[0].shape[0]
        if ("embeddings" in name or name == "output_layer.weight") and num_tokens > padded:
            error = ValueError(
                f"{rule.names[0]} has {num_tokens} rows, the model's padded vocabulary only "
                f"{padded}: raise --vocab-size to {num_tokens}"
            )
            raise hinted(error, f"--vocab-size {num_tokens}")
        value = rule.shard(tensors, rank, num_ranks)
        if value.shape != parameter.shape:
            raise ValueError(
                f"{' + '.join(rule.names)} gives {name} the shape {tuple(value.shape)}, the model "
                f"has {tuple(parameter.shape)}: its Megatron arguments don't fit the weights; "
                "leave them out and the weights' own config decides"
            )
        with torch.no_grad():
            parameter.copy_(value)


def whole_model_names(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return parameters by their names in the whole model.

    `named_parameters` counts layers and experts from the rank's first.
    """
    bare: Any = model
    while hasattr(bare, "module"):
        bare = bare.module
    named = {}
    for name, parameter in bare.named_parameters():
        parts = name.split(".")
        if parts[:2] == ["decoder", "layers"]:
            layer = bare.decoder.layers[int(parts[2])]
            parts[2] = str(layer.layer_number - 1)
            if _EXPERT in parts:
                place = parts.index(_EXPERT) + 1
                parts[place] = str(layer.mlp.local_expert_indices[int(parts[place])])
        named[".".join(parts)] = parameter
    return named


def tensors_of(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model's Hugging Face tensors, by name."""
    wide, head = shape.hidden_size, shape.head_size
    heads, groups = shape.num_attention_heads * head, shape.num_query_groups * head
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (shape.vocab_size, wide),
        "model.norm.weight": (wide,),
    }
    if not shape.tied_embeddings:
        found["lm_head.weight"] = (shape.vocab_size, wide)
    for number in range(shape.num_layers):
        layer = f"model.layers.{number}."
        attention = layer + "self_attn."
        found |= {layer + f"{norm}_layernorm.weight": (wide,) for norm in _NORMS}
        found |= {attention + "o_proj.weight": (wide, heads)}
        for side, rows in (("q", heads), ("k", groups), ("v", groups)):
            found[f"{attention}{side}_proj.weight"] = (rows, wide)
            if shape.qkv_bias:
                found[f"{attention}{side}_proj.bias"] = (rows,)
        if shape.qk_layernorm:
            found |= {f"{attention}{side}_norm.weight": (head,) for side in "qk"}
        found |= _mlp_tensors(layer + "mlp.", number, shape)
    return found


def _mlp_tensors(mlp: str, number: int, shape: ModelShape) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    wide, experts = shape.hidden_size, shape.experts
    parts, inner = [mlp], shape.ffn_hidden_size
    if experts is not None and experts.layers[number]:
        found[mlp + "gate.weight"] = (experts.count, wide)
        parts = [f"{mlp}experts.{expert}." for expert in range(experts.count)]
        inner = experts.ffn_hidden_size
    for part in parts:
        found |= {f"{part}{side}_proj.weight": (inner, wide) for side in ("gate", "up")}
        found[part + "down_proj.weight"] = (wide, inner)
    return found


def merge_weights(slices: Mapping[str, Sequence[Tensor]], shape: ModelShape) -> dict[str, Tensor]:
    """Return a model's Hugging Face tensors from tensor-parallel ranks' slices, by parameter."""
    merged: dict[str, Tensor] = {}
    for name, parts in slices.items():
        if name == "output_layer.weight" and shape.tied_embeddings:
            continue
        rule = rule_for(name, shape, padded_vocab_size=len(parts) * parts[0].shape[0])
        full = [tensor.contiguous() for tensor in rule.merge(parts)]
        merged.update(zip(rule.names, full, strict=True))
    return merged


def _layer_rule(layer: str, rest: str, shape: ModelShape) -> Rule:
    attention, mlp = layer + "self_attn.", layer + "mlp."
    if rest.startswith(f"mlp.experts.{_EXPERT}."):
        expert, rest = rest.removeprefix(f"mlp.experts.{_EXPERT}.").split(".", 1)
        mlp, rest = f"{mlp}experts.{expert}.", "mlp." + rest
    qkv = [f"{attention}{side}_proj." for side in "qkv"]
    rules: dict[str, Callable[[], Rule]] = {
        "input_layernorm.weight": lambda: _replicated(layer + "input_layernorm.weight"),
        "pre_mlp_layernorm.weight": lambda: _replicated(layer + "post_attention_layernorm.weight"),
        "self_attention.linear_qkv.weight": lambda: _qkv(tuple(q + "weight" for q in qkv), shape),
        "self_attention.linear_qkv.bias": lambda: _qkv(tuple(q + "bias" for q in qkv), shape),
        "self_attention.q_layernorm.weight": lambda: _replicated(attention + "q_norm.weight"),
        "self_attention.k_layernorm.weight": lambda: _replicated(attention + "k_norm.weight"),
        "self_attention.linear_proj.weight": lambda: _columns(attention + "o_proj.weight"),
        "mlp.linear_fc1.weight": lambda: _gated(mlp + "gate_proj.weight", mlp + "up_proj.weight"),
        "mlp.linear_fc2.weight": lambda: _columns(mlp + "down_proj.weight"),
        "mlp.router.weight": lambda: _replicated(mlp + "gate.weight"),
    }
    # Transformer Engine fuses each norm into the linear layer after it.
    rules["self_attention.linear_qkv.layer_norm_weight"] = rules["input_layernorm.weight"]
    rules["mlp.linear_fc1.layer_norm_weight"] = rules["pre_mlp_layernorm.weight"]
    return rules[rest]()


def _replicated(name: str) -> Rule:
    return Rule((name,), lambda full, rank, ranks: full[0][:], lambda parts: [parts[0]])


def _columns(name: str) -> Rule:
    return Rule(
        (name,),
        lambda full, rank, ranks: full[0][:, _share(full[0].shape[1], rank, ranks)],
        lambda parts: [torch.cat(list(parts), 1)],
    )


def _gated(gate: str, up: str) -> Rule:
    def shard(full: Sequence[Sliceable], rank: int, ranks: int) -> Tensor:
        return torch.cat([half[_share(half.shape[0], rank, ranks)] for half in full])

    def merge(parts: Sequence[Tensor]) -> list[Tensor]:
        halves = [part.chunk(2) for part in parts]
        return [torch.cat([half[side] for half in halves]) for side in (0, 1)]

    return Rule((gate, up), shard, merge)


def _qkv(names: tuple[str, ...], shape: ModelShape) -> Rule:
    groups, heads = shape.num_query_groups, shape.num_attention_heads
    rows = (heads // groups * shape.head_size, shape.head_size, shape.head_size)

    def shard(full: Sequence[Sliceable], rank: int, ranks: int) -> Tensor:
        if groups % ranks:  # a group's rows lie on several ranks
            return shard(full, 0, 1).chunk(ranks)[rank]
        own = groups // ranks
        grouped = [
            tensor[rank * own * size : (rank + 1) * own * size].unflatten(0, (own, size))
            for tensor, size in zip(full, rows, strict=True)
        ]
        return torch.cat(grouped, 1).flatten(0, 1)

    def merge(parts: Sequence[Tensor]) -> list[Tensor]:
        grouped = torch.cat(list(parts)).unflatten(0, (groups, sum(rows)))
        return [side.flatten(0, 1) for side in grouped.split(rows, 1)]

    return Rule(names, shard, merge)


def _vocabulary(name: str, shape: ModelShape, padded_vocab_size: int) -> Rule:
    def shard(full: Sequence[Sliceable], rank: int, ranks: int) -> Tensor:
        share, held = _share(padded_vocab_size, rank, ranks), full[0].shape[0]
        own = full[0][min(share.start, held) : min(share.stop, held)]
        missing = share.stop - share.start - len(own)
        return torch.nn.functional.pad(own, (0, 0, 0, missing)) if missing else own

    return Rule((name,), shard, lambda parts: [torch.cat(list(parts))[: shape.vocab_size]])


def _share(size: int, rank: int, ranks: int) -> slice:
    step = -(-size // ranks)
    return slice(min(rank * step, size), min((rank + 1) * step, size))
