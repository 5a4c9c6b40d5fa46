"""Attention with MultiMax, line by line, on any device and in any dtype: the oracle for every implementation.

Shapes: B batches, H query heads, Hkv key heads, Lq queries, Lk keys, D and Dv entries per head.
"""

from collections.abc import Callable, Iterator
from functools import reduce
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from multimax.ops import dtypes, masking
from multimax.ops.attention.call import AttentionCall, heads_inside
from multimax.ops.operators import decompose
from multimax.ops.rows.reference import modulated

Results = tuple[Tensor, Tensor]  # output and log-sums


class Places(NamedTuple):
    """Where the queries and keys of a call, or of a block of one, stand in their sequence: what the band and dropout
    depend on."""

    heads: Tensor  # (B, H, 1), or (B, H, Lq) if packed: numbered over all batches or sequences
    queries: Tensor  # (Lq,)
    keys: Tensor  # (Lk,)
    shift: int | Tensor  # the sequence's number of keys minus that of queries; (Lq, 1) if packed
    query_sequences: Tensor | None = None  # (Lq,), which sequence they belong to, if packed
    key_sequences: Tensor | None = None


def places(call: AttentionCall, first_head: int = 0) -> Places:
    """Of a whole call. Heads are counted from first_head on."""
    b, h, queries = call.query.shape[:3]
    keys, device = call.key.shape[2], call.query.device
    heads = first_head + torch.arange(b * h, device=device).reshape(b, h, 1)
    i, j = torch.arange(queries, device=device), torch.arange(keys, device=device)
    if call.query_starts is None or call.key_starts is None or call.query_starts.shape[0] == 1:
        return Places(heads, i, j, keys - queries)
    starts, key_starts = call.query_starts.long(), call.key_starts.long()
    last = starts.shape[0] - 2
    # values may be unchecked: no index goes beyond the last sequence
    of_query = torch.searchsorted(starts[1:].contiguous(), i, right=True).clamp(max=last)
    of_key = torch.searchsorted(key_starts[1:].contiguous(), j, right=True).clamp(max=last)
    shift = (key_starts.diff() - starts.diff())[of_query][:, None]
    return Places(heads + h * of_query, i - starts[of_query], j - key_starts[of_key], shift, of_query, of_key)


def _band(at: Places, causal: bool, left: int, right: int) -> Tensor | None:
    """As `band`, and in packed sequences only where both are of one; None where every key takes part."""
    i, j = at.queries[:, None], at.keys
    diagonal = i + at.shift
    inside = []
    if at.query_sequences is not None and at.key_sequences is not None:
        inside.append(at.query_sequences[:, None] == at.key_sequences)
    if causal:
        inside.append(j <= i)
    if left >= 0:
        inside.append(j >= diagonal - left)
    if right >= 0:
        inside.append(j <= diagonal + right)
    return reduce(torch.logical_and, inside) if inside else None


def band(
    queries: int,
    keys: int,
    causal: bool,
    left: int,
    right: int,
    device: torch.device,
    rows: slice | None = None,
) -> Tensor:
    """(Lq, Lk), True where key j takes part for query i: j <= i if causal, and -left <= j - (i + Lk - Lq) <= right,
    where a negative bound is none. With ``rows`` only these queries."""
    first, end = (0, queries) if rows is None else (rows.start, rows.stop)
    i, j = torch.arange(first, end, device=device), torch.arange(keys, device=device)
    inside = _band(Places(i, i, j, keys - queries), causal, left, right)  # it has no heads
    return torch.ones(end - first, keys, dtype=torch.bool, device=device) if inside is None else inside


def _mix(z: Tensor) -> Tensor:
    """64 bits in, 64 bits out, each depending on all (the finaliser of splitmix64)."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = (z ^ ((z >> shift) & ((1 << (64 - shift)) - 1))) * (factor - 2**64)
    return z ^ ((z >> 31) & ((1 << 33) - 1))


def dropout(seed: Tensor, p: float, heads: Tensor, queries: int, keys: int) -> Tensor:
    """(heads, Lq, Lk), 1 / (1 - p) where a weight is kept, else 0: a hash of seed, head, query and key alone:
    every implementation drops the same weights and nothing has to be stored."""
    i, j = torch.arange(queries, device=seed.device), torch.arange(keys, device=seed.device)
    return _dropout(seed, p, Places(heads[:, None], i, j, 0))


def _dropout(seed: Tensor, p: float, at: Places) -> Tensor:
    """As `dropout`, (*, Lq, Lk) for heads of (*, 1) or (*, Lq)."""
    golden, low = 0x9E3779B97F4A7C15 - 2**64, 0xFFFFFFFF
    # & changes nothing, but without it Inductor takes these products for indices, which must not overflow
    z = _mix(seed.reshape(()) + golden * ((at.heads + 1) & low))
    z = _mix(z + golden * ((at.queries + 1) & low))  # (heads, Lq)
    first, second = (z & low)[..., None], ((z >> 32) & low)[..., None]
    z = (((at.keys & low) * 0x9E3779B1) & low) ^ first  # (heads, Lq, Lk), 32 bits
    z = ((z ^ (z >> 16)) * 0x85EBCA6B + second) & low
    z = ((z ^ (z >> 13)) * 0xC2B2AE35) & low
    z = z ^ (z >> 16)
    kept = z >= min(int(p * 2**32), 2**32 - 1)
    return kept * (1 / (1 - p) if p < 1 else 0.0)


def attention_weights(
    x: Tensor,
    coefs: Tensor,
    knots: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    causal: bool,
    left: int,
    right: int,
    *,
    at: Places | None = None,
) -> tuple[Tensor, Tensor]:
    """Weights of the scores x, (B, H, Lq, Lk), and the log-sum of each row; arguments as in an AttentionCall. ``at`` is
    where they stand, unless they are all there is."""
    dtype = x.dtype
    if at is None:
        i, j = (torch.arange(size, device=x.device) for size in x.shape[2:])
        at = Places(i, i, j, x.shape[3] - x.shape[2])
    inside = _band(at, causal, left, right)
    excluded = [] if inside is None else [~inside]
    if bias is not None:
        excluded.append(masking.masked(bias))
        x = x + bias.to(dtype)
    added = None
    if mask is not None and mask.dtype == torch.bool:
        excluded.append(~mask)
    elif mask is not None:
        excluded.append(masking.masked(mask))
        added = mask.to(dtype)
    masked = masking.masked(x)
    if excluded:  # these are smaller if they broadcast
        masked = masked | reduce(torch.logical_or, excluded)
    lead = coefs.shape[:-2] and (*coefs.shape[:-2], 1)
    coefs, knots = (p.to(dtype).reshape(*lead, *p.shape[-2:]) for p in (coefs, knots))
    s = modulated(torch.where(masked, 0.0, x), coefs, knots)
    if added is not None:
        s = s + torch.where(masked, 0.0, added)
    s = torch.where(masked, float("-inf"), s)
    empty = (s == -torch.inf).all(-1, keepdim=True)  # (B, H, Lq, 1)
    # a row without entries still gets a softmax, to avoid NaN, and is zeroed with the rest
    s = torch.where(empty, 0.0, s)
    lse = torch.where(empty[..., 0], float("-inf"), torch.logsumexp(s, -1)) if x.shape[3] else s.sum(-1) - torch.inf
    return torch.where(masked | empty, 0.0, torch.softmax(s, -1)), lse


def _by_key_heads(rows: Tensor, shared: Tensor) -> Tensor:
    """rows @ shared, (B, H, Lq, n), for shared of (B, Hkv, m, n), which is not repeated for the heads that share it."""
    b, h, queries, _ = rows.shape
    key_heads = shared.shape[1]
    if h == key_heads:
        return rows @ shared
    product = rows.reshape(b, key_heads, h // key_heads * queries, rows.shape[3]) @ shared
    return product.reshape(b, h, queries, shared.shape[3])


def attention(call: AttentionCall, first_head: int = 0, at: Places | None = None) -> tuple[Tensor, Tensor]:
    """Attention with MultiMax instead of softmax, (B, H, Lq, Dv), and, in the compute dtype, the log-sum of each row,
    (B, H, Lq). Heads are counted from first_head on for dropout. A block of a larger call comes with its places."""
    query = call.query
    dtype = dtypes.compute_dtype(query.dtype)
    at = places(call, first_head) if at is None else at
    with dtypes.without_autocast(query.device):
        x = call.scale * _by_key_heads(query.to(dtype), call.key.to(dtype).transpose(-1, -2))  # (B, H, Lq, Lk)
        weights, lse = attention_weights(
            x, call.coefs, call.knots, call.mask, call.bias, call.causal, call.left, call.right, at=at
        )
        if call.seed is not None:
            weights = weights * _dropout(call.seed, call.dropout_p, at).to(dtype)
        return _by_key_heads(weights, call.value.to(dtype)).to(query.dtype), lse


def why_not(call: AttentionCall) -> str | None:
    """The formulas can run any call."""
    return None


def sequences(call: AttentionCall) -> Iterator[AttentionCall]:
    """The calls of packed sequences, one after the other."""
    assert call.query_starts is not None
    assert call.key_starts is not None
    bounds = zip(pairwise(call.query_starts.tolist()), pairwise(call.key_starts.tolist()), strict=True)
    for queries, keys in bounds:
        query = call.query[:, :, slice(*queries)]
        key, value = call.key[:, :, slice(*keys)], call.value[:, :, slice(*keys)]
        yield call._replace(query=query, key=key, value=value, query_starts=None, key_starts=None)


def together(call: AttentionCall) -> bool:
    """Whether packed sequences are computed together, by index. One after the other is less work, but the host has to
    know where they start: on the CPU it does, unless a graph is made."""
    return call.query.device.type != "cpu" or torch.compiler.is_compiling()


def by_sequence(call: AttentionCall, function: Callable[[AttentionCall, int], Results]) -> Results:
    """Results of a function of a call and its first head, for packed sequences one after the other."""
    if call.query_starts is None or call.query_starts.shape[0] == 1 or together(call):
        return function(call, 0)
    heads = call.query.shape[1]
    outs, lses = zip(*(function(each, i * heads) for i, each in enumerate(sequences(call))), strict=True)
    return torch.cat(outs, 2), torch.cat(lses, 2)


def run(call: AttentionCall, with_lse: bool = True) -> Results:
    """Output and log-sums of a call, which come along."""
    return by_sequence(call, attention)


def _decomposition(call: AttentionCall, for_backward: bool) -> Any:
    """What the operator returns. What rounding took from the output only makes the kernels' backward more exact. Packed
    sequences stay as they are: their lengths are not known before they come."""
    if call.query_starts is not None:
        return NotImplemented
    out, lse = run(call)
    if heads_inside(call.query):
        out = out.transpose(1, 2).contiguous().transpose(1, 2)
    empty = lse == -torch.inf
    stats = torch.stack([torch.where(empty, 0.0, lse), torch.where(empty, 0.0, torch.ones_like(lse))])
    rest = torch.zeros_like(out) if for_backward and out.dtype != torch.float32 else out.new_empty(0)
    return out, stats, rest


decompose("attention_forward", AttentionCall, _decomposition)
