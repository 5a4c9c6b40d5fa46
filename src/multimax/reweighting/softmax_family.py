"""Softmax, and the functions that are softmax of something else: of scores at a temperature, of some of the entries, or
with its high-pass part scaled. What they have in common is described in :mod:`multimax.reweighting.registry`.
"""

import math

import torch
from torch import Tensor

from multimax.ops import checks, dispatch, dtypes
from multimax.ops.dtypes import compute_dtype
from multimax.ops.entmax.api import of_kind
from multimax.ops.masking import takes_part
from multimax.ops.rows.api import IMPLEMENTATIONS
from multimax.ops.rows.call import KINDS, RowsCall
from multimax.reweighting.high_pass import unchecked_attn_scale


def _plain_softmax(x: Tensor, dim: int, mask: Tensor | None, impl: str) -> Tensor:
    """Softmax of arguments that have been checked: MultiMax at zero coefs."""
    if x.ndim == 0:
        return _plain_softmax(x[None], 0, None if mask is None else mask[None], impl)[0]
    coefs, knots = (x.new_zeros(1, 2, dtype=compute_dtype(x.dtype)) for _ in range(2))  # the compiler wants two
    call = RowsCall(x, coefs, knots, mask, dim, KINDS.index("multimax"))
    weights: Tensor = dispatch.choose(IMPLEMENTATIONS, impl, call).run(call)
    return weights


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
    dim, mask = checks.rows(x, dim, mask)
    checks.above("temperature", temperature, 0, x, dim)
    if isinstance(temperature, Tensor):
        return of_kind("softmax", x, dim, mask, impl, parameter=temperature)
    if temperature != 1:
        return of_kind("softmax", x, dim, mask, impl, option=float(temperature))
    return _plain_softmax(x, dim, mask, impl)


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
        mask: True where an entry takes part; the mean is over these.
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
    dim, mask = checks.rows(x, dim, mask)
    return of_kind("evsoftmax", x, dim, mask, impl, option=checks.finite("eps", eps))


def topk(x: Tensor, *, k: int | float, dim: int = -1, mask: Tensor | None = None, impl: str = "auto") -> Tensor:
    r"""Softmax of the k largest entries, 0 for the others.

    .. math:: \phi(x)_i = \frac{1[i \in \mathcal{T}]\, e^{x_i}}{\sum_{k \in \mathcal{T}} e^{x_k}}, \qquad
        \mathcal{T} = \text{the } k \text{ largest}

    Args:
        x: input of any shape.
        k: how many entries to keep: an int of at least 1 (all, if there are fewer), or a float in (0, 1], the share of
            those that take part, rounded up. Of equal entries at the edge only the first are kept, to have exactly k.
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
    dim, mask = checks.rows(x, dim, mask)
    checks.count_or_share("k", k)
    return of_kind("topk" if isinstance(k, int) else "topshare", x, dim, mask, impl, option=float(k))


def attnscale(
    x: Tensor, *, omega: float | Tensor, dim: int = -1, mask: Tensor | None = None, impl: str = "auto"
) -> Tensor:
    r"""AttnScale of softmax: the deviation of the weights from their mean is scaled by 1 + omega.

    .. math:: \phi(x)_i = \frac{1}{n} + (1 + \omega) \left(\operatorname{softmax}(x)_i - \frac{1}{n}\right)

    for the n entries of the row that take part. The weights still sum to 1, but **they may be negative**, unlike the
    weights of all other functions here: for :math:`\omega > 0`, where softmax is below
    :math:`\frac{\omega}{1 + \omega} \frac{1}{n}`. So they are not a distribution: there is no loss, and measures that
    take the logarithm of weights do not apply. For :math:`\omega < -1` the order of the entries is reversed.

    Args:
        x: input of any shape; of (..., heads, queries, keys) where each head has an omega.
        omega: :math:`\omega`, a number or a tensor of shape (), or (H,) for one per head, with a gradient; the heads
            are the second to last of x's dims without ``dim``. 0 is softmax.
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
    dim, mask = checks.rows(x, dim, mask)
    if not isinstance(omega, Tensor):
        checks.number_above("omega", omega, -math.inf)
        omega = torch.tensor(omega, dtype=compute_dtype(x.dtype), device=x.device)
    if x.ndim == 0:
        return attnscale(x[None], omega=omega, mask=None if mask is None else mask[None], impl=impl)[0]
    checks.omega(omega, x, (*x.shape[:dim], *x.shape[dim + 1 :], x.shape[dim]))
    part = takes_part(x) if mask is None else takes_part(x) & mask
    weights = _plain_softmax(x.to(compute_dtype(x.dtype)), dim, part, impl)
    scaled = unchecked_attn_scale(weights.movedim(dim, -1), omega, part.movedim(dim, -1))
    return scaled.movedim(-1, dim).to(dtypes.softmax_dtype(x))
