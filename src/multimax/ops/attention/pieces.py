"""Attention in pieces: how many batches, heads or queries a block of scores has, and tensors cut accordingly."""

import torch
from torch import Tensor


def sizes(count: int, scores: int, most: int) -> list[int]:
    """How many of ``count`` batches, heads or queries, with so many scores each, each block has: at most ``most``
    scores, unless one alone has more."""
    blocks = max(1, -(-count // max(1, most // max(1, scores))))
    return [count * (i + 1) // blocks - count * i // blocks for i in range(blocks)]


def pieces(t: Tensor | None, dim: int | None, sizes: list[int]) -> tuple[Tensor | None, ...]:
    """A tensor in pieces, or itself for each of them where it broadcasts. Slices would each have a gradient of the
    whole tensor's size."""
    if t is None or dim is None or not -t.ndim <= dim < t.ndim or t.shape[dim] == 1:
        return (t,) * len(sizes)
    found: tuple[Tensor, ...] = torch.split(t, sizes, dim)
    return found
