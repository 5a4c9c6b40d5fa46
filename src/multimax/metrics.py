"""The paper's two measures of a reweighting function's output."""

import torch
from torch import Tensor


def _per_row(x: Tensor, value: float | Tensor, dim: int) -> Tensor:
    """A number for all rows, or one a row, to compare with x."""
    value = torch.as_tensor(value, dtype=x.dtype, device=x.device)
    if value.numel() == 1:
        return value.reshape(())
    rows = x.select(dim, 0).shape
    if value.shape != rows:
        raise ValueError(
            f"multimax: expected one number or one a row, of shape {tuple(rows)}, got {tuple(value.shape)}"
        )
    return value.unsqueeze(dim)


def multi_modality(x: Tensor, weights: Tensor, *, threshold: float | Tensor, dim: int = -1) -> Tensor:
    r"""How close the relevant entries come to the largest (Definition 3.2).

    .. math:: \mathcal{M}(x) = 1 - \frac{1}{N} \sum_{\epsilon < x_n < x_{max}} (\phi(x)_{max} - \phi(x)_n)

    Args:
        x: the input of the reweighting function.
        weights: its output :math:`\phi(x)`, of the same shape.
        threshold: :math:`\epsilon`, above which an entry is relevant; a number, or one a row.
        dim: the dim of the function.

    Returns:
        A value a row, larger for more modes, in [0, 1] if the function keeps the order of the entries; NaN where no
        entry but the largest is relevant.

    Example:
        >>> import torch
        >>> from multimax import metrics
        >>> x = torch.tensor([3.0, 2.0, -1.0])
        >>> metrics.multi_modality(x, torch.softmax(x, -1), threshold=0.0)
        tensor(0.5440)
    """
    largest = x.amax(dim, keepdim=True)
    relevant = (x > _per_row(x, threshold, dim)) & (x < largest)
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
        A value a row, in [0, 1], larger for sparser; NaN where no entry is irrelevant. Entries that are -inf, masked,
        do not count.

    Example:
        >>> import torch
        >>> from multimax import metrics
        >>> x = torch.tensor([3.0, 2.0, -1.0])
        >>> metrics.sparsity(x, torch.softmax(x, -1), threshold=0.0)
        tensor(0.3679)
    """
    if reference is None:
        softmax = torch.softmax(x, dim)
        reference = torch.where(x == -torch.inf, 1, softmax).amin(dim)
    scale = _per_row(x, reference, dim)
    irrelevant = (x < _per_row(x, threshold, dim)) & (x != -torch.inf)
    # the exponent of the definition is -weight / s; an entry that weighs nothing scores 1 even where s underflows to 0
    scores = torch.where(weights == 0, 1, torch.exp(-weights / scale))
    return torch.where(irrelevant, scores, 0).sum(dim) / irrelevant.sum(dim)
