"""The rows of the losses on GPUs: from tensors to launches.

Shapes: R rows, C classes.
"""

from typing import Any, NamedTuple

from torch import Tensor

from multimax.ops import dtypes, gpu, masking
from multimax.ops.layout import contiguous_rows
from multimax.ops.loss.call import Logits
from multimax.ops.loss.sums import TOP, TOTAL, is_indices
from multimax.ops.loss.triton import kernels

PIECE = 2048  # entries of a row at a time
TILE = 2048  # entries that a program handles at once, if its rows are short


class Tiles(NamedTuple):
    """How the work is divided."""

    rows: int
    block: int
    warps: int

    def programs(self, rows: int) -> int:
        """How many it takes."""
        return -(-rows // self.rows)


def tiles_of(length: int, order: int) -> Tiles:
    """Tiles for rows of that length: none with less than an entry for each thread, since a thread whose entry is
    another's too might read it when that has been overwritten. The backward carries 4 order sums for each entry."""
    share = 1 if order <= 2 else 2
    block = min(1 << max(length - 1, 0).bit_length(), PIECE // share)
    rows = min(TILE // share // block, 64)
    return Tiles(rows, block, max(rows * block // (256 if order <= 2 else 128), 1))


def _options(logits: Logits, tiles: Tiles) -> dict[str, Any]:
    """What kernels are compiled for."""
    x, setting = logits.x, logits.setting
    return {
        "ORDER": logits.coefs.shape[-2],
        "INDICES": is_indices(logits.target),
        "HAS_WEIGHT": setting.weight is not None,
        # not numbers of a call: those are float32
        "UNIFORM": float(setting.smoothing / max(setting.classes or x.shape[1], 1)),
        "SHARE": float(1 - setting.smoothing),
        "FLOOR": masking.floor(x.dtype),
        "WIDE": gpu.wide(x.dtype),
        "ROWS": tiles.rows,
        "BLOCK": tiles.block,
        "num_warps": tiles.warps,
    }


def _target(logits: Logits) -> Tensor:
    """Indices one after the other, or probabilities with a row's entries side by side."""
    return logits.target.contiguous() if is_indices(logits.target) else contiguous_rows(logits.target)


def sums(logits: Logits) -> Tensor:
    """See `multimax.ops.loss.triton.sums`."""
    x, setting, target, weight = logits.x, logits.setting, _target(logits), logits.weight()
    rows, classes = x.shape
    planes = x.new_empty((7, rows), dtype=dtypes.compute_dtype(x.dtype))
    tiles = tiles_of(classes, logits.coefs.shape[-2])
    gpu.launch(
        kernels.forward,
        (tiles.programs(rows),),
        x, target, x if weight is None else weight, logits.coefs.contiguous(), logits.knots.contiguous(), planes,
        rows, classes, x.stride(0), target.stride(0), setting.first_class, setting.ignore_index,
        FULL=setting.full,
        **_options(logits, tiles),
    )  # fmt: skip
    return planes


def gradients(
    logits: Logits, sums: Tensor, scale: Tensor, p_scale: Tensor, params_grad: bool, out: Tensor
) -> tuple[Tensor, Tensor]:
    """See `multimax.ops.loss.triton.gradients`."""
    x, setting, target, weight = logits.x, logits.setting, _target(logits), logits.weight()
    coefs, knots = logits.coefs.contiguous(), logits.knots.contiguous()
    rows, classes = x.shape
    order, wide, exact = coefs.shape[-2], dtypes.compute_dtype(x.dtype), dtypes.exact_dtype(x.device)
    tiles = tiles_of(classes, order)
    parts = x.new_empty((tiles.programs(rows) if params_grad else 0, order, 2, 2), dtype=wide)
    gpu.launch(
        kernels.backward,
        (tiles.programs(rows),),
        x, target, x if weight is None else weight, coefs, knots,
        sums[TOP].contiguous(), sums[TOTAL].contiguous(), scale.to(wide).contiguous(), p_scale.to(wide).contiguous(),
        out, parts,
        rows, classes, x.stride(0), target.stride(0), out.stride(0), setting.first_class, setting.ignore_index,
        PARAMS=params_grad,
        **_options(logits, tiles),
    )  # fmt: skip
    if not params_grad:
        return coefs.new_empty(0, dtype=exact), knots.new_empty(0, dtype=exact)
    of_coefs, of_knots = parts.sum(0, dtype=exact).unbind(-2)
    return of_coefs.contiguous(), of_knots.contiguous()  # processes may add theirs up
