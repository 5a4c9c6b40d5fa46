"""A call of the row functions as one structure, and the operators that take it."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from multimax.ops.operators import define, one_device

KINDS = ("multimax", "log_multimax", "modulate")  # as in csrc/rows/rows.h


def saves(x: Tensor, kind: int) -> str | None:
    """What the backward needs of the forward's results, as in csrc/rows/rows.h."""
    if KINDS[kind] == "modulate":
        return None
    return "stats" if x.dtype in (torch.float16, torch.bfloat16) else "output"


class RowsCall(NamedTuple):
    """Arguments as `checks` leaves them; x has at least one dim."""

    x: Tensor
    coefs: Tensor
    knots: Tensor
    mask: Tensor | None
    dim: int
    kind: int


class RowsBackwardCall(NamedTuple):
    """The same with the incoming gradient and what the forward saved, and whether the parameters need a gradient."""

    grad: Tensor
    x: Tensor
    saved: Tensor | None
    coefs: Tensor
    knots: Tensor
    mask: Tensor | None
    dim: int
    kind: int
    params_grad: bool


def fake_forward(*args: Any) -> tuple[Tensor, Tensor]:
    """Empty results of the right shapes."""
    call = RowsCall(*args)
    one_device(call.x, call.coefs, call.knots, call.mask)
    rows = (2, *call.x.shape[: call.dim], *call.x.shape[call.dim + 1 :])
    size = rows if saves(call.x, call.kind) == "stats" else (0,)
    return torch.empty_like(call.x), call.x.new_empty(size, dtype=torch.float32)


def _fake_backward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    call = RowsBackwardCall(*args)
    one_device(call.grad, call.x, call.saved, call.coefs, call.knots, call.mask)
    size = call.coefs.shape if call.params_grad else (0,)
    return torch.empty_like(call.x), call.coefs.new_empty(size), call.knots.new_empty(size)


define("rows_forward", RowsCall, 2, fake_forward)  # the output, and the rows' statistics or nothing
define("rows_backward", RowsBackwardCall, 3, _fake_backward)  # gradients of x, coefs and knots
