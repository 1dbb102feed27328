"""Megatron models for packed rows: the student's layers, and the frozen teacher."""

import logging
import os
from typing import Any

import torch
from torch import distributed as dist

from megatron_plugin.models.attention import PackedAttention
from megatron_plugin.models.layers import PartedNorm, group_experts, replace_norms
from megatron_plugin.models.shape import Experts, ModelShape
from megatron_plugin.models.stage_cut import cut_layers, megatron_layout, output_cost
from megatron_plugin.models.weight_rules import load_weights
from megatron_plugin.models.weight_sources import Weights
from megatron_plugin.upstream import (
    Float16Module,
    GPTModelBuilder,
    GPTModelConfig,
    LayerNormImpl,
    ProcessGroupCollection,
    TransformerBlockSubmodules,
    TransformerConfig,
    default_layer_spec,
    get_num_layers_to_build,
    parallel_state,
)

logger = logging.getLogger(__name__)

_ENGINE_ATTENTION = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")


def packed_layer_spec(
    config: GPTModelConfig, vp_stage: int | None = None
) -> TransformerBlockSubmodules:
    """Return Megatron's layers, by --transformer-impl, with attention within documents."""
    spec = default_layer_spec(config, vp_stage)
    if not isinstance(spec, TransformerBlockSubmodules):  # a dense model's single layer
        count = get_num_layers_to_build(config.transformer, vp_stage)
        # Megatron would use an installed Transformer Engine or Apex for local layers, too.
        is_local = config.transformer.transformer_impl == "local"
        spec = TransformerBlockSubmodules([spec] * count, PartedNorm if is_local else LayerNormImpl)
    for layer in spec.layer_specs or ():
        layer.submodules.self_attention.submodules.core_attention = PackedAttention
    replace_norms(spec)
    group_experts(spec)
    return spec


def forget_engine_attention() -> None:
    """Remove environment variables of Transformer Engine's attention, which isn't used.

    Megatron compares them with --attention-backend for every model.
    """
    told = {name: os.environ.pop(name) for name in _ENGINE_ATTENTION if name in os.environ}
    if told:
        logger.debug("%s: not read, attention is torch's own", told)


def load_model(chunks: list[torch.nn.Module], weights: Weights) -> list[torch.nn.Module]:
    """Fill and return model chunks, with the weights' rotary frequencies."""
    frequencies = weights.shape.inverse_frequencies()
    group = parallel_state.get_tensor_model_parallel_group()
    for chunk in chunks:
        load_weights(chunk, weights.open, weights.shape, rank=group.rank(), num_ranks=group.size())
        rotary: Any = chunk.rotary_pos_emb
        rotary.inv_freq = frequencies.to(rotary.inv_freq.device)
    return chunks


def build_frozen_model(
    weights: Weights, dtype: torch.dtype, *, device: torch.device
) -> torch.nn.Module:
    """Return this rank's part of a model, loaded, without gradients, on its device.

    `dtype` is of weights and activations.
    """
    shape = weights.shape
    tensor_parallel = parallel_state.get_tensor_model_parallel_world_size()
    config = GPTModelConfig(
        transformer=_frozen_config(shape, dtype, tensor_parallel),
        transformer_layer_spec=packed_layer_spec,
        vocab_size=-(-shape.vocab_size // tensor_parallel) * tensor_parallel,
        seq_length=shape.max_position_embeddings,
        share_embeddings_and_output_weights=shape.tied_embeddings,
        position_embedding_type="rope",
        rotary_base=shape.rotary_base,
    )
    config.finalize()
    forget_engine_attention()
    groups = ProcessGroupCollection.use_mpu_process_groups()
    model: torch.nn.Module = GPTModelBuilder(config).build_model(groups)
    load_model([model], weights)
    model.requires_grad_(False).eval().to(device)  # torch makes norms on the host
    if dtype == torch.bfloat16:
        model = Float16Module(config.transformer, model)
    return model


def _frozen_config(
    shape: ModelShape, dtype: torch.dtype, tensor_parallel: int
) -> TransformerConfig:
    num_stages = parallel_state.get_pipeline_model_parallel_world_size()
    layers = cut_layers(shape.num_layers, num_stages, output_cost(shape))
    if num_stages > 1 and dist.get_rank() == 0:
        logger.info("the teacher's pipeline stages have %s layers", ",".join(map(str, layers)))
    return TransformerConfig(
        **_expert_settings(shape.experts, tensor_parallel),
        **shape.settings,
        tensor_model_parallel_size=tensor_parallel,
        context_parallel_size=parallel_state.get_context_parallel_world_size(),
        pipeline_model_parallel_size=num_stages,
        pipeline_model_parallel_layout=megatron_layout(layers) if num_stages > 1 else None,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        transformer_impl="local",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        # Built on the device: host memory would have to hold a copy per rank.
        use_cpu_initialization=False,
        perform_initialization=False,
        # Makes the host wait, for an old NCCL that mixed up a pair's messages.
        batch_p2p_sync=False,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        # Without a backward pass, no outputs are kept.
        deallocate_pipeline_outputs=False,
    )


def _expert_settings(experts: Experts | None, tensor_parallel: int) -> dict[str, Any]:
    if experts is None:
        return {}
    return {
        "num_moe_experts": experts.count,
        "moe_layer_freq": [int(has_experts) for has_experts in experts.layers],
        "moe_ffn_hidden_size": experts.ffn_hidden_size,
        "moe_router_topk": experts.per_token,
        # Renormalised softmax over all experts is softmax over a token's own.
        "moe_router_pre_softmax": not experts.renormalised,
        "moe_router_load_balancing_type": "none",
        # Sends each token to every rank; "alltoall" to each of its experts, eight with Qwen3,
        # which is less only on more than eight ranks.
        "moe_token_dispatcher_type": "allgather",
        "moe_grouped_gemm": False,  # Transformer Engine's; see `group_experts`
        "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
        # Otherwise each tensor-parallel rank would send the same tokens to the experts.
        "sequence_parallel": tensor_parallel > 1,
    }
