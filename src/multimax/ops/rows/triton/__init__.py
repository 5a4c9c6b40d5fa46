"""The row functions by Triton kernels."""

import torch
from torch import Tensor

from multimax.ops import dispatch, dtypes, gpu
from multimax.ops.rows.autograd import rows
from multimax.ops.rows.call import RowsCall

__all__ = ["compare", "run", "why_not"]


def why_not(call: RowsCall) -> str | None:
    """Why the kernels cannot run this call."""
    return gpu.why_not(call.x.device) or gpu.broken("rows", call.x.device, call.x.dtype, compare)


def run(call: RowsCall) -> Tensor:
    """The row function of that kind, in the dtype that torch.softmax would give."""
    return rows(call._replace(x=call.x.to(dtypes.softmax_dtype(call.x))))


def compare(device: torch.device, dtype: torch.dtype) -> list[tuple[str, Tensor, Tensor]]:
    """Results of a small input, and what they should be."""
    x, coefs, knots, grad = gpu.draws((6, 200), (2, 2), (2, 2), (6, 200))
    x[0, 3:] = -torch.inf
    x, grad = x.to(dtype), grad.to(dtype)
    found = []
    for kind in range(3):
        call = RowsCall(x, coefs, knots, None, 1, kind)
        judge = gpu.gradients(dispatch.load("rows")["reference"].run, call, ("x", "coefs", "knots"), grad, None)
        ours = gpu.gradients(rows, call, ("x", "coefs", "knots"), grad, device)
        found += [(name, ours[name], judge[name]) for name in judge]
    return found


gpu.register("rows_forward", "multimax.ops.rows.triton.launch", "forward")
gpu.register("rows_backward", "multimax.ops.rows.triton.launch", "backward")
