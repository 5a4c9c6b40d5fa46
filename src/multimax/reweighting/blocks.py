"""Attention with any reweighting function, for some of the batches, heads and queries.

Shapes: B batches, H query heads, Hkv key heads, q queries, D and Dv entries per head.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from multimax.ops import observing
from multimax.ops.attention.blocks import query_slices
from multimax.ops.attention.pieces import pieces
from multimax.ops.attention.reference import band
from multimax.ops.dtypes import without_autocast
from multimax.ops.masking import takes_part
from multimax.reweighting.high_pass import unchecked_attn_scale
from multimax.reweighting.registry import Function, Reweighting
from multimax.reweighting.softmax_family import softmax


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
    seed: int | None  # of dropout, with a generator for each block; None: torch's generator
    lengths: tuple[int, int]  # of all queries and keys
    first: tuple[int, int, int]  # batch, head and query
    keys: slice
    inside: Tensor | None = None  # (q, keys), see `placed`
    out: Tensor | None = None  # (B, H, q, Dv): the output, to be written, or its gradient

    @property
    def rows(self) -> slice:
        """Which of all queries these are."""
        return slice(self.first[2], self.first[2] + self.query.shape[2])

    def scores(self) -> tuple[int, ...]:
        """(B, H, q, keys)."""
        return (*self.query.shape[:3], self.key.shape[2])

    def split(self, dim: int, sizes: list[int]) -> Iterator["Attention"]:
        """So many batches (dim 0), key heads with the query heads that share them (1), or queries (2) at a time."""
        wide = [size * self.query.shape[1] // self.key.shape[1] for size in sizes] if dim == 1 else sizes
        masks, biases, outs = (pieces(t, dim, wide) for t in (self.mask, self.bias, self.out))
        queries: Any = pieces(self.query, dim, wide)
        keys: Any = pieces(self.key, dim if dim < 2 else None, sizes)
        values: Any = pieces(self.value, dim if dim < 2 else None, sizes)
        omegas = pieces(self.omega, 0 if dim == 1 else None, wide)
        functions = self.functions(dim, wide)
        first = list(self.first)
        for i, size in enumerate(wide):
            yield self._replace(
                query=queries[i],
                key=keys[i],
                value=values[i],
                mask=masks[i],
                bias=biases[i],
                function=functions[i],
                omega=omegas[i],
                first=(first[0], first[1], first[2]),
                out=outs[i],
            )
            first[dim] += size

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

    def placed(self) -> "Attention":
        """With what takes part by its place, which all heads share."""
        if self.inside is not None or not (self.causal or self.left >= 0 or self.right >= 0):
            return self
        inside = band(*self.lengths, self.causal, self.left, self.right, self.query.device, self.rows)[:, self.keys]
        return self._replace(inside=inside)

    def grouped(self, t: Tensor) -> Tensor:
        """(B, H, q, ...) as (B, Hkv, queries of a key head, ...): heads that share a key head become more queries of
        it, and nothing is repeated."""
        b, h, q, width = t.shape
        key_heads = self.key.shape[1]
        return t.reshape(b, key_heads, h * q // max(key_heads, 1), width)

    def products(self) -> Tensor:
        """Queries times keys, scaled, (B, H, q, keys)."""
        with without_autocast(self.key.device):
            x = self.grouped(self.scale * self.query) @ self.key.transpose(-1, -2)
        return x.reshape(self.scores())

    def block(self, x: Tensor) -> Block:
        """Scores and weights of the products."""
        part, added = self.placed().inside, None
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

    def dropped(self, weights: Tensor) -> Tensor:
        """After dropout."""
        if self.seed is None or self.dropout_p in (0, 1):
            return nn.functional.dropout(weights, self.dropout_p)
        batch, head, row = self.first
        seed = (self.seed + (batch << 42) + (head << 28) + row) % 2**63
        generator = torch.Generator(weights.device).manual_seed(seed)
        noise = torch.empty_like(weights).bernoulli_(1 - self.dropout_p, generator=generator)
        return weights * noise.div_(1 - self.dropout_p)

    def result(self) -> tuple[Tensor, Tensor]:
        """The output, (B, H, q, Dv), and the weights, after dropout."""
        weights = self.dropped(self.block(self.products()).weights)
        with without_autocast(weights.device):
            out = self.grouped(weights) @ self.value
        return out.reshape(*self.query.shape[:3], self.value.shape[-1]), weights

    def observed(self) -> Iterator[observing.Block]:
        """Blocks for observers, with all keys."""
        sizes = [rows.stop - rows.start for rows in query_slices(self.scores())]
        for part in self.split(2, sizes):
            x, weights, takes = part.block(part.products())
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
