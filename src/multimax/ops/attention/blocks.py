"""Scores and weights that fused attention never holds, computed again for those who watch, a few queries at a time.

Shapes: B batches, H query heads, Hkv key heads, Lq queries, Lk keys, D entries a head, q queries of a block.
"""

import math
from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from multimax.ops import dtypes, masking, observing
from multimax.ops.attention import reference

# Scores in a block, unless one query of each head has more: some tens of MB with what is computed from them.
ELEMENTS = 2**21


def query_slices(shape: tuple[int, ...], elements: int | None = None) -> Iterator[slice]:
    """The queries of scores of a shape (..., Lq, Lk), block by block."""
    *lead, queries, keys = shape
    step = max(1, (elements or ELEMENTS) // max(1, math.prod(lead) * keys))
    for first in range(0, queries, step):
        yield slice(first, min(first + step, queries))


def of_matrix(scores: Tensor, weights: Tensor, part: Tensor) -> Iterator[observing.Block]:
    """Blocks of what is there as a whole, (B, H, Lq, Lk) each."""
    for rows in query_slices(tuple(scores.shape)):
        yield scores[:, :, rows], weights[:, :, rows], part[:, :, rows]


def _of_rows(t: Tensor | None, rows: slice) -> Tensor | None:
    """A mask or a bias for these queries."""
    return t if t is None or t.shape[2] == 1 else t[:, :, rows]


def _block(
    query: Tensor,
    key: Tensor,
    coefs: Tensor,
    knots: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    inside: Tensor,
    scale: float,
) -> observing.Block:
    with dtypes.without_autocast(query.device):
        x = scale * (query @ key.transpose(-1, -2))  # (B, H, q, Lk)
    part = inside.expand(x.shape)
    if mask is not None and mask.dtype == torch.bool:
        mask = mask & inside
        part = part & mask
    elif mask is not None:
        mask = torch.where(inside, mask, -torch.inf)
        part = part & masking.takes_part(mask)
    else:
        mask = inside
    weights, _ = reference.attention_weights(x, coefs, knots, mask, bias, False, -1, -1)
    if bias is not None:
        part = part & masking.takes_part(bias)
        x = x + bias.to(x.dtype)
    return x, weights, part & masking.takes_part(x)


def multimax_blocks(
    query: Tensor,
    key: Tensor,
    coefs: Tensor,
    knots: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    scale: float,
    causal: bool,
    left: int,
    right: int,
) -> Iterator[observing.Block]:
    """Scores, weights and what takes part; arguments as for :func:`multimax.reference.attention`."""
    dtype = dtypes.compute_dtype(query.dtype)
    shape = (*query.shape[:3], key.shape[2])
    key = key.to(dtype).repeat_interleave(query.shape[1] // max(key.shape[1], 1), 1)  # (B, H, Lk, D)
    for rows in query_slices(shape):
        inside = reference.band(shape[2], shape[3], causal, left, right, query.device, rows)
        own = _of_rows(mask, rows), _of_rows(bias, rows)
        yield _block(query[:, :, rows].to(dtype), key, coefs, knots, *own, inside, scale)


def report(
    query: Tensor,
    key: Tensor,
    coefs: Tensor,
    knots: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    *options: float,
) -> None:
    """Tells of one call of attention; ``options`` are scale, causal, left and right."""
    scale, causal, left, right = options
    settings = (float(scale), bool(causal), int(left), int(right))

    def blocks() -> Iterator[observing.Block]:
        return multimax_blocks(query, key, coefs, knots, mask, bias, *settings)

    observing.report(coefs.shape[-2], (*query.shape[:3], key.shape[2]), blocks)


def report_packed(
    query: Tensor, key: Tensor, coefs: Tensor, knots: Tensor, query_starts: Tensor, key_starts: Tensor, *options: float
) -> None:
    """Tells of packed sequences, (1, H, all rows, D), one after the other."""
    bounds = zip(pairwise(query_starts.tolist()), pairwise(key_starts.tolist()), strict=True)
    for (q_first, q_end), (k_first, k_end) in bounds:
        report(query[:, :, q_first:q_end], key[:, :, k_first:k_end], coefs, knots, None, None, *options)
