"""The formulas of the paper, line by line, on any device and in any dtype: the oracle for every kernel.

Differentiable to any order. Arguments are taken as they come; `multimax.functional` checks them.

Shapes: x is (..., K, ...) with K entries along `dim`, S is x's shape without `dim`; coefs and knots are
(*lead, N, 2) with `lead` broadcasting against S; mask broadcasts against x.
"""

import torch
from torch import Tensor

from multimax.ops import dtypes, masking


def sigma(x: Tensor, coefs: Tensor, knots: Tensor) -> Tensor:
    """Equation 6, with coefs = (1 - t_b, t_d - 1) and knots = (b, d).

    Each term is multiplied out from its coefficient, (c u) u and not c (u^2): where the square would overflow, a zero
    coefficient still gives zero.
    """
    result = x  # (*S, K)
    for n in range(coefs.shape[-2]):
        lower = torch.relu(knots[..., n, 0, None] - x)  # (*S, K), Max(b - x, 0)
        upper = torch.relu(x - knots[..., n, 1, None])  # (*S, K), Max(x - d, 0)
        lower_term, upper_term = coefs[..., n, 0, None], coefs[..., n, 1, None]  # (*lead, 1)
        for _ in range(n + 1):
            lower_term, upper_term = lower_term * lower, upper_term * upper
        result = result + lower_term + upper_term
    return result


def _prepare(x: Tensor, coefs: Tensor, knots: Tensor, dim: int, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """With `dim` last and in the compute dtype: x, where it is masked, and sigma(x)."""
    dtype = dtypes.compute_dtype(x.dtype)
    masked = masking.masked(x)
    if mask is not None:
        masked = masked | ~mask
    x, masked = x.movedim(dim, -1), masked.movedim(dim, -1)
    # sigma of a masked entry is never taken: not even its gradient could be kept clean of inf and NaN
    safe = torch.where(masked, 0.0, x.to(dtype))
    return x.to(dtype), masked, sigma(safe, coefs.to(dtype), knots.to(dtype))


def modulate(x: Tensor, coefs: Tensor, knots: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    """sigma(x); masked entries pass through unchanged and without gradient."""
    wide, masked, modulated = _prepare(x, coefs, knots, -1, None)
    return torch.where(masked, wide.detach(), modulated).to(dtype or x.dtype)


def multimax(
    x: Tensor,
    coefs: Tensor,
    knots: Tensor,
    *,
    dim: int = -1,
    mask: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """softmax(sigma(x)); masked entries, and rows without any others, are 0."""
    _, masked, modulated = _prepare(x, coefs, knots, dim, mask)
    # a row without entries gets a softmax all the same, to have no NaN in it, and is zeroed with the rest
    scores = torch.where(masked & ~masked.all(-1, keepdim=True), float("-inf"), modulated)
    weights = torch.where(masked, 0.0, torch.softmax(scores, -1))
    return weights.to(dtype or x.dtype).movedim(-1, dim)


def log_multimax(
    x: Tensor,
    coefs: Tensor,
    knots: Tensor,
    *,
    dim: int = -1,
    mask: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """log softmax(sigma(x)); masked entries, and rows without any others, are -inf."""
    _, masked, modulated = _prepare(x, coefs, knots, dim, mask)
    scores = torch.where(masked & ~masked.all(-1, keepdim=True), float("-inf"), modulated)
    return torch.where(masked, float("-inf"), torch.log_softmax(scores, -1)).to(dtype or x.dtype).movedim(-1, dim)


def scores(x: Tensor, coefs: Tensor, knots: Tensor) -> tuple[Tensor, Tensor]:
    """Which entries are masked, and sigma(x), -inf there."""
    _, masked, modulated = _prepare(x, coefs, knots, -1, None)
    return masked, torch.where(masked, float("-inf"), modulated)


def cross_entropy(
    x: Tensor,
    target: Tensor,
    coefs: Tensor,
    knots: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    smoothing: float,
) -> tuple[Tensor, Tensor]:
    """Cross-entropy of each row of x, (R, C), with log multimax in the place of log softmax, and its log-sum.

    target is (R,) of class indices or (R, C) of probabilities, weight (C,). Rows to be ignored are 0. What is masked
    and not wanted costs nothing. Both results are (R,) in the compute dtype.
    """
    dtype = dtypes.compute_dtype(x.dtype)
    masked, s = scores(x, coefs, knots)
    empty = masked.all(-1)
    lse = torch.where(empty, float("-inf"), torch.logsumexp(torch.where(empty[:, None], 0.0, s), -1))
    log_p = log_multimax(x, coefs, knots, dtype=dtype)
    weights = x.new_ones(x.shape[1], dtype=dtype) if weight is None else weight.to(dtype)
    wanted = x.new_full((1, x.shape[1]), smoothing / max(x.shape[1], 1), dtype=dtype)
    if target.is_floating_point():
        wanted = (1 - smoothing) * target.to(dtype) + wanted
    wanted = weights * wanted
    losses = -torch.where((log_p == float("-inf")) & (wanted == 0), 0.0, wanted * log_p).sum(-1)
    if target.is_floating_point():
        return losses, lse
    ignored = target == ignore_index
    index = torch.where(ignored, 0, target)
    if x.shape[1]:
        losses = losses - (1 - smoothing) * weights[index] * log_p.gather(-1, index[:, None])[:, 0]
    return torch.where(ignored, 0.0, losses), torch.where(ignored, 0.0, lse)


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    target: Tensor,
    coefs: Tensor,
    knots: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    smoothing: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """The same for logits input @ linear_weight.T + linear_bias, made in that dtype, all at once."""
    bias = None if linear_bias is None else linear_bias.to(dtype)
    x = torch.nn.functional.linear(input.to(dtype), linear_weight.to(dtype), bias)
    return cross_entropy(x, target, coefs, knots, weight, ignore_index, smoothing)


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
    """(heads, Lq, Lk), 1 / (1 - p) where a weight is kept, else 0: a hash of seed, head, query and key alone, so that
    every path drops the same weights and nothing has to be stored."""
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
    """Weights of the scores x, (B, H, Lq, Lk), and the log-sum of each row; arguments as for :func:`attention`."""
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
    # a row without entries gets a softmax all the same, to have no NaN in it, and is zeroed with the rest
    s = torch.where(masked & ~empty, float("-inf"), s)
    lse = torch.where(empty[..., 0], float("-inf"), torch.logsumexp(s, -1)) if x.shape[3] else s.sum(-1) - torch.inf
    return torch.where(masked, 0.0, torch.softmax(s, -1)), lse


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    coefs: Tensor,
    knots: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    seed: Tensor | None,
    dropout_p: float,
    scale: float,
    causal: bool,
    left: int,
    right: int,
    *,
    first_head: int = 0,
) -> tuple[Tensor, Tensor]:
    """Attention with MultiMax in the place of softmax, and the log-sum of each row.

    query (B, H, Lq, D), key (B, Hkv, Lk, D), value (B, Hkv, Lk, Dv) with H a multiple of Hkv; mask (boolean, or added
    after sigma) and bias (added before) broadcast to (B, H, Lq, Lk); seed for dropout, None for none. Heads are counted
    from first_head on for dropout. Returns (B, H, Lq, Dv) and, in the compute dtype, (B, H, Lq).
    """
    dtype = dtypes.compute_dtype(query.dtype)
    group = query.shape[1] // max(key.shape[1], 1)
    key, value = (t.to(dtype).repeat_interleave(group, 1) for t in (key, value))
    x = scale * (query.to(dtype) @ key.transpose(-1, -2))  # (B, H, Lq, Lk)
    weights, lse = attention_weights(x, coefs, knots, mask, bias, causal, left, right)
    if seed is not None:
        b, h, queries, keys = x.shape
        heads = first_head + torch.arange(b * h, device=x.device)
        weights = weights * dropout(seed, dropout_p, heads, queries, keys).reshape(x.shape).to(dtype)
    return (weights @ value).to(query.dtype), lse
