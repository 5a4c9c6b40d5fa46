"""Attention with MultiMax instead of softmax: check the arguments, choose an implementation, call it.

Shapes: B batches, H query heads, Hkv key heads, Lq queries, Lk keys, D and Dv entries per head.
"""

from collections.abc import Sequence
from typing import Literal, overload

import torch
from torch import Tensor

from multimax.ops import checks, dispatch, observing
from multimax.ops.attention import blocks
from multimax.ops.attention.call import AttentionCall
from multimax.ops.attention.inputs import Window, checked, inputs, scale_of, seed_of
from multimax.ops.layout import contiguous_rows

IMPLEMENTATIONS = dispatch.load("attention")


def _run(call: AttentionCall, impl: str, with_lse: bool) -> tuple[Tensor, Tensor]:
    """Output and, if asked for, log-sums by the implementation of that name, or by the best."""
    implementation = dispatch.choose(IMPLEMENTATIONS, impl, call)
    if call.dropout_p:  # after everything that may raise: a call that fails draws no random number
        call = call._replace(seed=seed_of(call.dropout_p, call.query.device))
    result: tuple[Tensor, Tensor] = implementation.run(call, with_lse)
    if observing.active():
        blocks.report(call)
    return result


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
    r"""Scaled dot-product attention with MultiMax instead of softmax.

    .. math::
        o_i = \sum_j \frac{e^{s_{ij}}}{\sum_k e^{s_{ik}}} v_j, \qquad
        s_{ij} = \sigma(\text{scale}\, q_i \cdot k_j + \text{bias}_{ij}) + \text{mask}_{ij}

    with :math:`\sigma` as in :func:`multimax.multimax`. Signature and semantics are those of
    ``torch.nn.functional.scaled_dot_product_attention``, and all-zero ``coefs`` is softmax attention. The CPU kernels
    never hold the score matrix: memory beyond the results grows with the lengths only, forward and backward.

    A query for which no key is left gets zeros, with zero gradients. Half precision is computed in float32 and returned
    in its dtype. Equal calls give bitwise equal results.

    Args:
        query: (..., H, Lq, D); any strides as long as the last dim is contiguous, as in a transposed (B, L, H, D).
        key: (..., H, Lk, D), or (..., Hkv, Lk, D) with ``enable_gqa``.
        value: (..., H, Lk, Dv), or (..., Hkv, Lk, Dv) with ``enable_gqa``.
        coefs: (N, 2) for one set of parameters or (H, N, 2) for one per head, as for :func:`multimax.multimax`.
        knots: of the same shape as ``coefs``.
        attn_mask: broadcastable to (..., H, Lq, Lk): boolean, True where a key takes part, or numbers that are added
            after :math:`\sigma`, where -inf, or half of the dtype's lowest value and below, excludes a key; or a
            ``torch.nn.attention.bias.CausalBias``.
        score_bias: numbers that are part of the score, such as ALiBi or a relative position bias, broadcastable
            likewise: added before :math:`\sigma`, with a gradient.
        dropout_p: probability with which a weight is dropped. The choice follows from ``torch.manual_seed``, is the
            same in the backward, and is not stored. As in torch there is no training flag: pass 0 in evaluation.
        is_causal: key j takes part for query i only if j <= i, counted from the upper left as in torch. May be
            combined with a mask.
        window: (left, right): key j takes part for query i only if -left <= j - (i + Lk - Lq) <= right, counted from
            the lower right, so that the last query sees the last key; None for no bound. ``(None, 0)`` is causal
            attention for the last Lq of Lk positions, as in a decode step with a cache; ``(w - 1, 0)`` is the same with
            a sliding window of w keys.
        scale: factor of the dot products, 1 / sqrt(D) unless given.
        enable_gqa: let H / Hkv consecutive query heads share a key head. Nothing is repeated in memory.
        return_lse: also return the log-sums, for :func:`merge_attention`. They have a gradient.
        impl: as for :func:`multimax.multimax`. The CPU kernels have no float64 and no gradient for ``attn_mask``. Where
            there are no kernels for a call, "auto" takes "torch": plain PyTorch, a block of scores at a time.

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
    given = inputs(query, key, value, attn_mask, score_bias, is_causal, window, enable_gqa)
    checks.attention_parameters(given.query, coefs, knots)
    checks.flag("return_lse", return_lse)
    call = AttentionCall(
        given.query,
        given.key,
        given.value,
        coefs,
        knots,
        given.mask,
        given.bias,
        None,  # packed sequences
        None,
        None,  # a seed
        checks.number("dropout_p", dropout_p, 0, 1),
        scale_of(scale, given.query),
        given.causal,
        given.left,
        given.right,
    )
    out, lse = _run(call, impl, return_lse)
    if len(given.lead) != 2:
        out = out.reshape(*given.lead, *out.shape[-2:])
    return (out, lse.reshape(*given.lead, lse.shape[-1])) if return_lse else out


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
    ``cu_seqlens_k[b]`` to ``cu_seqlens_k[b + 1]``, and attends only to itself: the result is the
    same as from :func:`multimax_attention` on each sequence.

    Args:
        query: (all queries, H, D).
        key: (all keys, H, D), or (all keys, Hkv, D) with ``enable_gqa``.
        value: (all keys, H, Dv), or (all keys, Hkv, Dv) with ``enable_gqa``.
        coefs: as for :func:`multimax_attention`.
        knots: as for :func:`multimax_attention`.
        cu_seqlens_q: (B + 1,), int32 or int64, rising from 0 to the total number of queries. Values are checked on the
            CPU alone: on other devices reading them would make the host wait.
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
    checks.packed(query, key, value)
    query, key, value = (t.transpose(0, 1)[None] for t in (query, key, value))
    query, key, value = checked(query, key, value, enable_gqa, "(all rows, heads, size)")
    checks.attention_parameters(query, coefs, knots)
    checks.starts(cu_seqlens_q, cu_seqlens_k, query, key)
    checks.flag("is_causal", is_causal)
    checks.flag("return_lse", return_lse)
    left, right = checks.window_bounds(window)
    call = AttentionCall(
        contiguous_rows(query),
        contiguous_rows(key),
        contiguous_rows(value),
        coefs,
        knots,
        mask=None,
        bias=None,
        query_starts=cu_seqlens_q,
        key_starts=cu_seqlens_k,
        seed=None,
        dropout_p=checks.number("dropout_p", dropout_p, 0, 1),
        scale=scale_of(scale, query),
        causal=is_causal,
        left=left,
        right=right,
    )
    out, lse = _run(call, impl, return_lse)
    out = out.squeeze(0).transpose(0, 1)
    return (out, lse.squeeze(0)) if return_lse else out


def merge_attention(outputs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    r"""Attention over all keys, merged from attention over parts of them.

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
    checks.partial_results(outputs, lses)
    stacked = torch.stack(list(lses))  # (parts, ..., Lq)
    empty = (stacked == -torch.inf).all(0)
    lse = torch.logsumexp(torch.where(empty, 0.0, stacked), 0)
    weights = torch.where(empty, 0.0, torch.exp(torch.where(empty, 0.0, stacked) - lse))
    merged = sum(weight[..., None] * out.to(weight.dtype) for weight, out in zip(weights, outputs, strict=True))
    assert isinstance(merged, Tensor)
    return merged.to(outputs[0].dtype), torch.where(empty, -torch.inf, lse)
