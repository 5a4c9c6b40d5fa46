"""Random numbers of a useful kind."""

import torch
from torch import Tensor


def parameters(order: int = 2, heads: int | None = None, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Coefs and knots."""
    shape = (order, 2) if heads is None else (heads, order, 2)
    # shrinking with the order: with 1.0 at order 5 everything would be a one-hot vector
    coefs = torch.randn(shape) * torch.tensor([0.8 ** (3 * n) / (n + 1) for n in range(order)])[:, None]
    return coefs.to(dtype), torch.randn(shape).to(dtype)
