"""Attention in blocks of scores, which are computed again in the backward.

Two ways. The functions of this package can be asked for all gradients of a block at once, so what is large is written
to buffers that all blocks share: memory that comes and goes between results that stay would add up to several times
what is in use, as the C library cannot fill the gaps. A user's function may have parameters that only autograd knows
of, and compilers want to see what is done: there each block is a checkpoint.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from multimax.ops.attention.pieces import sizes
from multimax.ops.dtypes import compute_dtype, without_autocast
from multimax.ops.operators import traced
from multimax.reweighting.blocks import Attention
from multimax.reweighting.registry import Reweighting

# Scores in a block, unless told otherwise or one query has more. With buffers, as many as the CPU's caches hold with
# what is computed from them. Otherwise just over 32 MiB in float32: freed, they go back to the system at once.
IN_CACHES, ELEMENTS = 2**20, 2**23 + 2**16


def in_blocks(call: Attention, block: int | None, return_weights: bool) -> tuple[Tensor, Tensor | None]:
    """The output, and the weights if they are asked for."""
    b, h, q, keys = call.scores()
    exporting, transforms = torch.compiler.is_exporting(), torch._C._are_functorch_transforms_active()
    hidden = torch.compiler.is_compiling() or transforms or torch.autograd.forward_ad._current_level >= 0
    buffers = isinstance(call.function, Reweighting) and not (return_weights or hidden) and block is None
    most = IN_CACHES if buffers and call.query.device.type == "cpu" else ELEMENTS
    if block is not None:
        most = block * max(1, b * h * keys)
    rows = sizes(q, b * h * keys, most)
    if len(rows) == 1 or (block is None and exporting):  # blocks would fix the number of queries
        part = call if return_weights or exporting else call.seen()
        out, weights = part.result()
        return out, weights if return_weights else None
    if isinstance(call.function, Reweighting) and any(isinstance(t, Tensor) for t in call.function.options.values()):
        call.function(call.query.new_empty(b, h, q, 0))  # refuses options that do not fit the whole
    if buffers:
        return _in_buffers(call, most), None
    # a block's scores are not kept for the backward; torch.func's transforms do not support this
    again = not return_weights and torch.is_grad_enabled() and not transforms
    outs, matrices = [], []
    for part in call.split(2, rows):
        part = part if return_weights else part.seen()
        out, weights = checkpoint(part.result, use_reentrant=False) if again else part.result()
        outs.append(out)
        if return_weights:
            matrices.append(weights)
    return torch.cat(outs, 2), torch.cat(matrices, 2) if return_weights else None


def _parts(call: Attention, most: int, placed: bool = True) -> Iterator[Attention]:
    """Blocks of at most so many scores, if one query of a key head has no more: queries of one key head, or all queries
    of several. All heads share what takes part by its place, so queries change last."""
    (b, h, q, keys), key_heads = call.scores(), call.key.shape[1]
    rows = sizes(q, h // key_heads * keys, most)
    heads = sizes(key_heads, h // key_heads * max(rows) * keys, most)
    batches = sizes(b, h * max(rows) * keys, most) if len(heads) == 1 else [1] * b
    for some in call.split(2, rows):
        seen = some.seen()
        for of_batches in (seen.placed() if placed else seen).split(0, batches):
            yield from of_batches.split(1, heads)


TENSORS = ("query", "key", "value", "mask", "bias", "omega")


def _tensors(call: Attention) -> list[Tensor | None]:
    """All that may have a gradient; a function's options come last."""
    assert isinstance(call.function, Reweighting)
    options = [call.function.options.get(name) for name in call.function.spec.differentiable]
    return [*(getattr(call, name) for name in TENSORS), *(t if isinstance(t, Tensor) else None for t in options)]


def _with_tensors(call: Attention, tensors: list[Tensor | None]) -> Attention:
    """The same call with other tensors, in the order of `_tensors`."""
    assert isinstance(call.function, Reweighting)
    options = dict(call.function.options)
    for name, t in zip(call.function.spec.differentiable, tensors[len(TENSORS) :], strict=True):
        if t is not None:
            options[name] = t
    fields: dict[str, Any] = dict(zip(TENSORS, tensors, strict=False))
    return call._replace(function=Reweighting(call.function.name, options), **fields)


def _in_buffers(call: Attention, most: int) -> Tensor:
    """The output, with gradients, in buffers that all blocks share."""
    if call.dropout_p:
        call = call._replace(seed=int(torch.randint(2**62, ())))
    tensors = _tensors(call)
    if not traced(*tensors):
        return _forward(call, most)
    out: Tensor = InBuffers.apply(call, most, *tensors)
    return out


def _buffer(call: Attention, most: int) -> Tensor:
    """For the scores of any block."""
    b, h, q, keys = call.scores()
    return call.query.new_empty(max(min(most, b * h * q * keys), h // call.key.shape[1] * keys))


def _product(a: Tensor, b: Tensor, buffer: Tensor, scale: float = 1.0) -> Tensor:
    """(B, H, m, k) times (B, H, k, n), in the buffer."""
    shape = (*a.shape[:-1], b.shape[-1])
    out = buffer[: math.prod(shape)].view(shape)
    flat = out.flatten(0, 1)
    torch.baddbmm(flat, a.flatten(0, 1), b.flatten(0, 1), beta=0, alpha=scale, out=flat)
    return out


def _forward(call: Attention, most: int) -> Tensor:
    """The output of all blocks."""
    out = call.query.new_empty(*call.query.shape[:3], call.value.shape[3])
    buffer = _buffer(call, most)
    with torch.no_grad(), without_autocast(out.device):
        for part in _parts(call._replace(out=out), most):
            assert part.out is not None
            x = _product(part.grouped(part.query), part.key.transpose(-1, -2), buffer, part.scale).view(part.scores())
            weights = part.dropped(part.block(x).weights)
            part.out.copy_((part.grouped(weights) @ part.value).view(part.out.shape))
    return out


class InBuffers(torch.autograd.Function):
    """The output of a call whose tensors follow it."""

    @staticmethod
    def forward(ctx: Any, call: Attention, most: int, *tensors: Tensor | None) -> Tensor:
        """Of all blocks."""
        ctx.save_for_backward(*tensors)
        ctx.call, ctx.most = _with_tensors(call, [None] * len(tensors)), most
        return _forward(call, most)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the tensors."""
        wanted = ctx.needs_input_grad[2:]
        tensors = list(ctx.saved_tensors)
        if not torch.is_grad_enabled():
            return None, None, *_gradients(_with_tensors(ctx.call, tensors), ctx.most, grad, wanted)
        # second derivatives need all blocks; the query may be the key, and each has a gradient of its own
        tensors = [t.view_as(t) if needed else t for t, needed in zip(tensors, wanted, strict=True)]
        inputs = [t for t, needed in zip(tensors, wanted, strict=True) if needed]
        parts = list(_parts(_with_tensors(ctx.call, tensors)._replace(out=grad), ctx.most))
        outs, upstream = [part.result()[0] for part in parts], [part.out for part in parts]
        found = iter(torch.autograd.grad(outs, inputs, upstream, create_graph=True, allow_unused=True))
        return None, None, *(next(found) if needed else None for needed in wanted)


def _gradients(call: Attention, most: int, grad: Tensor, wanted: tuple[bool, ...]) -> list[Tensor | None]:
    """The gradients of the call's tensors: of queries, keys and values always, of the others if they are wanted."""
    tensors, wanted = _tensors(call), wanted[3:]
    # sums are cut as the tensors are; where there is none, the tensor stands in its place and stays as it is
    sums = [
        t if t is None or not needed else torch.zeros(t.shape, dtype=compute_dtype(t.dtype), device=t.device)
        for t, needed in zip(tensors, (True, True, True, *wanted), strict=True)
    ]
    homes = _parts(_with_tensors(call, sums), most, placed=False)
    scores, of_weights = _buffer(call, most), _buffer(call, most)
    for part, home in zip(_parts(call._replace(out=grad), most), homes, strict=True):
        assert part.out is not None
        query, upstream = part.grouped(part.query), part.grouped(part.out)
        x = _product(query, part.key.transpose(-1, -2), scores, part.scale).view(part.scores()).requires_grad_()
        others = _tensors(part)[3:]
        leaves = [
            t.detach().requires_grad_() for t, needed in zip(others, wanted, strict=True) if needed and t is not None
        ]
        found = iter(leaves)
        others = [next(found) if needed else t for t, needed in zip(others, wanted, strict=True)]
        with torch.enable_grad():
            part = _with_tensors(part, [part.query, part.key, part.value, *others])
            weights = part.dropped(part.block(x).weights)
        g = _product(upstream, part.value.transpose(-1, -2), of_weights).view(part.scores())
        of_x, *of_leaves = torch.autograd.grad(weights, [x, *leaves], g, allow_unused=True)
        home.value.add_(part.grouped(weights.detach()).transpose(-1, -2) @ upstream)
        home.query.copy_((part.grouped(of_x) @ part.key).mul_(part.scale).view(home.query.shape))
        home.key.add_((part.grouped(of_x).transpose(-1, -2) @ query).mul_(part.scale))
        places = [t for t, needed in zip(_tensors(home)[3:], wanted, strict=True) if needed]
        for place, more in zip(places, of_leaves, strict=True):
            if place is not None and more is not None:
                place.add_(more)
    return [
        s.to(t.dtype) if needed and s is not None and t is not None else None
        for s, t, needed in zip(sums, tensors, (True, True, True, *wanted), strict=True)
    ]
