"""Attention rollout: how attention adds up, layer by layer.

Shapes: L positions, H heads, after any number of batch dims.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from multimax.ops import checks
from multimax.ops.dtypes import compute_dtype


def _one_map(attention: Tensor, heads_dim: int | None) -> Tensor:
    """(..., L, L), averaged over the heads."""
    dim = checks.self_attention(attention, heads_dim)
    attention = attention.to(compute_dtype(attention.dtype))
    return attention if dim is None else attention.mean(dim)


class Rollout:
    r"""Attention rollout, layer by layer, for a model that is running.

    .. math:: R_1 = \tilde A_1, \qquad R_l = \tilde A_l R_{l-1}, \qquad \tilde A = \tfrac{1}{2} A + \tfrac{1}{2} I

    Args:
        residual: add the residual connection, :math:`I`, and divide each row by its sum, so it sums to 1 again; a row
            of zeros, whose query has no keys, becomes the row of :math:`I`. Without it :math:`\tilde A = A`.
        heads_dim: the dim of the heads in the maps, over which they are averaged; None for maps without heads.

    Example:
        >>> import torch
        >>> from multimax import metrics
        >>> rollout = metrics.Rollout()
        >>> rollout.update(torch.tensor([[0.5, 0.5], [0.0, 1.0]]))
        tensor([[0.7500, 0.2500],
                [0.0000, 1.0000]])
        >>> rollout.update(torch.tensor([[1.0, 0.0], [1.0, 0.0]]))
        tensor([[0.7500, 0.2500],
                [0.3750, 0.6250]])

    References:
        Abnar, Zuidema: Quantifying Attention Flow in Transformers. ACL 2020, section 3.
    """

    def __init__(self, *, residual: bool = True, heads_dim: int | None = None) -> None:
        self.residual, self.heads_dim = residual, heads_dim
        self.map: Tensor | None = None

    def update(self, attention: Tensor) -> Tensor:
        """Adds a layer's map, (..., L, L) or with heads, and returns the rollout up to it, (..., L, L)."""
        layer = _one_map(attention, self.heads_dim)
        checks.next_of_rollout(layer, self.map)
        if self.residual:
            layer = layer + torch.eye(layer.shape[-1], dtype=layer.dtype, device=layer.device)
            layer = layer / layer.sum(-1, keepdim=True)
        self.map = layer if self.map is None else layer @ self.map
        return self.map

    def discrepancy(self, attention: Tensor) -> Tensor:
        r"""How far the current rollout is from a single layer's map: see :func:`rollout_discrepancy`."""
        layer = _one_map(attention, self.heads_dim)
        distances = (checks.begun(self.map) - layer).abs().sum(-1) / 2  # (..., L)
        some = layer.sum(-1) != 0
        return torch.where(some, distances, 0).sum(-1) / some.sum(-1)


def rollout(attentions: Iterable[Tensor], *, residual: bool = True, heads_dim: int | None = None) -> list[Tensor]:
    r"""Attention rollout: for each layer, the product of the attention of all layers up to it.

    .. math:: R_1 = \tilde A_1, \qquad R_l = \tilde A_l R_{l-1}, \qquad \tilde A = \tfrac{1}{2} A + \tfrac{1}{2} I

    Args:
        attentions: the maps of the layers in the order in which they run, (..., L, L) each, rows summing to 1.
        residual: add the residual connection, see :class:`Rollout`.
        heads_dim: the dim of the heads, over which the maps are averaged, such as 1 or -3 for (B, H, L, L); None for
            maps without heads. It is not guessed: (B, L, L) and (H, L, L) look the same.

    Returns:
        The accumulated map of each layer, (..., L, L).

    Example:
        >>> import torch
        >>> from multimax import metrics
        >>> maps = [torch.softmax(torch.randn(2, 4, 9, 9), -1) for _ in range(3)]
        >>> [tuple(accumulated.shape) for accumulated in metrics.rollout(maps, heads_dim=1)]
        [(2, 9, 9), (2, 9, 9), (2, 9, 9)]

    References:
        Abnar, Zuidema: Quantifying Attention Flow in Transformers. ACL 2020, section 3.
    """
    accumulated = Rollout(residual=residual, heads_dim=heads_dim)
    return [accumulated.update(attention) for attention in attentions]


def rollout_discrepancy(
    attentions: Iterable[Tensor], *, residual: bool = True, heads_dim: int | None = None
) -> list[Tensor]:
    r"""How far accumulated attention is from the attention of each single layer.

    .. math:: \frac{1}{L} \sum_i \frac{1}{2} \sum_j |R_{l,ij} - A_{l,ij}|

    the total variation distance between a row of the rollout and the same row of the layer's map, averaged over the
    queries. The paper shows such a discrepancy ("Connection between sparsification and over-smoothing") but does not
    give its formula: this one is ours. The layer's map is taken as it is, without the residual connection.

    Args:
        attentions: as for :func:`rollout`.
        residual: likewise. Without it the discrepancy of the first layer is 0.
        heads_dim: likewise.

    Returns:
        One tensor (...) per layer, one value for each of the maps of the batch, in [0, 1]. Queries without keys, whose
        row is all zeros, do not count; NaN if no others are left.

    Example:
        >>> import torch
        >>> from multimax import metrics
        >>> first, second = torch.tensor([[0.5, 0.5], [0.0, 1.0]]), torch.tensor([[1.0, 0.0], [1.0, 0.0]])
        >>> metrics.rollout_discrepancy([first, second])
        [tensor(0.1250), tensor(0.4375)]
    """
    accumulated = Rollout(residual=residual, heads_dim=heads_dim)
    found = []
    for attention in attentions:
        accumulated.update(attention)
        found.append(accumulated.discrepancy(attention))
    return found
