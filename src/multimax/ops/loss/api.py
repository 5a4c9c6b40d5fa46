"""Cross-entropy on sigma(logits): check the arguments, choose the path, call it.

Shapes: R rows (tokens), C classes, D entries of a hidden state.
"""

from typing import Any, Literal, NamedTuple, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from multimax.ops import checks, dtypes, operators
from multimax.ops.loss import autograd as loss_ops
from multimax.ops.loss import chunks as loss_chunks
from multimax.ops.loss import reference
from multimax.ops.rows import reference as rows_reference
from multimax.ops.rows.api import choose


class LossStats(NamedTuple):
    """What a loss knows beside its value; no gradients flow through it.

    log_sum and entropy have a value for each row, in the target's shape and 0 where that is ``ignore_index``. accuracy
    is the share of the rows that count whose class of largest weight is the target (the first of several).
    """

    log_sum: Tensor
    entropy: Tensor
    accuracy: Tensor


def _why_not_cpu(target: Tensor) -> str | None:
    """Why the fused path cannot run a call that the reference can."""
    if target.requires_grad and torch.is_grad_enabled():
        return "the loss kernels give no gradient to the target"
    if torch._C._are_functorch_transforms_active():
        return "the loss kernels know nothing of torch.func's transforms"
    return None


def _path(impl: str, device: torch.device, target: Tensor) -> str:
    """ "cpu" for the kernels, "plain" for the same steps in plain PyTorch, or "reference" for the formulas."""
    why_not = _why_not_cpu(target)
    chosen = choose(impl, device, why_not)
    if chosen == "reference" and impl == "auto" and not why_not and torch.autograd.forward_ad._current_level < 0:
        return "plain"
    return chosen


def _counted(target: Tensor, ignore_index: int) -> Tensor:
    """How many rows count."""
    if target.is_floating_point():
        return torch.tensor(target.shape[0], device=target.device)
    return (target != ignore_index).sum()


def _divisor(target: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
    """What the sum of losses is divided by for their mean, as torch has it."""
    if weight is None or target.is_floating_point():
        return _counted(target, ignore_index)
    ignored = target == ignore_index
    weight = weight.to(dtypes.exact_dtype(weight.device))
    return torch.where(ignored, 0, weight[torch.where(ignored, 0, target)]).sum()


def _reduced(
    losses: Tensor,
    log_sum: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    reduction: str,
    z_loss: float,
) -> Tensor:
    """The loss from the rows' losses and log-sums."""
    extra = z_loss * log_sum.square() if z_loss else torch.zeros_like(losses)
    if reduction == "none":
        return losses + extra
    if reduction == "sum":
        return losses.sum() + extra.sum()
    mean = losses.sum() / _divisor(target, weight, ignore_index).to(losses.dtype)
    return mean + extra.sum() / _counted(target, ignore_index) if z_loss else mean


def _stats(rows: tuple[Tensor, ...], target: Tensor, ignore_index: int, shape: torch.Size) -> LossStats:
    _, log_sum, entropy, best = rows
    wanted = target.argmax(-1) if target.is_floating_point() else target
    hit = best == wanted
    if not target.is_floating_point():
        hit = hit & (target != ignore_index)
    accuracy = hit.sum() / _counted(target, ignore_index)
    return LossStats(log_sum.detach().reshape(shape), entropy.reshape(shape), accuracy)


def _entropy_and_best(x: Tensor, coefs: Tensor, knots: Tensor, target: Tensor, ignore_index: int) -> tuple[Tensor, ...]:
    """For the reference: what the fused path finds on its way."""
    with torch.no_grad():
        masked, s = rows_reference.scores(x, coefs, knots)
        log_p = torch.where(masked, 0.0, rows_reference.log_multimax(x, coefs, knots, dtype=s.dtype))
        entropy = -torch.where(masked | (log_p == -torch.inf), 0.0, log_p.exp() * log_p).sum(-1)
        if not target.is_floating_point():
            entropy = torch.where(target == ignore_index, 0.0, entropy)
        top, best = s.max(-1)
        return entropy, torch.where(top == -torch.inf, -1, best)


def _options(weight: Tensor | None, x: Tensor, classes: int, reduction: str, smoothing: float, z_loss: float) -> None:
    checks.choice("reduction", reduction, checks.REDUCTIONS)
    checks.number("label_smoothing", smoothing, 0, 1)
    checks.number("z_loss", z_loss, 0, float("inf"))
    if weight is not None:
        checks.class_weight(weight, x, classes)
        if weight.requires_grad and torch.is_grad_enabled():
            raise ValueError("multimax: expected weight without gradient, as torch does; detach it")


@overload
def multimax_cross_entropy(
    input: Tensor,
    target: Tensor,
    coefs: Tensor,
    knots: Tensor,
    *,
    weight: Tensor | None = ...,
    ignore_index: int = ...,
    reduction: str = ...,
    label_smoothing: float = ...,
    z_loss: float = ...,
    return_stats: Literal[False] = ...,
    impl: str = ...,
) -> Tensor: ...


@overload
def multimax_cross_entropy(
    input: Tensor,
    target: Tensor,
    coefs: Tensor,
    knots: Tensor,
    *,
    weight: Tensor | None = ...,
    ignore_index: int = ...,
    reduction: str = ...,
    label_smoothing: float = ...,
    z_loss: float = ...,
    return_stats: Literal[True],
    impl: str = ...,
) -> tuple[Tensor, LossStats]: ...


def multimax_cross_entropy(
    input: Tensor,
    target: Tensor,
    coefs: Tensor,
    knots: Tensor,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    return_stats: bool = False,
    impl: str = "auto",
) -> Tensor | tuple[Tensor, LossStats]:
    r"""``torch.nn.functional.cross_entropy`` with MultiMax in the place of softmax.

    .. math:: \ell = -\sum_c w_c\, q_c \log \phi(x)_c, \qquad \log \phi(x)_c = \sigma(x_c) - \log \sum_k e^{\sigma(x_k)}

    with class weights w and wanted probabilities q: 1 at the target's index, or the target itself, mixed with the
    uniform distribution by ``label_smoothing``. Zero ``coefs`` gives torch's loss. The kernel reads the logits once
    forward and once backward, and keeps three numbers a row between the two.

    Args:
        input: logits of shape (C,), (R, C) or (R, C, d1, ..., dk); where the classes do not lie side by side in
            memory, as in the last, it is copied.
        target: class indices of shape (), (R,) or (R, d1, ..., dk), or class probabilities of the shape of ``input``.
        coefs: (N, 2), see :func:`multimax.multimax`.
        knots: (N, 2).
        weight: (C,), a weight a class.
        ignore_index: rows with this target count for nothing; for indices only.
        reduction: "mean" (over the rows that count, weighted by ``weight``), "sum" or "none".
        label_smoothing: in [0, 1].
        z_loss: factor of the squared log-sum of each row that counts, added to its loss; "mean" takes its plain mean.
        return_stats: return also :class:`LossStats`: log-sum, entropy and accuracy, found on the way.
        impl: as for :func:`multimax.multimax`. Gradients of target probabilities and torch.func's transforms go
            through the reference.

    Returns:
        The loss, of the input's dtype (under autocast float32); with ``return_stats`` a pair.

    Example:
        >>> import torch, multimax
        >>> coefs, knots = multimax.from_paper(t_b=[2.0], t_d=[0.5], b=[0.0], d=[1.0])
        >>> logits, target = torch.tensor([[3.0, 2.0, -1.0]]), torch.tensor([0])
        >>> multimax.multimax_cross_entropy(logits, target, coefs, knots)
        tensor(0.4854)
    """
    checks.tensor("input", input)
    if input.ndim < 1:
        raise ValueError(f"multimax: expected input of shape (C,), (R, C) or (R, C, ...), got {checks.shape(input)}")
    checks.one_set(input, coefs, knots)
    checks.integer("ignore_index", ignore_index)
    dim = 0 if input.ndim == 1 else 1
    classes = input.shape[dim]
    checks.target(target, input, (*input.shape[:dim], *input.shape[dim + 1 :]), tuple(input.shape), ignore_index)
    _options(weight, input, classes, reduction, label_smoothing, z_loss)
    path = _path(impl, input.device, target)

    shape = target.shape
    if target.is_floating_point():
        shape = shape[:dim] + shape[dim + 1 :]
        target = target.movedim(dim, -1).flatten(0, -2) if target.ndim > 1 else target[None]
    else:
        target = target.reshape(-1).long()
    x = loss_chunks.side_by_side(input.movedim(dim, -1).flatten(0, -2) if input.ndim > 1 else input[None])
    rows: tuple[Tensor, ...]
    if path == "reference":
        if not torch._C._are_functorch_transforms_active():
            checks.target_values(target, classes, ignore_index)
        losses, log_sum = reference.cross_entropy(x, target, coefs, knots, weight, ignore_index, label_smoothing)
        rows = (losses, log_sum)
        if return_stats:
            rows += _entropy_and_best(x, coefs, knots, target, ignore_index)
    else:
        args = (x, target, coefs, knots, weight, ignore_index, label_smoothing, path, return_stats)
        if operators.traced(x, coefs, knots):
            rows = loss_ops.LossRows.apply(*args)[:4]
        else:
            rows = torch.ops.multimax.loss_rows.default(*args)[:4]
    loss = _reduced(rows[0], rows[1], target, weight, ignore_index, reduction, z_loss)
    if dtypes.autocast_dtype(input.device) is None:
        loss = loss.to(input.dtype)
    loss = loss.reshape(shape) if reduction == "none" else loss
    return (loss, _stats(rows, target, ignore_index, shape)) if return_stats else loss


@overload
def linear_multimax_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    coefs: Tensor,
    knots: Tensor,
    *,
    linear_bias: Tensor | None = ...,
    weight: Tensor | None = ...,
    ignore_index: int | None = ...,
    reduction: str = ...,
    label_smoothing: float = ...,
    z_loss: float = ...,
    return_stats: Literal[False] = ...,
    chunk: int | None = ...,
    group: Any = ...,
    impl: str = ...,
) -> Tensor: ...


@overload
def linear_multimax_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    coefs: Tensor,
    knots: Tensor,
    *,
    linear_bias: Tensor | None = ...,
    weight: Tensor | None = ...,
    ignore_index: int | None = ...,
    reduction: str = ...,
    label_smoothing: float = ...,
    z_loss: float = ...,
    return_stats: Literal[True],
    chunk: int | None = ...,
    group: Any = ...,
    impl: str = ...,
) -> tuple[Tensor, LossStats]: ...


def linear_multimax_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    coefs: Tensor,
    knots: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    ignore_index: int | None = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    return_stats: bool = False,
    chunk: int | None = None,
    group: Any = None,
    impl: str = "auto",
) -> Tensor | tuple[Tensor, LossStats]:
    r""":func:`multimax_cross_entropy` of a linear layer's logits, which are never held but in chunks of rows.

    .. math:: \ell = \operatorname{CE}(\sigma(h W^\top + \beta),\, y)

    for hidden states h, as ``torch.nn.functional.linear_cross_entropy`` is for softmax. Gradients flow to ``input``,
    ``linear_weight``, ``linear_bias``, ``coefs`` and ``knots``; what needs none costs nothing, and neither do rows
    that are ignored. With "mean" or "sum" the gradients are made in the forward, while a chunk's logits are there, and
    handed over by the first backward; with "none", under torch.compile and for any further backward (retain_graph)
    the logits are made a second time. Second derivatives hold all the logits.

    Half precision: products in that dtype, all sums over chunks in float32. Under autocast ``input`` and
    ``linear_weight`` are cast as torch casts those of a linear layer, and the loss is float32.

    Args:
        input: hidden states of shape (..., D).
        linear_weight: (C, D). With ``group`` the rows of this process, in the order of ranks. As in torch also
            (C, d1, ..., dk, D) with input (R, D), for a loss at each of d1 x ... x dk places; all logits are held then.
        target: class indices of shape (...), or class probabilities of shape (..., C); with a weight for several
            places (R, d1, ..., dk), or (R, C, d1, ..., dk).
        coefs: (N, 2), see :func:`multimax.multimax`.
        knots: (N, 2).
        linear_bias: (C,), or the weight's shape without D; with ``group`` this process's part.
        weight: (C,), a weight a class; with ``group`` of all classes.
        ignore_index: as for :func:`multimax_cross_entropy`, like the following four; None is -100, as in torch.
        reduction: "mean", "sum" or "none".
        label_smoothing: in [0, 1].
        z_loss: factor of the squared log-sums.
        return_stats: return also :class:`LossStats`.
        chunk: rows whose logits are held at once; None for as many as take half the memory that the sum of the
            weight's gradient takes (in float32 for half precision), within [64, 512].
        group: a ``torch.distributed`` process group over whose processes the rows of ``linear_weight`` are split.
            All processes give the same input, target (indices into the whole), parameters and options, and ask for
            the same gradients; all get the whole loss and the whole gradients of input and parameters, and each that
            of its part of the weight and bias.
        impl: "auto", "cpu" (chunks, with the compiled kernels) or "reference" (the formulas; holds all logits).
            Without kernels, and on other devices, "auto" takes the chunks too, in plain PyTorch.

    Returns:
        The loss, of the input's dtype (under autocast float32), for "none" of shape (...); with ``return_stats`` a
        pair.

    Example:
        >>> import torch, multimax
        >>> hidden, weight = torch.randn(2, 10, 16), torch.randn(1000, 16)
        >>> layer = multimax.MultiMax()
        >>> target = torch.randint(1000, (2, 10))
        >>> loss = multimax.linear_multimax_cross_entropy(hidden, weight, target, layer.coefs, layer.knots)
        >>> loss.backward()
        >>> layer.coefs.grad.shape
        torch.Size([2, 2])
    """
    autocast = dtypes.autocast_dtype(input.device)
    checks.linear(input, linear_weight, linear_bias, autocast is not None)
    checks.one_set(input, coefs, knots)
    if ignore_index is None:
        ignore_index = -100
    checks.integer("ignore_index", ignore_index)
    dtype = autocast if autocast and input.dtype != torch.float64 else input.dtype
    if chunk is None:
        chunk = loss_chunks.default_chunk(linear_weight, dtype)
    checks.integer("chunk", chunk)
    if chunk < 1:
        raise ValueError(f"multimax: expected chunk of at least 1 row, got {chunk}")
    places = linear_weight.shape[1:-1]
    first, classes = loss_ops.part_of(linear_weight, group)
    shape = input.shape[:-1] + places
    checks.target(target, input, tuple(shape), (*input.shape[:-1], classes, *places), ignore_index)
    if group is not None and (target.is_floating_point() or places):
        raise ValueError(
            "multimax: expected class indices and a weight (classes, in_features) with one in parts over processes"
        )
    _options(weight, input, classes, reduction, label_smoothing, z_loss)
    path = _path(impl, input.device, target)
    if group is not None and path == "reference":
        raise RuntimeError(
            "multimax: impl='reference' has no weight in parts over processes, and torch.func's transforms neither"
        )
    if places:
        bias = None if linear_bias is None else linear_bias.flatten()
        logits = F.linear(input, linear_weight.flatten(0, -2), bias).reshape(-1, classes, *places)
        options: dict[str, Any] = {"weight": weight, "ignore_index": ignore_index, "reduction": reduction}
        options |= {"label_smoothing": label_smoothing, "z_loss": z_loss, "return_stats": return_stats, "impl": impl}
        held: Tensor | tuple[Tensor, LossStats] = multimax_cross_entropy(logits, target, coefs, knots, **options)
        return held

    hidden = input.reshape(-1, input.shape[-1])
    target = target.reshape(-1, classes) if target.is_floating_point() else target.reshape(-1).long()
    differentiable = (hidden, linear_weight, linear_bias, coefs, knots)
    setting = (ignore_index, label_smoothing, path, return_stats, first, classes, loss_ops.group_name(group))
    args = (*differentiable[:3], target, coefs, knots, weight, *setting, chunk, dtype)
    loss: Tensor | None = None
    rows: tuple[Tensor, ...]
    if path == "reference":
        if not torch._C._are_functorch_transforms_active():
            checks.target_values(target, classes, ignore_index)
        logits = F.linear(hidden, linear_weight, linear_bias)
        losses, log_sum = reference.cross_entropy(logits, target, coefs, knots, weight, ignore_index, label_smoothing)
        rows = (losses, log_sum)
        if return_stats:
            rows += _entropy_and_best(logits, coefs, knots, target, ignore_index)
    elif operators.traced(*(t for t in differentiable if t is not None)):
        if reduction == "none" or torch.compiler.is_compiling():
            rows = loss_ops.LinearLoss.apply(*args)
        else:
            checks.target_values(target, classes, ignore_index)
            exact = dtypes.exact_dtype(input.device)
            scale = z_scale = torch.ones((), device=input.device, dtype=exact)
            if reduction == "mean":
                scale = 1 / _divisor(target, weight, ignore_index).to(exact)
                z_scale = 1 / _counted(target, ignore_index).to(exact)
            tensors = (target, weight, *setting, chunk, dtype)
            rows = loss_ops.ReducedLinearLoss.apply(
                scale, z_loss * z_scale if z_loss else None, tensors, *differentiable
            )
            loss = rows[0]
    else:
        rows = torch.ops.multimax.linear_loss.default(*args)
    if loss is None:
        loss = _reduced(rows[0], rows[1], target, weight, ignore_index, reduction, z_loss)
    if autocast is None:
        loss = loss.to(input.dtype)
    loss = loss.reshape(shape) if reduction == "none" else loss
    return (loss, _stats(rows, target, ignore_index, shape)) if return_stats else loss
