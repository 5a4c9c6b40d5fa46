"""Attention in plain PyTorch, ``impl="torch"``: the formulas of the reference on any device, a block of scores at a
time. Each block is computed again in the backward: all scores need not be held without the kernels either.

A block has some batches, or some heads of one batch, or some queries of one key head, with the keys that these can see.
Blocks are counted from shapes alone: nothing is read by the host, and compilers see a plain sequence of products.

Shapes: B batches, H query heads, Hkv key heads, Lq queries, Lk keys, D and Dv entries per head.
"""

from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from multimax.ops.attention import reference
from multimax.ops.attention.call import TENSORS, AttentionCall
from multimax.ops.attention.pieces import pieces, sizes
from multimax.ops.attention.reference import Places, Results, by_sequence
from multimax.ops.operators import traced

# Scores in a block, unless one query of the heads that share a key head has more: 16 MB in float32, and as much for
# each of the steps to the weights. Enough to keep a GPU busy.
ELEMENTS = 2**22


def why_not(call: AttentionCall) -> str | None:
    """Why blocks cannot run this call."""
    if torch.autograd.forward_ad._current_level >= 0:
        return "it has no forward-mode derivatives; use 'auto'"
    if torch._C._are_functorch_transforms_active():
        return "it does not support torch.func's transforms; use 'auto'"
    if torch.compiler.is_exporting():
        return "the number of blocks would be that of the example's shapes; use 'auto'"
    return None


def run(call: AttentionCall, with_lse: bool = True) -> Results:
    """Output and log-sums of a call, which come along."""
    b, h, queries = call.query.shape[:3]
    keys = call.key.shape[2]
    if b * h * queries * keys <= ELEMENTS:
        return reference.run(call)
    # a graph of blocks is for one shape: with sizes left open a compiler would ponder every block's bounds
    for size in (b, queries, keys):
        range(size)
    return by_sequence(call, lambda part, first_head: _blocks(part, reference.places(part, first_head)))


def _blocks(call: AttentionCall, at: Places) -> Results:
    """Output and log-sums, split in the first dim of the query that has to be."""
    (b, h, queries, _), key_heads, keys = call.query.shape, call.key.shape[1], call.key.shape[2]
    each = (h * queries * keys, b * (h // max(1, key_heads)) * queries * keys, b * h * keys)
    for dim, (count, scores) in enumerate(zip((b, key_heads, queries), each, strict=True)):
        each_has = sizes(count, scores, ELEMENTS)
        if len(each_has) > 1:
            parts = (_of_batches, _of_heads, _of_queries)[dim](call, at, each_has)
            outs, lses = zip(*(_blocks(*part) for part in parts), strict=True)
            return torch.cat(outs, dim), torch.cat(lses, dim)
    return _block(call, at)


def _block(call: AttentionCall, at: Places) -> Results:
    """Output and log-sums at once, to be computed again for gradients."""
    if not traced(*(t for t in call.tensors() if t is not None)):
        return reference.attention(call, at=at)
    numbers = call.numbers()

    def again(*tensors: Any) -> Results:
        return reference.attention(AttentionCall(*tensors, *numbers), at=at)

    # dropout has its own seed
    result: Results = checkpoint(again, *call[:TENSORS], use_reentrant=False, preserve_rng_state=False)
    return result


Parts = Iterator[tuple[AttentionCall, Places]]


def _of_batches(call: AttentionCall, at: Places, sizes: list[int]) -> Parts:
    """Some batches at a time."""
    tensors = (call.query, call.key, call.value, call.mask, call.bias, at.heads)
    for query, key, value, mask, bias, heads in zip(*(pieces(t, 0, sizes) for t in tensors), strict=True):
        yield call._replace(query=query, key=key, value=value, mask=mask, bias=bias), at._replace(heads=heads)


def _of_heads(call: AttentionCall, at: Places, sizes: list[int]) -> Parts:
    """Some key heads at a time, each with the query heads that share it."""
    group = call.query.shape[1] // call.key.shape[1]
    wide = [group * size for size in sizes]
    pairs = zip(pieces(call.key, 1, sizes), pieces(call.value, 1, sizes), strict=True)
    rest = [pieces(t, 1, wide) for t in (call.query, call.mask, call.bias, at.heads)]
    sets = [(p,) * len(sizes) if p.ndim == 2 else pieces(p, 0, wide) for p in (call.coefs, call.knots)]
    for (key, value), query, mask, bias, heads, coefs, knots in zip(pairs, *rest, *sets, strict=True):
        part = call._replace(query=query, key=key, value=value, coefs=coefs, knots=knots, mask=mask, bias=bias)
        yield part, at._replace(heads=heads)


def _of_queries(call: AttentionCall, at: Places, sizes: list[int]) -> Parts:
    """Some queries at a time, with the keys that lie in the band of one of them."""
    queries, keys = call.query.shape[2], call.key.shape[2]
    rows = [pieces(t, 2, sizes) for t in (call.query, call.mask, call.bias, at.heads)]
    for end, size, query, mask, bias, heads in zip(accumulate(sizes), sizes, *rows, strict=True):
        own = slice(end - size, end)
        here = at._replace(heads=heads, queries=at.queries[own])
        part = call._replace(query=query, mask=mask, bias=bias)
        if isinstance(at.shift, Tensor):
            assert at.query_sequences is not None
            yield part, here._replace(shift=at.shift[own], query_sequences=at.query_sequences[own])
            continue
        low, high = 0, keys
        if call.causal:
            high = min(high, end)
        if call.right >= 0:
            high = min(high, max(0, end + keys - queries + call.right))
        if call.left >= 0:
            low = min(high, max(0, end - size + keys - queries - call.left))
        seen = slice(low, high)
        yield (
            part._replace(
                key=call.key[:, :, seen],
                value=call.value[:, :, seen],
                mask=mask if mask is None or mask.shape[3] == 1 else mask[..., seen],
                bias=bias if bias is None or bias.shape[3] == 1 else bias[..., seen],
            ),
            here._replace(keys=at.keys[seen]),
        )
