"""Scores whose sigma overflows: one rule, on every path and instruction set, as for rows."""

import pytest
import torch
from torch import Tensor

from machine import needs_the_library
from multimax import multimax_attention

pytestmark = needs_the_library  # the GPU kernels let a term grow no further
IMPLS = ("cpu", "torch", "reference")
FAR = (0, 70, 199)  # keys, in several tiles


def inputs(far: float, queries: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Such that scores of keys that are far are far, on that side, and the others are ordinary."""
    query, key = torch.rand(1, 2, queries, 8) + 0.5, torch.randn(1, 2, 200, 8)
    key[:, :, FAR] = far
    return query.to(dtype), key.to(dtype), torch.randn(1, 2, 200, 5).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("queries", [1, 40])
def test_what_overflows_to_minus_infinity_counts_as_masked(isa: str, queries: int, dtype: torch.dtype) -> None:
    coefs, knots = torch.tensor([[0.0, 0.0], [-1.0, 0.0]]), torch.full((2, 2), -50.0)
    tensors = inputs(-1e25, queries, dtype)
    near = torch.ones(200, dtype=torch.bool)
    near[list(FAR)] = False
    ordinary = (tensors[0], tensors[1].masked_fill(~near[:, None], 0.0), tensors[2])
    grad = torch.randn(1, 2, queries, 5).to(dtype)
    for impl in IMPLS:
        results = []
        for (query, key, value), mask in ((tensors, None), (ordinary, near)):
            leaves = [t.clone().requires_grad_() for t in (query, key, value, coefs, knots)]
            out = multimax_attention(*leaves, attn_mask=mask, impl=impl)
            results.append([out, *torch.autograd.grad(out, leaves, grad)])
        for found, expected in zip(*results, strict=True):
            assert found.isfinite().all(), impl
            torch.testing.assert_close(found, expected, msg=lambda m, impl=impl: f"{impl}: {m}")
        of_key, of_value = results[0][2:4]
        assert torch.all(of_key[:, :, FAR] == 0), impl
        assert torch.all(of_value[:, :, FAR] == 0), impl


@pytest.mark.parametrize("queries", [1, 40])
def test_what_overflows_to_infinity_makes_its_query_nan(isa: str, queries: int) -> None:
    coefs, knots = torch.tensor([[0.0, 0.0], [0.0, 1.0]]), torch.full((2, 2), 50.0)
    tensors = inputs(1e25, queries, torch.float32)
    mask = torch.zeros(queries, 200, dtype=torch.bool)
    mask[:, 1:60] = True  # none that is far
    mask[0] = True
    for impl in IMPLS:
        leaves = [t.clone().requires_grad_() for t in (*tensors, coefs, knots)]
        out = multimax_attention(*leaves, attn_mask=mask, impl=impl)
        assert out[:, :, 0].isnan().all(), impl
        assert out[:, :, 1:].isfinite().all(), impl
        (of_query,) = torch.autograd.grad(out.sum(), leaves[:1])
        assert of_query[:, :, 0].isnan().all(), impl
        assert of_query[:, :, 1:].isfinite().all(), impl
