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
from multimax.ops.attention.inputs import Window, inputs, scale_of
from multimax.ops.attention.pieces import pieces, sizes
from multimax.ops.attention.reference import band
from multimax.ops.dtypes import compute_dtype, without_autocast
from multimax.ops.masking import takes_part
from multimax.reweighting.high_pass import unchecked_attn_scale
from multimax.reweighting.registry import Function, Reweighting, function_of
from multimax.reweighting.softmax_family import softmax

# Scores in a block, unless told otherwise, or one query has more: on the CPU what is computed from them stays in its
# caches, elsewhere there has to be enough for all cores.
CPU_ELEMENTS, ELEMENTS = 2**20, 2**22


class Block(NamedTuple):
    """Some of the queries, with what belongs to them."""

    scores: Tensor  # (B, H, q, keys), the bias included
    weights: Tensor  # (B, H, q, keys)
    part: Tensor | None  # broadcasts to the scores, True where a key takes part; None for all


class Attention(NamedTuple):
    """Attention of some batches, heads and queries: of all at first, and after :meth:`split` of what a block has."""

    query: Tensor  # (B, H, q, D), like key and value in the compute dtype
    key: Tensor  # (B, Hkv, keys, D)
    value: Tensor  # (B, Hkv, keys, Dv)
    mask: Tensor | None  # of 4 dims that broadcast to (B, H, q, keys), as is bias
    bias: Tensor | None
    function: Function
    omega: Tensor | None
    dropout_p: float
    scale: float
    causal: bool
    left: int
    right: int
    softcap: float | None
    lengths: tuple[int, int]  # of all queries and keys
    rows: slice  # which of them these are
    keys: slice

    def scores(self) -> tuple[int, ...]:
        """(B, H, q, keys)."""
        return (*self.query.shape[:3], self.key.shape[2])

    def split(self, dim: int, sizes: list[int]) -> Iterator["Attention"]:
        """So many batches (dim 0), key heads with the query heads that share them (1), or queries (2) at a time."""
        wide = [size * self.query.shape[1] // self.key.shape[1] for size in sizes] if dim == 1 else sizes
        queries, masks, biases = (pieces(t, dim, wide) for t in (self.query, self.mask, self.bias))
        keys, values = (pieces(t, dim if dim < 2 else None, sizes) for t in (self.key, self.value))
        omegas = pieces(self.omega, 0 if dim == 1 else None, wide)
        first = self.rows.start
        for i, function in enumerate(self.functions(dim, wide)):
            rows = slice(first, first + sizes[i]) if dim == 2 else self.rows
            first = rows.stop
            yield self._replace(
                query=queries[i],
                key=keys[i],
                value=values[i],
                mask=masks[i],
                bias=biases[i],
                function=function,
                omega=omegas[i],
                rows=rows,
            )

    def functions(self, dim: int, sizes: list[int]) -> list[Function]:
        """The function for each of these, with their part of the options that differ between them."""
        function = self.function
        if not isinstance(function, Reweighting):
            return [function] * len(sizes)
        options = {}
        for name, dims in function.spec.differentiable.items():
            value = function.options.get(name)
            if isinstance(value, Tensor):
                options[name] = pieces(value, dims(value.ndim)[dim], sizes)
        return [
            Reweighting(function.name, {**function.options, **{name: values[i] for name, values in options.items()}})
            for i in range(len(sizes))
        ]

    def seen(self) -> "Attention":
        """Without the keys that none of the queries sees."""
        queries, keys = self.lengths
        first, end = 0, keys
        if self.causal:
            end = min(end, self.rows.stop)
        if self.right >= 0:
            end = min(end, self.rows.stop + keys - queries + self.right)
        if self.left >= 0:
            first = max(first, self.rows.start + keys - queries - self.left)
        first = min(first, keys)
        seen = slice(first, max(end, first))
        if seen == self.keys:
            return self
        return self._replace(
            key=self.key[:, :, seen],
            value=self.value[:, :, seen],
            mask=_of_keys(self.mask, seen),
            bias=_of_keys(self.bias, seen),
            keys=seen,
        )

    def block(self) -> Block:
        """Scores and weights."""
        b, h, q, _ = self.query.shape
        key = self.key
        # heads that share a key head become more queries of it: nothing is repeated
        grouped = self.query.reshape(b, key.shape[1], h * q // max(key.shape[1], 1), self.query.shape[-1])
        with without_autocast(key.device):
            x = (self.scale * grouped @ key.transpose(-1, -2)).reshape(b, h, q, key.shape[2])
        part = added = None
        if self.causal or self.left >= 0 or self.right >= 0:
            part = band(*self.lengths, self.causal, self.left, self.right, x.device, self.rows)[:, self.keys]
        if self.bias is not None:
            part = _both(part, takes_part(self.bias))
            x = x + self.bias.to(x.dtype)
        if self.softcap is not None:
            x = self.softcap * torch.tanh(x / self.softcap)
        if self.mask is not None and self.mask.dtype == torch.bool:
            part = _both(part, self.mask)
        elif self.mask is not None:
            there = takes_part(self.mask)
            part, added = _both(part, there), torch.where(there, self.mask, 0.0).to(x.dtype)
        weights = weights_of(self.function, x, part, added)
        if self.omega is not None:
            weights = unchecked_attn_scale(weights, self.omega, None if part is None else part.expand(weights.shape))
        return Block(x, weights, part)

    def result(self) -> tuple[Tensor, Tensor]:
        """The output, (B, H, q, Dv), and the weights, after dropout."""
        b, h, q, _ = self.query.shape
        key_heads, keys = self.key.shape[1:3]
        weights = nn.functional.dropout(self.block().weights, self.dropout_p)
        with without_autocast(weights.device):
            out = weights.reshape(b, key_heads, h * q // max(key_heads, 1), keys) @ self.value
        return out.reshape(b, h, q, self.value.shape[-1]), weights

    def output(self) -> Tensor:
        """The output alone."""
        return self.result()[0]

    def observed(self) -> Iterator[observing.Block]:
        """Blocks for observers, with all keys."""
        sizes = [rows.stop - rows.start for rows in query_slices(self.scores())]
        for part in self.split(2, sizes):
            x, weights, takes = part.block()
            there = takes_part(x)
            yield x, weights, there if takes is None else there & takes


def weights_of(function: Function, x: Tensor, part: Tensor | None, added: Tensor | None) -> Tensor:
    """The function of the scores; numbers from a mask come after sigma and after the temperature."""
    if added is None:
        return function(x, dim=-1, mask=part)
    if isinstance(function, Reweighting) and function.spec.sigma is not None:
        return softmax(function.spec.sigma.scores(x, **function.options) + added, mask=part)
    return function(x + added, dim=-1, mask=part)


def _both(a: Tensor | None, b: Tensor) -> Tensor:
    return b if a is None else a & b


def _of_keys(t: Tensor | None, keys: slice) -> Tensor | None:
    """A mask or a bias for these keys."""
    return t if t is None or t.shape[3] == 1 else t[..., keys]


def _in_blocks(call: Attention, block: int | None, return_weights: bool) -> tuple[Tensor, Tensor | None]:
    """The output, and the weights if they are asked for."""
    b, h, q, keys = call.scores()
    one = max(1, b * h * keys)  # query of all heads
    most = CPU_ELEMENTS if call.query.device.type == "cpu" else ELEMENTS
    if block is not None:
        most = block * one
    elif q * one <= most or torch.compiler.is_exporting():  # blocks would fix the number of queries
        return call.result() if return_weights or torch.compiler.is_exporting() else (call.seen().output(), None)
    # a graph of blocks is for one shape: with sizes left open a compiler would ponder every block's bounds
    for size in (b, q, keys):
        range(size)
    dims = (2,)
    if block is None and isinstance(call.function, Reweighting):  # others may have parameters of heads, unseen
        dims = (0, 1, 2)
        if any(isinstance(value, Tensor) for value in call.function.options.values()):
            call.function(call.query.new_empty(b, h, q, 0), dim=-1)  # refuses options that do not fit the whole
    # a block's scores are not kept for the backward; torch.func's transforms do not support this
    again = q * one > most and not return_weights and torch.is_grad_enabled()
    again = again and not torch._C._are_functorch_transforms_active()
    return _split(call, dims, most, again, return_weights)


def _split(
    call: Attention, dims: tuple[int, ...], most: int, again: bool, return_weights: bool
) -> tuple[Tensor, Tensor | None]:
    """As `_in_blocks`, split in the first of the dims that has to be, to at most so many scores. Blocks may be computed
    again in the backward."""
    (b, h, q, keys), key_heads = call.scores(), max(call.key.shape[1], 1)
    scores = (h * q * keys, b * h // key_heads * q * keys, b * h * keys)
    for dim in dims:
        each = sizes((b, key_heads, q)[dim], scores[dim], most)
        if len(each) > 1:
            outs, weights = zip(
                *(_split(part, dims, most, again, return_weights) for part in call.split(dim, each)), strict=True
            )
            return torch.cat(outs, dim), torch.cat(weights, dim) if return_weights else None
    if return_weights:
        return call.result()
    part = call.seen()
    out: Tensor = checkpoint(part.output, use_reentrant=False) if again else part.output()
    return out, None


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
    checks.flag("is_causal", is_causal)
    given = inputs(query, key, value, attn_mask, score_bias, enable_gqa)
    shape = (*given.query.shape[:3], given.key.shape[2])
    if attn_scale is not None:
        checks.omega(attn_scale, given.query, shape)
    left, right = checks.window_bounds(window)
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
        causal=is_causal,
        left=left,
        right=right,
        softcap=softcap,
        lengths=shape[2:],
        rows=slice(0, shape[2]),
        keys=slice(0, shape[3]),
    )
    out, weights = _in_blocks(call, block, return_weights)
    out = out.to(given.query.dtype).reshape(*given.lead, shape[2], value.shape[-1])
    if observing.active():
        observing.report(_order(function), shape, call.observed)
    if not return_weights:
        return out
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
