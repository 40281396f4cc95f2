"""The device of a policy, and the function that moves data to it.

Environments, rollout buffers and checkpoints stay in CPU memory; weights, gradients and optimiser state are on the
device. `move_to` moves observations when the policy acts, and whole rollouts when it learns; actions are returned as
arrays. The compiled kernels run on the CPU only.
"""

from __future__ import annotations

import os
import platform
import re
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from palaestra.errors import ConfigError

Device: TypeAlias = str | torch.device
"""`auto`, `cpu`, `cuda`, `cuda:1`, or a `torch.device`."""

DEVICE_PATTERN = r"^(auto|cpu|cuda|cuda:[0-9]+)$"
"""Device names that a configuration may contain."""
_REMEDY = "Use 'auto' (a GPU where there is one), 'cpu', 'cuda' or 'cuda:N'"


def check_device_name(device: object, *, place: str) -> None:
    """Check a device name of a configuration, without torch."""
    if not (isinstance(device, str) and re.fullmatch(DEVICE_PATTERN, device)):
        raise ConfigError(place, device, "names no device", _REMEDY)


def choose_device(device: Device, *, place: str = "device") -> torch.device:
    """The named device with its index; `auto` is the first GPU that torch sees, or the CPU.

    Under torchrun, `auto` and `cuda` are a different GPU for every process of a machine. `ConfigError` if the device
    cannot be used here.
    """
    if device == "auto":
        return torch.device("cuda", _own_gpu()) if torch.cuda.is_available() else torch.device("cpu")
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError):
        raise ConfigError(place, str(device), "names no device", _REMEDY) from None
    if chosen.type == "cuda":
        _check_cuda(chosen, str(device), place)
        return torch.device("cuda", _own_gpu() if chosen.index is None else chosen.index)
    try:
        return torch.empty(0, device=chosen).device
    except (RuntimeError, NotImplementedError) as error:
        reason = f"torch cannot use it here ({str(error).partition('. ')[0]})"
        raise ConfigError(place, str(device), reason, _REMEDY) from None


def _own_gpu() -> int:
    """Index of the GPU of this process: torchrun numbers the processes of a machine."""
    return int(os.environ.get("LOCAL_RANK", "0")) % max(1, torch.cuda.device_count())


def _check_cuda(chosen: torch.device, given: str, place: str) -> None:
    if torch.version.cuda is None and torch.version.hip is None:
        remedy = "Install a CUDA build of torch (https://pytorch.org/get-started), or use 'auto' or 'cpu'"
        raise ConfigError(place, given, f"torch {torch.__version__} is built without CUDA", remedy)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    limit = "" if visible is None else f" (CUDA_VISIBLE_DEVICES is {visible!r})"
    if count == 0:
        remedy = "Use 'auto' or 'cpu'; with the run service, ask for a GPU: --gpus 1"
        raise ConfigError(place, given, f"torch sees no GPU{limit}", remedy)
    if (chosen.index or 0) >= count:
        known = ", ".join(f"cuda:{index}" for index in range(count))
        raise ConfigError(place, given, f"torch sees {count} GPU{'s' if count > 1 else ''}{limit}", f"Use {known}")


def has_bfloat16_instructions() -> bool:
    """Whether this processor multiplies bfloat16 matrices in hardware.

    torch supports the type on every processor with AVX-512, and emulates it there: a product takes four times as long
    as in float32.
    """
    if platform.machine().lower() in ("x86_64", "amd64"):
        return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def device_of(module: nn.Module) -> torch.device:
    """Device of a module's weights."""
    return next(module.parameters()).device


def move_to(device: torch.device, data: Any) -> Any:
    """Arrays, tensors, or mappings of them as tensors on `device`; copied only if necessary."""
    if isinstance(data, Tensor):
        return data.to(device)
    if isinstance(data, np.ndarray):
        return torch.from_numpy(data).to(device)
    return {name: move_to(device, part) for name, part in data.items()}
