"""Test-only: a step on a CUDA device that isn't there.

torch's fake tensors say where each result would lie and of which dtype, and refuse operations
across devices. They have no values, and values decide how a step goes on: so each has a twin on the
CPU, on which the same operation runs. What the host can't know without waiting for the device is
what torch can't answer for fake tensors; those places are noted.

The CPU's tensors stay what they are. torch's kernel for documents can't run: its results are zeros.
"""

import traceback
from collections import Counter, defaultdict
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.autograd.function import BackwardCFunction
from torch.nn.attention import varlen as torch_varlen
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from pipeline.models import varlen

ROOT = Path(__file__).resolve().parents[2]
OURS = tuple(str(ROOT / part) for part in ("megatron_plugin", "pipeline"))
CUDA = torch.device("cuda", 0)
HOPPER, CUDNN_VERSION = (9, 0), 92600
_NOT_ON_CPU = {"_varlen_attn", "_varlen_attn_backward"}


class FakeGpu:
    """Lets tensors inside its `with` statement lie on a device that isn't there.

    Attributes:
        waits: how often the host waited for it, by the function of ours that did.
        operations: that ran on it.
        products: matrix products that ran on it, by their operands' dtype.
    """

    def __init__(self):
        if not hasattr(torch_varlen, "_cudnn_version_and_major_capability"):
            pytest.skip("the fake device stands in for what torch 2.15 asks of one")
        self.waits, self.operations, self.products = Counter(), Counter(), Counter()
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._entered = (
            patch.object(FakeTensorMode, "avoid_device_init", True),
            self.mode,
            patch.object(torch.cuda, "is_available", lambda: True),
            patch.object(torch.cuda, "get_device_capability", lambda *_: HOPPER),
            patch.object(torch.cuda, "is_bf16_supported", lambda *_: True),
            patch.object(torch.Tensor, "pin_memory", lambda tensor: self.pin(tensor)),
            patch.object(torch.Tensor, "backward", backward),
            patch.object(FakeTensor, "tolist", lambda tensor: self._list(tensor)),
            patch.object(varlen, "why_not_cudnn", lambda *_: None),
            patch.object(
                torch_varlen,
                "_cudnn_version_and_major_capability",
                lambda _: (CUDNN_VERSION, HOPPER[0]),
            ),
            _Twins(self),
            _PageLocked(self),
        )

    def __enter__(self):
        torch_varlen._should_use_cudnn.cache_clear()
        for each in self._entered:
            each.__enter__()
        return self

    def __exit__(self, *error):
        for each in reversed(self._entered):
            each.__exit__(*error)
        torch_varlen._should_use_cudnn.cache_clear()

    def note(self, what):
        stack = [frame for frame, _ in traceback.walk_stack(None)]
        name = next(
            (f.f_code.co_qualname for f in stack if f.f_code.co_filename.startswith(OURS)), "torch"
        )
        self.waits[f"{name} {what}"] += 1

    def place(self, real):
        """Return a tensor of the device."""
        with _disable_current_modes():
            like = torch.empty_strided(real.size(), real.stride(), dtype=real.dtype, device="meta")
            fake = FakeTensor(self.mode, like, CUDA)
        fake.twin = real
        return fake

    def move(self, module):
        """Move a module's parameters and buffers, tied ones together."""
        moved = {}
        for part in module.modules():
            for kind in (part._parameters, part._buffers):
                for name, tensor in kind.items():
                    if tensor is not None and tensor not in moved:
                        moved[tensor] = self.place(tensor.detach())
                        moved[tensor].requires_grad_(tensor.requires_grad)
                    if tensor is not None:
                        kind[name] = moved[tensor]
        return module

    def _list(self, tensor):
        self.note("tolist")
        return tensor.twin.tolist()

    def pin(self, tensor):
        with _disable_current_modes():
            pinned = tensor.clone()
        pinned.is_page_locked = True
        return pinned


class _Twins(TorchDispatchMode):
    """Runs each operation of the device twice: on fake tensors, and on their twins."""

    def __init__(self, gpu):
        super().__init__()
        self._gpu = gpu

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, function.overloadpacket.__name__
        if name == "device":
            return function(*args, **kwargs)
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        on_device = [each for each in given if isinstance(each, FakeTensor)]
        device = kwargs.get("device")
        to_device = device is not None and torch.device(device).type == "cuda"
        if not on_device and not to_device:
            with _disable_current_modes():
                return function(*args, **kwargs)
        self._note_copies(name, args, kwargs, bool(on_device), to_device)
        try:
            fake = function(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            self._gpu.note(name)
            fake = None
        self._gpu.operations[name] += 1
        if name in ("mm", "addmm"):
            self._gpu.products[args[-1].dtype if name == "addmm" else args[0].dtype] += 1
        real = self._on_cpu(function, name, args, kwargs, fake)
        return self._joined(name, fake, real)

    def _note_copies(self, name, args, kwargs, from_device, to_device):
        device = kwargs.get("device")
        if name == "_to_copy" and from_device and device is not None and not to_device:
            self._gpu.note("copies to the host")
        page_locked = kwargs.get("non_blocking") and getattr(args[0], "is_page_locked", False)
        if name == "_to_copy" and to_device and not from_device and not page_locked:
            self._gpu.note("copies to the device")
        if name == "copy_" and len({isinstance(each, FakeTensor) for each in args[:2]}) == 2:
            self._gpu.note("copies")
        indices = args[1] if name in ("index_put", "index_put_") else ()
        if any(each is not None and each.dtype == torch.bool for each in indices):
            self._gpu.note(name)

    def _on_cpu(self, function, name, args, kwargs, fake):
        args, kwargs = tree_map_only(FakeTensor, lambda each: each.twin, (args, dict(kwargs)))
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("cpu")
        kwargs.pop("pin_memory", None)
        with _disable_current_modes():
            if name in _NOT_ON_CPU:
                return tree_map_only(
                    FakeTensor, lambda each: torch.zeros(each.shape, dtype=each.dtype), fake
                )
            if name == "mm" and len(args) == 3:  # with an fp32 result
                return torch.mm(args[0].to(args[2]), args[1].to(args[2]))
            return function(*args, **kwargs)

    def _joined(self, name, fake, real):
        """Return fake results with their twins, which must agree."""
        if fake is None:
            return tree_map_only(torch.Tensor, self._gpu.place, real)

        def join(one, other):
            if not isinstance(other, torch.Tensor):
                return one
            if one.device.type == "cpu":
                return other
            assert (one.dtype, one.shape) == (other.dtype, other.shape), (name, one, other.dtype)
            if not hasattr(one, "twin"):
                one.twin = other
            return one

        return tree_map(join, fake, real)


class _PageLocked(TorchFunctionMode):
    """Makes page-locked memory, which asks for a device that is there."""

    def __init__(self, gpu):
        super().__init__()
        self._gpu = gpu

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if kwargs.pop("pin_memory", False):
            return self._gpu.pin(function(*args, **kwargs))
        return function(*args, **kwargs)


def backward(tensor, gradient=None):
    """Walk the graph as torch's engine does, which asks for a device that is there."""
    gradient = torch.ones_like(tensor) if gradient is None else gradient
    waiting, todo = Counter(), [tensor.grad_fn]
    seen = set(todo)
    while todo:
        for node, _ in todo.pop().next_functions:
            waiting[node] += 1
            if node is not None and node not in seen:
                seen.add(node)
                todo.append(node)
    received = defaultdict(dict)
    received[tensor.grad_fn][tensor.output_nr] = gradient
    ready = [tensor.grad_fn]
    while ready:
        node = ready.pop()
        befores = [each for each in node.next_functions if each[0] is not None]
        for (after, place), found in zip(befores, _apply(node, received), strict=True):
            if found is not None:
                known = received[after].get(place)
                received[after][place] = found if known is None else known + found
            waiting[after] -= 1
            if not waiting[after]:
                ready.append(after)


def _apply(node, received):
    """Return the gradients that a node hands on, to those that want one."""
    given, wanted = received.pop(node, {}), [each is not None for each, _ in node.next_functions]
    if not given:
        return [None] * sum(wanted)
    with torch.no_grad():
        gradients = [
            given[place].to(meta.dtype).sum_to_size(meta.shape) if place in given else None
            for place, meta in enumerate(node._input_metadata)
        ]
        if hasattr(node, "variable"):
            (gradient,), leaf = gradients, node.variable
            leaf.grad = gradient if leaf.grad is None else leaf.grad + gradient
            return ()
        if isinstance(node, BackwardCFunction):
            found, wanted = node.apply(*gradients), node.needs_input_grad
        else:
            found = node(*gradients)
    found = found if isinstance(found, tuple) else (found,)
    return [each for each, is_wanted in zip(found, wanted, strict=False) if is_wanted]
