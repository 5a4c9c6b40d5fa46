"""A short test of an installed wheel, with the interpreter and torch that run it.

    python tools/wheel_smoke.py kernels    # every operation against the formulas in float64, values and gradients
    python tools/wheel_smoke.py pure       # the same for a wheel without kernels
    python tools/wheel_smoke.py compile    # torch.compile, which needs a compiler

The last line that it prints is a JSON object with what was seen. `tools/wheel_test.py` runs it for many versions.
"""

import json
import platform
import sys
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

import multimax
from multimax.ops import kernels

PARAMETERS = {
    "coefs": torch.tensor([[0.3, -0.2], [0.1, 0.05]]),
    "knots": torch.tensor([[-0.4, 0.5], [-1.0, 1.1]]),
}
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


def draw(*shape: int) -> Tensor:
    """Normal numbers, the same everywhere."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def operations(impl: str) -> dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]]:
    """By name: the operation, and what it is called with."""
    target = torch.tensor([3, 0, -100, 36, 20])
    params = (PARAMETERS["coefs"], PARAMETERS["knots"])
    mask = draw(1, 1, 19, 21) > -1
    return {
        "rows": (lambda x, c, k: multimax.multimax(x, c, k, impl=impl), (draw(7, 37), *params)),
        "attention": (
            lambda q, k, v, c, t: multimax.multimax_attention(q, k, v, c, t, attn_mask=mask, impl=impl),
            (draw(2, 3, 19, 16), draw(2, 3, 21, 16), draw(2, 3, 21, 24), *params),
        ),
        "loss": (
            lambda x, c, k: multimax.multimax_cross_entropy(x, target, c, k, label_smoothing=0.1, impl=impl),
            (draw(5, 37), *params),
        ),
        "entmax": (lambda x: multimax.reweighting.entmax(x, alpha=1.4, impl=impl), (draw(6, 37),)),
    }


def results(function: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """The output and the gradients of all inputs."""
    inputs = tuple(x.detach().clone().requires_grad_() for x in inputs)
    out = function(*inputs)
    out.backward(draw(*out.shape).to(out.dtype) if out.dim() else None)
    return [out.detach(), *(x.grad for x in inputs if x.grad is not None)]


def compare(name: str, got: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    """Raises where they differ by more than that, as a part of the largest number expected."""
    assert len(got) == len(expected), name
    for number, (a, b) in enumerate(zip(got, expected, strict=True)):
        error = (a.double() - b).abs().max().item() / b.abs().max().item()
        assert error <= tolerance, f"{name}, result {number}: off by {error:.1e} of its size, expected {tolerance:.0e}"


def check(impl: str, dtype: torch.dtype) -> None:
    """Every operation in one dtype against the reference in float64, at the numbers that it is really given."""
    for name, (function, inputs) in operations(impl).items():
        reference = operations("reference")[name][0]
        given = tuple(x if x.shape == PARAMETERS["coefs"].shape else x.to(dtype) for x in inputs)
        expected = results(reference, tuple(x.double() for x in given))
        compare(f"{name} in {dtype}", results(function, given), expected, TOLERANCE[dtype])


def check_all() -> str:
    """All operations in all dtypes, by each instruction set that the machine has. Names those."""
    if kernels.unavailable:
        for dtype in TOLERANCE:
            check("auto", dtype)
        return "none"
    seen = []
    for name in kernels.ISAS:
        try:
            kernels.use_isa(name)
        except RuntimeError:
            continue
        for dtype in TOLERANCE:
            check("cpu", dtype)
        seen.append(name)
    return ", ".join(seen)


def check_compiled() -> None:
    """A layer under torch.compile, against the same without."""
    layer = multimax.MultiMax(init=(PARAMETERS["coefs"], PARAMETERS["knots"]))

    def function(x: Tensor) -> Tensor:
        return layer(x * 2).square().sum()

    x = draw(6, 33)
    compare("torch.compile", results(torch.compile(function, fullgraph=True), (x,)), results(function, (x,)), 1e-5)


def main(what: str) -> None:
    """kernels: a wheel that has them; pure: one that has not; compile. An exception says what failed."""
    warnings.simplefilter("ignore")
    assert bool(kernels.unavailable) == (what == "pure"), kernels.unavailable or "expected a wheel without kernels"
    seen = {"file": multimax.__file__, "python": platform.python_version(), "torch": torch.__version__}
    if what == "compile":
        check_compiled()
    else:
        seen["kernels"] = check_all()
    print(json.dumps(seen))


if __name__ == "__main__":
    main(sys.argv[1])
