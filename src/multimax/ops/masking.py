"""What counts as masked by its value: the only definition in Python. csrc/simd/memory.h has the kernels' copy."""

import torch
from torch import Tensor


def masked(x: Tensor) -> Tensor:
    """True where an entry takes no part: -inf, or half of its dtype's lowest finite value and below."""
    return x <= torch.finfo(x.dtype).min / 2  # NaN compares false: it takes part, and propagates


def takes_part(x: Tensor) -> Tensor:
    """True where an entry is not masked by its value."""
    return ~masked(x)
