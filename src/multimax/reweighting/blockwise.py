"""Attention with any reweighting function, a few queries at a time.

Shapes: B batches, H query heads, Hkv key heads, Lq queries, Lk keys, D and Dv entries per head, q queries of a block.
"""

from typing import Literal, overload

from torch import Tensor

from multimax.ops import checks, observing
from multimax.ops.attention.api import multimax_attention
from multimax.ops.attention.inputs import Window, inputs, scale_of
from multimax.ops.dtypes import compute_dtype
from multimax.reweighting.blocks import Attention
from multimax.reweighting.recomputing import in_blocks
from multimax.reweighting.registry import Function, Reweighting, function_of


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    reweight: str | Function = ...,
    attn_mask: Tensor | None = ...,
    score_bias: Tensor | None = ...,
    dropout_p: float = ...,
    is_causal: bool = ...,
    window: Window | None = ...,
    scale: float | None = ...,
    enable_gqa: bool = ...,
    softcap: float | None = ...,
    attn_scale: Tensor | None = ...,
    return_weights: Literal[False] = ...,
    block: int | None = ...,
) -> Tensor: ...


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    reweight: str | Function = ...,
    attn_mask: Tensor | None = ...,
    score_bias: Tensor | None = ...,
    dropout_p: float = ...,
    is_causal: bool = ...,
    window: Window | None = ...,
    scale: float | None = ...,
    enable_gqa: bool = ...,
    softcap: float | None = ...,
    attn_scale: Tensor | None = ...,
    return_weights: Literal[True],
    block: int | None = ...,
) -> tuple[Tensor, Tensor]: ...


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    reweight: str | Function = "softmax",
    attn_mask: Tensor | None = None,
    score_bias: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    window: Window | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    softcap: float | None = None,
    attn_scale: Tensor | None = None,
    return_weights: bool = False,
    block: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Scaled dot-product attention with any reweighting function.

    .. math:: o_i = \sum_j \phi(s_i)_j\, v_j, \qquad s_{ij} = \text{scale}\, q_i \cdot k_j + \text{bias}_{ij} +
        \text{mask}_{ij}

    MultiMax and softmax go to the fused kernels (:func:`multimax.multimax_attention`; numbers in the mask are then
    added after :math:`\sigma` and after the temperature). All others are computed for a block of scores at a time,
    forward, and once more in the backward: memory grows with the length, not with its square.

    Args:
        query: (..., H, Lq, D).
        key: (..., H, Lk, D), or (..., Hkv, Lk, D) with ``enable_gqa``.
        value: (..., H, Lk, Dv), or (..., Hkv, Lk, Dv) with ``enable_gqa``.
        reweight: a name (:func:`names`), a name with options (:func:`get`), a module of this package, or any function
            that is called as ``function(scores, dim=-1, mask=mask)`` with a boolean mask or None.
        attn_mask: as for :func:`multimax.multimax_attention`.
        score_bias: as for :func:`multimax.multimax_attention`.
        dropout_p: probability with which a weight is dropped; pass 0 in evaluation.
        is_causal: as for :func:`multimax.multimax_attention`.
        window: as for :func:`multimax.multimax_attention`.
        scale: factor of the dot products, 1 / sqrt(D) unless given.
        enable_gqa: let H / Hkv consecutive query heads share a key head.
        softcap: c > 0 keeps the scores within (-c, c), as c tanh(s / c), before the function and before the mask's
            numbers. MultiMax and softmax are then computed in blocks, not fused.
        attn_scale: omega of AttnScale, () or (H,), see :func:`multimax.oversmoothing.attn_scale`.
        return_weights: also return the weights, (..., H, Lq, Lk): the whole matrix.
        block: how many queries of all heads to take at a time, at most; by default blocks have a million scores, of
            some heads if not all fit, or eight million of all heads where ``reweight`` is a function of your own.

    Returns:
        (..., H, Lq, Dv), and with ``return_weights`` the weights, after dropout, as torch's modules return them.

    Example:
        >>> import torch
        >>> from multimax import reweighting
        >>> query, key, value = torch.randn(3, 2, 6, 197, 64).unbind(0)
        >>> reweighting.attention(query, key, value, reweight="entmax15", is_causal=True).shape
        torch.Size([2, 6, 197, 64])
        >>> top8 = reweighting.get("topk", k=8)
        >>> out, weights = reweighting.attention(query, key, value, reweight=top8, return_weights=True)
        >>> (weights > 0).sum(-1).unique()
        tensor([8])
    """
    function = function_of(reweight)
    checks.flag("return_weights", return_weights)
    if block is not None:
        checks.at_least("block", block, 1)
    if softcap is not None:
        checks.number_above("softcap", softcap, 0)
    fused = None
    if attn_scale is None and softcap is None and not return_weights:
        fused = _fused_parameters(function, query)
    if fused is not None:
        with observing.as_order(_order(function)):
            return multimax_attention(
                query,
                key,
                value,
                *fused,
                attn_mask=attn_mask,
                score_bias=score_bias,
                dropout_p=dropout_p,
                is_causal=is_causal,
                window=window,
                scale=scale,
                enable_gqa=enable_gqa,
            )
    given = inputs(query, key, value, attn_mask, score_bias, is_causal, window, enable_gqa)
    shape = (*given.query.shape[:3], given.key.shape[2])
    if attn_scale is not None:
        checks.omega(attn_scale, given.query, shape)
    dtype = compute_dtype(given.query.dtype)
    query, key, value = (t.to(dtype) for t in (given.query, given.key, given.value))
    call = Attention(
        query,
        key,
        value,
        given.mask,
        given.bias,
        function=function,
        omega=attn_scale,
        dropout_p=checks.number("dropout_p", dropout_p, 0, 1),
        scale=scale_of(scale, query),
        causal=given.causal,
        left=given.left,
        right=given.right,
        softcap=softcap,
        seed=None,
        lengths=shape[2:],
        first=(0, 0, 0),
        keys=slice(0, shape[3]),
    )
    out, weights = in_blocks(call, block, return_weights)
    out = out.to(given.query.dtype).reshape(*given.lead, shape[2], value.shape[-1])
    if observing.active():
        observing.report(_order(function), shape, call.observed)
    if not return_weights:
        return out
    assert weights is not None
    return out, weights.to(given.query.dtype).reshape(*given.lead, *shape[2:])


def _fused_parameters(function: Function, query: object) -> tuple[Tensor, Tensor] | None:
    """Coefs and knots with which the fused attention computes the function; None if there are none."""
    if not isinstance(function, Reweighting) or function.spec.sigma is None:
        return None
    if not isinstance(query, Tensor) or query.ndim < 2:  # refused where the other inputs are
        return None
    heads = query.shape[-3] if query.ndim > 2 else 1
    return function.spec.sigma.parameters(heads, query, **function.options)


def _order(function: Function) -> int:
    """The order of sigma, 0 for other functions."""
    coefs = function.options.get("coefs") if isinstance(function, Reweighting) else None
    return 0 if coefs is None else coefs.shape[-2]
