"""A call of entmax as one structure, and the operators that take it."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from multimax.ops.dtypes import compute_dtype
from multimax.ops.operators import define, one_device

KINDS = ("sparsemax", "entmax15", "entmax")  # as in csrc/entmax/entmax.h


class EntmaxCall(NamedTuple):
    """Rows along the last dim of x, of which there is at least one; -inf for what takes no part."""

    x: Tensor
    alpha: Tensor | None  # one per row, for the kind "entmax"
    kind: int


class EntmaxBackwardCall(NamedTuple):
    """The same with the incoming gradient, two numbers per row from the forward, and whether alpha needs a gradient."""

    grad: Tensor
    x: Tensor
    stats: Tensor
    alpha: Tensor | None
    kind: int
    alpha_grad: bool


def fake_forward(*args: Any) -> tuple[Tensor, Tensor]:
    """Empty results of the right shapes."""
    call = EntmaxCall(*args)
    one_device(call.x, call.alpha)
    stats = call.x.new_empty((*call.x.shape[:-1], 2), dtype=compute_dtype(call.x.dtype))
    return torch.empty_like(call.x), stats


def _fake_backward(*args: Any) -> tuple[Tensor, Tensor]:
    call = EntmaxBackwardCall(*args)
    one_device(call.grad, call.x, call.stats, call.alpha)
    size = call.alpha.shape if call.alpha is not None and call.alpha_grad else (0,)
    return torch.empty_like(call.x), call.x.new_empty(size, dtype=compute_dtype(call.x.dtype))


define("entmax_forward", EntmaxCall, 2, fake_forward)  # the weights, and the rows' statistics
define("entmax_backward", EntmaxBackwardCall, 2, _fake_backward)  # gradients of x and, or nothing, alpha
