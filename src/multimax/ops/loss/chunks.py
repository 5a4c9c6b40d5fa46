"""The losses of rows of logits, and of a linear layer's logits in chunks of rows. Nothing here knows of autograd.

Shapes: R rows, C classes, D entries of a hidden state.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from multimax.ops import dispatch, dtypes
from multimax.ops.loss import products
from multimax.ops.loss.call import LinearGrads, LinearLossCall, Logits, LossBackwardCall, LossCall, Rows, group_of
from multimax.ops.loss.reference import counted as without_ignored
from multimax.ops.loss.sums import SCORE, TOP, TOTAL, is_indices, joined, rows_of


def _rows_by(impl: str) -> Any:
    """The implementation of that name, for its `sums` and `gradients`."""
    return dispatch.load("loss")[impl]


def _gradients(
    logits: Logits, sums: Tensor, scale: Tensor, p_scale: Tensor, params_grad: bool, out: Tensor
) -> tuple[Tensor, Tensor]:
    """Writes x's gradient to out, which may be x; returns the gradients of coefs and knots, empty unless asked for."""
    if logits.x.shape[1] == 0:
        size = logits.coefs.shape if params_grad else (0,)
        none = logits.coefs.new_zeros(size, dtype=dtypes.exact_dtype(logits.x.device))
        return none, none.clone()
    found: tuple[Tensor, Tensor] = _rows_by(logits.setting.impl).gradients(
        logits, sums, scale, p_scale, params_grad, out
    )
    return found


def rows_of_logits(call: LossCall) -> tuple[Rows, Tensor]:
    """The rows' results, and what the backward needs: (3, R), the first two sums and the mass."""
    logits = call.logits()
    sums = _rows_by(call.impl).sums(logits)
    rows, mass = rows_of(sums, call.target, logits.setting, call.x.shape[1])
    return rows, torch.stack([sums[TOP], sums[TOTAL], mass])


def rows_of_logits_backward(call: LossBackwardCall) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, coefs and knots, from the gradients of losses and log-sums."""
    out = call.x.new_empty(call.x.shape)
    sums, mass = call.saved.tensor_split([2])
    p_scale = call.grad_losses * mass.squeeze(0) + call.grad_log_sum
    params = _gradients(call.call().logits(), sums, call.grad_losses, p_scale, call.params_grad, out)
    return out, *params


class _Sums(dict[str, Tensor]):
    """Gradients by name, which chunks add to."""

    def add(self, name: str, part: Tensor) -> None:
        """Adds one more chunk's part, which may be kept."""
        self[name] = self[name].add_(part) if name in self else part


def _seen_by_the_host(target: Tensor) -> bool:
    """Whether its values can be looked at without waiting for another device."""
    return target.device.type == "cpu"


Upstream = Callable[[Tensor | slice, Tensor], tuple[Tensor, Tensor]]
NOTHING = LinearGrads(False, False, False, False, False)


@torch.no_grad()
def rows_of_linear(
    call: LinearLossCall, upstream: Upstream | None = None, needed: LinearGrads = NOTHING, keep_wide: bool = False
) -> tuple[Rows, LinearGrads]:
    """Rows of the loss, and the gradients that are needed, from `upstream`'s gradients of losses and log-sums.

    Logits live in one buffer of `chunk` rows: they are made, reduced to sums, overwritten by their gradient, and used
    for the products that follow from it. On the CPU ignored rows are left out of all this; elsewhere, where the host
    would have to wait to know them, they go along and come out as 0. upstream is called with the chunk's rows and
    log-sums. keep_wide: gradients in the dtype that they are summed in, not in the tensors' dtype.
    """
    setting, dtype, target = call.setting(), call.dtype, call.target
    rows, classes = call.input.shape[0], call.linear_weight.shape[0]
    counted, seen = None, _seen_by_the_host(target)
    if is_indices(target) and seen and bool((target == call.ignore_index).any()):
        counted = (target != call.ignore_index).nonzero()[:, 0]
    count = rows if counted is None else counted.shape[0]
    projection = call.linear_weight.to(dtype)
    bias = None if call.linear_bias is None else call.linear_bias.to(dtype)
    wide = dtypes.compute_dtype(dtype)
    held = min(call.chunk, count)
    rounded = needed.linear_weight and not keep_wide and held < count and wide != call.linear_weight.dtype == dtype
    place = None
    if rounded and held <= call.linear_weight.shape[1]:  # the weight's gradient takes the logits' memory at the end
        place = torch.empty_like(call.linear_weight, memory_format=torch.contiguous_format)
        buffer = place.view(-1)[: held * classes].view(held, classes)
    else:
        buffer = call.input.new_empty((held, classes), dtype=dtype)
    params_grad = needed.coefs or needed.knots
    implementation = _rows_by(call.impl)
    found: Rows | None = None
    grads = _Sums()
    if needed.input:
        make = call.input.new_empty if counted is None else call.input.new_zeros
        grads["input"] = make(call.input.shape, dtype=wide if keep_wide else call.input.dtype)

    for start in range(0, max(count, 1), call.chunk):
        end = min(start + call.chunk, count)
        places = slice(start, end) if counted is None else counted[start:end]
        hidden, targets = call.input[places].to(dtype), target[places]
        if not seen:
            hidden = without_ignored(hidden, targets, call.ignore_index)
        x = buffer[: end - start]
        products.make_logits(hidden, projection, bias, x)
        logits = Logits(x, targets, call.coefs, call.knots, setting)
        sums = implementation.sums(logits)
        if call.group:
            sums = joined(sums, setting)
        part, mass = rows_of(sums, targets, setting, call.classes)
        if found is None:
            some = rows if setting.full else 0
            found = Rows(
                part.losses.new_zeros(rows),
                part.log_sum.new_zeros(rows),
                part.entropy.new_zeros(some),
                part.best.new_zeros(some),
            )
        found.losses[places], found.log_sum[places] = part.losses, part.log_sum
        if setting.full:
            found.entropy[places], found.best[places] = part.entropy, part.best
        if upstream is None or not any(needed):
            continue
        grad_losses, grad_log_sum = upstream(places, part.log_sum)
        p_scale = grad_losses * mass + grad_log_sum
        params = _gradients(logits, sums[TOP:SCORE], grad_losses, p_scale, params_grad, x)
        if params_grad:
            of_coefs, of_knots = params
            grads.add("coefs", of_coefs)
            grads.add("knots", of_knots)
        if needed.input:
            of_rows = grads["input"][places]
            products.input_grad(x, projection, of_rows)
            if counted is not None:  # else it is a view
                grads["input"][places] = of_rows
        if needed.linear_weight:
            only = end - start == count and not keep_wide
            grads["linear_weight"] = products.weight_grad(x, hidden, grads.get("linear_weight"), only)
        if needed.linear_bias:
            grads.add("linear_bias", x.sum(0, dtype=wide))

    if call.group:
        import torch.distributed as dist

        for name in ("input", "coefs", "knots"):  # these depend on all parts of the weight
            if name in grads:
                grads[name] = grads[name].to(wide) if name == "input" else grads[name]
                dist.all_reduce(grads[name], group=group_of(call.group))
    assert found is not None
    if place is not None:
        grads["linear_weight"] = place.copy_(grads["linear_weight"])
    del buffer, x, logits
    final: dict[str, Tensor | None] = {}
    for name, need in needed._asdict().items():
        like = getattr(call, name)
        if not need or like is None:
            final[name] = None
        elif name not in grads:
            final[name] = like.new_zeros(like.shape)
        else:
            final[name] = grads[name] if keep_wide else grads[name].to(like.dtype)
    return found, LinearGrads(**final)


def default_chunk(linear_weight: Tensor, dtype: torch.dtype) -> int:
    """Rows whose logits take half the memory of the weight's gradient while it is summed, in float32 for half
    precision; but enough rows for fast products, and no more than that takes. With few classes more of them, as long
    as their logits fit the cache: each chunk costs some calls."""
    classes, width = linear_weight.shape[0], linear_weight.shape[1]
    half = width * dtypes.compute_dtype(dtype).itemsize // (2 * dtype.itemsize)
    return max(min(max(half, 64), 512), products.BLOCK // (max(classes, 1) * dtype.itemsize))
