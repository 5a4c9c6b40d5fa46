"""The formulas of the functions that are softmax or sparsemax of something else: of scaled scores, or of some entries.

Shapes as in :mod:`multimax.ops.entmax.reference`: z is (..., K) in the compute dtype, and masked, (..., K), says which
entries take no part.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from multimax.ops.entmax.reference import from_the_largest, split

Formula = Callable[[Tensor, Tensor], Tensor]  # of z and masked


def by_rows(x: Tensor, dim: int, mask: Tensor | None, formula: Formula, dtype: torch.dtype) -> Tensor:
    """A formula along a dim of x."""
    if x.ndim == 0:
        return by_rows(x[None], 0, None if mask is None else mask[None], formula, dtype)[0]
    return formula(*split(x, dim, mask)).to(dtype).movedim(-1, dim)


def kept(x: Tensor, dim: int, mask: Tensor | None, rule: Formula) -> Tensor:
    """A boolean mask of the entries that a rule keeps."""
    return by_rows(x.detach(), dim, mask, rule, torch.bool)


def cooled(z: Tensor, masked: Tensor, temperature: Tensor) -> Tensor:
    """z / temperature up to a constant in each row, -inf where masked. Numbers that overflow stay finite."""
    u = torch.where(masked, 0.0, from_the_largest(z, masked))  # -inf times a gradient of 0 would be NaN
    limits = torch.finfo(u.dtype)
    scaled = (u / temperature.to(u.dtype).clamp(min=limits.tiny)).clamp(min=limits.min / 4)
    return torch.where(masked, -torch.inf, scaled)


def at_or_above_the_mean(z: Tensor, masked: Tensor) -> Tensor:
    """Which entries Ev-SoftMax keeps (Chen, Itkina, Senanayake and Kochenderfer 2021).

    The mean is taken of z - max z: rounding cannot lift the mean of numbers that are never positive above all of them.
    """
    with torch.no_grad():
        u = from_the_largest(z, masked)
        count = (~masked).sum(-1, keepdim=True)
        return ~(u < torch.where(masked, 0.0, u).sum(-1, keepdim=True) / count) & ~masked


def hourglass(z: Tensor, masked: Tensor, q: float) -> Tensor:
    """What Sparsehourglass projects on the simplex: z (1 + K q) / (|sum z| + K q) (Laha et al. 2018).

    Divided by q throughout: q to infinity, sparsemax, is a number like any other. K counts the entries that take part.
    """
    taking_part = torch.where(masked, 0.0, z)
    count = (~masked).sum(-1, keepdim=True).to(z.dtype)
    factor = (1 / q + count) / (taking_part.sum(-1, keepdim=True).abs() / q + count)
    return torch.where(masked, -torch.inf, taking_part * factor)


def largest(z: Tensor, masked: Tensor, k: int | float) -> Tensor:
    """The k largest entries, or that share of those that take part, rounded up; of equal ones only some: k remain."""
    with torch.no_grad():
        length = z.shape[-1]
        taking_part = (~masked).sum(-1, keepdim=True)
        # a share of 0.07 of 100 entries is 7, however the product rounds
        most = k if isinstance(k, int) else math.ceil(k * length - 1e-9)
        order = torch.where(masked, -torch.inf, z).topk(min(most, length), -1).indices  # NaN first
        rank = torch.arange(order.shape[-1], device=z.device)
        kept = torch.ones_like(order, dtype=torch.bool)
        if not isinstance(k, int):
            kept = rank < torch.ceil(k * taking_part.double() - 1e-9)
        # a row with a NaN or an infinity is kept whole, and propagates it
        lost = (~(torch.where(masked, 0.0, z) < torch.inf)).any(-1, keepdim=True)
        return (torch.zeros_like(masked).scatter(-1, order, kept) | lost) & ~masked
