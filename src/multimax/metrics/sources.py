"""Where scores and weights come from in modules that do not report them: softmax in all its forms.

Shapes: B batches, H heads, Lq queries, Lk keys, E entries of all heads.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from multimax.ops import checks, dtypes, masking
from multimax.ops.attention import blocks as score_blocks
from multimax.ops.dtypes import compute_dtype
from multimax.ops.observing import Block, Blocks
from multimax.reweighting.layer import MultiMax

Source = tuple[tuple[int, ...], Blocks]


def is_function(module: nn.Module) -> bool:
    """Whether a module maps scores to weights."""
    return isinstance(module, MultiMax | nn.Softmax) or (
        hasattr(module, "reweighting_name") and not isinstance(module, nn.MultiheadAttention)
    )


def _four_dims(t: Tensor, dim: int) -> Tensor:
    """(B, H, Lq, Lk), with 1 for missing dims; the function's dim last, heads on the third from the end."""
    t = t.movedim(dim, -1)
    t = t.reshape(*[1] * (3 - t.ndim), *t.shape) if t.ndim < 3 else t
    return t[:, None] if t.ndim == 3 else t.flatten(0, -4)


def of_function(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: object) -> Source | None:
    """A module that maps scores to weights: its input, its mask if it has one, and its output."""
    given = {**dict(zip(("x", "mask"), args, strict=False)), **kwargs}
    x, mask = next(iter(given.values()), None), given.get("mask")
    if not isinstance(x, Tensor) or not isinstance(output, Tensor) or x.shape != output.shape or x.ndim == 0:
        return None
    dim = getattr(module, "dim", -1)
    if not isinstance(dim, int):  # nn.Softmax() without a dim: torch's choice
        dim = 0 if x.ndim in (1, 3) else 1
    part = masking.takes_part(x)
    if isinstance(mask, Tensor) and mask.dtype == torch.bool:
        part = part & mask
    wide = compute_dtype(x.dtype)
    scores, weights = (_four_dims(t.detach(), dim).to(wide) for t in (x, output))
    part = _four_dims(part, dim)
    return tuple(scores.shape), lambda: score_blocks.of_matrix(scores, weights, part)


def _projected(module: nn.MultiheadAttention, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Query and key, (B, H, L, D), as torch's module projects them."""
    if module.in_proj_weight is None:
        q_weight, k_weight = module.q_proj_weight, module.k_proj_weight
    else:
        q_weight, k_weight, _ = module.in_proj_weight.chunk(3)
    q_bias, k_bias = (None, None) if module.in_proj_bias is None else module.in_proj_bias.chunk(3)[:2]
    query, key = nn.functional.linear(query, q_weight, q_bias), nn.functional.linear(key, k_weight, k_bias)
    if module.bias_k is not None:
        key = torch.cat([key, module.bias_k.to(key.dtype).expand(len(key), 1, -1)], 1)
    if module.add_zero_attn:
        key = torch.cat([key, key.new_zeros(len(key), 1, key.shape[-1])], 1)
    query, key = (t.unflatten(-1, (module.num_heads, -1)).transpose(1, 2) for t in (query, key))
    return query, key


def _softmax_blocks(query: Tensor, key: Tensor, masks: list[Tensor]) -> Iterator[Block]:
    """Scores with the masks in them, as softmax gets them, and its weights."""
    dtype = compute_dtype(query.dtype)
    key = key.to(dtype)
    for rows in score_blocks.query_slices((*query.shape[:3], key.shape[2])):
        with dtypes.without_autocast(query.device):
            x = query[:, :, rows].to(dtype) * query.shape[-1] ** -0.5 @ key.transpose(-1, -2)  # (B, H, q, Lk)
        for mask in masks:
            part_of = mask if mask.shape[2] == 1 else mask[:, :, rows]
            x = x.masked_fill(part_of, -torch.inf) if mask.dtype == torch.bool else x + part_of.to(dtype)
        part = masking.takes_part(x)
        yield x, torch.where(part, torch.softmax(x, -1), 0), part


def of_torch(module: nn.MultiheadAttention, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Source, bool]:
    """torch.nn.MultiheadAttention, and whether it is cross attention.

    Computed separately, from the arguments of the call: asking the module itself for its weights would take another
    path through it, with different rounding and different random numbers for dropout, and give them after dropout.
    """
    names = ("query", "key", "value", "key_padding_mask", "need_weights", "attn_mask")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    query, key, attn_mask, padding = (given.get(name) for name in ("query", "key", "attn_mask", "key_padding_mask"))
    assert isinstance(query, Tensor)
    assert isinstance(key, Tensor)
    masks = []
    cross = key is not query and (key.shape != query.shape or not torch.equal(key, query))
    if query.is_nested:  # as nn.TransformerEncoder makes it of padded input, in evaluation; always self-attention
        lengths = torch.tensor([len(sequence) for sequence in query.unbind()], device=query.device)
        query = key = query.to_padded_tensor(0.0)
        beyond = torch.arange(query.shape[1], device=query.device) >= lengths[:, None]  # (B, L)
        masks += [beyond[:, None, None], beyond[:, None, :, None]]
    elif query.ndim == 2:
        query, key = query[None], key[None]
        padding = None if padding is None else padding[None]
    elif not module.batch_first:
        query, key = query.transpose(0, 1), key.transpose(0, 1)
    query, key = _projected(module, query, key)
    if attn_mask is not None:
        shape = (1, 1) if attn_mask.ndim == 2 else (len(query), module.num_heads)
        masks.append(attn_mask.reshape(*shape, *attn_mask.shape[-2:]))
    if padding is not None:
        masks.append(padding[:, None, None])
    # what torch adds to the keys is never masked
    masks = [mask if mask.shape[3] in (1, key.shape[2]) else _padded(mask, key.shape[2]) for mask in masks]
    return ((*query.shape[:3], key.shape[2]), lambda: _softmax_blocks(query, key, masks)), cross


def _padded(mask: Tensor, keys: int) -> Tensor:
    return nn.functional.pad(mask, (0, keys - mask.shape[3]))


def _of_weights(weights: Tensor) -> Source:
    def blocks() -> Iterator[Block]:
        for rows in score_blocks.query_slices(tuple(weights.shape)):
            block = weights[:, :, rows]
            yield block.log(), block, ~(block == 0)

    return tuple(weights.shape), blocks


def of_output(module: nn.Module, output: object) -> Source | None:
    """A module that returns its weights, (B, H, Lq, Lk), after its result, as in transformers.

    Scores are the logarithm of the weights, which for softmax are the scores up to a constant per row; entries of
    weight zero count as masked.
    """
    if not isinstance(output, tuple | list):
        return None
    for weights in output[1:]:
        if not isinstance(weights, Tensor) or weights.ndim != 4 or not weights.is_floating_point():
            continue
        weights = weights.detach().to(compute_dtype(weights.dtype))
        total = weights.sum(-1)
        # a position bias, which T5 returns in this place, is not a distribution
        if bool((weights < 0).any()) or not bool((total != 0).any()):
            continue
        if bool(((total - 1).abs() <= 0.02).logical_or(total == 0).logical_or(total.isnan()).all()):
            return _of_weights(weights)
        checks.before_dropout(module)
    return None
