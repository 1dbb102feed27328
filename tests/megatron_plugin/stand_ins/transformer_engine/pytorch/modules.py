"""Linear layers and norms, tensor- and sequence-parallel as the real ones are."""

import torch
from torch.nn.functional import linear, rms_norm


class _Base(torch.nn.Module):
    """What all share: an extra state, which checkpoints hold, and a weight that may be shared."""

    def get_extra_state(self):
        """Return what fp8 would remember."""
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state):
        """Forget it."""

    def _make(self, in_features, out_features, **given):
        self.tp_group, self.parallel_mode = given["tp_group"], given["parallel_mode"]
        ranks = 1 if self.tp_group is None else self.tp_group.size()
        assert given["tp_size"] == ranks
        assert not given["fuse_wgrad_accumulation"], "a kernel's"
        assert not given["return_bias"], "no supported family has such a bias"
        self.sequence_parallel = ranks > 1 and given["sequence_parallel"]
        self.shares = ranks > 1 and self.parallel_mode is not None
        if self.parallel_mode == "column":
            out_features //= ranks
        elif self.parallel_mode == "row":
            in_features //= ranks
        kind = {"dtype": given["params_dtype"], "device": given["device"]}
        self.weight = torch.nn.Parameter(torch.empty(out_features, in_features, **kind))
        given["init_method"](self.weight)
        for name, value in (
            ("tensor_model_parallel", True),
            ("partition_dim", int(self.parallel_mode == "row")),
            ("partition_stride", 1),
        ):
            setattr(self.weight, name, value)
        self.bias = torch.nn.Parameter(torch.zeros(out_features, **kind)) if given["bias"] else None

    def _apply_linear(self, inp):
        from megatron.core.tensor_parallel import mappings  # which imports this package first

        if self.shares and self.parallel_mode == "column":
            if self.sequence_parallel:
                inp = mappings.gather_from_sequence_parallel_region(inp, group=self.tp_group)
            else:
                inp = mappings.copy_to_tensor_model_parallel_region(inp, group=self.tp_group)
        out = linear(inp, self.weight, self.bias)
        if self.shares and self.parallel_mode == "row":
            if self.sequence_parallel:
                return mappings.reduce_scatter_to_sequence_parallel_region(out, group=self.tp_group)
            return mappings.reduce_from_tensor_model_parallel_region(out, group=self.tp_group)
        return out


class Linear(_Base):
    """A linear layer."""

    def __init__(
        self,
        in_features,
        out_features,
        sequence_parallel=False,
        fuse_wgrad_accumulation=False,
        tp_group=None,
        tp_size=1,
        get_rng_state_tracker=None,
        init_method=None,
        bias=True,
        return_bias=False,
        params_dtype=None,
        parallel_mode=None,
        parameters_split=None,
        device="cuda",
        ub_overlap_ag=False,
        ub_overlap_rs=False,
        ub_overlap_rs_dgrad=False,
        ub_bulk_dgrad=False,
        ub_bulk_wgrad=False,
        ub_name=None,
        delay_wgrad_compute=False,
        rng_tracker_name=None,
        symmetric_ar_type=None,
        save_original_input=False,
        name=None,
    ):
        super().__init__()
        self._make(
            in_features,
            out_features,
            sequence_parallel=sequence_parallel,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            tp_group=tp_group,
            tp_size=tp_size,
            init_method=init_method,
            bias=bias,
            return_bias=return_bias,
            params_dtype=params_dtype,
            parallel_mode=parallel_mode,
            device=device,
        )

    def forward(self, inp, is_first_microbatch=None, fp8_output=False, fp8_grad=False):
        """Multiply."""
        return self._apply_linear(inp)


class LayerNormLinear(_Base):
    """A norm and the linear layer behind it."""

    def __init__(
        self,
        in_features,
        out_features,
        eps=1e-5,
        sequence_parallel=False,
        fuse_wgrad_accumulation=False,
        tp_group=None,
        tp_size=1,
        get_rng_state_tracker=None,
        init_method=None,
        bias=True,
        normalization="LayerNorm",
        return_bias=False,
        params_dtype=None,
        parallel_mode=None,
        return_layernorm_output=False,
        return_layernorm_output_gathered=False,
        parameters_split=None,
        zero_centered_gamma=False,
        device="cuda",
        ub_overlap_ag=False,
        ub_overlap_rs=False,
        ub_overlap_rs_dgrad=False,
        ub_bulk_wgrad=False,
        ub_bulk_dgrad=False,
        ub_name=None,
        delay_wgrad_compute=False,
        symmetric_ar_type=None,
        name=None,
    ):
        super().__init__()
        assert (normalization, zero_centered_gamma) == ("RMSNorm", False)
        assert parallel_mode == "column"
        self.eps = eps
        self.layer_norm_weight = torch.nn.Parameter(
            torch.ones(in_features, dtype=params_dtype, device=device)
        )
        self._make(
            in_features,
            out_features,
            sequence_parallel=sequence_parallel,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            tp_group=tp_group,
            tp_size=tp_size,
            init_method=init_method,
            bias=bias,
            return_bias=return_bias,
            params_dtype=params_dtype,
            parallel_mode=parallel_mode,
            device=device,
        )
        self.layer_norm_weight.sequence_parallel = self.sequence_parallel

    def forward(self, inp, is_first_microbatch=None, fp8_output=False, fp8_grad=False):
        """Normalise and multiply."""
        normalised = rms_norm(inp, inp.shape[-1:], self.layer_norm_weight, self.eps)
        return self._apply_linear(normalised)


class RMSNorm(torch.nn.RMSNorm):
    """A norm."""

    def __init__(
        self,
        normalized_shape=None,
        eps=1e-5,
        sequence_parallel=None,
        params_dtype=None,
        zero_centered_gamma=False,
        hidden_size=None,
        *,
        device="cuda",
    ):
        super().__init__(normalized_shape, eps, dtype=params_dtype, device=device)
        self.weight.sequence_parallel = sequence_parallel


class LayerNorm(torch.nn.Module):
    """A name to build for other models."""


class GroupedLinear(torch.nn.Module):
    """A name to subclass."""


class DotProductAttention(torch.nn.Module):
    """A name to subclass: the plugin puts its own in its place."""
