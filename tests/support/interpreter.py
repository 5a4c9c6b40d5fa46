"""Triton's interpreter, with the rounding of the hardware that it stands for, and in half the time."""

from typing import Any

import numpy as np
import torch


def round_to_nearest() -> None:
    """The interpreter cuts float32 off to bfloat16, where every device rounds to nearest, makes infinity of some NaN,
    and zero of a bfloat16 that is too small to be normal."""
    from triton import language as tl
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def rounding(data: Any, source: Any, target: Any, mode: Any) -> Any:
        if (source, target) == (tl.bfloat16, tl.float32):
            return np.asarray(data, np.uint16).astype(np.uint32) << 16
        if (source, target) != (tl.float32, tl.bfloat16):
            return convert(data, source, target, mode)
        values = torch.tensor(np.asarray(data, np.float32))
        return values.bfloat16().view(torch.int16).numpy().view(np.uint16)

    interpreter._convert_float = rounding


def patch_once() -> None:
    """The interpreter puts its own functions into triton.language for each launch, and once more for each call of a
    function in it, which then takes longer than the function."""
    from triton import language as tl
    from triton.runtime import interpreter

    patch = interpreter._patch_lang
    patched: set[str] = set()

    def once(function: Any) -> Any:
        seen = {module.__name__ for module in function.__globals__.values() if module is tl or module is tl.core}
        if seen <= patched:
            return interpreter._LangPatchScope()
        scope = patch(function)
        new = seen - patched
        patched.update(new)
        restore = scope.restore

        def leave() -> None:  # after a launch; what a function in it has patched stays, as it does without this
            patched.difference_update(new)
            restore()

        scope.restore = leave
        return scope

    interpreter._patch_lang = once


def large_tiles() -> None:
    """Programs that handle many rows each: they take turns here. A row still has as many pieces."""
    from multimax.ops.entmax.triton import launch as entmax
    from multimax.ops.loss.triton import launch as loss

    entmax.TILE = loss.TILE = 1 << 17
