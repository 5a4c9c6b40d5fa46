"""Times the other reweighting functions against torch.softmax and the entmax package, interleaved.

    python benchmarks/reweighting.py                      everything: about a minute
    python benchmarks/reweighting.py --quick              without the entmax package
    python benchmarks/reweighting.py --table FILE.json    print the tables of a saved run

float32; measuring.py says how times are taken. The entmax package's functions are called with their defaults: exact by
sorting for sparsemax and entmax15, by bisection for any other alpha; they take no masks. "With a mask", a quarter of
the entries is masked, at random, and torch's way is `x.masked_fill(~mask, -inf).softmax(-1)`. Every competitor is
checked against the float64 reference, gradient included, before it is timed.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

import measuring
from measuring import Case
from multimax import reweighting

SHAPES = [(8192, 1000), (4, 12, 256, 256)]
TORCH, PACKAGE = "torch.softmax", " (entmax package)"
OURS = {
    "sparsemax": reweighting.get("sparsemax"),
    "entmax15": reweighting.get("entmax15"),
    "entmax, alpha 1.3": reweighting.get("entmax", alpha=1.3),
    "evsoftmax": reweighting.get("evsoftmax"),
    "sparsehourglass": reweighting.get("sparsehourglass"),
    "topk, k = 16": reweighting.get("topk", k=16),
    "softmax, T = 0.5": reweighting.get("softmax", temperature=0.5),
}
Function = Callable[[Tensor], Tensor]
CASES = [
    Case("float32, with a mask" if masked else "float32", str(shape), (shape, masked))
    for masked in (False, True)
    for shape in SHAPES
]


def softmax(x: Tensor, mask: Tensor | None = None) -> Tensor:
    """What all are compared with."""
    return torch.softmax(x if mask is None else x.masked_fill(~mask, -math.inf), -1)


def competitors(quick: bool, mask: Tensor | None) -> dict[str, Function]:
    """Names and functions of x; the first is what all are compared with."""
    functions: dict[str, Function] = {TORCH: lambda x: softmax(x, mask)}
    functions |= {name: (lambda x, ours=ours: ours(x, mask=mask)) for name, ours in OURS.items()}
    if not quick and mask is None:
        import entmax

        functions |= {
            "sparsemax" + PACKAGE: lambda x: entmax.sparsemax(x, -1),
            "entmax15" + PACKAGE: lambda x: entmax.entmax15(x, -1),
            "entmax, alpha 1.3" + PACKAGE: lambda x: entmax.entmax_bisect(x, 1.3, -1),
        }
    return functions


def check(name: str, weights: Tensor, gradient: Tensor, x: Tensor, grad: Tensor, mask: Tensor | None) -> None:
    """Refuses to time what is wrong, in the weights or in the gradient; eight rows are looked at."""

    def rows(tensor: Tensor) -> Tensor:
        return tensor.detach().reshape(-1, x.shape[-1])[:8]

    exact = rows(x).double().requires_grad_()
    ours = OURS.get(name.removesuffix(PACKAGE))
    taken = None if mask is None else rows(mask)
    expected = softmax(exact, taken) if ours is None else ours(exact, mask=taken, impl="reference")
    expected.backward(rows(grad).double())
    pairs = ((weights, expected), (gradient, exact.grad))
    error = max((rows(a).double() - rows(b)).abs().max().item() for a, b in pairs)
    if not error <= 1e-4:
        raise AssertionError(f"{name} is off by {error} on {tuple(x.shape)}")


def measure(shape: tuple[int, ...], masked: bool, seconds: float, quick: bool) -> dict:
    """All competitors, forward and with the backward."""
    torch.manual_seed(0)
    x, grad = torch.randn(shape).requires_grad_(), torch.randn(shape)
    mask = torch.rand(shape) > 0.25 if masked else None
    functions = competitors(quick, mask)
    calls = {}
    for name, function in functions.items():
        calls |= measuring.passes(name, lambda function=function: function(x), [x], grad)

    def checked(name: str) -> None:
        weights = functions[name](x)
        check(name, weights, torch.autograd.grad(weights, x, grad)[0], x, grad, mask)

    return measuring.compare(calls, seconds, TORCH, list(OURS), check=checked)


if __name__ == "__main__":
    measuring.main("reweighting", __doc__, 8.0, CASES, measure)
