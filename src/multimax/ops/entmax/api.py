"""Sparsemax and entmax, and the call of all functions of this room: check the arguments, build the call, choose the
implementation, return its result."""

import torch
from torch import Tensor

from multimax.ops import checks, dispatch
from multimax.ops.dtypes import compute_dtype
from multimax.ops.entmax.call import KINDS, EntmaxCall

IMPLEMENTATIONS = dispatch.load("entmax")
CLOSED = {2: "sparsemax", 1.5: "entmax15"}  # alphas with a formula that needs no iteration


def last(value: float | Tensor, x: Tensor, dim: int) -> Tensor:
    """A number, or a tensor that broadcasts against x, as a tensor that does so with `dim` last."""
    t = torch.as_tensor(value, dtype=None if isinstance(value, Tensor) else torch.float64, device=x.device)
    return t.reshape(*[1] * (x.ndim - t.ndim), *t.shape).movedim(dim, -1) if x.ndim and t.ndim else t


def of_kind(
    kind: str,
    x: Tensor,
    dim: int,
    mask: Tensor | None = None,
    impl: str = "auto",
    *,
    parameter: float | Tensor | None = None,
    option: float = 0.0,
) -> Tensor:
    """Weights by one of `KINDS`. Arguments have been checked: dim counts from the front, mask is of x's shape."""
    rows = x.movedim(dim, -1) if x.ndim else x[None]
    if mask is not None:
        mask = mask.movedim(dim, -1) if x.ndim else mask[None]
    if parameter is not None:
        parameter = last(parameter, x, dim).to(compute_dtype(x.dtype)).expand(*rows.shape[:-1], 1)[..., 0]
    call = EntmaxCall(rows, parameter, mask, KINDS.index(kind), option)
    weights: Tensor = dispatch.choose(IMPLEMENTATIONS, impl, call).run(call)
    return weights.movedim(-1, dim) if x.ndim else weights[0]


def unchecked(x: Tensor, alpha: float | Tensor, dim: int, mask: Tensor | None = None, impl: str = "auto") -> Tensor:
    """Entmax of arguments that have been checked."""
    if not isinstance(alpha, Tensor) and alpha in CLOSED:
        return of_kind(CLOSED[alpha], x, dim, mask, impl)
    dtype = compute_dtype(x.dtype)
    least = 1 + torch.finfo(dtype).eps  # it may round to 1
    alpha = alpha.to(dtype).clamp(min=least) if isinstance(alpha, Tensor) else max(alpha, least)
    return of_kind("entmax", x, dim, mask, impl, parameter=alpha)


def sparsemax(x: Tensor, *, dim: int = -1, mask: Tensor | None = None, impl: str = "auto") -> Tensor:
    r"""The point of the simplex that is closest to the input, often on its boundary: weights that are exactly 0.

    .. math:: \operatorname{sparsemax}(x) = \arg\min_{p \in \Delta} \lVert p - x \rVert^2 = \max(x - \tau, 0)

    The kernel finds :math:`\tau` without sorting: the few entries within 1 of the largest are picked out, and Newton's
    method on them ends after a few steps.

    Args:
        x: input of any shape.
        dim: the dim along which the weights sum to 1.
        mask: True where an entry takes part.
        impl: "auto", "cpu", "triton" or "reference".

    Returns:
        Weights of the shape and dtype of ``x``.

    Example:
        >>> import torch
        >>> from multimax import reweighting
        >>> reweighting.sparsemax(torch.tensor([1.0, 0.6, -1.0]))
        tensor([0.7000, 0.3000, 0.0000])

    References:
        Martins, Astudillo: From Softmax to Sparsemax. ICML 2016.
    """
    return unchecked(x, 2, *checks.rows(x, dim, mask), impl)


def entmax15(x: Tensor, *, dim: int = -1, mask: Tensor | None = None, impl: str = "auto") -> Tensor:
    r"""Entmax at :math:`\alpha = 1.5`, between softmax and sparsemax, exactly.

    .. math:: \operatorname{entmax}_{1.5}(x) = \max(x / 2 - \tau, 0)^2

    Args:
        x: input of any shape.
        dim: the dim along which the weights sum to 1.
        mask: True where an entry takes part.
        impl: "auto", "cpu", "triton" or "reference".

    Returns:
        Weights of the shape and dtype of ``x``.

    Example:
        >>> import torch
        >>> from multimax import reweighting
        >>> reweighting.entmax15(torch.tensor([1.0, 0.6, -1.0]))
        tensor([0.6400, 0.3600, 0.0000])

    References:
        Peters, Niculae, Martins: Sparse Sequence-to-Sequence Models. ACL 2019.
    """
    return unchecked(x, 1.5, *checks.rows(x, dim, mask), impl)


def entmax(
    x: Tensor, *, alpha: float | Tensor = 1.5, dim: int = -1, mask: Tensor | None = None, impl: str = "auto"
) -> Tensor:
    r"""Entmax: softmax for :math:`\alpha \to 1`, sparsemax at 2, sparser beyond.

    .. math:: \operatorname{entmax}_\alpha(x) = \arg\max_{p \in \Delta} p^\top x + H_\alpha(p)
        = \max((\alpha - 1) x - \tau, 0)^{1 / (\alpha - 1)}

    with Tsallis' entropy :math:`H_\alpha(p) = \frac{1}{\alpha (\alpha - 1)} \sum_i (p_i - p_i^\alpha)`.

    Args:
        x: input of any shape.
        alpha: above 1; a number, or a tensor that broadcasts against x, of size 1 along ``dim``, with a gradient. A
            tensor's values are checked on the CPU alone: on other devices reading them would make the host wait.
        dim: the dim along which the weights sum to 1.
        mask: True where an entry takes part.
        impl: "auto", "cpu", "triton" or "reference".

    Returns:
        Weights of the shape and dtype of ``x``.

    Example:
        >>> import torch
        >>> from multimax import reweighting
        >>> alpha = torch.tensor([[1.1], [2.0]], requires_grad=True)  # for each of two rows
        >>> reweighting.entmax(torch.tensor([[1.0, 0.6, -1.0], [1.0, 0.6, -1.0]]), alpha=alpha)
        tensor([[0.5740, 0.3726, 0.0534],
                [0.7000, 0.3000, 0.0000]], grad_fn=<PermuteBackward0>)

    References:
        Peters, Niculae, Martins: Sparse Sequence-to-Sequence Models. ACL 2019. Correia, Niculae, Martins: Adaptively
        Sparse Transformers. EMNLP 2019 (the gradient of alpha).
    """
    dim, mask = checks.rows(x, dim, mask)
    checks.above("alpha", alpha, 1, x, dim)
    return unchecked(x, alpha, dim, mask, impl)
