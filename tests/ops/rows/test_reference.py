"""The oracle itself, against hand-written formulas."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import multimax
from multimax.ops.rows import reference

finite = st.floats(-8, 8)


def sigma_by_hand(x: float, coefs: list[list[float]], knots: list[list[float]]) -> float:
    total = x
    for n, ((c, e), (b, d)) in enumerate(zip(coefs, knots, strict=True), start=1):
        total += c * max(b - x, 0) ** n + e * max(x - d, 0) ** n
    return total


@given(st.data(), st.integers(1, 4))
@settings(deadline=None, derandomize=True)
def test_equation_6(data: st.DataObject, order: int) -> None:
    def pairs(strategy: st.SearchStrategy[float]) -> list[list[float]]:
        return data.draw(st.lists(st.lists(strategy, min_size=2, max_size=2), min_size=order, max_size=order))

    coefs, knots = pairs(st.floats(-1, 1)), pairs(finite)
    x = data.draw(st.lists(finite, min_size=1, max_size=6))
    tensors = [torch.tensor(value, dtype=torch.float64) for value in (x, coefs, knots)]
    by_hand = [sigma_by_hand(value, coefs, knots) for value in x]
    torch.testing.assert_close(
        reference.sigma(*tensors), torch.tensor(by_hand, dtype=torch.float64), rtol=1e-9, atol=1e-9
    )
    top = max(by_hand)
    weights = [math.exp(value - top) for value in by_hand]
    expected = torch.tensor([weight / sum(weights) for weight in weights], dtype=torch.float64)
    torch.testing.assert_close(reference.multimax(*tensors), expected, rtol=1e-6, atol=1e-9)


def test_values_of_the_published_code() -> None:
    """x + ts[0] relu(r[0] - x) + ts[1] relu(x - r[1]) + ts[2] relu(r[2] - x)^2 + ts[3] relu(x - r[3])^2, softmaxed."""
    ranges, ts = torch.randn(4), torch.randn(4) * 0.3
    scores = torch.randn(2, 6, 17, 17)
    lower = ts[0] * torch.relu(ranges[0] - scores) + ts[2] * torch.relu(ranges[2] - scores) ** 2
    upper = ts[1] * torch.relu(scores - ranges[1]) + ts[3] * torch.relu(scores - ranges[3]) ** 2
    published = (scores + lower + upper).softmax(-1)
    for impl in ("reference", "auto"):
        ours = multimax.multimax(scores, ts.reshape(-1, 2), ranges.reshape(-1, 2), impl=impl)
        torch.testing.assert_close(ours, published)


def test_zero_coefs_are_softmax() -> None:
    x, knots = torch.randn(4, 33), torch.randn(3, 2)
    for impl in ("reference", "auto"):
        torch.testing.assert_close(multimax.multimax(x, torch.zeros(3, 2), knots, impl=impl), torch.softmax(x, -1))
        log = multimax.log_multimax(x, torch.zeros(3, 2), knots, impl=impl)
        torch.testing.assert_close(log, torch.log_softmax(x, -1))
        assert torch.equal(multimax.modulate(x, torch.zeros(3, 2), knots, impl=impl), x)


def test_the_maximum_is_that_of_sigma() -> None:
    # sigma falls steeply above 0: the largest x has the smallest sigma, and exp of its distance would overflow
    coefs, knots = torch.tensor([[0.0, -300.0]]), torch.zeros(1, 2)
    x = torch.tensor([1.0, 0.5, 0.0, -1.0])
    for impl in ("reference", "auto"):
        weights = multimax.multimax(x, coefs, knots, impl=impl)
        torch.testing.assert_close(weights[2:], torch.softmax(torch.tensor([0.0, -1.0]), -1))


@pytest.mark.parametrize("function", [reference.multimax, reference.log_multimax, reference.modulate])
def test_differentiable_to_the_third_order(function: object) -> None:
    x = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
    coefs = (torch.randn(2, 2, dtype=torch.float64) * 0.3).requires_grad_()
    knots = torch.randn(2, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(function, (x, coefs, knots))
    value = function(x, coefs, knots).square().sum()
    for _ in range(3):
        (grad,) = torch.autograd.grad(value, x, create_graph=True)
        value = grad.square().sum()
    assert value.isfinite()
