"""What kernels are compared with before they are trusted on a device: they pass, where they are interpreted."""

from typing import Any

import pytest
import torch

from multimax.ops import dispatch, gpu, kernels


@pytest.mark.skipif(not kernels.INTERPRETED, reason="needs Triton's interpreter")
@pytest.mark.parametrize("operation", ["entmax", "loss"])
@pytest.mark.parametrize("dtype", gpu.TOLERANCE, ids=str)
def test_kernels_pass(operation: str, dtype: torch.dtype) -> None:
    compare: Any = dispatch.load(operation)["triton"].compare
    # a name other than that of the judge's device, which computes in float64
    assert gpu._first_use(operation, torch.device("cpu:0"), dtype, compare) is None
