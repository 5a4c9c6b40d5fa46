"""The operators of the row functions on GPUs: from tensors of any layout to launches.

Shapes: R rows of K entries, S = x's shape without the reduced dim.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from multimax.ops import dtypes, gpu, masking
from multimax.ops.rows.call import RowsBackwardCall, RowsCall, fake_forward, saves
from multimax.ops.rows.triton import kernels

AXES = 4  # of rows, at most, after those that can be counted as one have been put together
ONE_TILE = 16384  # entries: longer rows are read in pieces
PIECE = 2048  # of them at a time; and of short rows together


class Layout(NamedTuple):
    """The axes of the rows, outermost first, and the strides of some tensors along them."""

    sizes: tuple[int, ...]  # AXES
    strides: tuple[tuple[int, ...], ...]  # of each tensor, AXES

    @property
    def rows(self) -> int:
        """How many there are."""
        return math.prod(self.sizes)


def layout_of(sizes: Sequence[int], strides: Sequence[Sequence[int]]) -> Layout | None:
    """Axes of rows put together wherever every tensor steps through them evenly; None if more than AXES are left."""
    axes = [(size, tuple(each[i] for each in strides)) for i, size in enumerate(sizes) if size != 1]
    # In the order of the first tensor's memory: rows are independent of one another.
    axes.sort(key=lambda axis: -abs(axis[1][0]))
    merged: list[tuple[int, tuple[int, ...]]] = []
    for size, steps in axes:
        if merged and all(outer == size * step for outer, step in zip(merged[-1][1], steps, strict=True)):
            merged[-1] = (merged[-1][0] * size, steps)
        else:
            merged.append((size, steps))
    if len(merged) > AXES:
        return None
    merged = [(1, (0,) * len(strides))] * (AXES - len(merged)) + merged
    return Layout(tuple(size for size, _ in merged), tuple(zip(*(steps for _, steps in merged), strict=True)))


class Operand(NamedTuple):
    """A tensor's strides over the rows, and along the reduced dim."""

    rows: tuple[int, ...]
    column: int


def operand(t: Tensor | None, dim: int, ndim: int) -> Operand:
    """Of a tensor of x's shape; all zeros where there is none."""
    if t is None:
        return Operand((0,) * (ndim - 1), 0)
    strides = [0 if size == 1 else stride for size, stride in zip(t.shape, t.stride(), strict=True)]
    return Operand((*strides[:dim], *strides[dim + 1 :]), strides[dim])


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Of a tensor whose entries lie one after the other."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def set_strides(lead: Sequence[int], shape: Sequence[int]) -> tuple[int, ...]:
    """Which set belongs to which row: steps along the axes of S for sets of (*lead, order, 2)."""
    lead = (1,) * (len(shape) - len(lead)) + tuple(lead)
    return tuple(0 if size == 1 else step for size, step in zip(lead, contiguous_strides(lead), strict=True))


class Tiles(NamedTuple):
    """How the work is divided."""

    rows: int
    block: int
    one_tile: bool
    warps: int


def tiles_of(length: int, along_rows: bool, backward: bool = False) -> Tiles:
    """Tiles for rows of that length; along_rows: neighbouring rows lie side by side in memory, not a row's entries. The
    backward has a dozen numbers for each entry at a time, and so has half as many entries for each thread."""
    width = 1 << max(length - 1, 0).bit_length()
    each = 8 if backward else 16  # entries of a thread
    if along_rows:  # reads are of 32 neighbouring rows
        block = min(width, each)
        return Tiles(32, block, block >= length, max(block // each, 1))
    one_tile = width <= ONE_TILE and not backward
    block = width if one_tile else min(width, PIECE)
    rows = min(max(PIECE // block, 1), 16)
    return Tiles(rows, block, one_tile, min(max(rows * block // (32 * each), 1), 16))


def _parameters(call: RowsCall | RowsBackwardCall, shape: Sequence[int]) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """Coefs and knots, contiguous, and which set belongs to which row."""
    return call.coefs.contiguous(), call.knots.contiguous(), set_strides(call.coefs.shape[:-2], shape)


def _rows_shape(call: RowsCall | RowsBackwardCall) -> tuple[int, ...]:
    return (*call.x.shape[: call.dim], *call.x.shape[call.dim + 1 :])


def _wide(dtype: torch.dtype) -> Any:
    """The dtype that kernels compute in."""
    import triton.language as tl

    return tl.float64 if dtypes.compute_dtype(dtype) == torch.float64 else tl.float32


def _common(call: RowsCall | RowsBackwardCall, tiles: Tiles, sets: int) -> dict[str, Any]:
    return {
        "KIND": call.kind,
        "ORDER": call.coefs.shape[-2],
        "HAS_MASK": call.mask is not None,
        "HAS_STATS": saves(call.x, call.kind) == "stats",
        "SETS": sets > 1,
        "FLOOR": masking.floor(call.x.dtype),
        "WIDE": _wide(call.x.dtype),
        "ROWS": tiles.rows,
        "BLOCK": tiles.block,
        "num_warps": tiles.warps,
    }


def _flat(t: Tensor, dim: int) -> Tensor:
    """(R, K), one row after the other."""
    return t.movedim(dim, -1).reshape(-1, t.shape[dim])


def _flattened(call: Any) -> Any:
    """The same call with rows one after the other and a set of parameters for each."""
    shape, dim = _rows_shape(call), call.dim
    rows = math.prod(shape)
    params = [p.expand(*shape, *p.shape[-2:]).reshape(rows, *p.shape[-2:]) for p in (call.coefs, call.knots)]
    changed = {"x": _flat(call.x, dim), "coefs": params[0], "knots": params[1], "dim": 1}
    if call.mask is not None:
        changed["mask"] = _flat(call.mask.expand(call.x.shape), dim)
    if isinstance(call, RowsBackwardCall):
        changed["grad"] = _flat(call.grad.expand(call.x.shape), dim)
        if call.saved is not None:
            with_stats = saves(call.x, call.kind) == "stats"
            changed["saved"] = call.saved.reshape(2, rows) if with_stats else _flat(call.saved, dim)
    return call._replace(**changed)


def _by_set(sums: Tensor, layout: Layout, steps: tuple[int, ...]) -> Tensor:
    """The rows' sums, (R, order, 2, 2) in the layout's order, added up for each set of parameters."""
    sums = sums.reshape(*layout.sizes, *sums.shape[1:])
    kept = sorted((axis for axis in range(AXES) if steps[axis]), key=lambda axis: -steps[axis])
    shared = [axis for axis in range(AXES) if not steps[axis]]
    sums = sums.permute(*shared, *kept, *range(AXES, sums.ndim))
    return sums.flatten(0, len(shared) - 1).sum(0) if shared else sums


def forward(*args: Any) -> tuple[Tensor, Tensor]:
    """multimax::rows_forward."""
    call = RowsCall(*args)
    x, dim = call.x, call.dim
    y, stats = fake_forward(*call)
    mask = None if call.mask is None else call.mask.expand(x.shape)
    shape = _rows_shape(call)
    coefs, knots, sets = _parameters(call, shape)
    operands = [operand(t, dim, x.ndim) for t in (x, mask, y)]
    layout = layout_of(shape, [*(each.rows for each in operands), sets, contiguous_strides(shape)])
    if layout is None:  # scattered over too many axes: once more, one row after the other
        flat = _flattened(call)
        result, flat_stats = forward(*flat)
        y.copy_(result.reshape(*shape, x.shape[dim]).movedim(-1, dim))
        return y, stats.copy_(flat_stats.reshape(stats.shape))
    x_strides, m_strides, y_strides, set_steps, stat_steps = layout.strides
    columns = [each.column for each in operands]
    tiles = tiles_of(x.shape[dim], columns[0] != 1 and x.shape[dim] > 1 and 1 in x_strides)
    gpu.launch(
        kernels.forward,
        (-(-layout.rows // tiles.rows) if x.numel() else 0,),
        x, mask if mask is not None else x, coefs, knots, y, stats,
        layout.rows, x.shape[dim], *layout.sizes[1:],
        *x_strides, columns[0], *m_strides, columns[1], *set_steps, *y_strides, columns[2], *stat_steps,
        ONE_TILE=tiles.one_tile,
        **_common(call, tiles, coefs.shape[:-2].numel()),
    )  # fmt: skip
    if not x.numel():
        stats.zero_()
    return y, stats


def backward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """multimax::rows_backward."""
    call = RowsBackwardCall(*args)
    x, dim = call.x, call.dim
    out = torch.empty_like(x)
    mask = None if call.mask is None else call.mask.expand(x.shape)
    grad = call.grad.expand(x.shape)
    shape = _rows_shape(call)
    coefs, knots, sets = _parameters(call, shape)
    with_stats = saves(x, call.kind) == "stats"
    saved = call.saved.contiguous() if call.saved is not None and with_stats else call.saved
    found = [operand(t, dim, x.ndim) for t in (x, grad, None if with_stats else saved, mask, out)]
    if with_stats:
        found[2] = Operand(contiguous_strides(shape), 0)
    layout = layout_of(shape, [*(each.rows for each in found), sets])
    count = coefs.shape[:-2].numel()
    if layout is None:
        flat = _flattened(call)
        of_x, of_coefs, of_knots = backward(*flat)
        out.copy_(of_x.reshape(*shape, x.shape[dim]).movedim(-1, dim))
        if not call.params_grad:
            return out, of_coefs, of_knots
        many = (*shape, *coefs.shape[-2:])
        like = (*[1] * (len(shape) - coefs.ndim + 2), *coefs.shape)
        of_coefs, of_knots = (g.reshape(many).sum_to_size(like).reshape(coefs.shape) for g in (of_coefs, of_knots))
        return out, of_coefs, of_knots
    x_strides, g_strides, y_strides, m_strides, o_strides, set_steps = layout.strides
    columns = [each.column for each in found]
    tiles = tiles_of(x.shape[dim], columns[0] != 1 and x.shape[dim] > 1 and 1 in x_strides, backward=True)
    programs = -(-layout.rows // tiles.rows) if x.numel() else 0
    order = coefs.shape[-2]
    parts = layout.rows if count > 1 else programs
    sums = x.new_empty((parts if call.params_grad else 0, order, 2, 2), dtype=dtypes.compute_dtype(x.dtype))
    gpu.launch(
        kernels.backward,
        (programs,),
        grad, x, saved if saved is not None else x, mask if mask is not None else x, coefs, knots, out, sums,
        layout.rows, x.shape[dim], *layout.sizes[1:],
        *g_strides, columns[1], *x_strides, columns[0], *y_strides, columns[2], *m_strides, columns[3], *set_steps,
        *o_strides, columns[4],
        PARAMS=call.params_grad,
        **_common(call, tiles, count),
    )  # fmt: skip
    if not call.params_grad:
        return out, coefs.new_empty(0), knots.new_empty(0)
    if not x.numel():
        return out, torch.zeros_like(coefs), torch.zeros_like(knots)
    exact = dtypes.exact_dtype(x.device)
    total = _by_set(sums.to(exact), layout, set_steps) if count > 1 else sums.sum(0, dtype=exact)
    of_coefs, of_knots = total.unbind(-2)
    return out, of_coefs.reshape(coefs.shape).to(coefs.dtype), of_knots.reshape(knots.shape).to(knots.dtype)
