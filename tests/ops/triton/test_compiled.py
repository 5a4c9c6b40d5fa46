"""Every Triton kernel, compiled ahead of time for real targets: it compiles, spills nothing and fits."""

import pytest
import torch

from multimax.ops import kernels

pytest.importorskip("triton")
if kernels.INTERPRETED:
    pytest.skip("kernels are interpreted here", allow_module_level=True)

import gpu_resources

CASES = [
    (operation, size, dtype, target)
    for operation, (_, sizes) in gpu_resources.OPERATIONS.items()
    for size in sizes
    for dtype in gpu_resources.DTYPES
    for target in gpu_resources.TARGETS
]


@pytest.mark.parametrize(("operation", "size", "dtype", "target"), CASES, ids=str)
def test_kernels_compile_without_spills(operation: str, size: int, dtype: torch.dtype, target: str) -> None:
    make, _ = gpu_resources.OPERATIONS[operation]
    with gpu_resources.configured_for(target):
        launches = make(dtype, size)
    assert launches
    for launch in launches:
        used = gpu_resources.resources(launch, target)
        assert used.spills == 0, (launch.name, launch.options, used)
        assert used.shared <= gpu_resources.SHARED[target], (launch.name, launch.options, used)
