"""The products of a linear layer's loss, in blocks, by whichever library, and what they hold meanwhile."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import multimax
from machine import needs_kernels
from multimax.ops import kernels
from multimax.ops.loss import products

pytestmark = pytest.mark.skipif(kernels.INTERPRETED, reason="the CPU's products")
has_onednn = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@pytest.fixture(params=["torch", "oneDNN"], autouse=True)
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "oneDNN" and not has_onednn:
        pytest.skip("this torch has no oneDNN")
    monkeypatch.setattr(products, "_mkl_is_held_back", lambda: request.param == "oneDNN")
    monkeypatch.setattr(products, "WORTH_IT", 0)
    monkeypatch.setattr(products, "BLOCK", 1024)  # several blocks, the last of them cut short


@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values(dtype: torch.dtype, rows: int) -> None:
    hidden, weight, bias = (torch.randn(size).to(dtype) for size in ((rows, 8), (997, 8), (997,)))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    close = {"rtol": 1e-2, "atol": 1e-2} if dtype.itemsize == 2 else {"rtol": 1e-4, "atol": 1e-5}
    x = torch.empty(rows, 997, dtype=dtype)
    for b in (None, bias):
        products.make_logits(hidden, weight, b, x)
        exact = hidden.double() @ weight.double().t() + (0 if b is None else b.double())
        torch.testing.assert_close(x.double(), exact, **close)
    exact = x.double() @ weight.double()
    for result in (dtype, wide):
        found = torch.full((rows, 8), torch.nan, dtype=result)
        products.input_grad(x, weight, found)
        assert (found.double() - exact).norm() <= 1e-2 * exact.norm()
    exact = x.double().t() @ hidden.double()
    once = products.weight_grad(x, hidden, None, only=False)
    assert once.dtype == wide
    torch.testing.assert_close(once.double(), exact, **close)
    twice = products.weight_grad(x, hidden, once, only=False)
    assert twice is once
    torch.testing.assert_close(twice.double(), 2 * exact, **close)
    torch.testing.assert_close(products.weight_grad(x, hidden, None, only=True).double(), exact, **close)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_add(dtype: torch.dtype) -> None:
    for entries in (0, 1, 100_003):
        part = torch.randn(entries).to(dtype)
        total = torch.randn(entries, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
        expected = total + part
        torch.ops.multimax.loss_add.default(total, part)
        torch.testing.assert_close(total, expected, rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="as many entries"):
        torch.ops.multimax.loss_add.default(total, part[1:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_weights_gradient_is_held_once(dtype: torch.dtype) -> None:
    """Its sum in float32; what is rounded from it takes the logits' place; parts are small."""
    memory: dict[int, tuple[int, ...]] = {}

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and out.untyped_storage().nbytes() > 4 * 1024:
                memory.setdefault(out.untyped_storage()._cdata, (out.untyped_storage().nbytes(), *out.shape))
            return out

    hidden, weight = torch.randn(64, 32).to(dtype).requires_grad_(), torch.randn(997, 32).to(dtype).requires_grad_()
    layer = multimax.MultiMax()
    given = (weight.untyped_storage()._cdata, hidden.untyped_storage()._cdata)
    with Watch():
        loss = multimax.linear_multimax_cross_entropy(
            hidden, weight, torch.randint(997, (64,)), layer.coefs, layer.knots, chunk=16
        )
        loss.backward()
    assert weight.grad is not None
    assert weight.grad.untyped_storage().nbytes() == weight.numel() * weight.itemsize
    sizes = sorted((size for key, size in memory.items() if key not in given), reverse=True)
    total = 997 * 32
    assert sizes[0][0] == 4 * total
    assert sizes[1][0] == 2 * total  # logits of 16 rows in float32, or the gradient in bfloat16, half of it the logits
    assert all(size[0] <= 16 * 997 for size in sizes[2:]), sizes
