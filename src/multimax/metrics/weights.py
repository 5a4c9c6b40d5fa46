"""Measures of a reweighting function's output, row by row: the paper's two, and the usual ones.

Half precision is computed in float32, and the values come back in float32: a measure is averaged afterwards.
"""

import torch
from torch import Tensor

from multimax.ops import checks, masking
from multimax.ops.dtypes import compute_dtype


def _per_row(value: float | Tensor, rows: torch.Size, like: Tensor) -> Tensor:
    """A number for all rows, or one per row, to compare with `like`, whose last dim is the function's."""
    value = torch.as_tensor(value, dtype=like.dtype, device=like.device)
    checks.one_or_per_row(value, rows)
    return value.reshape(()) if value.numel() == 1 else value[..., None]


def _taking_part(x: Tensor, mask: Tensor | None) -> Tensor:
    """True for the entries that count, by the mask and by their value; a NaN counts."""
    mask = checks.mask_for(x, mask)
    part = masking.takes_part(x)
    return part if mask is None else part & mask


def _rows(x: Tensor, weights: Tensor, mask: Tensor | None, dim: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """With `dim` last: x, weights, what takes part, and in which rows of it there is a NaN."""
    checks.weights_for(x, weights)
    dim = checks.dimension(dim, x.ndim)
    part = _taking_part(x, mask)
    dtype = torch.promote_types(compute_dtype(x.dtype), compute_dtype(weights.dtype))
    x, weights, part = (t.reshape(1) if t.ndim == 0 else t.movedim(dim, -1) for t in (x, weights, part))
    broken = (part & (x.isnan() | weights.isnan())).any(-1)
    return x.to(dtype), weights.to(dtype), part, broken


def _wide(weights: Tensor, dim: int) -> tuple[Tensor, int]:
    """Weights alone, checked, to compute with, and their dim."""
    checks.tensor("weights", weights)
    dim = checks.dimension(dim, weights.ndim)
    return weights.to(compute_dtype(weights.dtype)), dim


def mean_score(x: Tensor, *, mask: Tensor | None = None, dim: int = -1) -> Tensor:
    """The mean of each row's entries that take part, NaN where there are none: the collector's threshold."""
    checks.tensor("x", x)
    dim = checks.dimension(dim, x.ndim)
    part = _taking_part(x, mask)
    return torch.where(part, x.to(compute_dtype(x.dtype)), 0).sum(dim) / part.sum(dim)


def multi_modality(
    x: Tensor, weights: Tensor, *, threshold: float | Tensor, mask: Tensor | None = None, dim: int = -1
) -> Tensor:
    r"""How close the relevant entries come to the largest (Definition 3.2).

    .. math:: \mathcal{M}(x) = 1 - \frac{1}{N} \sum_{\epsilon < x_n < x_{max}} (\phi(x)_{max} - \phi(x)_n)

    Args:
        x: the input of the reweighting function.
        weights: its output :math:`\phi(x)`, of the same shape.
        threshold: :math:`\epsilon`, above which an entry is relevant; a number, or one per row.
        mask: boolean, broadcastable to ``x``; True where an entry takes part. Entries that do not, and those that are
            -inf or at or below half of the dtype's lowest finite value, are neither relevant nor the largest.
        dim: the dim of the function.

    Returns:
        One value per row, larger for more modes, in [0, 1] if the function keeps the order of the entries; NaN where no
        entry but the largest is relevant, and where there is a NaN among the entries or weights that take part.

    Example:
        >>> import torch
        >>> from multimax import metrics
        >>> x = torch.tensor([3.0, 2.0, -1.0])
        >>> metrics.multi_modality(x, torch.softmax(x, -1), threshold=0.0)
        tensor(0.5440)
    """
    x, weights, part, broken = _rows(x, weights, mask, dim)
    epsilon = _per_row(threshold, x.shape[:-1], x)
    if x.shape[-1] == 0:
        return x.new_full(x.shape[:-1], torch.nan)
    x = torch.where(part, x, -torch.inf)
    relevant = part & (x > epsilon) & (x < x.amax(-1, keepdim=True))
    peak = weights.gather(-1, x.argmax(-1, keepdim=True))
    gaps = torch.where(relevant, peak - weights, 0).sum(-1)
    return torch.where(broken, torch.nan, 1 - gaps / relevant.sum(-1))


def sparsity(
    x: Tensor,
    weights: Tensor,
    *,
    threshold: float | Tensor,
    reference: float | Tensor | None = None,
    mask: Tensor | None = None,
    dim: int = -1,
) -> Tensor:
    r"""How close the irrelevant entries come to zero (Definition 3.3).

    .. math:: \mathcal{S}(x) = \frac{1}{L} \sum_{x_l < \epsilon} \exp\left(\frac{s - \phi(x)_l}{s} - 1\right)

    Args:
        x: the input of the reweighting function.
        weights: its output :math:`\phi(x)`, of the same shape.
        threshold: :math:`\epsilon`, below which an entry is irrelevant; a number, or one per row.
        reference: s, the scale of a weight that counts as small; a number, or one per row. By default the smallest
            weight that softmax gives in the row, as the paper proposes.
        mask: boolean, broadcastable to ``x``; True where an entry takes part. Entries that do not, and those that are
            -inf or at or below half of the dtype's lowest finite value, count neither as irrelevant nor in s.
        dim: the dim of the function.

    Returns:
        One value per row, in [0, 1], larger for sparser; NaN where no entry is irrelevant, and where there is a NaN
        among the entries or weights that take part.

    Example:
        >>> import torch
        >>> from multimax import metrics
        >>> x = torch.tensor([3.0, 2.0, -1.0])
        >>> metrics.sparsity(x, torch.softmax(x, -1), threshold=0.0)
        tensor(0.3679)
    """
    x, weights, part, broken = _rows(x, weights, mask, dim)
    epsilon = _per_row(threshold, x.shape[:-1], x)
    if x.shape[-1] == 0:
        return x.new_full(x.shape[:-1], torch.nan)
    if reference is None:
        softmax = torch.softmax(torch.where(part, x, -torch.inf), -1)
        reference = torch.where(part, softmax, 1).amin(-1)
    scale = _per_row(reference, x.shape[:-1], x)
    irrelevant = part & (x < epsilon)
    # the exponent of the definition is -weight / s; an entry of weight 0 scores 1 even where s underflows to 0
    scores = torch.where(weights == 0, 1, torch.exp(-weights / scale))
    return torch.where(broken, torch.nan, torch.where(irrelevant, scores, 0).sum(-1) / irrelevant.sum(-1))


def entropy(weights: Tensor, *, dim: int = -1) -> Tensor:
    r"""The entropy of each row, in nats.

    .. math:: H = -\sum_i w_i \log w_i, \qquad 0 \log 0 = 0

    Args:
        weights: the output of a reweighting function.
        dim: the dim along which the weights sum to 1.

    Returns:
        One value per row: 0 for one entry of weight 1, the logarithm of the number of entries where all weigh the same.
        A row of zeros, with nothing left in it, gives 0.

    Example:
        >>> import torch
        >>> from multimax import metrics
        >>> metrics.entropy(torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]))
        tensor([0.6931, 0.0000])
    """
    weights, dim = _wide(weights, dim)
    terms: Tensor = torch.special.entr(weights)
    return terms.sum(dim)


def support(weights: Tensor, *, dim: int = -1, threshold: float = 0.0) -> Tensor:
    r"""The number of entries in each row that weigh more than a threshold.

    .. math:: |\{i : w_i > \tau\}|

    Args:
        weights: the output of a reweighting function.
        dim: the dim along which the weights sum to 1.
        threshold: :math:`\tau`; 0 counts what is not exactly zero.

    Returns:
        One integer per row. A NaN is not above anything and does not count.

    Example:
        >>> import torch
        >>> from multimax import metrics
        >>> metrics.support(torch.tensor([[0.9, 0.1, 0.0], [1.0, 0.0, 0.0]]))
        tensor([2, 1])
    """
    weights, dim = _wide(weights, dim)
    checks.real_number("threshold", threshold)
    return (weights > threshold).sum(dim)


def top_mass(weights: Tensor, k: int, *, dim: int = -1) -> Tensor:
    r"""The share of the k largest entries of each row.

    .. math:: \sum_{i \le k} w_{(i)}, \qquad w_{(1)} \ge w_{(2)} \ge \dots

    Args:
        weights: the output of a reweighting function.
        k: how many entries, at least 1. If there are fewer, the whole row.
        dim: the dim along which the weights sum to 1.

    Returns:
        One value per row.

    Example:
        >>> import torch
        >>> from multimax import metrics
        >>> metrics.top_mass(torch.tensor([0.5, 0.125, 0.375]), 2)
        tensor(0.8750)
    """
    weights, dim = _wide(weights, dim)
    k = checks.positive_integer("k", k)
    if weights.ndim == 0:
        return weights
    return weights.topk(min(k, weights.shape[dim]), dim, sorted=False).values.sum(dim)
