"""The losses in plain PyTorch, ``impl="torch"``: the steps of the kernels on any device. A linear layer's
logits need not be held without the kernels either."""

import torch
from torch import Tensor

from multimax.ops import dtypes
from multimax.ops.loss.autograd import loss as run
from multimax.ops.loss.autograd import unable
from multimax.ops.loss.call import LinearLossCall, Logits, LossCall
from multimax.ops.loss.reference import counted
from multimax.ops.loss.sums import BEST, DOT, MASS, SCORE, SPREAD, TOP, TOTAL, is_indices
from multimax.ops.rows.reference import scores

__all__ = ["NAME", "gradients", "run", "sums", "why_not"]

NAME = "torch"


def why_not(call: LossCall | LinearLossCall) -> str | None:
    """Why these steps cannot run this call."""
    if torch.autograd.forward_ad._current_level >= 0:
        return "it has no forward-mode derivatives; use 'auto'"
    return unable(call.target)


def _wanted(logits: Logits) -> Tensor:
    """(R or 1, C): q of csrc/loss/loss.h, what the loss wants of each class, except for an index."""
    x, setting = logits.x, logits.setting
    dtype = dtypes.compute_dtype(x.dtype)
    q = x.new_full((1, 1), setting.smoothing / max(setting.classes or x.shape[1], 1), dtype=dtype)
    if not is_indices(logits.target):
        q = q + (1 - setting.smoothing) * logits.target.to(dtype)
    weight = logits.weight()
    return q.expand(-1, x.shape[1]) if weight is None else q * weight


def _entry(logits: Logits) -> tuple[Tensor, Tensor]:
    """(R, 1), where in a row its index points to, and (R,), whether that lies in this part of the row."""
    target, setting = logits.target, logits.setting
    entry = target - setting.first_class
    here = (entry >= 0) & (entry < logits.x.shape[1]) & (target != setting.ignore_index)
    return torch.where(here, entry, 0)[:, None], here


def sums(logits: Logits) -> Tensor:
    """The seven planes of csrc/loss/loss.h, (7, R)."""
    x, target, setting = logits.x, logits.target, logits.setting
    masked, s = scores(x, logits.coefs, logits.knots)
    planes = s.new_zeros(7, x.shape[0])
    if x.shape[1] == 0:
        planes[TOP] = -torch.inf
        return planes
    planes[TOP], best = s.max(-1)
    shifted = s - torch.where(planes[TOP] == -torch.inf, 0, planes[TOP])[:, None]
    exp = shifted.exp()
    planes[TOTAL] = exp.sum(-1)
    if is_indices(target):
        entry, here = _entry(logits)
        planes[SCORE] = torch.where(here, s.gather(1, entry)[:, 0], 0)
    if setting.smoothing or not is_indices(target):
        q = _wanted(logits)
        planes[MASS] = torch.where(masked, 0, q).sum(-1)
        planes[DOT] = torch.where((s == -torch.inf) & (q == 0), 0, q * shifted).sum(-1)
    if setting.full:
        planes[SPREAD] = torch.where(exp == 0, 0, exp * shifted).sum(-1)
        planes[BEST] = torch.where(planes[TOP] == -torch.inf, -1, best + setting.first_class).to(s.dtype)
    return torch.where(target == setting.ignore_index, 0, planes) if is_indices(target) else planes


def gradients(
    logits: Logits, sums: Tensor, scale: Tensor, p_scale: Tensor, params_grad: bool, out: Tensor
) -> tuple[Tensor, Tensor]:
    """Writes the gradient of x to out, which may be x; returns the gradients of coefs and knots.

    The gradient of s is p_scale p - scale q, with one scale of each for every row.
    """
    x, target, setting = logits.x, logits.target, logits.setting
    with torch.enable_grad():
        leaves = [t.detach().requires_grad_() for t in (x, logits.coefs, logits.knots)]
        masked, s = scores(counted(leaves[0], target, setting.ignore_index), *leaves[1:])
    top, total = sums[TOP].to(s.dtype), sums[TOTAL]
    weights = (s.detach() - top[:, None]).exp() * (p_scale / total).to(s.dtype)[:, None]
    grad = weights - scale.to(s.dtype)[:, None] * _wanted(logits)
    if is_indices(target):
        entry, here = _entry(logits)
        share = (1 - setting.smoothing) * scale.to(s.dtype)
        weight = logits.weight()
        if weight is not None:
            share = share * weight[entry[:, 0]]
        grad = grad.scatter_add(1, entry, torch.where(here, -share, 0)[:, None])
        masked = masked | (target == setting.ignore_index)[:, None]
    of_x, of_coefs, of_knots = torch.autograd.grad(s, leaves, torch.where(masked, 0, grad), allow_unused=True)
    out.copy_(of_x)
    exact = dtypes.exact_dtype(x.device)
    if not params_grad:
        return logits.coefs.new_zeros(0, dtype=exact), logits.knots.new_zeros(0, dtype=exact)
    return of_coefs.to(exact), of_knots.to(exact)
