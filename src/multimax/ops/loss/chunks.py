"""Cross-entropy of MultiMax row by row: the sums behind it by the compiled library or by plain PyTorch, and the loop
over chunks of logits. Nothing here knows of autograd; `loss_ops` does.

Shapes: R rows, C classes, D entries of a hidden state. A target is (R,) of class indices or (R, C) of probabilities.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from multimax.ops import dtypes
from multimax.ops.rows import reference

# Planes of the rows' sums, as in csrc/loss.h.
TOP, TOTAL, SCORE, MASS, DOT, SPREAD, BEST = range(7)


class Rows(NamedTuple):
    """What is found of each row, (R,) each; the last two only if asked for, else empty."""

    losses: Tensor
    log_sum: Tensor
    entropy: Tensor
    best: Tensor  # the class with the largest weight


@dataclass(frozen=True)
class Setting:
    """All that a loss depends on beside the logits, the target and the parameters."""

    weight: Tensor | None  # (C,) for each class
    ignore_index: int
    smoothing: float
    impl: str  # "cpu", or "plain" for plain PyTorch
    full: bool  # entropy and best class too
    first_class: int = 0
    classes: int | None = None  # of all processes, where each has a part
    group: Any = None

    def own_weight(self, x: Tensor) -> Tensor | None:
        """The weights of x's classes, in the dtype it is computed in."""
        if self.weight is None:
            return None
        own = self.weight[self.first_class : self.first_class + x.shape[1]]
        return own.to(dtypes.compute_dtype(x.dtype)).contiguous()

    def kernel_arguments(self, x: Tensor, target: Tensor, coefs: Tensor, knots: Tensor) -> tuple[Any, ...]:
        """As the compiled library wants them."""
        hard, soft = (target.contiguous(), None) if _indices(target) else (None, side_by_side(target))
        if soft is not None and soft.dtype not in (x.dtype, dtypes.compute_dtype(x.dtype)):
            soft = soft.to(dtypes.compute_dtype(x.dtype))
        tensors = (x, hard, soft, coefs, knots, self.own_weight(x))
        return *tensors, self.smoothing, self.classes or x.shape[1], self.first_class, self.ignore_index


def side_by_side(t: Tensor) -> Tensor:
    """With the entries of a row next to each other in memory."""
    return t if t.shape[1] <= 1 or t.stride(1) == 1 else t.contiguous()


def _indices(target: Tensor) -> bool:
    return not target.is_floating_point()


def _wanted(x: Tensor, target: Tensor, setting: Setting) -> Tensor:
    """(R or 1, C): q of csrc/loss.h, what the loss wants of each class but for an index."""
    dtype = dtypes.compute_dtype(x.dtype)
    q = x.new_full((1, 1), setting.smoothing / max(setting.classes or x.shape[1], 1), dtype=dtype)
    if not _indices(target):
        q = q + (1 - setting.smoothing) * target.to(dtype)
    weight = setting.own_weight(x)
    return q.expand(-1, x.shape[1]) if weight is None else q * weight


def _entry(x: Tensor, target: Tensor, setting: Setting) -> tuple[Tensor, Tensor]:
    """Where in a row its index points to, and whether it lies in this part of the row."""
    entry = target - setting.first_class
    here = (entry >= 0) & (entry < x.shape[1]) & (target != setting.ignore_index)
    return torch.where(here, entry, 0)[:, None], here


def _sums(x: Tensor, target: Tensor, coefs: Tensor, knots: Tensor, setting: Setting) -> Tensor:
    """The seven planes of csrc/loss.h, (7, R)."""
    if setting.impl == "cpu":
        arguments = setting.kernel_arguments(x, target, coefs, knots)
        result: Tensor = torch.ops.multimax.loss_forward.default(*arguments, setting.full)
        return result
    masked, s = reference.scores(x, coefs, knots)
    planes = s.new_zeros(7, x.shape[0])
    if x.shape[1] == 0:
        planes[TOP] = -torch.inf
        return planes
    planes[TOP], best = s.max(-1)
    shifted = s - torch.where(planes[TOP] == -torch.inf, 0, planes[TOP])[:, None]
    exp = shifted.exp()
    planes[TOTAL] = exp.sum(-1)
    if _indices(target):
        entry, here = _entry(x, target, setting)
        planes[SCORE] = torch.where(here, s.gather(1, entry)[:, 0], 0)
    if setting.smoothing or not _indices(target):
        q = _wanted(x, target, setting)
        planes[MASS] = torch.where(masked, 0, q).sum(-1)
        planes[DOT] = torch.where((s == -torch.inf) & (q == 0), 0, q * shifted).sum(-1)
    if setting.full:
        planes[SPREAD] = torch.where(exp == 0, 0, exp * shifted).sum(-1)
        planes[BEST] = torch.where(planes[TOP] == -torch.inf, -1, best + setting.first_class).to(s.dtype)
    return torch.where(target == setting.ignore_index, 0, planes) if _indices(target) else planes


def _times(a: Tensor, b: Tensor) -> Tensor:
    """a b, and 0 where a is 0, whatever b."""
    return torch.where(a == 0, 0, a * b)


def _joined(sums: Tensor, setting: Setting) -> Tensor:
    """The sums of whole rows, from those of the parts that the processes of a group have."""
    if setting.group is None:
        return sums
    import torch.distributed as dist

    assert setting.classes is not None
    top = sums[TOP].clone()
    dist.all_reduce(top, dist.ReduceOp.MAX, group=setting.group)
    highest = sums[TOP] == top
    below = torch.where(highest, 0, sums[TOP] - top)  # also where both are -inf
    factor = below.exp()
    best = torch.where(highest, sums[BEST], setting.classes)
    joined = sums.clone()
    joined[SPREAD] = _times(factor, sums[SPREAD] + _times(sums[TOTAL], below))
    joined[DOT] = sums[DOT] + _times(sums[MASS], below)
    joined[TOTAL] *= factor
    dist.all_reduce(joined, dist.ReduceOp.SUM, group=setting.group)
    dist.all_reduce(best, dist.ReduceOp.MIN, group=setting.group)
    joined[TOP], joined[BEST] = top, best
    return joined


def _rows_of(sums: Tensor, target: Tensor, setting: Setting) -> tuple[Rows, Tensor]:
    """Losses and the rest from the sums, and the sum of all that a row's loss wants."""
    log_total = sums[TOTAL].log()
    log_sum = sums[TOP] + log_total
    losses, mass = _times(sums[MASS], log_total) - sums[DOT], sums[MASS]
    if _indices(target):
        ignored = target == setting.ignore_index
        share = torch.full_like(log_sum, 1 - setting.smoothing)
        if setting.weight is not None:
            share = share * setting.weight.to(share.dtype)[torch.where(ignored, 0, target)]
        absent = sums[SCORE] == -torch.inf
        losses = losses + share * torch.where(absent, torch.inf, (sums[TOP] - sums[SCORE]) + log_total)
        mass = mass + torch.where(absent, 0, share)
        losses, log_sum, mass = (torch.where(ignored, 0, value) for value in (losses, log_sum, mass))
    if not setting.full:
        return Rows(losses, log_sum, losses.new_empty(0), target.new_empty(0, dtype=torch.int64)), mass
    entropy = torch.where(sums[TOTAL] > 0, log_total - sums[SPREAD] / sums[TOTAL], 0)
    entropy = torch.where(sums[TOTAL].isnan(), torch.nan, entropy)
    return Rows(losses, log_sum, entropy, sums[BEST].to(torch.int64)), mass


def _gradients(
    x: Tensor,
    target: Tensor,
    coefs: Tensor,
    knots: Tensor,
    setting: Setting,
    sums: Tensor,
    scale: Tensor,
    p_scale: Tensor,
    params_grad: bool,
    out: Tensor,
) -> tuple[Tensor, Tensor]:
    """Writes the gradient of x to out, which may be x; returns those of coefs and knots.

    The gradient of s is p_scale p - scale q, with a scale of each for every row.
    """
    none = coefs.new_zeros(coefs.shape if params_grad else 0, dtype=dtypes.exact_dtype(x.device))
    if x.shape[1] == 0:
        return none, none.clone()
    if setting.impl == "cpu":
        arguments = setting.kernel_arguments(x, target, coefs, knots)
        scales = (sums.contiguous(), scale.double().contiguous(), p_scale.double().contiguous())
        result: tuple[Tensor, Tensor] = torch.ops.multimax.loss_backward.default(*arguments, *scales, params_grad, out)
        return result
    with torch.enable_grad():
        leaves = [t.detach().requires_grad_() for t in (x, coefs, knots)]
        masked, s = reference.scores(*leaves)
    weights = (s.detach() - sums[TOP][:, None].to(s.dtype)).exp() * (p_scale / sums[TOTAL]).to(s.dtype)[:, None]
    grad = weights - scale.to(s.dtype)[:, None] * _wanted(x, target, setting)
    if _indices(target):
        entry, here = _entry(x, target, setting)
        share = (1 - setting.smoothing) * scale.to(s.dtype)
        weight = setting.own_weight(x)
        if weight is not None:
            share = share * weight[entry[:, 0]]
        grad = grad.scatter_add(1, entry, torch.where(here, -share, 0)[:, None])
        masked = masked | (target == setting.ignore_index)[:, None]
    grads = torch.autograd.grad(s, leaves, torch.where(masked, 0, grad), allow_unused=True)
    out.copy_(grads[0])
    if not params_grad:
        return none, none
    return grads[1].to(none.dtype), grads[2].to(none.dtype)


def rows_of_logits(x: Tensor, target: Tensor, coefs: Tensor, knots: Tensor, setting: Setting) -> tuple[Rows, Tensor]:
    """The rows' results, and what the backward needs: (3, R), the first two sums and the mass."""
    sums = _sums(x, target, coefs, knots, setting)
    rows, mass = _rows_of(sums, target, setting)
    return rows, torch.stack([sums[TOP], sums[TOTAL], mass])


def rows_of_logits_backward(
    grad_losses: Tensor,
    grad_log_sum: Tensor,
    x: Tensor,
    target: Tensor,
    coefs: Tensor,
    knots: Tensor,
    saved: Tensor,
    setting: Setting,
    params_grad: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, coefs and knots, from those of losses and log-sums; ``saved`` is what the forward kept."""
    out = x.new_empty(x.shape)
    p_scale = grad_losses * saved[2] + grad_log_sum
    params = _gradients(x, target, coefs, knots, setting, saved[:2], grad_losses, p_scale, params_grad, out)
    return out, *params


class LinearGrads(NamedTuple):
    """Gradients, None where they are not wanted."""

    input: Tensor | None
    linear_weight: Tensor | None
    linear_bias: Tensor | None
    coefs: Tensor | None
    knots: Tensor | None


def _add(total: Tensor | None, part: Tensor) -> Tensor:
    return part if total is None else total.add_(part)


@torch.no_grad()
def rows_of_linear(
    input: Tensor,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    target: Tensor,
    coefs: Tensor,
    knots: Tensor,
    setting: Setting,
    chunk: int,
    dtype: torch.dtype,
    upstream: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None,
    needed: tuple[bool, ...] = (False,) * 5,
    keep_wide: bool = False,
) -> tuple[Rows, LinearGrads]:
    """Rows of the loss, and, for the gradients that `upstream` gives of losses and log-sums, those that are needed.

    Logits live in one buffer of `chunk` rows: they are made, reduced to sums, overwritten by their gradient, and used
    for the products that follow from it. Rows to be ignored are left out of all of it. upstream is called with the
    chunk's rows and log-sums. keep_wide: gradients in the dtype that they are summed in, not in that of the tensors.
    """
    rows, width, classes = input.shape[0], input.shape[1], linear_weight.shape[0]
    counted = None
    if _indices(target) and bool((target == setting.ignore_index).any()):
        counted = (target != setting.ignore_index).nonzero()[:, 0]
    count = rows if counted is None else counted.shape[0]
    projection = linear_weight.to(dtype)
    bias = None if linear_bias is None else linear_bias.to(dtype)
    wide = dtypes.compute_dtype(dtype)
    buffer = input.new_empty((min(chunk, count), classes), dtype=dtype)
    found: list[Tensor] | None = None
    grads: list[Tensor | None] = [None] * 5
    if needed[0]:
        make = input.new_empty if counted is None else input.new_zeros
        grads[0] = make((rows, width), dtype=wide if keep_wide else input.dtype)

    for start in range(0, max(count, 1), chunk):
        end = min(start + chunk, count)
        own = torch.arange(start, end, device=input.device) if counted is None else counted[start:end]
        hidden = (input[start:end] if counted is None else input[own]).to(dtype)
        targets = target[start:end] if counted is None else target[own]
        logits = buffer[: end - start]
        if bias is None:
            torch.mm(hidden, projection.t(), out=logits)
        else:
            torch.addmm(bias, hidden, projection.t(), out=logits)
        sums = _joined(_sums(logits, targets, coefs, knots, setting), setting)
        part, mass = _rows_of(sums, targets, setting)
        if found is None:
            found = [t.new_zeros(rows if t.ndim and (i < 2 or setting.full) else 0) for i, t in enumerate(part)]
        for whole, t in zip(found, part, strict=True):
            if whole.shape[0]:
                whole[own] = t
        if upstream is None or not any(needed):
            continue
        grad_losses, grad_log_sum = upstream(own, part.log_sum)
        p_scale = grad_losses * mass + grad_log_sum
        params = _gradients(
            logits, targets, coefs, knots, setting, sums[:2], grad_losses, p_scale, needed[3] or needed[4], logits
        )
        if needed[3] or needed[4]:
            grads[3], grads[4] = (_add(total, part) for total, part in zip(grads[3:], params, strict=True))
        if needed[0]:
            assert grads[0] is not None
            if counted is None and grads[0].dtype == dtype:
                torch.mm(logits, projection, out=grads[0][start:end])
            else:
                grads[0][own] = torch.mm(logits, projection).to(grads[0].dtype)
        if needed[1]:
            if grads[1] is None:
                one = end - start == count
                grads[1] = torch.mm(logits.t(), hidden) if one else torch.mm(logits.t(), hidden).to(wide)
            elif dtype == wide:
                grads[1].addmm_(logits.t(), hidden)
            else:
                grads[1].add_(torch.mm(logits.t(), hidden))
        if needed[2]:
            grads[2] = _add(grads[2], logits.sum(0, dtype=wide))

    if setting.group is not None:
        import torch.distributed as dist

        for i in (0, 3, 4):  # these depend on all parts of the weight
            grad = grads[i]
            if grad is not None:
                grad = grad.to(wide) if i == 0 else grad
                dist.all_reduce(grad, group=setting.group)
                grads[i] = grad
    assert found is not None
    shapes = (input, linear_weight, linear_bias, coefs, knots)
    final: list[Tensor | None] = []
    for grad, like, need in zip(grads, shapes, needed, strict=True):
        if not need or like is None:
            final.append(None)
        elif grad is None:
            final.append(like.new_zeros(like.shape))
        else:
            final.append(grad if keep_wide else grad.to(like.dtype))
    return Rows(*found), LinearGrads(*final)


def default_chunk(linear_weight: Tensor, dtype: torch.dtype) -> int:
    """Rows whose logits take half the memory of the weight's gradient while it is summed, in float32 for half
    precision; but enough for the products to be quick, and no more than that takes."""
    return min(max(linear_weight.shape[1] * dtypes.compute_dtype(dtype).itemsize // (2 * dtype.itemsize), 64), 512)
