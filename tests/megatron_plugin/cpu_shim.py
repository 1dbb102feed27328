"""Test-only: let megatron-core 0.19 and its trainer run on the CPU, by standing in for torch.cuda.

Import it before anything of megatron. The CPU's random generator stands in for the device's.
"""

import contextlib
import os
from collections import defaultdict
from types import SimpleNamespace

os.environ["TORCHDYNAMO_DISABLE"] = "1"
# Megatron asks for it where tensor parallelism is used on older GPUs.
os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")
NUM_DEVICES = 8


class _Nothing:
    """Stands in for streams and events."""

    cuda_stream = 0
    device = CPU

    def __init__(self, *_, **__):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return False

    def query(self):
        return True

    def elapsed_time(self, _):
        return 0.0

    def record_event(self, *_):
        return self

    def _pass(self, *_):
        pass

    record = wait = wait_stream = wait_event = synchronize = _pass


class _DevicesAreCpu(TorchFunctionMode):
    """Reads every device named "cuda" as the CPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if "device" in kwargs:
            kwargs["device"] = _cpu_for_cuda(kwargs["device"])
        kwargs.pop("pin_memory", None)
        if any(isinstance(value, str | torch.device) for value in args):
            args = tuple(_cpu_for_cuda(value) for value in args)
        return function(*args, **kwargs)


def install():
    """Replace what Megatron calls of torch.cuda."""
    _describe_devices()
    _replace_random_state()
    _replace_streams()
    _replace_tensor_methods()
    _DevicesAreCpu().__enter__()


def _describe_devices():
    properties = SimpleNamespace(
        major=9, minor=0, total_memory=1 << 34, name="cpu", multi_processor_count=1
    )
    silent = ("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats")
    memory = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
    values = {
        "is_available": True,
        "is_initialized": True,
        "device_count": NUM_DEVICES,
        "current_device": CPU,
        "mem_get_info": (1 << 34, 1 << 34),
        "get_device_properties": properties,
        "get_device_capability": (9, 0),
        "get_device_name": "cpu",
    }
    for name, value in (values | dict.fromkeys(silent) | dict.fromkeys(memory, 0)).items():
        setattr(torch.cuda, name, _always(value))
    torch.cuda.memory_stats = lambda *_, **__: defaultdict(int)


def _replace_random_state():
    for module in (torch.cuda, torch.cuda.random):
        module.get_rng_state = lambda *_, **__: torch.get_rng_state()
        module.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    torch.cuda.manual_seed = torch.cuda.manual_seed_all = lambda seed: (
        torch.default_generator.manual_seed(seed) and None
    )
    # Indexed by what `current_device` returns, which is a device here.
    torch.cuda.default_generators = {CPU: torch.default_generator}


def _replace_streams():
    torch.cuda.Stream = torch.cuda.Event = _Nothing
    torch.cuda.current_stream = torch.cuda.default_stream = lambda *_: _Nothing()
    torch.cuda.set_stream = lambda *_: None
    torch.cuda.stream = lambda *_: contextlib.nullcontext()
    torch.cuda.is_current_stream_capturing = lambda: False
    for name in ("_accelerator_graph_capture_health_check", "_cuda_graph_capture_health_check"):
        setattr(torch.optim.Optimizer, name, lambda self: None)


def _replace_tensor_methods():
    torch.Tensor.cuda = torch.Tensor.pin_memory = lambda self, *_, **__: self
    torch.nn.Module.cuda = lambda self, *_, **__: self
    torch.Tensor.record_stream = lambda self, *_: None
    type_of = torch.Tensor.type

    def cuda_type(self, *args, **kwargs):
        # Gradient clipping compares with "torch.cuda.FloatTensor".
        found = type_of(self, *args, **kwargs)
        return found if args or kwargs else f"torch.cuda.{found.rpartition(chr(46))[2]}"

    torch.Tensor.type = cuda_type
    for name in ("Float", "Int", "Long", "BFloat16", "Half", "Byte"):
        setattr(torch.cuda, f"{name}Tensor", getattr(torch, f"{name}Tensor"))


def _always(value):
    return lambda *_, **__: value


def _cpu_for_cuda(device):
    named = device.type if isinstance(device, torch.device) else device
    return CPU if isinstance(named, str) and named.startswith("cuda") else device


install()
