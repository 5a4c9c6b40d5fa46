"""Cross-entropy on sigma(logits): check the arguments, choose an implementation, call it.

Shapes: R rows (tokens), C classes, D entries of a hidden state.
"""

from typing import Any, Literal, NamedTuple, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from multimax.ops import checks, dispatch, dtypes
from multimax.ops.layout import contiguous_rows
from multimax.ops.loss import chunks, reference
from multimax.ops.loss.autograd import differentiable, reduced_linear_loss
from multimax.ops.loss.call import LinearLossCall, LossCall, Rows, group_name
from multimax.ops.loss.sums import is_class
from multimax.ops.operators import traced

IMPLEMENTATIONS = dispatch.load("loss")


class LossStats(NamedTuple):
    """What a loss computes besides its value; no gradients flow through it.

    log_sum and entropy have a value for each row, in the target's shape and 0 where that is ``ignore_index``. accuracy
    is the share of the counted rows in which the target has the largest weight (in a tie, the first class has it).
    """

    log_sum: Tensor
    entropy: Tensor
    accuracy: Tensor


def _counted(target: Tensor, ignore_index: int) -> Tensor:
    """How many rows count."""
    if target.is_floating_point():
        return torch.tensor(target.shape[0], device=target.device)
    return (target != ignore_index).sum()


def _divisor(target: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
    """What the sum of losses is divided by for their mean, as in torch."""
    if weight is None or target.is_floating_point():
        return _counted(target, ignore_index)
    counted = (target != ignore_index) & is_class(target, weight.shape[0])
    weight = weight.to(dtypes.exact_dtype(weight.device))
    return torch.where(counted, weight[torch.where(counted, target, 0)], 0).sum()


def _reduced(rows: Rows, call: LossCall | LinearLossCall, reduction: str, z_loss: float) -> Tensor:
    """The loss from the rows' losses and log-sums."""
    losses, target = rows.losses, call.target
    extra = z_loss * rows.log_sum.square() if z_loss else torch.zeros_like(losses)
    if reduction == "none":
        return losses + extra
    if reduction == "sum":
        return losses.sum() + extra.sum()
    mean = losses.sum() / _divisor(target, call.weight, call.ignore_index).to(losses.dtype)
    return mean + extra.sum() / _counted(target, call.ignore_index) if z_loss else mean


def _scales(call: LinearLossCall, reduction: str, z_loss: float) -> tuple[Tensor, Tensor | None]:
    """What each row's loss and squared log-sum are multiplied by in their sum."""
    exact = dtypes.exact_dtype(call.input.device)
    one = torch.ones((), device=call.input.device, dtype=exact)
    if reduction == "sum":
        return one, z_loss * one if z_loss else None
    scale = one / _divisor(call.target, call.weight, call.ignore_index)
    return scale, z_loss * (one / _counted(call.target, call.ignore_index)) if z_loss else None


def _part_of(linear_weight: Tensor, group: Any) -> tuple[int, int]:
    """The first class of this process's part of a weight, and the number of all classes."""
    import torch.distributed as dist

    sizes = torch.zeros(dist.get_world_size(group), dtype=torch.int64, device=linear_weight.device)
    rank = dist.get_rank(group)
    sizes[rank] = linear_weight.shape[0]
    dist.all_reduce(sizes, group=group)
    return int(sizes[:rank].sum()), int(sizes.sum())


def _stats(rows: Rows, target: Tensor, ignore_index: int, shape: torch.Size) -> LossStats:
    wanted = target.argmax(-1) if target.is_floating_point() else target
    hit = rows.best == wanted
    if not target.is_floating_point():
        hit = hit & (target != ignore_index)
    accuracy = hit.sum() / _counted(target, ignore_index)
    return LossStats(rows.log_sum.detach().reshape(shape), rows.entropy.reshape(shape), accuracy)


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
    r"""``torch.nn.functional.cross_entropy`` with MultiMax instead of softmax.

    .. math:: \ell = -\sum_c w_c\, q_c \log \phi(x)_c, \qquad \log \phi(x)_c = \sigma(x_c) - \log \sum_k e^{\sigma(x_k)}

    with class weights w and wanted probabilities q: 1 at the target's index, or the target itself, mixed with the
    uniform distribution by ``label_smoothing``. Zero ``coefs`` gives torch's loss. The kernel reads the logits once
    forward and once backward, and keeps three numbers per row between the two.

    Args:
        input: logits of shape (C,), (R, C) or (R, C, d1, ..., dk); where the classes do not lie side by side in
            memory, as in the last, it is copied.
        target: class indices of shape (), (R,) or (R, d1, ..., dk), or class probabilities of the shape of ``input``.
            As these may have been computed in half precision, a row may sum to 1 within 1/128 (bfloat16's eps) and
            C / 2**25 (half of float16's smallest number for each class).
        coefs: (N, 2), see :func:`multimax.multimax`.
        knots: (N, 2).
        weight: (C,), one weight per class.
        ignore_index: rows with this target do not count; for indices only.
        reduction: "mean" (over the rows that count, weighted by ``weight``), "sum" or "none".
        label_smoothing: in [0, 1].
        z_loss: factor of the squared log-sum of each row that counts, added to its loss; "mean" takes its plain mean.
        return_stats: also return :class:`LossStats`: log-sum, entropy and accuracy, computed on the way.
        impl: as for :func:`linear_multimax_cross_entropy`. Gradients of target probabilities and torch.func's
            transforms go through the reference.

    Returns:
        The loss, of the input's dtype (under autocast float32); with ``return_stats`` a pair.

    Example:
        >>> import torch, multimax
        >>> coefs, knots = multimax.from_paper(t_b=[2.0], t_d=[0.5], b=[0.0], d=[1.0])
        >>> logits, target = torch.tensor([[3.0, 2.0, -1.0]]), torch.tensor([0])
        >>> multimax.multimax_cross_entropy(logits, target, coefs, knots)
        tensor(0.4854)
    """
    checks.logits(input)
    checks.one_set(input, coefs, knots)
    ignore_index = checks.integer("ignore_index", ignore_index)
    checks.flag("return_stats", return_stats)
    dim = 0 if input.ndim == 1 else 1
    checks.target(target, input, (*input.shape[:dim], *input.shape[dim + 1 :]), tuple(input.shape), ignore_index)
    checks.loss_options(reduction, label_smoothing, z_loss)
    checks.class_weight(weight, input, input.shape[dim])

    shape = target.shape
    if target.is_floating_point():
        shape = shape[:dim] + shape[dim + 1 :]
        target = target.movedim(dim, -1).flatten(0, -2) if target.ndim > 1 else target[None]
    else:
        target = target.reshape(-1).long()
    x = contiguous_rows(input.movedim(dim, -1).flatten(0, -2) if input.ndim > 1 else input[None])
    call = LossCall(x, target, coefs, knots, weight, ignore_index, label_smoothing, impl, return_stats)
    implementation = dispatch.choose(IMPLEMENTATIONS, impl, call)
    rows: Rows = implementation.run(call._replace(impl=implementation.NAME))
    loss = _reduced(rows, call, reduction, z_loss)
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
    r""":func:`multimax_cross_entropy` of a linear layer's logits, which are only ever held in chunks of rows.

    .. math:: \ell = \operatorname{CE}(\sigma(h W^\top + \beta),\, y)

    for hidden states h, as ``torch.nn.functional.linear_cross_entropy`` is for softmax. Gradients flow to ``input``,
    ``linear_weight``, ``linear_bias``, ``coefs`` and ``knots``; what needs no gradient costs nothing, and neither do
    ignored rows. With "mean" or "sum" the gradients are made in the forward, while a chunk's logits are there, and
    handed over by the first backward; with "none", under torch.compile and for any further backward (retain_graph)
    the logits are made a second time. Second derivatives hold all the logits.

    Half precision: products in that dtype, all sums over chunks in float32. Under autocast ``input`` and
    ``linear_weight`` are cast as torch casts the inputs of a linear layer, and the loss is float32.

    Args:
        input: hidden states of shape (..., D).
        linear_weight: (C, D). With ``group`` the rows of this process, in the order of ranks. As in torch also
            (C, d1, ..., dk, D) with input (R, D), for a loss at each of d1 x ... x dk places; all logits are held then.
        target: class indices of shape (...), or class probabilities of shape (..., C); with a weight for several
            places (R, d1, ..., dk), or (R, C, d1, ..., dk).
        coefs: (N, 2), see :func:`multimax.multimax`.
        knots: (N, 2).
        linear_bias: (C,), or the weight's shape without D; with ``group`` this process's part.
        weight: (C,), one weight per class; with ``group`` of all classes.
        ignore_index: as for :func:`multimax_cross_entropy`, like the following four; None is -100, as in torch.
        reduction: "mean", "sum" or "none".
        label_smoothing: in [0, 1].
        z_loss: factor of the squared log-sums.
        return_stats: also return :class:`LossStats`.
        chunk: rows whose logits are held at once; None for as many as take half the memory that the sum of the
            weight's gradient takes (in float32 for half precision), within [64, 512], or 4 MiB if that is more.
        group: a ``torch.distributed`` process group over whose processes the rows of ``linear_weight`` are split.
            All processes give the same input, target (indices into the whole), parameters and options, and ask for
            the same gradients; all get the whole loss and the whole gradients of input and parameters, and each
            gets the gradient of its part of the weight and bias.
        impl: "auto", "cpu" (chunks, with the compiled kernels), "torch" (chunks, in plain PyTorch) or "reference"
            (the formulas; holds all logits). Without kernels, and on other devices, "auto" takes "torch".

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
    checks.tensor("input", input)
    autocast = dtypes.autocast_dtype(input.device)
    checks.linear(input, linear_weight, linear_bias, autocast is not None)
    checks.one_set(input, coefs, knots)
    if ignore_index is None:
        ignore_index = -100
    ignore_index = checks.integer("ignore_index", ignore_index)
    checks.flag("return_stats", return_stats)
    dtype = autocast if autocast and input.dtype != torch.float64 else input.dtype
    if chunk is None:
        chunk = chunks.default_chunk(linear_weight, dtype)
    chunk = checks.rows_of_a_chunk(chunk)
    places = linear_weight.shape[1:-1]
    first_class, classes = (0, linear_weight.shape[0]) if group is None else _part_of(linear_weight, group)
    shape = input.shape[:-1] + places
    checks.target(target, input, tuple(shape), (*input.shape[:-1], classes, *places), ignore_index)
    if group is not None:
        checks.whole_rows(target, places)
    checks.loss_options(reduction, label_smoothing, z_loss)
    checks.class_weight(weight, input, classes)
    if places:
        bias = None if linear_bias is None else linear_bias.flatten()
        hidden = input
        if not target.is_floating_point():  # as where chunks are made: what counts nowhere reaches no gradient
            hidden = torch.where((target == ignore_index).flatten(1).all(1)[:, None], 0.0, input)
        logits = F.linear(hidden, linear_weight.flatten(0, -2), bias).reshape(-1, classes, *places)
        options: dict[str, Any] = {"weight": weight, "ignore_index": ignore_index, "reduction": reduction}
        options |= {"label_smoothing": label_smoothing, "z_loss": z_loss, "return_stats": return_stats, "impl": impl}
        held: Tensor | tuple[Tensor, LossStats] = multimax_cross_entropy(logits, target, coefs, knots, **options)
        return held

    target = target.reshape(-1, classes) if target.is_floating_point() else target.reshape(-1).long()
    call = LinearLossCall(
        input.reshape(-1, input.shape[-1]),
        linear_weight,
        linear_bias,
        target,
        coefs,
        knots,
        weight,
        ignore_index,
        label_smoothing,
        impl,
        return_stats,
        first_class=first_class,
        classes=classes,
        group="" if group is None else group_name(group),
        chunk=chunk,
        dtype=dtype,
    )
    implementation = dispatch.choose(IMPLEMENTATIONS, impl, call)
    call = call._replace(impl=implementation.NAME)
    in_forward = reduction != "none" and implementation is not reference and not torch.compiler.is_compiling()
    if in_forward and traced(*differentiable(call)):
        checks.target_values(target, classes, ignore_index)  # before they index the weights
        rows = reduced_linear_loss(call, *_scales(call, reduction, z_loss))
        loss = rows.losses
    else:
        rows = implementation.run(call)
        loss = _reduced(rows, call, reduction, z_loss)
    if autocast is None:
        loss = loss.to(input.dtype)
    loss = loss.reshape(shape) if reduction == "none" else loss
    return (loss, _stats(rows, target, ignore_index, shape)) if return_stats else loss
