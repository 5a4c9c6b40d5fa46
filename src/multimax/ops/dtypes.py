"""Which dtype to compute in, and which to return: half precision, autocast, sums over many rows."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 for half precision, otherwise the dtype itself."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def exact_dtype(device: torch.device) -> torch.dtype:
    """For sums over many rows: float64, if the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


# Known beforehand: the compilers of torch 2.10 and 2.11 cannot trace the question.
_HAS_AUTOCAST = {kind: torch.amp.is_autocast_available(kind) for kind in ("cpu", "cuda", "xpu", "mps", "meta")}


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype that autocast casts a linear layer's inputs to on that device, None where it is off."""
    kind = device.type
    has = _HAS_AUTOCAST[kind] if kind in _HAS_AUTOCAST else torch.amp.is_autocast_available(kind)
    return torch.get_autocast_dtype(kind) if has and torch.is_autocast_enabled(kind) else None


def softmax_dtype(x: Tensor) -> torch.dtype:
    """As torch.softmax: the input's, but float32 under autocast, except on the CPU."""
    wide = x.device.type != "cpu" and autocast_dtype(x.device) is not None
    return compute_dtype(x.dtype) if wide else x.dtype


def loss_dtype(x: Tensor) -> torch.dtype:
    """As torch's losses: the input's, but float32 under autocast."""
    return x.dtype if autocast_dtype(x.device) is None else compute_dtype(x.dtype)


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Products in the dtype of their factors, as the kernels compute them."""
    if autocast_dtype(device) is None:
        return nullcontext()
    return torch.autocast(device.type, enabled=False)
