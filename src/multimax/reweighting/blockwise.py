"""Attention with any reweighting function, a few queries at a time.

Shapes: B batches, H query heads, Hkv key heads, Lq queries, Lk keys, D and Dv entries per head, q queries of a block.
"""

from collections.abc import Iterator
from typing import Literal, NamedTuple, overload

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from multimax.ops import checks, observing
from multimax.ops.attention.api import multimax_attention
from multimax.ops.attention.blocks import query_slices
from multimax.ops.attention.inputs import Inputs, Window, inputs, scale_of
from multimax.ops.attention.reference import band
from multimax.ops.dtypes import compute_dtype, without_autocast
from multimax.ops.masking import takes_part
from multimax.reweighting.high_pass import unchecked_attn_scale
from multimax.reweighting.registry import Function, Reweighting, function_of
from multimax.reweighting.softmax_family import softmax

# Scores in a block, unless told otherwise. Just over 32 MiB in float32: smaller blocks come from the C library's heap,
# where the results of blocks in between would keep the memory from being reused.
ELEMENTS = 2**23 + 2**16


class Block(NamedTuple):
    """Some of the queries, with what belongs to them."""

    scores: Tensor  # (B, H, q, keys), the bias included
    weights: Tensor  # (B, H, q, keys)
    part: Tensor | None  # broadcasts to the scores, True where a key takes part; None for all


class Attention(NamedTuple):
    """What a block needs from the call."""

    inputs: Inputs
    function: Function
    omega: Tensor | None
    dropout_p: float
    scale: float
    causal: bool
    left: int
    right: int
    softcap: float | None

    def keys(self, rows: slice) -> slice:
        """The range of keys outside which none takes part for these queries."""
        queries, keys = self.inputs.query.shape[2], self.inputs.key.shape[2]
        first, end = 0, keys
        if self.causal:
            end = min(end, rows.stop)
        if self.right >= 0:
            end = min(end, rows.stop + keys - queries + self.right)
        if self.left >= 0:
            first = max(first, rows.start + keys - queries - self.left)
        first = min(first, keys)
        return slice(first, max(end, first))

    def block(self, query: Tensor, key: Tensor, rows: slice, keys: slice) -> Block:
        """Scores and weights of these queries, (B, H, q, D), and keys, (B, Hkv, keys, D)."""
        b, h, q, _ = query.shape
        # heads that share a key head become more queries of it: nothing is repeated
        grouped = query.reshape(b, key.shape[1], h * q // max(key.shape[1], 1), query.shape[-1])
        with without_autocast(query.device):
            x = (self.scale * grouped @ key.transpose(-1, -2)).reshape(b, h, q, key.shape[2])
        part = added = None
        if self.causal or self.left >= 0 or self.right >= 0:
            lengths = self.inputs.query.shape[2], self.inputs.key.shape[2]
            part = band(*lengths, self.causal, self.left, self.right, x.device, rows)[:, keys]
        bias = _cut(self.inputs.bias, rows, keys)
        if bias is not None:
            part = _both(part, takes_part(bias))
            x = x + bias.to(x.dtype)
        if self.softcap is not None:
            x = self.softcap * torch.tanh(x / self.softcap)
        mask = _cut(self.inputs.mask, rows, keys)
        if mask is not None and mask.dtype == torch.bool:
            part = _both(part, mask)
        elif mask is not None:
            there = takes_part(mask)
            part, added = _both(part, there), torch.where(there, mask, 0.0).to(x.dtype)
        weights = weights_of(self.function_for(rows), x, part, added)
        if self.omega is not None:
            weights = unchecked_attn_scale(weights, self.omega, None if part is None else part.expand(weights.shape))
        return Block(x, weights, part)

    def function_for(self, rows: slice) -> Function:
        """The function for these queries, with their part of the options that differ between queries."""
        if not isinstance(self.function, Reweighting):
            return self.function
        queries = self.inputs.query.shape[2]
        options = dict(self.function.options)
        for name, place in self.function.spec.differentiable.items():
            value = options.get(name)
            if place is None or not isinstance(value, Tensor) or value.ndim < place.ndim:
                continue
            if queries > 1 and value.shape[place.dim] == queries:
                options[name] = value.narrow(place.dim, rows.start, rows.stop - rows.start)
        return Reweighting(self.function.name, options)

    def result(self, query: Tensor, key: Tensor, value: Tensor, rows: slice, keys: slice) -> tuple[Tensor, Tensor]:
        """The output of these queries, (B, H, q, Dv), and the weights, after dropout."""
        b, h, q, _ = query.shape
        weights = nn.functional.dropout(self.block(query, key, rows, keys).weights, self.dropout_p)
        with without_autocast(query.device):
            out = weights.reshape(b, key.shape[1], h * q // max(key.shape[1], 1), key.shape[2]) @ value
        return out.reshape(b, h, q, value.shape[-1]), weights

    def observed(self) -> Iterator[observing.Block]:
        """Blocks for observers, with all keys."""
        dtype = compute_dtype(self.inputs.query.dtype)
        query, key = self.inputs.query.to(dtype), self.inputs.key.to(dtype)
        whole = slice(0, key.shape[2])
        for rows in query_slices((*query.shape[:3], key.shape[2])):
            x, weights, part = self.block(query[:, :, rows], key, rows, whole)
            there = takes_part(x)
            yield x, weights, there if part is None else there & part


def weights_of(function: Function, x: Tensor, part: Tensor | None, added: Tensor | None) -> Tensor:
    """The function of the scores; numbers from a mask come after sigma and after the temperature."""
    if added is None:
        return function(x, dim=-1, mask=part)
    if isinstance(function, Reweighting) and function.spec.sigma is not None:
        return softmax(function.spec.sigma.scores(x, **function.options) + added, mask=part)
    return function(x + added, dim=-1, mask=part)


def _both(a: Tensor | None, b: Tensor) -> Tensor:
    return b if a is None else a & b


def _cut(t: Tensor | None, rows: slice, keys: slice) -> Tensor | None:
    """A mask or a bias for these queries and keys."""
    if t is None:
        return None
    t = t if t.shape[2] == 1 else t[:, :, rows]
    return t if t.shape[3] == 1 else t[..., keys]


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
    added after :math:`\sigma` and after the temperature). All others are computed for a block of queries at a time,
    forward, and once more in the backward: memory grows with block x length, not with the square of the length.

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
        block: how many queries to take at a time; by default some million scores.

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
    call = Attention(
        inputs=given,
        function=function,
        omega=attn_scale,
        dropout_p=checks.number("dropout_p", dropout_p, 0, 1),
        scale=scale_of(scale, given.query),
        causal=given.causal,
        left=given.left,
        right=given.right,
        softcap=softcap,
    )
    dtype = compute_dtype(given.query.dtype)
    q, k, v = (t.to(dtype) for t in (given.query, given.key, given.value))
    whole = block is None and torch.compiler.is_exporting()  # blocks would fix the number of queries
    if whole:
        slices = [slice(0, shape[2])]
    elif block is None:
        slices = list(query_slices(shape, ELEMENTS))
    else:
        slices = [slice(first, min(first + block, shape[2])) for first in range(0, shape[2], block)]
    # a block's scores are not kept for the backward; torch.func's transforms do not support this
    again = len(slices) > 1 and not return_weights and torch.is_grad_enabled()
    again = again and not torch._C._are_functorch_transforms_active()
    outs, matrices = [], []
    for rows in slices or [slice(0, 0)]:
        keys = slice(0, shape[3]) if return_weights or whole else call.keys(rows)
        arguments = (q[:, :, rows], k[:, :, keys], v[:, :, keys], rows, keys)
        out, weights = checkpoint(call.result, *arguments, use_reentrant=False) if again else call.result(*arguments)
        outs.append(out)
        if return_weights:
            matrices.append(weights)
    out = torch.cat(outs, 2).to(given.query.dtype).reshape(*given.lead, shape[2], v.shape[-1])
    if observing.active():
        observing.report(_order(function), shape, call.observed)
    if not return_weights:
        return out
    return out, torch.cat(matrices, 2).to(given.query.dtype).reshape(*given.lead, *shape[2:])


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
