"""The paper's two measures of a reweighting function's output."""

import torch
from torch import Tensor


def _threshold(x: Tensor, threshold: float | Tensor, dim: int) -> Tensor:
    value = torch.as_tensor(threshold, dtype=x.dtype, device=x.device)
    return value.unsqueeze(dim) if value.ndim == x.ndim - 1 and value.ndim > 0 else value


def multi_modality(x: Tensor, weights: Tensor, *, threshold: float | Tensor, dim: int = -1) -> Tensor:
    r"""How close the relevant entries come to the largest (Definition 3.2).

    .. math:: \mathcal{M}(x) = 1 - \frac{1}{N} \sum_{\epsilon < x_n < x_{max}} (\phi(x)_{max} - \phi(x)_n)

    Args:
        x: the input of the reweighting function.
        weights: its output :math:`\phi(x)`, of the same shape.
        threshold: :math:`\epsilon`, above which an entry is relevant; a number, or one a row.
        dim: the dim of the function.

    Returns:
        A value a row, in [0, 1], larger for more modes; NaN where no entry but the largest is relevant.

    Example:
        >>> import torch
        >>> from multimax import metrics
        >>> x = torch.tensor([3.0, 2.0, -1.0])
        >>> metrics.multi_modality(x, torch.softmax(x, -1), threshold=0.0)
        tensor(0.5440)
    """
    largest = x.amax(dim, keepdim=True)
    relevant = (x > _threshold(x, threshold, dim)) & (x < largest)
    peak = weights.gather(dim, x.argmax(dim, keepdim=True))
    gaps = torch.where(relevant, peak - weights, 0).sum(dim)
    return 1 - gaps / relevant.sum(dim)


def sparsity(
    x: Tensor, weights: Tensor, *, threshold: float | Tensor, reference: float | Tensor | None = None, dim: int = -1
) -> Tensor:
    r"""How close the irrelevant entries come to zero (Definition 3.3).

    .. math:: \mathcal{S}(x) = \frac{1}{L} \sum_{x_l < \epsilon} \exp\left(\frac{s - \phi(x)_l}{s} - 1\right)

    Args:
        x: the input of the reweighting function.
        weights: its output :math:`\phi(x)`, of the same shape.
        threshold: :math:`\epsilon`, below which an entry is irrelevant; a number, or one a row.
        reference: s, the scale of a weight that counts as small; a number, or one a row. By default the smallest
            weight that softmax gives in the row, as the paper proposes.
        dim: the dim of the function.

    Returns:
        A value a row, in [0, 1], larger for sparser; NaN where no entry is irrelevant.

    Example:
        >>> import torch
        >>> from multimax import metrics
        >>> x = torch.tensor([3.0, 2.0, -1.0])
        >>> metrics.sparsity(x, torch.softmax(x, -1), threshold=0.0)
        tensor(0.3679)
    """
    if reference is None:
        reference = torch.softmax(x, dim).amin(dim)
    scale = _threshold(x, reference, dim)
    irrelevant = x < _threshold(x, threshold, dim)
    scores = torch.where(irrelevant, torch.exp((scale - weights) / scale - 1), 0).sum(dim)
    return scores / irrelevant.sum(dim)
