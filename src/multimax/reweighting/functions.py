"""The reweighting functions of the field, all called alike: ``function(x, *, dim=-1, mask=None, impl="auto", ...)``.

What holds for all of them: x is of any shape, float32, float64, bfloat16 or float16; half precision is computed in
float32 and returned in its dtype. ``mask`` is boolean, broadcastable to x, True where an entry takes part; an entry
that is -inf, or at or below half of its dtype's lowest finite value, takes no part either. What takes no part has
weight 0 and no gradient, and a row with nothing left is all zeros. A NaN shows in its whole row. ``impl`` is "auto",
"cpu" (the compiled kernels) or "reference" (plain PyTorch), as for :func:`multimax.multimax`.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from multimax.ops import checks, dtypes, masking
from multimax.ops.dtypes import compute_dtype
from multimax.ops.entmax import autograd as ops
from multimax.ops.entmax import reference
from multimax.ops.masking import takes_part
from multimax.ops.rows import api as F
from multimax.ops.rows.api import multimax
from multimax.reweighting.high_pass import attn_scale

__all__ = [
    "attnscale",
    "entmax",
    "entmax15",
    "evsoftmax",
    "multimax",
    "softmax",
    "sparsehourglass",
    "sparsemax",
    "topk",
]


def _checked(x: Tensor, dim: int, mask: Tensor | None) -> tuple[int, Tensor | None]:
    checks.tensor("x", x)
    dim = checks.dimension(dim, x.ndim)
    return dim, checks.mask_for(x, mask)


def _plain_softmax(x: Tensor, dim: int, mask: Tensor | None, impl: str) -> Tensor:
    """Softmax with all that is said above: MultiMax at zero coefs."""
    coefs, knots = (x.new_zeros(1, 2, dtype=compute_dtype(x.dtype)) for _ in range(2))  # the compiler wants two
    return multimax(x, coefs, knots, dim=dim, mask=mask, impl=impl)


def _by_rows(
    x: Tensor, dim: int, mask: Tensor | None, formula: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype
) -> Tensor:
    """A formula of `reference` on x."""
    if x.ndim == 0:
        return _by_rows(x[None], 0, None if mask is None else mask[None], formula, dtype)[0]
    return formula(*reference.split(x, dim, mask)).to(dtype).movedim(-1, dim)


def _kept(x: Tensor, dim: int, mask: Tensor | None, rule: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """A boolean mask of the entries that a rule of `reference` keeps."""
    return _by_rows(x.detach(), dim, mask, rule, torch.bool)


def _last(value: float | Tensor, x: Tensor, dim: int) -> Tensor:
    """A number, or a tensor that broadcasts against x, as a tensor that does so with `dim` last."""
    t = torch.as_tensor(value, dtype=None if isinstance(value, Tensor) else torch.float64, device=x.device)
    return t.reshape(*[1] * (x.ndim - t.ndim), *t.shape).movedim(dim, -1) if x.ndim and t.ndim else t


def lowered(x: Tensor, kept: Tensor, eps: float) -> Tensor:
    """Scores in the compute dtype whose softmax is Ev-SoftMax's training-time form: what is not kept is lower by the
    logarithm of (1 + eps) / eps."""
    wide = x.to(compute_dtype(x.dtype))
    below = wide - (math.log1p(eps) - math.log(eps))
    masked = masking.masked(x)  # stays so, in the wider dtype
    return torch.where(masked, -torch.inf, torch.where(kept, wide, below))


def softmax(
    x: Tensor, *, temperature: float | Tensor = 1.0, dim: int = -1, mask: Tensor | None = None, impl: str = "auto"
) -> Tensor:
    r"""Softmax at a temperature.

    .. math:: \phi(x)_i = \frac{e^{x_i / T}}{\sum_k e^{x_k / T}}

    Args:
        x: input of any shape.
        temperature: T > 0, a number or a tensor that broadcasts against x, of size 1 along ``dim``, with a gradient.
        dim: the dim along which the weights sum to 1.
        mask: True where an entry takes part.
        impl: "auto", "cpu" or "reference".

    Returns:
        Weights of the shape and dtype of ``x``.

    Example:
        >>> import torch
        >>> from multimax import reweighting
        >>> reweighting.softmax(torch.tensor([3.0, 2.0, -1.0]), temperature=2.0)
        tensor([0.5741, 0.3482, 0.0777])
    """
    dim, mask = _checked(x, dim, mask)
    checks.above("temperature", temperature, 0, x, dim)
    if isinstance(temperature, Tensor) or temperature != 1:
        t = _last(temperature, x, dim)
        wide = compute_dtype(x.dtype)
        scaled = _by_rows(x, dim, mask, lambda z, masked: reference.cooled(z, masked, t), wide)
        return _plain_softmax(scaled, dim, mask, impl).to(dtypes.softmax_dtype(x))
    return _plain_softmax(x, dim, mask, impl)


def _entmax(kind: str, x: Tensor, dim: int, mask: Tensor | None, impl: str, *alpha: Tensor) -> Tensor:
    """The kernels or the reference; alpha, for the kind "entmax", of x's dims but for size 1 in the last."""
    if F.choose(impl, x.device) == "reference":
        formula = getattr(reference, kind)
        return _by_rows(x, dim, mask, lambda z, masked: formula(z, masked, *alpha), dtypes.softmax_dtype(x))
    if mask is not None:
        x = torch.where(mask, x, -torch.inf)
    if x.ndim == 0:
        return ops.entmax(x[None], kind, *alpha)[0]
    return ops.entmax(x.movedim(dim, -1), kind, *alpha).movedim(-1, dim)


def sparsemax(x: Tensor, *, dim: int = -1, mask: Tensor | None = None, impl: str = "auto") -> Tensor:
    r"""The point of the simplex that is closest to the input, often on its boundary: weights that are exactly 0.

    .. math:: \operatorname{sparsemax}(x) = \arg\min_{p \in \Delta} \lVert p - x \rVert^2 = \max(x - \tau, 0)

    The kernel finds :math:`\tau` without sorting: the few entries within 1 of the largest are picked out, and Newton's
    method on them ends after a few steps.

    Args:
        x: input of any shape.
        dim: the dim along which the weights sum to 1.
        mask: True where an entry takes part.
        impl: "auto", "cpu" or "reference".

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
    return _entmax("sparsemax", x, *_checked(x, dim, mask), impl)


def entmax15(x: Tensor, *, dim: int = -1, mask: Tensor | None = None, impl: str = "auto") -> Tensor:
    r"""Entmax at :math:`\alpha = 1.5`, between softmax and sparsemax, exactly.

    .. math:: \operatorname{entmax}_{1.5}(x) = \max(x / 2 - \tau, 0)^2

    Args:
        x: input of any shape.
        dim: the dim along which the weights sum to 1.
        mask: True where an entry takes part.
        impl: "auto", "cpu" or "reference".

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
    return _entmax("entmax15", x, *_checked(x, dim, mask), impl)


def entmax(
    x: Tensor, *, alpha: float | Tensor = 1.5, dim: int = -1, mask: Tensor | None = None, impl: str = "auto"
) -> Tensor:
    r"""Entmax: softmax for :math:`\alpha \to 1`, sparsemax at 2, sparser beyond.

    .. math:: \operatorname{entmax}_\alpha(x) = \arg\max_{p \in \Delta} p^\top x + H_\alpha(p)
        = \max((\alpha - 1) x - \tau, 0)^{1 / (\alpha - 1)}

    with Tsallis' entropy :math:`H_\alpha(p) = \frac{1}{\alpha (\alpha - 1)} \sum_i (p_i - p_i^\alpha)`.

    Args:
        x: input of any shape.
        alpha: above 1; a number, or a tensor that broadcasts against x, of size 1 along ``dim``, with a gradient.
        dim: the dim along which the weights sum to 1.
        mask: True where an entry takes part.
        impl: "auto", "cpu" or "reference".

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
    dim, mask = _checked(x, dim, mask)
    checks.above("alpha", alpha, 1, x, dim)
    if not isinstance(alpha, Tensor) and alpha in (1.5, 2):
        return _entmax("entmax15" if alpha == 1.5 else "sparsemax", x, dim, mask, impl)
    dtype = compute_dtype(x.dtype)
    alpha = _last(alpha, x, dim).to(dtype).clamp(min=1 + torch.finfo(dtype).eps)  # rounded, it may be 1
    return _entmax("entmax", x, dim, mask, impl, alpha)


def evsoftmax(x: Tensor, *, eps: float = 0.0, dim: int = -1, mask: Tensor | None = None, impl: str = "auto") -> Tensor:
    r"""Ev-SoftMax: softmax of the entries at or above the mean, 0 for the others.

    .. math:: \phi(x)_i = \frac{(1[x_i \ge \bar x] + \epsilon)\, e^{x_i}}
        {\sum_k (1[x_k \ge \bar x] + \epsilon)\, e^{x_k}}

    The paper trains with a small :math:`\epsilon`, so that the others have a gradient and a finite logarithm, and
    evaluates with 0; :class:`EvSoftmax` does so.

    Args:
        x: input of any shape.
        eps: :math:`\epsilon \ge 0`.
        dim: the dim along which the weights sum to 1.
        mask: True where an entry takes part; the mean is that of these.
        impl: "auto", "cpu" or "reference".

    Returns:
        Weights of the shape and dtype of ``x``.

    Example:
        >>> import torch
        >>> from multimax import reweighting
        >>> reweighting.evsoftmax(torch.tensor([2.0, 1.6, 1.0, -1.0]))
        tensor([0.4906, 0.3289, 0.1805, 0.0000])

    References:
        Chen, Itkina, Senanayake, Kochenderfer: Evidential Softmax for Sparse Multimodal Distributions in Deep
        Generative Models. NeurIPS 2021.
    """
    dim, mask = _checked(x, dim, mask)
    eps = checks.finite("eps", eps)
    kept = _kept(x, dim, mask, reference.at_or_above_the_mean)
    if eps == 0:
        return _plain_softmax(x, dim, kept, impl)
    return _plain_softmax(lowered(x, kept, eps), dim, mask, impl).to(dtypes.softmax_dtype(x))


def sparsehourglass(
    x: Tensor, *, q: float = 1.0, dim: int = -1, mask: Tensor | None = None, impl: str = "auto"
) -> Tensor:
    r"""Sparsehourglass: sparsemax of an input that is scaled towards sum-normalisation.

    .. math:: \phi(x) = \operatorname{sparsemax}\left(\frac{1 + K q}{\lvert \sum_k x_k \rvert + K q}\, x\right)

    for K entries. q to infinity is sparsemax, q to 0 projects :math:`x / \lvert \sum_k x_k \rvert`. Unlike the other
    functions here, it changes if a constant is added to x.

    Args:
        x: input of any shape.
        q: above 0; infinity is allowed.
        dim: the dim along which the weights sum to 1.
        mask: True where an entry takes part; K and the sum are of these.
        impl: "auto", "cpu" or "reference".

    Returns:
        Weights of the shape and dtype of ``x``.

    Example:
        >>> import torch
        >>> from multimax import reweighting
        >>> reweighting.sparsehourglass(torch.tensor([1.0, 0.6, -1.0]), q=0.5)
        tensor([0.7381, 0.2619, 0.0000])

    References:
        Laha, Chemmengath, Agrawal, Khapra, Sankaranarayanan, Ramaswamy: On Controllable Sparse Alternatives to Softmax.
        NeurIPS 2018.
    """
    dim, mask = _checked(x, dim, mask)
    checks.number_above("q", q, 0, infinite=True)
    wide = compute_dtype(x.dtype)
    scaled = _by_rows(x, dim, mask, lambda z, masked: reference.hourglass(z, masked, float(q)), wide)
    return sparsemax(scaled, dim=dim, impl=impl).to(dtypes.softmax_dtype(x))


def topk(x: Tensor, *, k: int | float, dim: int = -1, mask: Tensor | None = None, impl: str = "auto") -> Tensor:
    r"""Softmax of the k largest entries, 0 for the others.

    .. math:: \phi(x)_i = \frac{1[i \in \mathcal{T}]\, e^{x_i}}{\sum_{k \in \mathcal{T}} e^{x_k}}, \qquad
        \mathcal{T} = \text{the } k \text{ largest}

    Args:
        x: input of any shape.
        k: how many entries to keep: an int of at least 1 (all, if there are not so many), or a float in (0, 1], the
            share of those that take part, rounded up. Of equal entries at the edge some are kept, so that there are k.
        dim: the dim along which the weights sum to 1.
        mask: True where an entry takes part.
        impl: "auto", "cpu" or "reference".

    Returns:
        Weights of the shape and dtype of ``x``.

    Example:
        >>> import torch
        >>> from multimax import reweighting
        >>> reweighting.topk(torch.tensor([3.0, 2.0, -1.0]), k=2)
        tensor([0.7311, 0.2689, 0.0000])

    References:
        Wang, Wang, Wang, Lin, Wang, Bai: KVT: k-NN Attention for Boosting Vision Transformers. ECCV 2022. Gupta, Dar,
        Goodman, Ciprut, Berant: Memory-efficient Transformers via Top-k Attention. SustaiNLP 2021.
    """
    dim, mask = _checked(x, dim, mask)
    checks.count_or_share("k", k)
    kept = _kept(x, dim, mask, lambda z, masked: reference.largest(z, masked, k))
    return _plain_softmax(x, dim, kept, impl)


def attnscale(
    x: Tensor, *, omega: float | Tensor, dim: int = -1, mask: Tensor | None = None, impl: str = "auto"
) -> Tensor:
    r"""AttnScale of softmax: what the weights have beside their mean is scaled by 1 + omega.

    .. math:: \phi(x)_i = \frac{1}{n} + (1 + \omega) \left(\operatorname{softmax}(x)_i - \frac{1}{n}\right)

    for the n entries of the row that take part. The weights still sum to 1, but **they may be negative**, unlike those
    of all the other functions here: for :math:`\omega > 0` below :math:`\frac{\omega}{1 + \omega} \frac{1}{n}` of
    softmax. So they are no distribution: there is no loss, and measures of weights that have a logarithm in them do not
    hold. For :math:`\omega < -1` the order of the entries is reversed.

    Args:
        x: input of any shape; of (..., heads, queries, keys) where each head has an omega.
        omega: :math:`\omega`, a number or a tensor of shape (), or (H,) for one a head, with a gradient; the heads are
            the last but one of x's dims without ``dim``. 0 is softmax.
        dim: the dim along which the weights sum to 1.
        mask: True where an entry takes part; n is the number of these in the row.
        impl: "auto", "cpu" or "reference", for softmax.

    Returns:
        Weights of the shape and dtype of ``x``.

    Example:
        >>> import torch
        >>> from multimax import reweighting
        >>> reweighting.attnscale(torch.tensor([3.0, 2.0, -1.0]), omega=0.5)
        tensor([ 0.9154,  0.2314, -0.1468])

    References:
        Wang, Zheng, Chen, Wang: Anti-Oversmoothing in Deep Vision Transformers via the Fourier Domain Analysis.
        ICLR 2022. On weights: :func:`multimax.oversmoothing.attn_scale`.
    """
    dim, mask = _checked(x, dim, mask)
    if not isinstance(omega, Tensor):
        checks.number_above("omega", omega, -math.inf)
        omega = torch.tensor(omega, dtype=compute_dtype(x.dtype), device=x.device)
    if x.ndim == 0:
        return attnscale(x[None], omega=omega, mask=None if mask is None else mask[None], impl=impl)[0]
    part = takes_part(x) if mask is None else takes_part(x) & mask
    weights = _plain_softmax(x.to(compute_dtype(x.dtype)), dim, part, impl)
    scaled = attn_scale(weights.movedim(dim, -1), omega, part.movedim(dim, -1))
    return scaled.movedim(-1, dim).to(dtypes.softmax_dtype(x))
