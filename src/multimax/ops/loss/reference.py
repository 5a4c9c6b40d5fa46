"""Cross-entropy of MultiMax, line by line, on any device and in any dtype: the oracle for every implementation.

Shapes: R rows, C classes, D entries of a hidden state.
"""

import torch
from torch import Tensor

from multimax.ops import dtypes
from multimax.ops.rows.reference import log_multimax, scores


def cross_entropy(
    x: Tensor,
    target: Tensor,
    coefs: Tensor,
    knots: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    smoothing: float,
) -> tuple[Tensor, Tensor]:
    """Cross-entropy of each row of x, (R, C), with log multimax in the place of log softmax, and its log-sum.

    target is (R,) of class indices or (R, C) of probabilities, weight (C,). Rows to be ignored are 0. What is masked
    and not wanted costs nothing. Both results are (R,) in the compute dtype.
    """
    dtype = dtypes.compute_dtype(x.dtype)
    masked, s = scores(x, coefs, knots)
    empty = masked.all(-1)
    lse = torch.where(empty, float("-inf"), torch.logsumexp(torch.where(empty[:, None], 0.0, s), -1))
    log_p = log_multimax(x, coefs, knots, dtype=dtype)
    weights = x.new_ones(x.shape[1], dtype=dtype) if weight is None else weight.to(dtype)
    wanted = x.new_full((1, x.shape[1]), smoothing / max(x.shape[1], 1), dtype=dtype)
    if target.is_floating_point():
        wanted = (1 - smoothing) * target.to(dtype) + wanted
    wanted = weights * wanted
    losses = -torch.where((log_p == float("-inf")) & (wanted == 0), 0.0, wanted * log_p).sum(-1)
    if target.is_floating_point():
        return losses, lse
    ignored = target == ignore_index
    index = torch.where(ignored, 0, target)
    if x.shape[1]:
        losses = losses - (1 - smoothing) * weights[index] * log_p.gather(-1, index[:, None])[:, 0]
    return torch.where(ignored, 0.0, losses), torch.where(ignored, 0.0, lse)


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    target: Tensor,
    coefs: Tensor,
    knots: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    smoothing: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """The same for logits input @ linear_weight.T + linear_bias, made in that dtype, all at once."""
    bias = None if linear_bias is None else linear_bias.to(dtype)
    x = torch.nn.functional.linear(input.to(dtype), linear_weight.to(dtype), bias)
    return cross_entropy(x, target, coefs, knots, weight, ignore_index, smoothing)
