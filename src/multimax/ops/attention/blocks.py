"""Scores and weights that fused attention never holds, computed again for observers, a few queries at a time.

Shapes: B batches, H query heads, Hkv key heads, Lq queries, Lk keys, q queries of a block.
"""

import math
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from multimax.ops import dtypes, masking, observing
from multimax.ops.attention import reference
from multimax.ops.attention.call import AttentionCall

# Scores in a block, unless one query of each head has more: tens of MB, with what is computed from them.
ELEMENTS = 2**21


def query_slices(shape: tuple[int, ...], elements: int | None = None) -> Iterator[slice]:
    """The queries of scores of a shape (..., Lq, Lk), block by block."""
    *lead, queries, keys = shape
    step = max(1, (elements or ELEMENTS) // max(1, math.prod(lead) * keys))
    for first in range(0, queries, step):
        yield slice(first, min(first + step, queries))


def of_matrix(scores: Tensor, weights: Tensor, part: Tensor) -> Iterator[observing.Block]:
    """Blocks of tensors that exist as a whole, (B, H, Lq, Lk) each."""
    for rows in query_slices(tuple(scores.shape)):
        yield scores[:, :, rows], weights[:, :, rows], part[:, :, rows]


def _of_rows(t: Tensor | None, rows: slice) -> Tensor | None:
    """A mask or a bias for these queries."""
    return t if t is None or t.shape[2] == 1 else t[:, :, rows]


def _block(call: AttentionCall, inside: Tensor) -> observing.Block:
    """Scores, weights and what takes part, of a call in the compute dtype with a mask and a bias for its queries and
    as many key heads as query heads; ``inside`` is its band."""
    with dtypes.without_autocast(call.query.device):
        x = call.scale * (call.query @ call.key.transpose(-1, -2))  # (B, H, q, Lk)
    mask, bias = call.mask, call.bias
    part = inside.expand(x.shape)
    if mask is not None and mask.dtype == torch.bool:
        mask = mask & inside
        part = part & mask
    elif mask is not None:
        mask = torch.where(inside, mask, -torch.inf)
        part = part & masking.takes_part(mask)
    else:
        mask = inside
    weights, _ = reference.attention_weights(x, call.coefs, call.knots, mask, bias, False, -1, -1)
    if bias is not None:
        part = part & masking.takes_part(bias)
        x = x + bias.to(x.dtype)
    return x, weights, part & masking.takes_part(x)


def blocks_of(call: AttentionCall) -> Iterator[observing.Block]:
    """Scores, weights and what takes part, a few queries at a time."""
    query, key = call.query, call.key
    dtype = dtypes.compute_dtype(query.dtype)
    shape = (*query.shape[:3], key.shape[2])
    key = key.to(dtype).repeat_interleave(query.shape[1] // max(key.shape[1], 1), 1)  # (B, H, Lk, D)
    for rows in query_slices(shape):
        inside = reference.band(shape[2], shape[3], call.causal, call.left, call.right, query.device, rows)
        part = call._replace(
            query=query[:, :, rows].to(dtype), key=key, mask=_of_rows(call.mask, rows), bias=_of_rows(call.bias, rows)
        )
        yield _block(part, inside)


def report(call: AttentionCall) -> None:
    """Reports one call of attention, or each of its packed sequences, to the observers."""
    for each in [call] if call.query_starts is None else reference.sequences(call):
        shape = (*each.query.shape[:3], each.key.shape[2])
        observing.report(each.coefs.shape[-2], shape, partial(blocks_of, each))
