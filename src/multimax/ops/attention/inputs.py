"""The arguments of scaled_dot_product_attention, checked and brought to one form.

Shapes: B batches, H query heads, Hkv key heads, Lq queries, Lk keys, D and Dv entries per head.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from multimax.ops import checks, dtypes
from multimax.ops.layout import contiguous_rows

Window = tuple[int | None, int | None]
CAST = (torch.float32, torch.float16, torch.bfloat16)  # what autocast casts


class Inputs(NamedTuple):
    """The inputs of attention: (B, H, L, D) each with contiguous rows, masks that broadcast to (B, H, Lq, Lk), the band
    as an AttentionCall has it, and the dims that come before (Lq, Dv) in the result."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    bias: Tensor | None
    causal: bool
    left: int
    right: int
    lead: tuple[int, ...]


def checked(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool, shapes: str) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value that belong together, cast as autocast casts the arguments of torch's function."""
    checks.tensor("query", query)
    checks.tensor("key", key)
    checks.tensor("value", value)
    dtype = dtypes.autocast_dtype(query.device)
    if dtype is not None:
        query, key, value = (t.to(dtype) if t.dtype in CAST else t for t in (query, key, value))
    checks.flag("enable_gqa", enable_gqa)
    checks.attention_inputs(query, key, value, enable_gqa, shapes)
    return query, key, value


def inputs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    score_bias: Tensor | None,
    is_causal: bool,
    window: Window | None,
    enable_gqa: bool,
) -> Inputs:
    """All arguments, checked once, in one form."""
    checks.flag("is_causal", is_causal)
    left, right = checks.window_bounds(window)
    query, key, value = checked(query, key, value, enable_gqa, "(..., H, L, D)")
    batched = query.ndim > 2
    if not batched:
        query, key, value = query[None], key[None], value[None]
    sizes = query.shape
    batch, heads = checks.batch_shape(query, key, value), sizes[-3]
    if checks.is_causal_bias(attn_mask):  # torch's, which has no values
        checks.causal_bias(attn_mask, query, key)
        if attn_mask.variant.name == "UPPER_LEFT":  # type: ignore[union-attr]
            is_causal = True
        else:
            right = 0
        attn_mask = None
    if attn_mask is not None or score_bias is not None:
        full = (*batch, heads, sizes[-2], key.shape[-2])
        if attn_mask is not None:
            checks.scores("attn_mask", attn_mask, query, full, boolean=True)
        if score_bias is not None:
            checks.scores("score_bias", score_bias, query, full, boolean=False)
    lead = (*batch, heads) if batched else ()
    batch = batch or (1,)
    return Inputs(
        _flat(query, batch),
        _flat(key, batch),
        _flat(value, batch),
        None if attn_mask is None else _scores(attn_mask, batch),
        None if score_bias is None else _scores(score_bias, batch),
        is_causal,
        left,
        right,
        lead,
    )


def _flat(t: Tensor, batch: Sequence[int]) -> Tensor:
    """(..., H, L, D) as (B, H, L, D)."""
    sizes = t.shape
    if len(sizes) == 4 and len(batch) == 1 and sizes[0] == batch[0]:
        return contiguous_rows(t)
    if sizes[:-3] != batch:
        t = t.expand(*batch, *sizes[-3:])
    if t.ndim != 4:
        t = t.reshape(math.prod(batch), *t.shape[-3:])
    return contiguous_rows(t)


def _scores(t: Tensor, batch: Sequence[int]) -> Tensor:
    """A mask or bias as (B or 1, H or 1, Lq or 1, Lk or 1), with contiguous rows."""
    missing = len(batch) + 3 - t.ndim
    if missing:
        t = t.reshape(*[1] * missing, *t.shape)
    if len(batch) != 1:
        shared = all(size == 1 for size in t.shape[: len(batch)])
        t = t.reshape(1, *t.shape[-3:]) if shared else _flat(t, batch)
    return contiguous_rows(t)


def scale_of(scale: float | None, query: Tensor) -> float:
    """The factor of the dot products."""
    return 1 / math.sqrt(max(query.shape[-1], 1)) if scale is None else checks.real("scale", scale)


def seed_of(dropout_p: float, device: torch.device) -> Tensor | None:
    """A number from torch's generator that determines all of dropout."""
    if dropout_p == 0:
        return None
    return torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=device)
