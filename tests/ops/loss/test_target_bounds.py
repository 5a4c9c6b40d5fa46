"""The loss's kernels read targets as they are: however wrong, they must not lead outside of a row."""

import pytest
import torch
from torch import Tensor

import multimax
from machine import KERNEL, needs_kernels
from multimax.ops import dispatch
from multimax.ops.loss.call import Logits, Setting

pytestmark = needs_kernels

ROWS, CLASSES, FIRST, TOTAL, IGNORE = 6, 37, 5, 60, -100
ELSEWHERE = [-(2**63), 2**63 - 1, -1, FIRST - 1, FIRST + CLASSES, 2**40]
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def guarded(x: Tensor) -> tuple[Tensor, Tensor]:
    """A copy between NaN on all sides, and all of that memory."""
    around = x.new_full((x.shape[0] + 2, x.shape[1] + 32), torch.nan)
    inside = around[1:-1, 16:-16]
    inside.copy_(x)
    return inside, around


def call(x: Tensor, target: Tensor, smoothing: float, weighted: bool, out: Tensor) -> tuple[Tensor, ...]:
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    weight = torch.linspace(0.5, 2, CLASSES, dtype=wide) if weighted else None
    coefs, knots = torch.tensor([[-0.4, 0.3], [0.1, -0.2]]), torch.tensor([[-0.5, 0.5], [0.0, 1.0]])
    if weight is not None:
        weight = torch.nn.functional.pad(weight, (FIRST, TOTAL - FIRST - CLASSES))  # of all classes
    setting = Setting(weight, IGNORE, smoothing, KERNEL, True, FIRST, TOTAL)
    logits, kernel = Logits(x, target, coefs, knots, setting), dispatch.load("loss")[KERNEL]
    sums = kernel.sums(logits)
    scale = torch.ones(ROWS, dtype=torch.float64)
    return sums, *kernel.gradients(logits, sums[:2], scale, scale, True, out)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("smoothing", "weighted"), [(0.0, False), (0.1, True)])
def test_wild_targets_count_as_those_of_another_part(
    isa: str, dtype: torch.dtype, smoothing: float, weighted: bool
) -> None:
    x, x_around = guarded(torch.randn(ROWS, CLASSES, generator=torch.Generator().manual_seed(3)).to(dtype))
    results = []
    for target in (torch.tensor(ELSEWHERE), torch.full((ROWS,), FIRST + CLASSES)):
        out, out_around = guarded(torch.zeros_like(x))
        sums, *grads = call(x, target, smoothing, weighted, out)
        assert sums.isfinite().all()
        assert out.isfinite().all()
        assert all(grad.isfinite().all() for grad in grads)
        assert not sums[2].any()  # no score: the target is not among these classes
        assert out_around.isnan().sum() == x_around.isnan().sum() == x_around.numel() - x.numel()
        results.append((sums, out, *grads))
    for wild, elsewhere in zip(*results, strict=True):
        assert torch.equal(wild, elsewhere)


def test_the_public_function_still_names_a_wrong_target() -> None:
    with pytest.raises(ValueError, match=r"expected targets in \[0, 4\] or ignore_index=-100, got 5"):
        multimax.multimax_cross_entropy(torch.randn(2, 5), torch.tensor([0, 5]), torch.zeros(2, 2), torch.zeros(2, 2))
