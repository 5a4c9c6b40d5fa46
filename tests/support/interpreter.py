"""Triton's interpreter, with the rounding of the hardware that it stands for."""

from typing import Any

import numpy as np
import torch


def round_to_nearest() -> None:
    """The interpreter cuts float32 off to bfloat16, where every device rounds to nearest, and makes infinity of some
    NaN."""
    from triton import language as tl
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def rounding(data: Any, source: Any, target: Any, mode: Any) -> Any:
        if (source, target) != (tl.float32, tl.bfloat16):
            return convert(data, source, target, mode)
        values = torch.tensor(np.asarray(data, np.float32))
        return values.bfloat16().view(torch.int16).numpy().view(np.uint16)

    interpreter._convert_float = rounding
