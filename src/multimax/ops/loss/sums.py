"""Losses from sums over the entries of each row. The sums themselves are up to the implementations: see `cpu` and
`plain`."""

import torch
from torch import Tensor

from multimax.ops.loss.call import Rows, Setting, group_of

# Planes of the rows' sums, as in csrc/loss/loss.h.
TOP, TOTAL, SCORE, MASS, DOT, SPREAD, BEST = range(7)


def is_indices(target: Tensor) -> bool:
    """Whether a target is class indices, not probabilities."""
    return not target.is_floating_point()


def _times(a: Tensor, b: Tensor) -> Tensor:
    """a b, and 0 where a is 0, whatever b."""
    return torch.where(a == 0, 0, a * b)


def joined(sums: Tensor, setting: Setting) -> Tensor:
    """The sums of whole rows, from the sums of the parts that the processes of a group hold."""
    import torch.distributed as dist

    group = group_of(setting.group)
    assert setting.classes is not None
    top = sums[TOP].clone()
    dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
    highest = sums[TOP] == top
    below = torch.where(highest, 0, sums[TOP] - top)  # also where both are -inf
    factor = below.exp()
    best = torch.where(highest, sums[BEST], setting.classes)
    whole = sums.clone()
    whole[SPREAD] = _times(factor, sums[SPREAD] + _times(sums[TOTAL], below))
    whole[DOT] = sums[DOT] + _times(sums[MASS], below)
    whole[TOTAL] *= factor
    dist.all_reduce(whole, dist.ReduceOp.SUM, group=group)
    dist.all_reduce(best, dist.ReduceOp.MIN, group=group)
    whole[TOP], whole[BEST] = top, best
    return whole


def is_class(target: Tensor, classes: int) -> Tensor:
    """Which indices are a class's: not all, if they have not been checked, or for ignored rows."""
    return (target >= 0) & (target < classes)


def rows_of(sums: Tensor, target: Tensor, setting: Setting, classes: int) -> tuple[Rows, Tensor]:
    """Losses and the other results from the sums, and the total of what each row's loss wants; NaN for an index that
    is none of that many classes."""
    log_total = torch.where(sums[TOTAL] == 0, 0, sums[TOTAL].log())  # nothing is left: the log-sum is TOP, -inf
    log_sum = sums[TOP] + log_total
    if not is_indices(target) or setting.smoothing:
        losses, mass = _times(sums[MASS], log_total) - sums[DOT], sums[MASS]
    if is_indices(target):
        ignored, known = target == setting.ignore_index, is_class(target, classes)
        share = torch.where(known, 1 - setting.smoothing, torch.full_like(log_sum, torch.nan))
        if setting.weight is not None:
            share = share * setting.weight.to(share.dtype)[torch.where(known, target, 0)]
        absent = (sums[SCORE] == -torch.inf) & (sums[TOTAL] >= 0)  # NaN in a row is never hidden
        cost = share * torch.where(absent, torch.inf, (sums[TOP] - sums[SCORE]) + log_total)
        if setting.weight is not None or setting.smoothing == 1:
            cost = torch.where(absent & (share == 0), 0, cost)  # what is not wanted costs nothing
        share = torch.where(absent, 0, share)
        losses = torch.where(ignored, 0, losses + cost if setting.smoothing else cost)
        mass = torch.where(ignored, 0, mass + share if setting.smoothing else share)
        log_sum = torch.where(ignored, 0, log_sum)
    if not setting.full:
        return Rows(losses, log_sum, losses.new_empty(0), target.new_empty(0, dtype=torch.int64)), mass
    entropy = torch.where(sums[TOTAL] > 0, log_total - sums[SPREAD] / sums[TOTAL], 0)
    entropy = torch.where(sums[TOTAL].isnan(), torch.nan, entropy)
    return Rows(losses, log_sum, entropy, sums[BEST].to(torch.int64)), mass
