"""MultiMax and softmax at a temperature as softmax of sigma(x): for the fused attention, and for masks of numbers,
which are added after sigma.
"""

import torch
from torch import Tensor

from multimax.ops import checks
from multimax.ops.dtypes import compute_dtype
from multimax.ops.rows.api import modulate
from multimax.reweighting.registry import Sigma


def _modulated(x: Tensor, coefs: Tensor, knots: Tensor) -> Tensor:
    lead = coefs.shape[:-2] and (*coefs.shape[:-2], *[1] * (coefs.ndim == 3))  # heads come before queries
    return modulate(x, *(t.reshape(*lead, *t.shape[-2:]) for t in (coefs, knots)))


def _per_head(heads: int, like: Tensor, coefs: Tensor, knots: Tensor) -> tuple[Tensor, Tensor] | None:
    return (coefs, knots) if coefs.ndim < 4 else None


def _cooled(x: Tensor, temperature: float | Tensor = 1.0) -> Tensor:
    return x / temperature


def _slopes(heads: int, like: Tensor, temperature: float | Tensor = 1.0) -> tuple[Tensor, Tensor] | None:
    """Softmax at temperature T is a sigma with the slope 1 / T on both sides of 0."""
    dtype = compute_dtype(like.dtype)
    if not isinstance(temperature, Tensor):
        checks.number_above("temperature", temperature, 0)
        if temperature < 1e-6:  # 1 / T times a score could overflow
            return None
        slope = torch.tensor(1 / temperature, dtype=dtype, device=like.device)
    elif temperature.numel() == 1 or (temperature.shape[-3:] == (heads, 1, 1) and temperature.numel() == heads):
        checks.above("temperature", temperature, 0, like.new_empty(()).expand(1, heads, 1, 1), 3)
        slope = 1 / temperature.to(dtype).reshape(() if temperature.numel() == 1 else (-1, 1))
    else:
        return None
    coefs = torch.stack([1 - slope, slope - 1], -1)  # (2,) or (H, 1, 2)
    coefs = coefs.reshape(1, 2) if coefs.ndim == 1 else coefs
    return coefs, torch.zeros_like(coefs)


MULTIMAX = Sigma(_modulated, _per_head)
SOFTMAX = Sigma(_cooled, _slopes)
