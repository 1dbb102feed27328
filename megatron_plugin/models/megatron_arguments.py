"""A model's shape as Megatron's arguments, and these as a Hugging Face config."""

from argparse import Namespace
from importlib.util import find_spec
from typing import Any

from megatron_plugin.arguments import ArgumentError
from megatron_plugin.models.shape import ModelShape
from pipeline.command_line.failures import hinted

_OPTIONS = {"layernorm_epsilon": "--norm-epsilon"}  # others are named like their attributes

# Settings that all supported families share and no config has.
_UNTRANSLATED = {
    "rotary_percent": 1.0,
    "use_rope_scaling": False,
    "rotary_interleaved": False,
    "no_rope_freq": None,
    "qk_l2_norm": False,
    "attention_output_gate": False,
    "experimental_attention_variant": None,
    "apply_residual_connection_post_layernorm": False,
    "squared_relu": False,
    "quick_geglu": False,
    "glu_linear_offset": 0.0,
    "activation_func_clamp_value": None,
}


def installed_arguments() -> list[str]:
    """Return arguments for missing packages and packed rows, to precede the user's."""
    arguments = ["--attention-dropout", "0", "--hidden-dropout", "0"]
    arguments += ["--dataloader-type", "external"]
    if find_spec("transformer_engine") is None:
        arguments += ["--transformer-impl", "local", "--no-rope-fusion", "--no-persist-layer-norm"]
    # Apex's; Megatron's output layer needs it among Transformer Engine's layers, too.
    if find_spec("fused_weight_gradient_mlp_cuda") is None:
        arguments += ["--no-gradient-accumulation-fusion"]
    return arguments


def model_arguments(shape: ModelShape) -> list[str]:
    """Return a student's arguments; ArgumentError for experts."""
    if shape.experts is not None:
        raise ArgumentError(
            f"the student is a mixture of {shape.experts.count} experts ({shape.family}), which "
            "only a teacher may be: choose a dense one"
        )
    arguments = []
    for name, value in _attributes(shape).items():
        option = _option_of(name)
        if value is True:
            arguments.append(option)
        elif value is not False:
            arguments += [option, str(value)]
    arguments += ["--group-query-attention"] * (shape.num_query_groups < shape.num_attention_heads)
    arguments += ["--vocab-size", str(shape.vocab_size), "--disable-bias-linear"]
    arguments += ["--max-position-embeddings", str(shape.max_position_embeddings)]
    arguments += ["--rotary-base", str(int(shape.rotary_base))]
    return arguments


def _option_of(name: str) -> str:
    return _OPTIONS.get(name, "--" + name.replace("_", "-"))


def require_model(args: Namespace, shape: ModelShape) -> None:
    """Raise ArgumentError unless the arguments describe the loaded weights' model."""
    expected = {**_UNTRANSLATED, **_attributes(shape), "add_bias_linear": False}
    expected["rotary_base"] = int(shape.rotary_base)
    for name, value in expected.items():
        given = getattr(args, name)
        if given != value and not (name == "num_query_groups" and given in (None, 1)):
            error = ArgumentError(
                f"the arguments say {name} {given}, --vocag-student's config {value}: leave the "
                "argument out, the config sets it"
            )
            raise hinted(error, f"leave out {_option_of(name)}")


def config_of_arguments(args: Namespace, vocab_size: int) -> dict[str, Any] | None:
    """Return the Llama, Qwen2 or Qwen3 config of Megatron's arguments; None if none fits."""
    translated = (
        args.normalization == "RMSNorm"
        and args.swiglu
        and not args.add_bias_linear
        and args.position_embedding_type == "rope"
        and all(getattr(args, name) == value for name, value in _UNTRANSLATED.items())
        and not (args.add_qkv_bias and args.qk_layernorm)
    )
    if not translated:
        return None
    from transformers import AutoConfig

    family = "qwen2" if args.add_qkv_bias else "qwen3" if args.qk_layernorm else "llama"
    grouped = args.group_query_attention
    config = AutoConfig.for_model(
        family,
        vocab_size=vocab_size,
        hidden_size=args.hidden_size,
        intermediate_size=args.ffn_hidden_size,
        num_hidden_layers=args.num_layers,
        num_attention_heads=args.num_attention_heads,
        num_key_value_heads=args.num_query_groups if grouped else args.num_attention_heads,
        head_dim=args.kv_channels,
        max_position_embeddings=args.max_position_embeddings,
        rms_norm_eps=args.layernorm_epsilon,
        rope_parameters={"rope_type": "default", "rope_theta": float(args.rotary_base)},
        tie_word_embeddings=not args.untie_embeddings_and_output_weights,
    )
    return config.to_dict()


def _attributes(shape: ModelShape) -> dict[str, int | float | str | bool]:
    return shape.settings | {
        "position_embedding_type": "rope",
        "swiglu": True,
        "untie_embeddings_and_output_weights": not shape.tied_embeddings,
    }
