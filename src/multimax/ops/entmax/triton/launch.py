"""The operators of entmax on GPUs: from tensors to launches.

Shapes: R rows of K entries, one after the other.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from multimax.ops import dtypes, gpu, masking
from multimax.ops.entmax.call import KINDS, EntmaxBackwardCall, EntmaxCall, fake_forward
from multimax.ops.entmax.triton import kernels

ONE_TILE = 2048  # entries: of longer rows, every step reads all pieces again
PIECE = 2048
TILE = 2048  # entries that a program handles at once, if its rows are short


class Tiles(NamedTuple):
    """How the work is divided."""

    rows: int
    block: int
    one_tile: bool
    warps: int


def tiles_of(length: int, kind: int) -> Tiles:
    """Tiles for rows of that length, of eight entries for each thread, or four where powers take registers. Rows that
    share a tile also share the number of steps, so there are few."""
    share = 2 if KINDS[kind] == "entmax" else 1
    width = 1 << max(length - 1, 0).bit_length()
    one_tile = width <= ONE_TILE // share
    block = width if one_tile else PIECE // share
    rows = min(max(TILE // share**2 // block, 1), 16)
    return Tiles(rows, block, one_tile, min(max(rows * block * share // 256, 1), 8))


def _check(fits: bool, what: str) -> None:
    """Kernels read memory as they are told to."""
    if not fits:
        raise RuntimeError(f"multimax: {what}")


def _beside(t: Tensor, x: Tensor, each: int, name: str) -> None:
    """Numbers beside the rows: so many for each."""
    rows = x.shape[:-1].numel()
    fits = t.is_contiguous() and t.dtype == dtypes.compute_dtype(x.dtype) and t.numel() == each * rows
    _check(fits, f"{name} does not fit the input")


def _check_call(call: EntmaxCall | EntmaxBackwardCall) -> None:
    x = call.x
    _check(0 <= call.kind < 3, f"unknown kind {call.kind}")
    _check(call.mask is None, "expected -inf instead of a mask")
    _check(x.is_floating_point(), f"expected an input of floating point, got {x.dtype}")
    _check(x.ndim >= 1 and x.is_contiguous(), "expected a contiguous input of at least one dim")
    _check((call.parameter is not None) == (KINDS[call.kind] == "entmax"), "the parameter does not fit the kind")
    if call.parameter is not None:
        _beside(call.parameter, x, 1, "the parameter")


def _launch(kernel: Any, call: EntmaxCall | EntmaxBackwardCall, *tensors: Tensor | None, **options: bool) -> None:
    """A program for each few rows; a tensor that there is not is never read."""
    x = call.x
    length = x.shape[-1]
    rows = x.shape[:-1].numel()
    tiles = tiles_of(length, call.kind)
    gpu.launch(
        kernel,
        (-(-rows // tiles.rows) if length else 0,),
        *(x if t is None else t for t in tensors),
        rows,
        length,
        KIND=call.kind,
        FLOOR=masking.floor(x.dtype),
        WIDE=gpu.wide(x.dtype),
        ROWS=tiles.rows,
        BLOCK=tiles.block,
        ONE_TILE=tiles.one_tile,
        num_warps=tiles.warps,
        **options,
    )


def forward(*args: Any) -> tuple[Tensor, Tensor]:
    """multimax::entmax_forward."""
    call = EntmaxCall(*args)
    _check_call(call)
    y, stats = fake_forward(*call)
    _launch(kernels.forward, call, call.x, call.parameter, y, stats)
    return y, stats if call.x.numel() else stats.zero_()


def backward(*args: Any) -> tuple[Tensor, Tensor]:
    """multimax::entmax_backward."""
    call = EntmaxBackwardCall(*args)
    x, grad, alpha = call.x, call.grad, call.parameter
    _check_call(call)
    _beside(call.stats, x, 2, "stats")
    fits = grad.numel() == x.numel() and grad.is_contiguous() and grad.dtype == x.dtype
    _check(fits, "grad does not fit the input")
    _check(not call.parameter_grad or alpha is not None, "there is no parameter to give a gradient to")
    out = torch.empty_like(x)
    of_alpha = torch.empty_like(alpha) if alpha is not None and call.parameter_grad else None
    _launch(kernels.backward, call, grad, x, call.stats, alpha, out, of_alpha, WITH_ALPHA=call.parameter_grad)
    if of_alpha is None:
        return out, x.new_empty(0, dtype=dtypes.compute_dtype(x.dtype))
    return out, of_alpha if x.numel() else of_alpha.zero_()
