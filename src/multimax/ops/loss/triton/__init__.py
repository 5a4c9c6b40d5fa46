"""The losses by Triton kernels: the sums of each row, and the gradients that follow from them."""

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from multimax.ops import dispatch, dtypes, gpu
from multimax.ops.loss.autograd import loss as run
from multimax.ops.loss.autograd import unable
from multimax.ops.loss.call import LinearLossCall, Logits, LossCall

__all__ = ["NAME", "compare", "gradients", "run", "sums", "why_not"]

NAME = "triton"


def why_not(call: LossCall | LinearLossCall) -> str | None:
    """Why the kernels cannot run this call."""
    device = call.target.device
    dtype = call.dtype if isinstance(call, LinearLossCall) else call.x.dtype
    return gpu.why_not(device, unable(call.target)) or gpu.broken("loss", device, dtype, compare)


def _launch() -> Any:
    """What launches the kernels, imported when it is first needed."""
    return import_module("multimax.ops.loss.triton.launch")


def sums(logits: Logits) -> Tensor:
    """The seven planes of csrc/loss/loss.h, (7, R) in the compute dtype."""
    with gpu.guard(logits.x.device):
        result: Tensor = _launch().sums(logits)
    return result


def gradients(
    logits: Logits, sums: Tensor, scale: Tensor, p_scale: Tensor, params_grad: bool, out: Tensor
) -> tuple[Tensor, Tensor]:
    """Writes the gradient of x to out, which may be x; returns the gradients of coefs and knots.

    The gradient of s is p_scale p - scale q, with one scale of each for every row.
    """
    with gpu.guard(logits.x.device):
        result: tuple[Tensor, Tensor] = _launch().gradients(logits, sums, scale, p_scale, params_grad, out)
    return result


def compare(device: torch.device, dtype: torch.dtype) -> list[tuple[str, Tensor, Tensor]]:
    """Results of a small input, and what they should be."""
    x, coefs, knots, grad, soft = gpu.draws((6, 3000), (2, 2), (2, 2), (6,), (6, 3000))
    x[0, 30:] = -torch.inf
    x = x.to(dtype)
    coefs, knots = (p.to(dtypes.compute_dtype(dtype)) for p in (coefs, knots))  # their gradients are of their dtype
    index = torch.tensor([3, -100, 2999, 0, 17, 2048])
    weight = torch.linspace(0.5, 2, 3000)
    found = []
    for target, smoothing in ((index, 0.0), (torch.softmax(soft, -1), 0.0), (index, 0.1)):
        # what is masked may not be wanted
        whole = x.clone() if target is index and not smoothing else x.nan_to_num(neginf=-8.0)
        call = LossCall(whole, target, coefs, knots, weight, -100, smoothing, NAME, True)
        names = ("x", "coefs", "knots")
        judge = gpu.gradients(dispatch.load("loss")["reference"].run, call, names, grad, None)
        ours = gpu.gradients(run, call, names, grad, device)
        found += [(name, ours[name], judge[name]) for name in judge]
    return found
