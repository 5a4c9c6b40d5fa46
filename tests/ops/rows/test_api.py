"""The public functions: what they refuse, which path they take, what they return."""

import re
import warnings

import pytest
import torch
from torch import Tensor

import multimax
from machine import needs_kernels
from multimax.ops import dispatch, kernels

X, COEFS, KNOTS = torch.randn(2, 3, 4, 5), torch.zeros(2, 2), torch.zeros(2, 2)


def heads(*lead: int) -> Tensor:
    return torch.zeros(*lead, 2, 2)


# what is given, the error, its text
BAD = {
    "x is a list": (([1.0], COEFS, KNOTS), {}, TypeError, "multimax: expected x to be a tensor, got list"),
    "x of integers": (
        (torch.arange(4), COEFS, KNOTS),
        {},
        TypeError,
        "multimax: expected x of dtype float32, float64, bfloat16, float16, got torch.int64; convert it with .float()",
    ),
    "x complex": ((X.to(torch.complex64), COEFS, KNOTS), {}, TypeError, "got torch.complex64"),
    "coefs of integers": ((X, COEFS.long(), KNOTS), {}, TypeError, "multimax: expected coefs of dtype"),
    "flat coefs": (
        (X, torch.zeros(4), torch.zeros(4)),
        {},
        ValueError,
        "multimax: expected coefs of shape (order, 2) or (heads, order, 2), got (4,)",
    ),
    "three columns": (
        (X, torch.zeros(2, 3), torch.zeros(2, 3)),
        {},
        ValueError,
        "multimax: expected coefs of shape (order, 2) or (heads, order, 2), got (2, 3)",
    ),
    "order 0": (
        (X, torch.zeros(0, 2), torch.zeros(0, 2)),
        {},
        ValueError,
        "multimax: expected coefs of an order of at least 1, got (0, 2)",
    ),
    "other knots": (
        (X, COEFS, torch.zeros(1, 2)),
        {},
        ValueError,
        "multimax: expected knots of the shape of coefs, (2, 2), got (1, 2)",
    ),
    "other heads": ((X, heads(4), heads(4)), {}, ValueError, "leading dims that broadcast against"),
    "heads of a vector": ((X[0, 0, 0], heads(3), heads(3)), {}, ValueError, "leading dims that broadcast against"),
    "too many dims": (
        (X, heads(2, 3, 4, 1), heads(2, 3, 4, 1)),
        {},
        ValueError,
        "the input's other dims (2, 3, 4), got (2, 3, 4, 1, 2, 2)",
    ),
    "parameters elsewhere": (
        (X, COEFS.to("meta"), KNOTS.to("meta")),
        {},
        ValueError,
        "multimax: expected coefs on the input's device, cpu, got meta; move it with .to('cpu')",
    ),
    "sparse": (
        (X.to_sparse(), COEFS, KNOTS),
        {},
        TypeError,
        "multimax: expected x to be a dense tensor, got torch.sparse_coo; convert it with .to_dense()",
    ),
    "sparse coefs": ((X, COEFS.to_sparse(), KNOTS), {}, TypeError, "expected coefs to be a dense tensor"),
    "unknown impl": (
        (X, COEFS, KNOTS),
        {"impl": "gpu"},
        ValueError,
        "multimax: expected impl to be one of 'auto', 'reference', 'cpu', 'triton', got 'gpu'",
    ),
    "no triton": ((X, COEFS, KNOTS), {"impl": "triton"}, RuntimeError, "multimax: impl='triton' cannot run"),
}
BAD_ROWS = {
    "dim too large": (
        {"dim": 4},
        ValueError,
        "multimax: expected dim in [-4, 3] for an input of 4 dims, got 4",
    ),
    "dim too small": ({"dim": -5}, ValueError, "got -5"),
    "dim no int": ({"dim": 1.0}, TypeError, "multimax: expected dim to be an int, got float"),
    "dim a bool": ({"dim": True}, TypeError, "multimax: expected dim to be an int, got bool"),
    "float mask": (
        {"mask": torch.zeros(5)},
        TypeError,
        "multimax: expected mask to be a boolean tensor, True where an entry takes part, got torch.float32",
    ),
    "mask a list": ({"mask": [True]}, TypeError, "True where an entry takes part, got list"),
    "mask too long": (
        {"mask": torch.ones(6, dtype=torch.bool)},
        ValueError,
        "multimax: expected a mask that broadcasts to the input's shape (2, 3, 4, 5), got (6,)",
    ),
    "sparse mask": ({"mask": torch.ones(5, dtype=torch.bool).to_sparse()}, TypeError, "expected mask to be a dense"),
    "mask elsewhere": ({"mask": torch.ones(5, dtype=torch.bool, device="meta")}, ValueError, "expected mask on the"),
}


@pytest.mark.parametrize("function", [multimax.multimax, multimax.log_multimax, multimax.modulate])
@pytest.mark.parametrize("impl", ["auto", "reference"])
@pytest.mark.parametrize("case", BAD)
def test_bad_input(function: object, impl: str, case: str) -> None:
    arguments, options, error, text = BAD[case]
    with pytest.raises(error, match=re.escape(text)):
        function(*arguments, **{"impl": impl, **options})


@pytest.mark.parametrize("function", [multimax.multimax, multimax.log_multimax])
@pytest.mark.parametrize("impl", ["auto", "reference"])
@pytest.mark.parametrize("case", BAD_ROWS)
def test_bad_dim_and_mask(function: object, impl: str, case: str) -> None:
    options, error, text = BAD_ROWS[case]
    with pytest.raises(error, match=re.escape(text)):
        function(X, COEFS, KNOTS, impl=impl, **options)


@pytest.mark.parametrize("impl", ["auto", "reference"])
def test_heads_as_attention_has_them(impl: str) -> None:
    coefs, knots = torch.randn(3, 2, 2) * 0.3, torch.randn(3, 2, 2)
    each = [multimax.multimax(X[:, head], coefs[head], knots[head], impl=impl) for head in range(3)]
    torch.testing.assert_close(multimax.multimax(X, coefs, knots, impl=impl), torch.stack(each, 1))
    # the same scores as (batch, queries, heads, keys), with the heads' place said in full
    moved = multimax.multimax(X.transpose(1, 2), coefs[None], knots[None], impl=impl)
    torch.testing.assert_close(moved, torch.stack(each, 2))


@needs_kernels
def test_an_impl_given_outright_runs() -> None:
    coefs, knots = torch.randn(2, 2) * 0.3, torch.randn(2, 2)
    cpu, reference = (multimax.multimax(X, coefs, knots, impl=impl) for impl in ("cpu", "reference"))
    torch.testing.assert_close(cpu, reference)
    assert torch.equal(cpu, multimax.multimax(X, coefs, knots))
    with pytest.raises(RuntimeError, match="impl='cpu' cannot run: the input is on meta"):
        multimax.multimax(X.to("meta"), COEFS.to("meta"), KNOTS.to("meta"), impl="cpu")


def test_other_devices_take_the_reference() -> None:
    assert multimax.multimax(X.to("meta"), COEFS.to("meta"), KNOTS.to("meta")).shape == X.shape


@pytest.mark.parametrize(
    "why", ["the CPU kernels were not built; with torch", "the CPU kernels were built but could not be loaded"]
)
def test_without_kernels_one_warning_and_the_reference(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    monkeypatch.setattr(kernels, "unavailable", kernels.Unavailable(why))
    monkeypatch.setattr(dispatch, "_warned", set())
    with pytest.warns(UserWarning, match=f"multimax: using slower plain PyTorch, because {why}") as caught:
        first = multimax.multimax(X, COEFS, KNOTS)
    assert caught[0].filename == __file__
    monkeypatch.setattr(dispatch, "_warned", set())
    with pytest.warns(UserWarning, match="multimax: using slower plain PyTorch") as caught:
        multimax.MultiMax()(X)  # through torch's Module.__call__
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(multimax.multimax(X, COEFS, KNOTS), first)
    assert torch.equal(first, multimax.multimax(X, COEFS, KNOTS, impl="reference"))
    with pytest.raises(RuntimeError, match=f"impl='cpu' cannot run: {why}"):
        multimax.multimax(X, COEFS, KNOTS, impl="cpu")


@pytest.mark.parametrize("impl", ["auto", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_autocast_does_as_softmax_does(impl: str, dtype: torch.dtype) -> None:
    x = X.clone().to(dtype).requires_grad_()
    coefs, knots = COEFS.clone().requires_grad_(), KNOTS.clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        weights = multimax.multimax(x, coefs, knots, impl=impl)
        assert weights.dtype == torch.softmax(x, -1).dtype
    weights.backward(torch.ones_like(weights))
    assert x.grad.dtype == dtype
    assert coefs.grad.dtype == torch.float32


@pytest.mark.parametrize("impl", ["auto", "reference"])
def test_inputs_are_left_alone(impl: str) -> None:
    inputs = [value.clone() for value in (X, COEFS, KNOTS)]
    mask = torch.rand(5) < 0.5
    kept = mask.clone()
    multimax.multimax(*inputs, mask=mask, impl=impl)
    assert all(torch.equal(a, b) for a, b in zip(inputs, (X, COEFS, KNOTS), strict=True))
    assert torch.equal(mask, kept)
