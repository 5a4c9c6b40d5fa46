"""Cross-entropy of MultiMax, line by line, on any device and in any dtype: the oracle for every implementation.

Shapes: R rows, C classes, D entries of a hidden state.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from multimax.ops import checks, dtypes
from multimax.ops.loss.call import LinearLossCall, LossCall, Rows, saved_dtype
from multimax.ops.operators import decompose
from multimax.ops.rows.reference import log_multimax, scores

NAME = "reference"


def counted(x: Tensor, target: Tensor, ignore_index: int) -> Tensor:
    """Logits or hidden states with 0 in the rows that are ignored: nothing that stands there may reach a gradient, not
    even NaN."""
    return x if target.is_floating_point() else torch.where((target == ignore_index)[:, None], 0.0, x)


def cross_entropy(call: LossCall) -> tuple[Tensor, Tensor]:
    """Cross-entropy of each row of x, with log multimax instead of log softmax, and its log-sum.

    Ignored rows are 0. Masked entries that the target does not want add nothing. Both results are (R,), in the compute
    dtype.
    """
    x, target = counted(call.x, call.target, call.ignore_index), call.target
    dtype = dtypes.compute_dtype(x.dtype)
    masked, s = scores(x, call.coefs, call.knots)
    empty = masked.all(-1)
    lse = torch.where(empty, float("-inf"), torch.logsumexp(torch.where(empty[:, None], 0.0, s), -1))
    log_p = log_multimax(x, call.coefs, call.knots, dtype=dtype)
    weights = x.new_ones(x.shape[1], dtype=dtype) if call.weight is None else call.weight.to(dtype)
    wanted = x.new_full((1, x.shape[1]), call.smoothing / max(x.shape[1], 1), dtype=dtype)
    if target.is_floating_point():
        wanted = (1 - call.smoothing) * target.to(dtype) + wanted
    wanted = weights * wanted
    losses = -torch.where((log_p == float("-inf")) & (wanted == 0), 0.0, wanted * log_p).sum(-1)
    if target.is_floating_point():
        return losses, lse
    ignored = target == call.ignore_index
    index = torch.where(ignored, 0, target)
    if x.shape[1]:
        of_target, share = log_p.gather(-1, index[:, None])[:, 0], (1 - call.smoothing) * weights[index]
        losses = losses - torch.where((of_target == float("-inf")) & (share == 0), 0.0, share * of_target)
    return torch.where(ignored, 0.0, losses), torch.where(ignored, 0.0, lse)


def _logits_call(call: LinearLossCall, dtype: torch.dtype | None = None) -> LossCall:
    """The call for the logits of a linear layer, made all at once, in that dtype or as torch makes them."""
    x, weight, bias = counted(call.input, call.target, call.ignore_index), call.linear_weight, call.linear_bias
    if dtype is not None:
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    x = F.linear(x, weight, bias)
    return LossCall(
        x, call.target, call.coefs, call.knots, call.weight, call.ignore_index, call.smoothing, call.impl, call.full
    )


def linear_cross_entropy(call: LinearLossCall) -> tuple[Tensor, Tensor]:
    """The same for logits input @ linear_weight.T + linear_bias, made in the call's dtype, all at once."""
    return cross_entropy(_logits_call(call, call.dtype))


def _entropy_and_best(call: LossCall) -> tuple[Tensor, Tensor]:
    """What the other implementations compute on the way."""
    with torch.no_grad():
        masked, s = scores(call.x, call.coefs, call.knots)
        log_p = torch.where(masked, 0.0, log_multimax(call.x, call.coefs, call.knots, dtype=s.dtype))
        entropy = -torch.where(masked | (log_p == -torch.inf), 0.0, log_p.exp() * log_p).sum(-1)
        top, best = s.max(-1)
        best = torch.where(top == -torch.inf, -1, best)
        if call.target.is_floating_point():
            return entropy, best
        ignored = call.target == call.ignore_index
        return torch.where(ignored, 0.0, entropy), torch.where(ignored, 0, best)


def why_not(call: LossCall | LinearLossCall) -> str | None:
    """Why the formulas cannot run this call."""
    if isinstance(call, LinearLossCall) and call.group:
        return "it does not support a weight that is split over processes, nor do torch.func's transforms"
    return None


def _rows(call: LossCall) -> Rows:
    """The rows' results for targets that have been checked."""
    losses, log_sum = cross_entropy(call)
    if call.full:
        return Rows(losses, log_sum, *_entropy_and_best(call))
    return Rows(losses, log_sum, losses.new_empty(0), losses.new_empty(0, dtype=torch.int64))


def run(call: LossCall | LinearLossCall) -> Rows:
    """The rows' results by the formulas."""
    if isinstance(call, LinearLossCall):
        call = _logits_call(call)
    if not torch._C._are_functorch_transforms_active():
        checks.target_values(call.target, call.x.shape[1], call.ignore_index)
    return _rows(call)


def _decomposition(call: LossCall) -> tuple[Tensor, ...]:
    """What the operator returns. What it saves is of use to the kernels' backward alone, and NaN here."""
    saved = call.x.new_full((3, call.x.shape[0]), torch.nan, dtype=saved_dtype(call))
    return *_rows(call).in_compute_dtype(call.x.dtype), saved


def _linear_decomposition(call: LinearLossCall) -> Any:
    """The same for a linear layer's logits, all at once. A weight that is split over processes stays as it is."""
    if call.group:
        return NotImplemented
    return tuple(_rows(_logits_call(call, call.dtype)).in_compute_dtype(call.dtype))


decompose("loss_rows", LossCall, _decomposition)
decompose("linear_loss", LinearLossCall, _linear_decomposition)
