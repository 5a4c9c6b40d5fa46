"""Attention with MultiMax, line by line, on any device and in any dtype: the oracle for every implementation.

Shapes: B batches, H query heads, Hkv key heads, Lq queries, Lk keys, D and Dv entries per head.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from multimax.ops import dtypes, masking
from multimax.ops.attention.call import AttentionCall, heads_inside
from multimax.ops.operators import decompose
from multimax.ops.rows.reference import sigma


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
    i = torch.arange(first, end, device=device)[:, None]
    j = torch.arange(keys, device=device)
    diagonal = i + (keys - queries)
    inside = torch.ones(end - first, keys, dtype=torch.bool, device=device)
    if causal:
        inside = inside & (j <= i)
    if left >= 0:
        inside = inside & (j >= diagonal - left)
    if right >= 0:
        inside = inside & (j <= diagonal + right)
    return inside


def _mix(z: Tensor) -> Tensor:
    """64 bits in, 64 bits out, each depending on all (the finaliser of splitmix64)."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = (z ^ ((z >> shift) & ((1 << (64 - shift)) - 1))) * (factor - 2**64)
    return z ^ ((z >> 31) & ((1 << 33) - 1))


def dropout(seed: Tensor, p: float, heads: Tensor, queries: int, keys: int) -> Tensor:
    """(heads, Lq, Lk), 1 / (1 - p) where a weight is kept, else 0: a hash of seed, head, query and key alone:
    every implementation drops the same weights and nothing has to be stored."""
    golden, low = 0x9E3779B97F4A7C15 - 2**64, 0xFFFFFFFF
    z = _mix(seed.reshape(()) + golden * (heads + 1))[:, None]
    z = _mix(z + golden * (torch.arange(queries, device=seed.device) + 1))  # (heads, Lq)
    first, second = (z & low)[..., None], ((z >> 32) & low)[..., None]
    z = ((torch.arange(keys, device=seed.device) * 0x9E3779B1) & low) ^ first  # (heads, Lq, Lk), 32 bits
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
) -> tuple[Tensor, Tensor]:
    """Weights of the scores x, (B, H, Lq, Lk), and the log-sum of each row; arguments as in an AttentionCall."""
    dtype = x.dtype
    masked = ~band(x.shape[2], x.shape[3], causal, left, right, x.device).expand(x.shape)
    if bias is not None:
        masked = masked | masking.masked(bias)
        x = x + bias.to(dtype)
    masked = masked | masking.masked(x)
    added = None
    if mask is not None and mask.dtype == torch.bool:
        masked = masked | ~mask
    elif mask is not None:
        masked = masked | masking.masked(mask)
        added = mask.to(dtype)
    lead = coefs.shape[:-2] and (*coefs.shape[:-2], 1)
    coefs, knots = (p.to(dtype).reshape(*lead, *p.shape[-2:]) for p in (coefs, knots))
    s = sigma(torch.where(masked, 0.0, x), coefs, knots)
    if added is not None:
        s = torch.where(masked, 0.0, s + added)
    empty = masked.all(-1, keepdim=True)  # (B, H, Lq, 1)
    # a row without entries still gets a softmax, to avoid NaN, and is zeroed with the rest
    s = torch.where(masked & ~empty, float("-inf"), s)
    lse = torch.where(empty[..., 0], float("-inf"), torch.logsumexp(s, -1)) if x.shape[3] else s.sum(-1) - torch.inf
    return torch.where(masked, 0.0, torch.softmax(s, -1)), lse


def attention(call: AttentionCall, first_head: int = 0) -> tuple[Tensor, Tensor]:
    """Attention with MultiMax instead of softmax, (B, H, Lq, Dv), and, in the compute dtype, the log-sum of each row,
    (B, H, Lq). Packed sequences are left to `run`. Heads are counted from first_head on for dropout."""
    query, key, value = call.query, call.key, call.value
    dtype = dtypes.compute_dtype(query.dtype)
    group = query.shape[1] // max(key.shape[1], 1)
    key, value = (t.to(dtype).repeat_interleave(group, 1) for t in (key, value))
    x = call.scale * (query.to(dtype) @ key.transpose(-1, -2))  # (B, H, Lq, Lk)
    weights, lse = attention_weights(
        x, call.coefs, call.knots, call.mask, call.bias, call.causal, call.left, call.right
    )
    if call.seed is not None:
        b, h, queries, keys = x.shape
        heads = first_head + torch.arange(b * h, device=x.device)
        weights = weights * dropout(call.seed, call.dropout_p, heads, queries, keys).reshape(x.shape).to(dtype)
    return (weights @ value).to(query.dtype), lse


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


def run(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Output and log-sums of a call, packed sequences one after the other."""
    if call.query_starts is None:
        return attention(call)
    heads = call.query.shape[1]
    parts = [attention(each, first_head=i * heads) for i, each in enumerate(sequences(call))]
    if not parts:  # no sequences: empty results
        return attention(call)
    outs, lses = zip(*parts, strict=True)
    return torch.cat(outs, 2), torch.cat(lses, 2)


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
