"""Every Triton kernel, compiled ahead of time for real targets: it compiles, spills nothing and fits."""

import pytest
import torch

from multimax.ops import kernels

pytest.importorskip("triton", minversion="3.9", reason="its tools and the form of its results are that version's")
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
        assert len(launch.grid) == 1  # the other dims end at 65535
        used = gpu_resources.resources(launch, target)
        assert used.spills == 0, (launch.name, launch.options, used)
        assert used.shared <= gpu_resources.SHARED[target], (launch.name, launch.options, used)


def test_sums_of_parameters_have_one_place_for_each_program() -> None:
    """Whatever the autotuner tries: it does not clear them in between."""
    from multimax.ops.attention.triton import configs

    for table in (configs.NVIDIA_HALF, configs.NVIDIA_SINGLE, configs.AMD_HALF, configs.AMD_SINGLE):
        for choices in table["of_query"].values():
            assert len({config.kwargs["BLOCK_M"] for config in choices}) == 1
