"""Times the row functions against torch.softmax and the other ways to compute MultiMax, in one interleaved run.

    python benchmarks/rows.py                      everything: about five minutes
    python benchmarks/rows.py --quick              softmax and the kernel only: about a minute
    python benchmarks/rows.py --table FILE.json    print the tables of a saved run

Every competitor is checked against the float64 reference before it is timed. measuring.py says how times are taken.
GB/s is what softmax has to move (forward 2 tensors, forward and backward 5) divided by the time. Memory is the peak of
the process above its state before the call, results included.
"""

from collections.abc import Callable

import torch
from torch import Tensor

import measuring
import multimax
from measuring import BACKWARD, FORWARD, Case
from multimax.ops.rows import reference

SHAPES = [(8, 6, 197, 197), (8192, 1000), (512, 32000), (4, 12, 1024, 1024), (1, 10_000_000), (1_000_000, 16)]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
TORCH, KERNEL, COMPILED = "torch.softmax", "multimax (kernel)", "reference, torch.compile"
Function = Callable[[Tensor, Tensor, Tensor], Tensor]
CASES = [Case(name, str(shape), (shape, dtype)) for name, dtype in DTYPES.items() for shape in SHAPES]


@torch.jit.script
def _published(x: Tensor, ranges: Tensor, ts: Tensor) -> Tensor:
    """As in the published code: one scripted expression, then torch's softmax."""
    lower = ts[0] * torch.relu(ranges[0] - x) + ts[2] * torch.relu(ranges[2] - x) ** 2
    upper = ts[1] * torch.relu(x - ranges[1]) + ts[3] * torch.relu(x - ranges[3]) ** 2
    return torch.softmax(x + lower + upper, dim=-1)


def competitors(quick: bool) -> dict[str, Function]:
    """Names and functions of x, coefs and knots; the first is what all are compared with."""
    functions: dict[str, Function] = {
        TORCH: lambda x, coefs, knots: torch.softmax(x, -1),
        KERNEL: lambda x, coefs, knots: multimax.multimax(x, coefs, knots, impl="cpu"),
    }
    if not quick:
        compiled = torch.compile(reference.multimax, dynamic=False)
        functions |= {
            "reference, eager": lambda x, coefs, knots: multimax.multimax(x, coefs, knots, impl="reference"),
            "published, torch.jit": lambda x, coefs, knots: _published(x, knots.reshape(-1), coefs.reshape(-1)),
            COMPILED: lambda x, coefs, knots: compiled(x, coefs, knots),
        }
    return functions


def check(name: str, function: Function, x: Tensor, coefs: Tensor, knots: Tensor) -> None:
    """Refuses to time what is wrong."""
    given = x if name == COMPILED else x.reshape(-1, x.shape[-1])[:8]  # another shape would be compiled for itself
    sample = x.reshape(-1, x.shape[-1])[:8].double()
    expected = multimax.multimax(sample, coefs.double(), knots.double(), impl="reference")
    if name == TORCH:
        expected = torch.softmax(sample, -1)
    found = function(given, coefs, knots).reshape(-1, x.shape[-1])[:8].double()
    # of the largest weight: in a row of ten million all are small
    error = ((found - expected).abs().max() / expected.max()).item()
    # torch.softmax, which most rivals end in, adds up a row in float32: ten million entries cost a few digits
    tolerance = 0.05 if x.dtype == torch.bfloat16 else max(1e-4, 1e-10 * x.shape[-1])
    if not error <= tolerance:
        raise AssertionError(f"{name} is off by {error} on {tuple(x.shape)} {x.dtype}")


def measure(shape: tuple[int, ...], dtype: torch.dtype, seconds: float, quick: bool) -> dict:
    """All competitors, forward and with the backward."""
    torch.manual_seed(0)
    # the paper's eleventh DeiT-small layer: all terms are active
    coefs, knots = multimax.from_paper(*multimax.presets["deit_small"][10])
    x = torch.randn(shape).to(dtype)
    grad = torch.randn(shape).to(dtype)
    leaves = [t.requires_grad_() for t in (x, coefs, knots)]

    torch._dynamo.reset()  # else the compiler gives up after a few shapes, and plain PyTorch is timed instead
    functions = competitors(quick)
    calls = {}
    for name, function in functions.items():
        calls |= measuring.passes(name, lambda function=function: function(*leaves), leaves, grad)

    @torch.no_grad()
    def checked(name: str) -> None:
        check(name, functions[name], *leaves)

    figures = measuring.compare(calls, seconds, TORCH, [KERNEL], [COMPILED], memory=BACKWARD, check=checked)
    for row in figures["rows"]:
        row["bytes"] = {FORWARD: 2, BACKWARD: 5}[row["pass"]] * x.numel() * x.element_size()
    return figures


if __name__ == "__main__":
    measuring.main("rows", __doc__, 3.0, CASES, measure)
