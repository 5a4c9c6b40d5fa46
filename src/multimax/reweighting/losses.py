r"""Losses for classifiers that end in one of the sparse functions, as functions and modules.

A sparse function gives classes a probability of exactly 0, whose logarithm is useless in training. Each comes with a
Fenchel-Young loss instead (Blondel, Martins, Niculae 2020), convex and smooth, with the gradient
:math:`p - y`:

.. math:: L(x, y) = \max_{p \in \Delta} \left[ p^\top x + H_\alpha(p) \right] - y^\top x - H_\alpha(y), \qquad
    H_\alpha(p) = \frac{1}{\alpha (\alpha - 1)} \sum_i (p_i - p_i^\alpha)

where p is sparsemax (alpha = 2), entmax15 or entmax of x. It holds for every y in the simplex, so soft targets and
label smoothing are allowed. Ev-SoftMax's loss is the negative logarithm of its training-time form, which is nowhere 0.

Shapes: R rows, C classes.
"""

from typing import Any

import torch
from torch import Tensor, nn

from multimax.ops import checks, dtypes, masking
from multimax.ops.dtypes import compute_dtype
from multimax.ops.entmax import api as entmax
from multimax.ops.entmax import reference
from multimax.ops.loss.api import multimax_cross_entropy


def _entropy(p: Tensor, alpha: Tensor) -> Tensor:
    """H_alpha of each row, (R, C) and (1, 1) or (R, 1) to (R,)."""
    return ((p - p**alpha) / (alpha * (alpha - 1))).sum(-1)


def _entropy_slope(p: Tensor, alpha: Tensor) -> Tensor:
    """Its derivative with respect to alpha, (R,)."""
    scale = alpha * (alpha - 1)
    power = p**alpha
    log_p = torch.where(p > 0, p, 1.0).log()
    return (-power * log_p / scale - (p - power) * (2 * alpha - 1) / scale**2).sum(-1)


class FenchelYoung(torch.autograd.Function):
    """The loss of each row from x, its weights p and the target; p counts as a function of x in the second derivative
    only, because the first one is p - y whatever the slope of p."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, p: Tensor, target: Tensor, alpha: Tensor) -> Tensor:
        """(R, C), (R, C), (R, 1) of indices or (R, C) of probabilities, (1, 1) or (R, 1), to (R,)."""
        if target.is_floating_point():
            inner = torch.where(p == target, 0.0, (p - target) * x).sum(-1)  # 0 for what is masked and not wanted
            return (inner + _entropy(p, alpha) - _entropy(target, alpha)).clamp(min=0)  # negative only by rounding
        inner = torch.where(p == 0, 0.0, p * x).sum(-1) - x.gather(-1, target)[:, 0]
        return (inner + _entropy(p, alpha)).clamp(min=0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        """Keeps all inputs."""
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """p - y, and the gradients of y and alpha."""
        x, p, target, alpha = ctx.saved_tensors
        soft = target.is_floating_point()
        of_x = of_target = of_alpha = None
        if ctx.needs_input_grad[0]:
            wanted = target if soft else torch.zeros_like(p).scatter(-1, target, 1.0)
            of_x = torch.where(x == -torch.inf, 0.0, grad[:, None] * (p - wanted))
        if soft and ctx.needs_input_grad[2]:
            of_target = grad[:, None] * (-x - (1 - alpha * target ** (alpha - 1)) / (alpha * (alpha - 1)))
        if ctx.needs_input_grad[3]:
            slope = _entropy_slope(p, alpha) - (_entropy_slope(target, alpha) if soft else 0.0)
            of_alpha = (grad * slope)[:, None]
            of_alpha = of_alpha.sum(0, keepdim=True) if alpha.shape[0] == 1 else of_alpha
        return of_x, None, of_target, of_alpha


def _levelled(x: Tensor, dim: int) -> Tensor:
    """Scores minus the largest of their row: no loss changes, and no digits are lost."""
    if x.shape[dim] == 0:
        return x
    top = x.detach().amax(dim, keepdim=True)
    return x - torch.where(top.isinf(), 0.0, top)


def _rows(x: Tensor, dim: int) -> Tensor:
    """(C,) or (R, C, ...) as (rows, C)."""
    return x[None] if x.ndim == 1 else x.movedim(dim, -1).flatten(0, -2)


def _fenchel_young(
    alpha: float | Tensor, input: Tensor, target: Tensor, ignore_index: int, reduction: str, label_smoothing: float
) -> Tensor:
    """The loss of entmax at any alpha, number or tensor."""
    checks.logits(input)
    ignore_index = checks.integer("ignore_index", ignore_index)
    checks.choice("reduction", reduction, checks.REDUCTIONS)
    smoothing = checks.number("label_smoothing", label_smoothing, 0, 1)
    dim = 0 if input.ndim == 1 else 1
    checks.above("alpha", alpha, 1, input, dim)
    shape = (*input.shape[:dim], *input.shape[dim + 1 :])
    checks.target(target, input, shape, tuple(input.shape), ignore_index)
    dtype, classes = compute_dtype(input.dtype), input.shape[dim]
    x = _rows(input, dim)  # (R, C)
    x = torch.where(masking.masked(x), -torch.inf, x.to(dtype))
    soft = target.is_floating_point()
    y = _rows(target, dim).to(dtype) if soft else target.reshape(-1, 1).long()
    if not torch.compiler.is_compiling() and not torch._C._are_functorch_transforms_active():
        checks.target_values(y if soft else y[:, 0], classes, ignore_index)
    ignored = torch.zeros(x.shape[0], dtype=torch.bool, device=x.device) if soft else (y == ignore_index)[:, 0]
    y = y if soft else torch.where(ignored[:, None], 0, y)
    if smoothing:
        y = y if soft else torch.zeros_like(x).scatter(-1, y, 1.0)
        y = (1 - smoothing) * y + smoothing / max(classes, 1)
    if isinstance(alpha, Tensor):
        a = alpha.to(dtype)
        a = _rows(a.expand(*input.shape[:dim], 1, *input.shape[dim + 1 :]), dim) if a.numel() > 1 else a.reshape(1, 1)
    else:
        a = torch.full((1, 1), alpha, dtype=dtype, device=x.device)
    x = _levelled(torch.where(ignored[:, None], 0.0, x), -1)  # whatever an ignored row holds
    weights = entmax.unchecked(x, a if isinstance(alpha, Tensor) else alpha, dim=1)
    losses = torch.where(ignored, 0.0, FenchelYoung.apply(x, weights, y, a))
    if reduction == "none":
        return losses.reshape(shape).to(dtypes.loss_dtype(input))
    total = losses.sum()
    return (total if reduction == "sum" else total / (~ignored).sum()).to(dtypes.loss_dtype(input))


def sparsemax_loss(
    input: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    r"""The Fenchel-Young loss of :func:`sparsemax`: its :math:`L` with :math:`\alpha = 2`.

    .. math:: L(x, y) = \tfrac12 \sum_i (y_i^2 - p_i^2) + (p - y)^\top x, \qquad p = \operatorname{sparsemax}(x)

    Args:
        input: scores of shape (C,), (R, C) or (R, C, d1, ..., dk), as in ``F.cross_entropy``.
        target: class indices of shape (), (R,) or (R, d1, ..., dk), or class probabilities of the shape of ``input``.
            As for :func:`multimax.multimax_cross_entropy`, a row's sum may be off by what rounding makes of it.
        ignore_index: rows with this target do not count; for indices only.
        reduction: "mean" (over the rows that count), "sum" or "none".
        label_smoothing: in [0, 1].

    Returns:
        The loss, of the input's dtype.

    Example:
        >>> import torch
        >>> from multimax import reweighting
        >>> reweighting.sparsemax_loss(torch.tensor([[1.0, 0.6, -1.0], [3.0, 0.0, 0.0]]), torch.tensor([0, 0]))
        tensor(0.0450)

    References:
        Martins, Astudillo: From Softmax to Sparsemax. ICML 2016. Blondel, Martins, Niculae: Learning with
        Fenchel-Young Losses. JMLR 2020.
    """
    return _fenchel_young(2.0, input, target, ignore_index, reduction, label_smoothing)


def entmax15_loss(
    input: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    r"""The Fenchel-Young loss of :func:`entmax15`: :func:`entmax_loss` with :math:`\alpha = 1.5`.

    Args:
        input: as for :func:`sparsemax_loss`.
        target: as for :func:`sparsemax_loss`.
        ignore_index: as for :func:`sparsemax_loss`.
        reduction: "mean", "sum" or "none".
        label_smoothing: in [0, 1].

    Returns:
        The loss, of the input's dtype.

    Example:
        >>> import torch
        >>> from multimax import reweighting
        >>> reweighting.entmax15_loss(torch.tensor([[1.0, 0.6, -1.0]]), torch.tensor([0]))
        tensor(0.2187)

    References:
        Peters, Niculae, Martins: Sparse Sequence-to-Sequence Models. ACL 2019.
    """
    return _fenchel_young(1.5, input, target, ignore_index, reduction, label_smoothing)


def entmax_loss(
    input: Tensor,
    target: Tensor,
    *,
    alpha: float | Tensor = 1.5,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    r"""The Fenchel-Young loss of :func:`entmax`.

    .. math:: L(x, y) = (p - y)^\top x + H_\alpha(p) - H_\alpha(y), \qquad p = \operatorname{entmax}_\alpha(x)

    with :math:`H_\alpha(p) = \frac{1}{\alpha (\alpha - 1)} \sum_i (p_i - p_i^\alpha)`.

    Args:
        input: as for :func:`sparsemax_loss`.
        target: as for :func:`sparsemax_loss`.
        alpha: above 1; a number, or a tensor that broadcasts against input, of size 1 along the classes, with a
            gradient.
        ignore_index: as for :func:`sparsemax_loss`.
        reduction: "mean", "sum" or "none".
        label_smoothing: in [0, 1].

    Returns:
        The loss, of the input's dtype.

    Example:
        >>> import torch
        >>> from multimax import reweighting
        >>> reweighting.entmax_loss(torch.tensor([[1.0, 0.6, -1.0]]), torch.tensor([0]), alpha=1.2)
        tensor(0.3759)
    """
    return _fenchel_young(alpha, input, target, ignore_index, reduction, label_smoothing)


def evsoftmax_loss(
    input: Tensor,
    target: Tensor,
    *,
    eps: float = 1e-6,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    r"""The negative log-likelihood under the training-time form of :func:`evsoftmax`.

    .. math:: L(x, y) = -\sum_i y_i \log p_i, \qquad p_i \propto (1[x_i \ge \bar x] + \epsilon)\, e^{x_i}

    Args:
        input: as for :func:`sparsemax_loss`.
        target: as for :func:`sparsemax_loss`.
        eps: :math:`\epsilon > 0`: with 0, classes below the mean would have an infinite loss.
        ignore_index: as for :func:`sparsemax_loss`.
        reduction: "mean", "sum" or "none".
        label_smoothing: in [0, 1].

    Returns:
        The loss, of the input's dtype.

    Example:
        >>> import torch
        >>> from multimax import reweighting
        >>> reweighting.evsoftmax_loss(torch.tensor([[2.0, 1.6, -1.0]]), torch.tensor([1]))
        tensor(0.9130)

    References:
        Chen, Itkina, Senanayake, Kochenderfer: Evidential Softmax for Sparse Multimodal Distributions in Deep
        Generative Models. NeurIPS 2021.
    """
    checks.logits(input)
    checks.number_above("eps", eps, 0)
    dim = 0 if input.ndim == 1 else 1
    high = reference.at_or_above_the_mean(*reference.split(input.detach(), dim, None)).movedim(-1, dim)
    wide = input.to(compute_dtype(input.dtype))
    wide = _levelled(torch.where(masking.masked(input), -torch.inf, wide), dim)
    x = reference.lowered(wide, high, eps)
    coefs, knots = x.new_zeros(1, 2), x.new_zeros(1, 2)
    loss = multimax_cross_entropy(
        x, target, coefs, knots, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
    )
    return loss.to(dtypes.loss_dtype(input))


class _Loss(nn.Module):
    """What the modules share."""

    def __init__(self, *, ignore_index: int = -100, reduction: str = "mean", label_smoothing: float = 0.0) -> None:
        super().__init__()
        ignore_index = checks.integer("ignore_index", ignore_index)
        checks.choice("reduction", reduction, checks.REDUCTIONS)
        checks.number("label_smoothing", label_smoothing, 0, 1)
        self.ignore_index, self.reduction, self.label_smoothing = ignore_index, reduction, label_smoothing

    def _options(self) -> dict[str, Any]:
        return {
            "ignore_index": self.ignore_index,
            "reduction": self.reduction,
            "label_smoothing": self.label_smoothing,
        }


class SparsemaxLoss(_Loss):
    """:func:`sparsemax_loss` as a module."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """The loss."""
        return sparsemax_loss(input, target, **self._options())


class Entmax15Loss(_Loss):
    """:func:`entmax15_loss` as a module."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """The loss."""
        return entmax15_loss(input, target, **self._options())


class EntmaxLoss(_Loss):
    """:func:`entmax_loss` as a module, with a fixed alpha."""

    def __init__(self, alpha: float = 1.5, **options: Any) -> None:
        super().__init__(**options)
        checks.number_above("alpha", alpha, 1)
        self.alpha = float(alpha)

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """The loss."""
        return entmax_loss(input, target, alpha=self.alpha, **self._options())


class EvSoftmaxLoss(_Loss):
    """:func:`evsoftmax_loss` as a module."""

    def __init__(self, eps: float = 1e-6, **options: Any) -> None:
        super().__init__(**options)
        checks.number_above("eps", eps, 0)
        self.eps = float(eps)

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """The loss."""
        return evsoftmax_loss(input, target, eps=self.eps, **self._options())
