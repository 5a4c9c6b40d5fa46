"""Before Triton's kernels are trusted on a device they are compared with the reference, and wrong ones are caught."""

import warnings
from importlib import import_module
from typing import Any

import pytest
import torch

import multimax
from multimax.ops import dispatch, gpu, kernels

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
backward = import_module("multimax.ops.attention.triton.backward")
rows = import_module("multimax.ops.rows.triton.kernels")
CPU = torch.device("cpu")
X, COEFS, KNOTS = torch.randn(3, 7), torch.randn(2, 2), torch.randn(2, 2)


def room(operation: str) -> Any:
    return import_module(f"multimax.ops.{operation}.triton")


interpreted = pytest.mark.skipif(not kernels.INTERPRETED, reason="kernels are not interpreted here")


@interpreted
@pytest.mark.parametrize("operation", ["rows", "attention", "loss", "entmax"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_right_kernels_pass(operation: str, dtype: torch.dtype) -> None:
    assert gpu._first_use(operation, CPU, dtype, room(operation).compare) is None


right_factors = backward.param_factors
right_terms = rows.param_terms


@triton.jit
def wrong_factors(coefs, ORDER: tl.constexpr):
    found = right_factors(coefs, ORDER)
    return -found[0], found[1], found[2], found[3], found[4], found[5], found[6], found[7]


@triton.jit
def wrong_terms(x, ds, coefs, knots, ORDER: tl.constexpr):
    found = right_terms(x, ds, coefs, knots, ORDER)
    return -found[0], found[1], found[2], found[3], found[4], found[5], found[6], found[7]


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_wrong_sign_in_a_gradient_of_attentions_parameters_is_caught(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backward, "param_factors", wrong_factors)
    why = gpu._first_use("attention", CPU, dtype, room("attention").compare)
    assert isinstance(why, kernels.Unavailable)
    assert "give a wrong coefs" in why
    assert "multimax check" in why


@interpreted
def test_a_wrong_sign_in_a_gradient_of_the_rows_parameters_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "param_terms", wrong_terms)
    assert "give a wrong coefs" in (gpu._first_use("rows", CPU, torch.float32, room("rows").compare) or "")


def test_a_failed_compilation_is_a_reason() -> None:
    def compare(*_: Any) -> Any:
        raise RuntimeError("PTXAS error\nat length")

    why = gpu._first_use("rows", CPU, torch.float32, compare)
    assert why is not None
    assert "do not work on cpu in torch.float32 (RuntimeError: PTXAS error)" in why


def test_auto_falls_back_with_one_warning_and_a_name_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    why = kernels.Unavailable("the Triton kernels of rows give a wrong coefs")
    monkeypatch.setattr(room("rows"), "why_not", lambda call: why)
    monkeypatch.setattr(dispatch.load("rows")["cpu"], "why_not", lambda call: "the input is on cuda:0")
    monkeypatch.setattr(dispatch, "_warned", set())
    with (
        dispatch.implementation("auto"),
        pytest.warns(UserWarning, match="using slower plain PyTorch, because the Tri"),
    ):
        first = multimax.multimax(X, COEFS, KNOTS)
    assert torch.equal(first, multimax.multimax(X, COEFS, KNOTS, impl="reference"))
    with dispatch.implementation("auto"), warnings.catch_warnings():
        warnings.simplefilter("error")
        multimax.multimax(X, COEFS, KNOTS)  # said once
    with pytest.raises(RuntimeError, match="impl='triton' cannot run: the Triton kernels of rows give a wrong coefs"):
        multimax.multimax(X, COEFS, KNOTS, impl="triton")


def test_a_device_is_checked_once_for_each_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_checked", {})
    calls: list[tuple[str, torch.dtype]] = []

    def compare(device: torch.device, dtype: torch.dtype) -> list[Any]:
        calls.append((str(device), dtype))
        return []

    for dtype in (torch.float32, torch.float32, torch.bfloat16, torch.float32):
        assert gpu._broken("rows", "cpu", dtype, compare) is None
    assert calls == [("cpu", torch.float32), ("cpu", torch.bfloat16)]


def test_without_triton_the_reason_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> Any:
        raise ImportError("No module named 'triton'")

    monkeypatch.setattr(gpu, "import_module", fail)
    why = gpu._missing.__wrapped__()
    assert "pip install triton" in str(why)
