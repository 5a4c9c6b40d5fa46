"""Rows that do not count, rows of which nothing is left, and rows with NaN, by every implementation."""

from typing import Any

import pytest
import torch
from torch import Tensor

import multimax
from machine import KERNEL
from multimax.ops import kernels
from multimax.ops.loss import chunks

IMPLS = [
    pytest.param(KERNEL, marks=pytest.mark.skipif(bool(kernels.unavailable) and KERNEL == "cpu", reason="no kernels")),
    *([] if kernels.INTERPRETED else ["torch", "reference"]),
]
every_impl = pytest.mark.parametrize("impl", IMPLS)
REDUCTIONS = ("mean", "sum", "none")
BAD = {"nan": torch.nan, "inf": torch.inf, "-inf": -torch.inf, "huge": 3e38}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "smoothed": {"label_smoothing": 0.1},
    "all": {"label_smoothing": 0.1, "z_loss": 0.01, "weight": torch.linspace(0.5, 2, 7), "return_stats": True},
}
IGNORED = torch.tensor([False, True, False, True, False, False])
COEFS, KNOTS = torch.tensor([[0.4, -0.3], [0.2, -0.1]]), torch.tensor([[-0.5, 0.3], [0.1, -0.2]])


def target(ignored: Tensor) -> Tensor:
    return torch.where(ignored, -100, torch.tensor([2, 0, 6, 3, 1, 5]))


def run(leaves: list[Tensor], target: Tensor, linear: bool, bias: Tensor | None = None, **options: Any) -> list[Tensor]:
    """The loss, statistics if any, and the gradients of all leaves."""
    leaves = [t.detach().clone().requires_grad_() for t in leaves]
    if linear:
        hidden, weight, coefs, knots = leaves
        found = multimax.linear_multimax_cross_entropy(
            hidden, weight, target, coefs, knots, linear_bias=bias, chunk=4, **options
        )
    else:
        found = multimax.multimax_cross_entropy(leaves[0], target, *leaves[1:], **options)
    loss, *stats = (found[0], *found[1]) if isinstance(found, tuple) else (found,)
    return [loss, *stats, *torch.autograd.grad(loss.sum(), leaves)]


def compare(found: list[Tensor], expected: list[Tensor], ignored: Tensor) -> None:
    """With the results of the same without the rows that are ignored."""
    for got, judge in zip(found, expected, strict=True):
        if got.ndim and len(got) == len(ignored):  # by rows
            assert torch.all(got[ignored] == 0)
            got = got[~ignored]
        torch.testing.assert_close(got, judge, rtol=1e-5, atol=1e-6)


@every_impl
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("kind", OPTIONS)
def test_logits_that_are_ignored_reach_nothing(impl: str, bad: str, reduction: str, kind: str) -> None:
    x = torch.randn(6, 7)
    x[1, 2], x[3] = BAD[bad], BAD[bad]
    options = {**OPTIONS[kind], "reduction": reduction, "impl": impl}
    found = run([x, COEFS, KNOTS], target(IGNORED), False, **options)
    expected = run([x[~IGNORED], COEFS, KNOTS], target(IGNORED)[~IGNORED], False, **options)
    compare(found, expected, IGNORED)


@every_impl
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("left_out", [True, False], ids=["left out", "go along"])
def test_hidden_states_that_are_ignored_reach_nothing(
    impl: str, bad: str, reduction: str, left_out: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor do they reach the weight, with which they are multiplied. Off the CPU they go along with the others."""
    if not left_out:
        monkeypatch.setattr(chunks, "_seen_by_the_host", lambda _: False)
    hidden, weight = torch.randn(6, 5), torch.randn(7, 5)
    hidden[1, 2], hidden[3] = BAD[bad], BAD[bad]
    options = {**OPTIONS["all"], "reduction": reduction, "impl": impl}
    found = run([hidden, weight, COEFS, KNOTS], target(IGNORED), True, **options)
    expected = run([hidden[~IGNORED], weight, COEFS, KNOTS], target(IGNORED)[~IGNORED], True, **options)
    compare(found, expected, IGNORED)


@every_impl
def test_hidden_states_that_are_ignored_at_all_places(impl: str) -> None:
    hidden, weight = torch.randn(6, 5), torch.randn(7, 2, 5)
    hidden[1, 2], hidden[3] = torch.nan, torch.inf
    wanted = torch.stack([target(IGNORED), target(IGNORED).roll(1)], 1)
    wanted[IGNORED] = -100
    found, expected = (
        run([hidden[rows], weight, COEFS, KNOTS], wanted[rows], True, impl=impl) for rows in (slice(None), ~IGNORED)
    )
    compare(found, expected, IGNORED)


@every_impl
@pytest.mark.parametrize("linear", [False, True])
def test_second_derivatives_of_what_is_ignored(impl: str, linear: bool) -> None:
    first = torch.randn(6, 5 if linear else 7)
    first[1, 2], first[3] = torch.nan, torch.inf
    rest = [torch.randn(7, 5), COEFS, KNOTS] if linear else [COEFS, KNOTS]
    found = []
    for rows in (slice(None), ~IGNORED):
        leaves = [t.double().requires_grad_() for t in (first[rows], *rest)]
        wanted = target(IGNORED)[rows]
        if linear:
            loss = multimax.linear_multimax_cross_entropy(leaves[0], leaves[1], wanted, *leaves[2:], impl=impl)
        else:
            loss = multimax.multimax_cross_entropy(leaves[0], wanted, *leaves[1:], impl=impl)
        grads = torch.autograd.grad(loss, leaves, create_graph=True)
        found.append([*grads, *torch.autograd.grad(sum(g.square().sum() for g in grads), leaves)])
    compare(*found, IGNORED)


@every_impl
@pytest.mark.parametrize("fill", [-torch.inf, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("kind", OPTIONS)
def test_the_log_sum_of_a_row_of_which_nothing_is_left(impl: str, fill: float, kind: str) -> None:
    """-inf, the logarithm of an empty sum, as torch.logsumexp has it; the loss is infinite, and no gradient comes."""
    x = torch.randn(3, 7)
    x[1] = fill
    options = {**OPTIONS[kind], "z_loss": 0.0, "return_stats": True, "impl": impl, "reduction": "none"}
    loss, log_sum, entropy, _, *grads = run([x, COEFS, KNOTS], torch.tensor([1, 2, 3]), False, **options)
    assert log_sum[1] == -torch.inf
    assert (loss[1], entropy[1]) == (torch.inf, 0)
    assert all(t[[0, 2]].isfinite().all() for t in (loss, log_sum, entropy))
    assert torch.all(grads[0][1] == 0)
    without = run([x[[0, 2]], COEFS, KNOTS], torch.tensor([1, 3]), False, **options)
    for got, judge in zip(grads[1:], without[-2:], strict=True):
        torch.testing.assert_close(got, judge)


@every_impl
def test_the_log_sum_of_hidden_states_of_which_nothing_is_left(impl: str) -> None:
    bias = torch.full((7,), -torch.inf)
    options = {"reduction": "none", "return_stats": True, "impl": impl, "bias": bias}
    leaves = [torch.randn(6, 5), torch.randn(7, 5), COEFS, KNOTS]
    loss, log_sum, entropy, accuracy, *grads = run(leaves, target(IGNORED), True, **options)
    assert torch.equal(log_sum, torch.where(IGNORED, 0, -torch.inf))
    assert torch.equal(loss, torch.where(IGNORED, 0, torch.inf))
    assert torch.all(entropy == 0)
    assert accuracy == 0
    assert all(torch.all(grad == 0) for grad in grads)


@every_impl
@pytest.mark.parametrize("weight", [None, 0.0])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("z_loss", [0.0, 0.1])
def test_nan_beside_a_masked_target_shows(impl: str, weight: float | None, smoothing: float, z_loss: float) -> None:
    """Also where nothing is wanted of the target, which costs nothing in other rows."""
    x = torch.randn(3, 7)
    x[:, 2] = -torch.inf
    x[1, 4] = torch.nan
    by_class = None if weight is None else torch.ones(7).index_fill(0, torch.tensor([2]), weight)
    options = {"weight": by_class, "label_smoothing": smoothing, "z_loss": z_loss, "impl": impl}
    wanted = torch.full((3,), 2)
    losses, log_sum, entropy, _, of_x, *of_parameters = run(
        [x, COEFS, KNOTS], wanted, False, reduction="none", return_stats=True, **options
    )
    assert losses.isnan().tolist() == log_sum.isnan().tolist() == entropy.isnan().tolist() == [False, True, False]
    assert of_x.isnan().any(1).tolist() == [False, True, False]
    assert all(grad.isnan().any() for grad in of_parameters)
    for reduction in ("mean", "sum"):
        assert run([x, COEFS, KNOTS], wanted, False, reduction=reduction, **options)[0].isnan()


@every_impl
def test_nan_beside_a_masked_target_shows_from_hidden_states(impl: str) -> None:
    bias = torch.zeros(7).index_fill(0, torch.tensor([2]), -torch.inf)
    hidden = torch.randn(3, 5)
    hidden[1, 0] = torch.nan
    leaves, wanted = [hidden, torch.randn(7, 5), COEFS, KNOTS], torch.full((3,), 2)
    weight = torch.ones(7).index_fill(0, torch.tensor([2]), 0.0)
    for reduction, nan in (("none", [False, True, False]), ("sum", True)):
        loss, *grads = run(leaves, wanted, True, bias=bias, weight=weight, reduction=reduction, impl=impl)
        assert loss.isnan().tolist() == nan
        assert all(grad.isnan().any() for grad in grads)
