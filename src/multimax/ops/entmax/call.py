"""A call of the functions of the field as one structure, and the operators that take it."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from multimax.ops.dtypes import compute_dtype
from multimax.ops.operators import define, one_device

# As in csrc/entmax/entmax.h. The last four are softmax of something.
KINDS = ("sparsemax", "entmax15", "entmax", "sparsehourglass", "softmax", "evsoftmax", "topk", "topshare")
SOFTMAX = KINDS[4:]
STATS = (2, 2, 2, 4, 4, 4, 4, 4)  # numbers per row that the backward needs


class EntmaxCall(NamedTuple):
    """Rows along the last dim of x, of which there is at least one."""

    x: Tensor
    parameter: (
        Tensor | None
    )  # one per row: alpha of the kind "entmax"; for "softmax" the temperature, if it is a tensor
    mask: Tensor | None  # of x's shape, True where an entry takes part
    kind: int
    option: float = 0.0  # 1 / q, the temperature, eps, or k: how many of the largest, or which share


class EntmaxBackwardCall(NamedTuple):
    """The same with the incoming gradient, what the forward saved, and whether the parameter needs a gradient."""

    grad: Tensor
    x: Tensor
    output: Tensor | None
    stats: Tensor
    parameter: Tensor | None
    mask: Tensor | None
    kind: int
    option: float
    parameter_grad: bool


def saves_output(x: Tensor, kind: int) -> bool:
    """Whether the backward needs the output: softmax does, unless it has been rounded to half precision."""
    return KINDS[kind] in SOFTMAX and x.dtype == compute_dtype(x.dtype)


def fake_forward(*args: Any) -> tuple[Tensor, Tensor]:
    """Empty results of the right shapes."""
    call = EntmaxCall(*args)
    one_device(call.x, call.parameter, call.mask)
    stats = call.x.new_empty((*call.x.shape[:-1], STATS[call.kind]), dtype=compute_dtype(call.x.dtype))
    return torch.empty_like(call.x), stats


def _fake_backward(*args: Any) -> tuple[Tensor, Tensor]:
    call = EntmaxBackwardCall(*args)
    one_device(call.grad, call.x, call.output, call.stats, call.parameter, call.mask)
    size = call.parameter.shape if call.parameter is not None and call.parameter_grad else (0,)
    return torch.empty_like(call.x), call.x.new_empty(size, dtype=compute_dtype(call.x.dtype))


define("entmax_forward", EntmaxCall, 2, fake_forward)  # the weights, and the rows' statistics
define("entmax_backward", EntmaxBackwardCall, 2, _fake_backward)  # gradients of x and, or nothing, the parameter
