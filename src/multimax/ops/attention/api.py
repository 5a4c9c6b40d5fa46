"""Attention with MultiMax in the place of softmax: check the arguments, choose the path, call it.

Shapes: B batches, H query heads, Hkv key heads, Lq queries, Lk keys, D and Dv entries a head.
"""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple, overload

import torch
from torch import Tensor

from multimax.ops import checks, dtypes, observing
from multimax.ops.attention import autograd as attention_ops
from multimax.ops.attention import blocks as score_blocks
from multimax.ops.rows.api import choose

Window = tuple[int | None, int | None]


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """As torch does with the inputs of scaled_dot_product_attention."""
    dtype = dtypes.autocast_dtype(tensors[0].device)
    if dtype is None:
        return tensors
    return tuple(t.to(dtype) if t.dtype in (torch.float32, torch.float16, torch.bfloat16) else t for t in tensors)


def _flat(t: Tensor, batch: Sequence[int]) -> Tensor:
    """(..., H, L, D) as (B, H, L, D)."""
    t = t.expand(*batch, *t.shape[-3:])
    return t if t.ndim == 4 else t.reshape(math.prod(batch), *t.shape[-3:])


def _scores(t: Tensor | None, batch: Sequence[int]) -> Tensor | None:
    """A mask or bias as (B or 1, H or 1, Lq or 1, Lk or 1), with columns side by side."""
    if t is None:
        return None
    t = t.reshape(*[1] * (len(batch) + 3 - t.ndim), *t.shape)
    if len(batch) != 1:
        shared = all(size == 1 for size in t.shape[: len(batch)])
        t = t.reshape(1, *t.shape[-3:]) if shared else _flat(t, batch)
    return t if t.shape[-1] == 1 or t.stride(-1) == 1 else t.contiguous()


def _side_by_side(t: Tensor) -> Tensor:
    return t if t.shape[-1] <= 1 or t.stride(-1) == 1 else t.contiguous()


def _why_not_cpu(query: Tensor, mask: Tensor | None, bias: Tensor | None) -> str | None:
    """Why the kernels cannot run a call that the reference can."""
    if query.dtype == torch.float64:
        return "the attention kernels have no float64"
    for name, t in (("attn_mask", mask), ("score_bias", bias)):
        if t is not None and t.dtype == torch.float64:
            return f"the attention kernels take no float64 {name}"
    if mask is not None and mask.requires_grad and torch.is_grad_enabled():
        return "the attention kernels give no gradient to attn_mask"
    return None


def _seed(dropout_p: float, device: torch.device) -> Tensor | None:
    """A number from torch's generator, from which all that dropout does follows."""
    if dropout_p == 0:
        return None
    return torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=device)


def _checked(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool, shapes: str) -> tuple[Tensor, Tensor, Tensor]:
    for name, t in (("query", query), ("key", key), ("value", value)):
        checks.tensor(name, t)
    query, key, value = _autocast(query, key, value)
    checks.attention_inputs(query, key, value, enable_gqa, shapes)
    return query, key, value


def scale_of(scale: float | None, query: Tensor) -> float:
    """The factor of the dot products."""
    return 1 / math.sqrt(max(query.shape[-1], 1)) if scale is None else float(scale)


class Inputs(NamedTuple):
    """What attention is about, as (B, H, L, D) each, masks that broadcast to (B, H, Lq, Lk), and the dims that come
    before (Lq, Dv) in the result."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    bias: Tensor | None
    lead: tuple[int, ...]


def inputs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    score_bias: Tensor | None,
    enable_gqa: bool,
) -> Inputs:
    """The arguments of scaled_dot_product_attention, checked and brought to one form."""
    query, key, value = _checked(query, key, value, enable_gqa, "(..., H, L, D)")
    batched = query.ndim > 2
    query, key, value = (t[None] if t.ndim == 2 else t for t in (query, key, value))
    heads = query.shape[-3]
    try:
        batch = torch.broadcast_shapes(*(t.shape[:-3] for t in (query, key, value)))
    except RuntimeError:
        raise ValueError(
            "multimax: expected query, key and value with batch dims that broadcast, got "
            f"{checks.shape(query)}, {checks.shape(key)} and {checks.shape(value)}"
        ) from None
    full = (*batch, heads, query.shape[-2], key.shape[-2])
    if attn_mask is not None:
        checks.scores("attn_mask", attn_mask, query, full, boolean=True)
    if score_bias is not None:
        checks.scores("score_bias", score_bias, query, full, boolean=False)
    batch4 = batch or (1,)
    query, key, value = (_flat(t, batch4) for t in (query, key, value))
    lead = (*batch, heads) if batched else ()
    return Inputs(query, key, value, _scores(attn_mask, batch4), _scores(score_bias, batch4), lead)


@overload
def multimax_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    coefs: Tensor,
    knots: Tensor,
    *,
    attn_mask: Tensor | None = ...,
    score_bias: Tensor | None = ...,
    dropout_p: float = ...,
    is_causal: bool = ...,
    window: Window | None = ...,
    scale: float | None = ...,
    enable_gqa: bool = ...,
    return_lse: Literal[False] = ...,
    impl: str = ...,
) -> Tensor: ...


@overload
def multimax_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    coefs: Tensor,
    knots: Tensor,
    *,
    attn_mask: Tensor | None = ...,
    score_bias: Tensor | None = ...,
    dropout_p: float = ...,
    is_causal: bool = ...,
    window: Window | None = ...,
    scale: float | None = ...,
    enable_gqa: bool = ...,
    return_lse: Literal[True],
    impl: str = ...,
) -> tuple[Tensor, Tensor]: ...


def multimax_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    coefs: Tensor,
    knots: Tensor,
    *,
    attn_mask: Tensor | None = None,
    score_bias: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    window: Window | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    impl: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Scaled dot-product attention with MultiMax in the place of softmax.

    .. math::
        o_i = \sum_j \frac{e^{s_{ij}}}{\sum_k e^{s_{ik}}} v_j, \qquad
        s_{ij} = \sigma(\text{scale}\, q_i \cdot k_j + \text{bias}_{ij}) + \text{mask}_{ij}

    with :math:`\sigma` as in :func:`multimax.multimax`. Signature and meaning are those of
    ``torch.nn.functional.scaled_dot_product_attention``, and all-zero ``coefs`` is softmax attention. The CPU kernels
    never hold the score matrix: memory beyond the results grows with the lengths only, forward and backward.

    A query for which no key is left gets zeros, with zero gradients. Half precision is computed in float32 and returned
    in its dtype. Equal calls give bitwise equal results.

    Args:
        query: (..., H, Lq, D); any strides as long as the last dim is contiguous, as in a transposed (B, L, H, D).
        key: (..., H, Lk, D), or (..., Hkv, Lk, D) with ``enable_gqa``.
        value: (..., H, Lk, Dv), or (..., Hkv, Lk, Dv) with ``enable_gqa``.
        coefs: (N, 2) for one set of parameters or (H, N, 2) for one a head, as for :func:`multimax.multimax`.
        knots: of the same shape as ``coefs``.
        attn_mask: broadcastable to (..., H, Lq, Lk): boolean, True where a key takes part, or numbers that are added
            after :math:`\sigma`, where -inf, or half of the dtype's lowest value and below, is a key that does not.
        score_bias: numbers that are part of the score, such as ALiBi or a relative position bias, broadcastable
            likewise: added before :math:`\sigma`, with a gradient.
        dropout_p: probability with which a weight is dropped. The choice follows from ``torch.manual_seed``, is the
            same in the backward, and is not stored. As in torch there is no training flag: pass 0 in evaluation.
        is_causal: key j takes part for query i only if j <= i, counted from the upper left as in torch. May be given
            beside a mask.
        window: (left, right): key j takes part for query i only if -left <= j - (i + Lk - Lq) <= right, counted from
            the lower right, so that the last query sees the last key; None for no bound. ``(None, 0)`` is causal
            attention for the last Lq of Lk positions, as in a decode step with a cache; ``(w - 1, 0)`` is that with a
            sliding window of w keys.
        scale: factor of the dot products, 1 / sqrt(D) unless given.
        enable_gqa: let H / Hkv consecutive query heads share a key head. Nothing is repeated in memory.
        return_lse: also return the log-sums, for :func:`merge_attention`. They have a gradient.
        impl: as for :func:`multimax.multimax`. The CPU kernels have no float64 and no gradient for ``attn_mask``.

    Returns:
        (..., H, Lq, Dv), and with ``return_lse`` also (..., H, Lq) in float32 (or float64): the log of the sum of
        :math:`e^{s_{ij}}` over the keys, -inf where there are none.

    Example:
        >>> import torch, multimax
        >>> coefs, knots = multimax.from_paper(*multimax.presets["deit_small"][11])
        >>> query, key, value = torch.randn(3, 2, 6, 197, 64).unbind(0)
        >>> multimax.multimax_attention(query, key, value, coefs, knots, is_causal=True).shape
        torch.Size([2, 6, 197, 64])
    """
    own = inputs(query, key, value, attn_mask, score_bias, enable_gqa)
    query, key, value, mask, bias = own[:5]
    checks.attention_parameters(query, coefs, knots, query.shape[1])
    dropout_p = checks.number("dropout_p", dropout_p, 0, 1)
    left, right = checks.window_bounds(window)
    path = choose(impl, query.device, _why_not_cpu(query, attn_mask, score_bias))
    query, key, value = (_side_by_side(t) for t in (query, key, value))
    seed = _seed(dropout_p, query.device)
    options = (dropout_p, scale_of(scale, query), is_causal, left, right)
    out, lse = attention_ops.attention(path, query, key, value, coefs, knots, mask, bias, None, None, seed, *options)
    if observing.active():
        score_blocks.report(query, key, coefs, knots, mask, bias, *options[1:])
    out, lse = out.reshape(*own.lead, *out.shape[-2:]), lse.reshape(*own.lead, lse.shape[-1])
    return (out, lse) if return_lse else out


def multimax_attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    coefs: Tensor,
    knots: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    window: Window | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    impl: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    r"""MultiMax attention on sequences of different lengths, packed one after the other without padding.

    Sequence b has the queries ``cu_seqlens_q[b]`` to ``cu_seqlens_q[b + 1]`` (exclusive) and the keys
    ``cu_seqlens_k[b]`` to ``cu_seqlens_k[b + 1]``, and attends to itself alone: the result is that of
    :func:`multimax_attention` on each.

    Args:
        query: (all queries, H, D).
        key: (all keys, H, D), or (all keys, Hkv, D) with ``enable_gqa``.
        value: (all keys, H, Dv), or (all keys, Hkv, Dv) with ``enable_gqa``.
        coefs: as for :func:`multimax_attention`.
        knots: as for :func:`multimax_attention`.
        cu_seqlens_q: (B + 1,), int32 or int64, rising from 0 to the number of all queries.
        cu_seqlens_k: (B + 1,), likewise for the keys.
        dropout_p: as for :func:`multimax_attention`.
        is_causal: as for :func:`multimax_attention`, in each sequence.
        window: as for :func:`multimax_attention`, in each sequence.
        scale: as for :func:`multimax_attention`.
        enable_gqa: as for :func:`multimax_attention`.
        return_lse: also return the log-sums, (H, all queries).
        impl: as for :func:`multimax_attention`.

    Returns:
        (all queries, H, Dv), and with ``return_lse`` the log-sums.

    Example:
        >>> import torch, multimax
        >>> coefs, knots = multimax.from_paper(*multimax.presets["wikitext103_lm"][0])
        >>> query, key, value = torch.randn(3, 12, 8, 64).unbind(0)  # lengths 5, 0 and 7
        >>> starts = torch.tensor([0, 5, 5, 12])
        >>> multimax.multimax_attention_varlen(query, key, value, coefs, knots, starts, starts, is_causal=True).shape
        torch.Size([12, 8, 64])
    """
    for name, t in (("query", query), ("key", key), ("value", value)):
        checks.tensor(name, t)
        if t.ndim != 3:
            raise ValueError(f"multimax: expected {name} of shape (all rows, heads, size), got {checks.shape(t)}")
    query, key, value = (t.transpose(0, 1)[None] for t in (query, key, value))
    query, key, value = _checked(query, key, value, enable_gqa, "(all rows, heads, size)")
    checks.attention_parameters(query, coefs, knots, query.shape[1])
    checks.starts("cu_seqlens_q", cu_seqlens_q, query)
    checks.starts("cu_seqlens_k", cu_seqlens_k, query)
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise ValueError(
            f"multimax: expected cu_seqlens_k of the shape of cu_seqlens_q, {checks.shape(cu_seqlens_q)}, "
            f"got {checks.shape(cu_seqlens_k)}"
        )
    if not torch.compiler.is_compiling():  # the kernels look too, but know no Python errors
        checks.rising("cu_seqlens_q", cu_seqlens_q, query.shape[2])
        checks.rising("cu_seqlens_k", cu_seqlens_k, key.shape[2])
    dropout_p = checks.number("dropout_p", dropout_p, 0, 1)
    left, right = checks.window_bounds(window)
    path = choose(impl, query.device, _why_not_cpu(query, None, None))
    query, key, value = (_side_by_side(t) for t in (query, key, value))
    seed = _seed(dropout_p, query.device)
    options = (dropout_p, scale_of(scale, query), is_causal, left, right)
    out, lse = attention_ops.attention(
        path, query, key, value, coefs, knots, None, None, cu_seqlens_q, cu_seqlens_k, seed, *options
    )
    if observing.active():
        score_blocks.report_packed(query, key, coefs, knots, cu_seqlens_q, cu_seqlens_k, *options[1:])
    out = out[0].transpose(0, 1)
    return (out, lse[0]) if return_lse else out


def merge_attention(outputs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    r"""The attention over all keys, from attention over parts of them.

    .. math:: o = \sum_p e^{l_p - l}\, o_p, \qquad l = \log \sum_p e^{l_p}

    Args:
        outputs: results of :func:`multimax_attention` for the same queries and disjoint sets of keys, (..., Lq, Dv).
        lses: their log-sums, (..., Lq) each.

    Returns:
        Output and log-sums as if all keys had been given at once.

    Example:
        >>> import torch, multimax
        >>> coefs, knots = multimax.from_paper(*multimax.presets["deit_small"][11])
        >>> query, key, value = torch.randn(3, 1, 2, 8, 16).unbind(0)
        >>> halves = [(key[..., :4, :], value[..., :4, :]), (key[..., 4:, :], value[..., 4:, :])]
        >>> parts = [multimax.multimax_attention(query, *half, coefs, knots, return_lse=True) for half in halves]
        >>> out, lse = multimax.merge_attention(*zip(*parts))
        >>> torch.allclose(out, multimax.multimax_attention(query, key, value, coefs, knots), atol=1e-6)
        True
    """
    if not outputs or len(outputs) != len(lses):
        raise ValueError(f"multimax: expected as many lses as outputs, got {len(lses)} and {len(outputs)}")
    for out, part in zip(outputs, lses, strict=True):
        checks.tensor("outputs", out)
        checks.tensor("lses", part)
        if out.shape != outputs[0].shape or part.shape != out.shape[:-1]:
            raise ValueError(
                f"multimax: expected outputs of one shape, {checks.shape(outputs[0])}, with lses of that shape but its "
                f"last dim, got {checks.shape(out)} with {checks.shape(part)}"
            )
    stacked = torch.stack(list(lses))  # (parts, ..., Lq)
    empty = (stacked == -torch.inf).all(0)
    lse = torch.logsumexp(torch.where(empty, 0.0, stacked), 0)
    weights = torch.where(empty, 0.0, torch.exp(torch.where(empty, 0.0, stacked) - lse))
    merged = sum(weight[..., None] * out.to(weight.dtype) for weight, out in zip(weights, outputs, strict=True))
    assert isinstance(merged, Tensor)
    return merged.to(outputs[0].dtype), torch.where(empty, -torch.inf, lse)
