"""A GPU for machines that have none: a device with its own name that computes on the CPU.

Every operation is checked for tensors of both devices, as CUDA does, and then carried out on the CPU tensors inside, so
numbers come out and whole updates can be compared with the CPU's. Registering the backend changes torch for the whole
process: import it only in a separate process (`device_checks.py`). `FakeTensorMode` has no numbers, and a trainer
reads some (a gradient's norm) in every update.
"""

import copy
import threading
from contextlib import contextmanager

import torch
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

backend_registration._setup_privateuseone_for_python_backend("fakegpu")
GPU = torch.device("fakegpu:0")
CROSSING = ("copy_", "_to_copy")
"""What may see both devices."""


class MixedDevices(RuntimeError):
    """An operation was given tensors of two devices; a real GPU refuses it too."""


class GpuTensor(torch.Tensor):
    """A tensor that says it is on the GPU; `inner` holds its numbers."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device=GPU,
        )  # fmt: skip

    def __init__(self, inner):
        self.inner = inner

    def __deepcopy__(self, memo):
        # torch would copy its storage, which is empty.
        copied = GpuTensor(copy.deepcopy(self.inner.detach(), memo))
        if isinstance(self, torch.nn.Parameter):
            copied = torch.nn.Parameter(copied, self.requires_grad)
        return memo.setdefault(id(self), copied)

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            if function == torch.Tensor.data.__set__:
                args[0].inner = args[1].inner
            elif function == torch.Tensor.data_ptr:
                return args[0].inner.data_ptr()
            return function(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return run_on_cpu(function, args, kwargs or {})


def run_on_cpu(function, args, kwargs):
    """Do it on the CPU, if all tensors are on one device; the answer is where a GPU would leave it."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    ours = [tensor for tensor in tensors if isinstance(tensor, GpuTensor)]
    name = function.overloadpacket.__name__
    # A CPU tensor without axes is a number, which CUDA takes.
    if ours and name not in CROSSING and any(not isinstance(t, GpuTensor) and t.ndim for t in tensors):
        raise MixedDevices(f"{function}: {[f'{tuple(t.shape)} on {t.device}' for t in tensors]}")
    on_gpu = bool(ours) and name != "_local_scalar_dense"
    if name == "copy_":
        on_gpu = isinstance(args[0], GpuTensor)
    if kwargs.get("device") is not None:
        on_gpu = torch.device(kwargs["device"]).type == GPU.type
        kwargs = {**kwargs, "device": torch.device("cpu")}
    inside = lambda leaf: leaf.inner if isinstance(leaf, GpuTensor) else leaf  # noqa: E731
    answer = function(*tree_map(inside, args), **tree_map(inside, kwargs))
    known = {id(tensor.inner): tensor for tensor in ours}

    def outside(leaf):
        if not isinstance(leaf, torch.Tensor) or not on_gpu:
            return leaf
        return known.get(id(leaf)) if id(leaf) in known else GpuTensor(leaf)

    return tree_map(outside, answer)


class _Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return run_on_cpu(function, args, kwargs or {})


@contextmanager
def fake_gpu():
    """Make `fakegpu` a device that can be used, in this thread and in threads that are started inside."""
    generator, run = torch.Generator, threading.Thread.run

    class Generator(generator):
        def __new__(cls, device="cpu"):
            return super().__new__(cls, "cpu" if torch.device(device).type == GPU.type else device)

    def run_with_gpu(thread):
        with _Dispatch():
            run(thread)

    torch.Generator, threading.Thread.run = Generator, run_with_gpu
    try:
        with _Dispatch():
            yield GPU
    finally:
        torch.Generator, threading.Thread.run = generator, run
