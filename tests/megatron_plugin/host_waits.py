"""Test-only: where a host would wait for its device, though here both are the CPU.

What a tensor was made of says where it would lie: on the device if it was copied there, was made
there, or is the result of anything that is there. A tensor's storage carries the mark.

A host waits where it reads a value of the device, where the device decides a shape (nonzero), and
for copies to the device unless they are said not to block and come from page-locked memory.
"""

import traceback
from collections import Counter
from pathlib import Path

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ROOT = Path(__file__).resolve().parents[2]
OURS = tuple(str(ROOT / part) for part in ("megatron_plugin", "pipeline"))
_WAITING = {
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "equal",
    "bincount",
    "unique_dim",
    "unique_consecutive",
    "_unique2",
}
_INDEXING = {"index", "index_put", "index_put_"}
_FACTORIES = {"empty", "zeros", "ones", "full", "arange", "rand", "randn"}


class HostWaits:
    """Counts the waits inside its `with` statement, by the line of ours that waits.

    Attributes:
        found: waits by place: whose line it is, file and line, and what waits.
        most_elements: of a tensor on the device.
    """

    def __init__(self):
        self.found, self.most_elements = Counter(), 0
        self._on_device, self._pinned = {}, {}
        self._modes = (_Functions(self), _Operations(self))

    def __enter__(self):
        self._methods = torch.Tensor.cuda, torch.Tensor.pin_memory
        torch.Tensor.cuda = lambda tensor, *_, **__: self.to_device(tensor, non_blocking=False)
        torch.Tensor.pin_memory = lambda tensor, *_, **__: self._pin(tensor)
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, *error):
        for mode in reversed(self._modes):
            mode.__exit__(*error)
        torch.Tensor.cuda, torch.Tensor.pin_memory = self._methods

    def note(self, what):
        frames = ((frame.f_code.co_filename, line) for frame, line in traceback.walk_stack(None))
        file, line = next(at for at in frames if at[0].startswith(OURS) or "/megatron/" in at[0])
        whose = "ours" if file.startswith(OURS) else "Megatron"
        self.found[f"{whose} {Path(file).name}:{line} {what}"] += 1

    def mark(self, tensor):
        if isinstance(tensor, torch.Tensor):
            _remember(self._on_device, tensor)
            self.most_elements = max(self.most_elements, tensor.numel())
        return tensor

    def is_on_device(self, tensor):
        return isinstance(tensor, torch.Tensor) and _is_in(self._on_device, tensor)

    def to_device(self, tensor, *, non_blocking):
        if self.is_on_device(tensor):
            return tensor
        if not (non_blocking and _is_in(self._pinned, tensor)):
            self.note("copies to the device")
        return self.mark(tensor.clone())

    def pinned(self, tensor):
        _remember(self._pinned, tensor)
        return tensor

    def _pin(self, tensor):
        return self.pinned(tensor if _is_in(self._pinned, tensor) else tensor.clone())


class _Functions(TorchFunctionMode):
    """Sees devices by their names, before they are read as the CPU."""

    def __init__(self, waits):
        super().__init__()
        self._waits = waits

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs, name = dict(kwargs or {}), getattr(function, "__name__", "")
        named = kwargs.get("device") or next(
            (each for each in args[1:] if isinstance(each, str | torch.device)), None
        )
        if name == "cpu" and self._waits.is_on_device(args[0]):
            self._waits.note("copies to the host")
            return args[0].clone()
        if name in ("tolist", "numpy") and self._waits.is_on_device(args[0]):
            self._waits.note(name)
        to_cuda = named is not None and torch.device(named).type == "cuda"
        # A device that was asked of a tensor reads "cpu", too.
        if name == "to" and isinstance(named, torch.device):
            moved = self._waits.to_device(args[0], non_blocking=kwargs.pop("non_blocking", False))
            others = [each for each in args[1:] if isinstance(each, torch.dtype)]
            return self._waits.mark(function(moved, *others)) if others else moved
        if name == ("tensor" if named is not None else "new_tensor"):
            self._waits.note("copies to the device")
        pinned = kwargs.get("pin_memory", False)
        made = function(*args, **kwargs)
        if pinned:
            return self._waits.pinned(made)
        return self._waits.mark(made) if name in _FACTORIES and to_cuda else made


class _Operations(TorchDispatchMode):
    """Results of what is on the device are there, too."""

    def __init__(self, waits):
        super().__init__()
        self._waits = waits

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = function.overloadpacket.__name__
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        on_device = any(map(self._waits.is_on_device, given))
        if on_device and (name in _WAITING or (name in _INDEXING and _by_mask(args[1]))):
            self._waits.note(name)
        result = function(*args, **kwargs)
        if on_device and name != "_local_scalar_dense":
            for each in tree_leaves(result):
                self._waits.mark(each)
        return result


def _by_mask(indices):
    return any(each is not None and each.dtype in (torch.bool, torch.uint8) for each in indices)


def _remember(known, tensor):
    reference = StorageWeakRef(tensor.untyped_storage())
    known[reference.cdata] = reference  # which keeps the address from being given anew


def _is_in(known, tensor):
    return tensor.untyped_storage()._cdata in known
