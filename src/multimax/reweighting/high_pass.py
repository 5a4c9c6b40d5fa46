"""AttnScale: the high-pass part of attention weights, scaled.

Shapes: H heads, Lq queries, Lk keys.
"""

import torch
from torch import Tensor, nn

from multimax.ops import checks
from multimax.ops.dtypes import compute_dtype


def attn_scale(weights: Tensor, omega: Tensor, mask: Tensor | None = None) -> Tensor:
    r"""AttnScale: attention weights with their high-pass part scaled by 1 + omega.

    .. math:: A' = \bar{A} + (1 + \omega) (A - \bar{A}), \qquad \bar{A}_{ij} = \frac{1}{n} \sum_k A_{ik} = \frac{1}{n}

    A row of attention weights is a filter over the n keys. Its mean is all that it does to the constant (DC) signal,
    and this part stays; the rest, which alone passes on differences between the keys, is scaled. The sum of each row
    does not change: it is 1 for the usual weights, hence the paper's 1/n. Weights may become negative.

    Args:
        weights: A, of shape (..., H, Lq, Lk).
        omega: :math:`\omega`, a tensor of shape (), or (H,) for one value per head. 0 changes nothing.
        mask: boolean, True where a key takes part, of a shape that broadcasts to the weights. n is then the
            number of keys that take part in the row; the others get weight 0, as does a row with none.

    Returns:
        A', of the shape and dtype of the weights; half precision is computed in float32.

    Example:
        >>> import torch
        >>> from multimax.oversmoothing import attn_scale
        >>> weights = torch.tensor([[0.7, 0.2, 0.1, 0.0]])
        >>> attn_scale(weights, torch.tensor(0.5))
        tensor([[ 0.9250,  0.1750,  0.0250, -0.1250]])
        >>> attn_scale(weights, torch.tensor(0.5), mask=torch.tensor([True, True, True, False]))
        tensor([[ 0.8833,  0.1333, -0.0167,  0.0000]])

    References:
        Wang, Zheng, Chen, Wang: Anti-Oversmoothing in Deep Vision Transformers via the Fourier Domain Analysis,
        ICLR 2022, arXiv:2203.05962.
    """
    checks.tensor("weights", weights)
    checks.omega(omega, weights, tuple(weights.shape))
    return unchecked_attn_scale(weights, omega, checks.mask_for(weights, mask))


def unchecked_attn_scale(weights: Tensor, omega: Tensor, on: Tensor | None) -> Tensor:
    """AttnScale of arguments that have been checked; the mask is of the shape of the weights."""
    scale = omega[:, None, None] if omega.ndim else omega
    a = weights.to(compute_dtype(weights.dtype))
    if on is None:
        count: Tensor | int = max(a.shape[-1], 1)
    else:
        a = torch.where(on, a, 0)
        count = on.sum(-1, keepdim=True).clamp(min=1)
    rest = a - a.sum(-1, keepdim=True) / count
    # not as mean + (1 + omega) * rest, which has a rounding error at omega = 0
    scaled = a + scale.to(a.dtype) * rest
    if on is not None:
        scaled = torch.where(on, scaled, 0)
    return scaled.to(weights.dtype)


class AttnScale(nn.Module):
    r"""AttnScale as a layer, for use between the attention weights and the values; see :func:`attn_scale`.

    .. math:: A' = \frac{1}{n} + (1 + \omega_h) \left(A - \frac{1}{n}\right)

    The state_dict has one tensor, ``omega``, which starts at 0 and so changes nothing (the published code calls it
    ``lamb``).

    Args:
        heads: H, for one omega per head, as in the paper; None for a single one.

    Shape:
        weights (..., H, Lq, Lk), and a boolean mask that broadcasts to it or None; output as the weights.

    Example:
        >>> import torch
        >>> from multimax.oversmoothing import AttnScale
        >>> layer = AttnScale(heads=2)
        >>> weights = torch.softmax(torch.randn(1, 2, 4, 4), -1)
        >>> torch.equal(layer(weights), weights)
        True

    References:
        Wang, Zheng, Chen, Wang: Anti-Oversmoothing in Deep Vision Transformers via the Fourier Domain Analysis,
        ICLR 2022, arXiv:2203.05962.
    """

    omega: nn.Parameter

    def __init__(
        self,
        heads: int | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if heads is not None:
            heads = checks.integer("heads", heads)
            checks.at_least("heads", heads, 1)
        self.heads = heads
        self.omega = nn.Parameter(torch.empty(() if heads is None else (heads,), device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets omega to 0."""
        nn.init.zeros_(self.omega)

    def forward(self, weights: Tensor | None, mask: Tensor | None = None) -> Tensor:
        """The scaled weights, of the same shape. Without weights, a copy of omega, for the same reason as in
        :func:`multimax.reweighting.registry.in_use`."""
        return self.omega.clone() if weights is None else attn_scale(weights, self.omega, mask)

    def extra_repr(self) -> str:
        """What the layer was made with."""
        return f"heads={self.heads}"
