"""What counts as masked by its value: the only definition in Python. csrc/simd/memory.h has the kernels' copy;
Triton's are given it."""

import torch
from torch import Tensor


def floor(dtype: torch.dtype) -> float:
    """Half of the lowest finite value of a dtype: entries at or below it take no part."""
    return torch.finfo(dtype).min / 2


def masked(x: Tensor) -> Tensor:
    """True where an entry takes no part: -inf, or half of its dtype's lowest finite value and below."""
    return x <= floor(x.dtype)  # NaN compares false: it takes part, and propagates


def takes_part(x: Tensor) -> Tensor:
    """True where an entry is not masked by its value."""
    return ~masked(x)
