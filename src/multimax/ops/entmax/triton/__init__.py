"""Entmax by Triton kernels."""

import torch
from torch import Tensor

from multimax.ops import dispatch, dtypes, gpu
from multimax.ops.entmax.autograd import entmax
from multimax.ops.entmax.call import KINDS, EntmaxCall

__all__ = ["compare", "run", "why_not"]

TRITON_KINDS = KINDS[:3]


def why_not(call: EntmaxCall) -> str | None:
    """Why the kernels cannot run this call."""
    if call.kind >= len(TRITON_KINDS):
        return f"there is no Triton kernel for {KINDS[call.kind]}; use 'auto'"
    return gpu.why_not(call.x.device) or gpu.broken("entmax", call.x.device, call.x.dtype, compare)


def run(call: EntmaxCall) -> Tensor:
    """The weights, in the dtype that torch.softmax would give; the kernels read one row after the other."""
    x = call.x if call.mask is None else torch.where(call.mask, call.x, -torch.inf)
    x = x.to(dtypes.softmax_dtype(x)).contiguous()
    return entmax(EntmaxCall(x, None if call.parameter is None else call.parameter.contiguous(), None, call.kind))


def compare(device: torch.device, dtype: torch.dtype) -> list[tuple[str, Tensor, Tensor]]:
    """Results of a small input, and what they should be."""
    x, grad = gpu.draws((6, 200), (6, 200))
    x[0, 3:] = -torch.inf
    x, grad = x.to(dtype), grad.to(dtype)
    alphas = torch.tensor([1.1, 1.2, 1.4, 1.7, 2.0, 1.5], dtype=dtypes.compute_dtype(dtype))
    found = []
    for kind, kind_name in enumerate(TRITON_KINDS):
        call = EntmaxCall(x, alphas if kind_name == "entmax" else None, None, kind)
        names = ("x", "parameter") if kind_name == "entmax" else ("x",)
        judge = gpu.gradients(dispatch.load("entmax")["reference"].run, call, names, grad, None)
        ours = gpu.gradients(entmax, call, names, grad, device)
        found += [(name, ours[name], judge[name]) for name in judge]
    return found


gpu.register("entmax_forward", "multimax.ops.entmax.triton.launch", "forward")
gpu.register("entmax_backward", "multimax.ops.entmax.triton.launch", "backward")
