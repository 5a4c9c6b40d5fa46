"""Times the other reweighting functions, forward and backward, against torch.softmax and the entmax package.

    python benchmarks/reweighting.py                      everything: about two minutes
    python benchmarks/reweighting.py --quick              without the entmax package
    python benchmarks/reweighting.py --table FILE.json    print the table of a saved run
    python benchmarks/reweighting.py --readme FILE.json   put it into the README

float32. The entmax package's functions are called with their defaults: exact by sorting for sparsemax and entmax15, by
bisection for any other alpha. Every competitor is checked against the float64 reference, gradient included, before it
is timed. All take their turns in one interleaved run; the ratio is taken round by round.
"""

import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import measuring
from multimax import reweighting

SHAPES = [(8192, 1000), (4, 12, 256, 256)]
RESULTS = Path(__file__).parent / "results" / "reweighting.json"
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


def competitors(quick: bool) -> dict[str, Function]:
    """Names and functions of x; the first is what all are compared with."""
    functions: dict[str, Function] = {TORCH: lambda x: torch.softmax(x, -1), **OURS}
    if not quick:
        import entmax

        functions |= {
            "sparsemax" + PACKAGE: lambda x: entmax.sparsemax(x, -1),
            "entmax15" + PACKAGE: lambda x: entmax.entmax15(x, -1),
            "entmax, alpha 1.3" + PACKAGE: lambda x: entmax.entmax_bisect(x, 1.3, -1),
        }
    return functions


def check(name: str, function: Function, x: Tensor, grad: Tensor) -> None:
    """Refuses to time what is wrong, in the weights or in the gradient."""
    sample = x.detach().reshape(-1, x.shape[-1])[:8].clone().requires_grad_()
    grad = grad.reshape(-1, x.shape[-1])[:8]
    exact = sample.detach().double().requires_grad_()
    weights = function(sample)
    ours = OURS.get(name.removesuffix(PACKAGE))
    expected = torch.softmax(exact, -1) if ours is None else ours(exact, impl="reference")
    weights.backward(grad)
    expected.backward(grad.double())
    pairs = ((weights, expected), (sample.grad, exact.grad))
    error = max((a.detach().double() - b.detach()).abs().max().item() for a, b in pairs)
    if not error <= 1e-4:
        raise AssertionError(f"{name} is off by {error} on {tuple(x.shape)}")


def measure(shape: tuple[int, ...], seconds: float, quick: bool) -> list[dict]:
    """One row per competitor."""
    torch.manual_seed(0)
    x, grad = torch.randn(shape).requires_grad_(), torch.randn(shape)

    def run(function: Function) -> None:
        x.grad = None
        function(x).backward(grad)

    functions = competitors(quick)
    for name, function in functions.items():
        check(name, function, x, grad)
        run(function)
    calls = {name: (lambda function=function: run(function)) for name, function in functions.items()}
    times, _ = measuring.interleaved(calls, seconds, rounds=9)
    rows = []
    for name, values in times.items():
        row = {"name": name, "shape": list(shape), "ms": statistics.median(values) * 1e3, "rounds": len(values)}
        row["ratio"] = statistics.median(time / soft for time, soft in zip(values, times[TORCH], strict=False))
        other = times.get(name + PACKAGE)
        if other:
            row["package_ratio"] = statistics.median(b / a for a, b in zip(values, other, strict=False))
        rows.append(row)
    return rows


def table(run: dict) -> str:
    """A saved run as Markdown."""
    about = run["machine"]
    shapes = list(dict.fromkeys(tuple(row["shape"]) for row in run["rows"]))
    lines = [
        f"{about['cpu']}, {about['threads']} threads, {about['isa']} kernels, torch {about['torch']}, {about['date']}.",
        "",
        "| float32, forward+backward | " + " | ".join(str(shape) for shape in shapes) + " |",
        "|---|" + "---|" * len(shapes),
    ]
    for name in dict.fromkeys(row["name"] for row in run["rows"]):
        cells = []
        for row in (row for row in run["rows"] if row["name"] == name):
            faster = f", entmax package {row['package_ratio']:.0f} times as long" if "package_ratio" in row else ""
            cells.append(f"{row['ms']:.1f} ms ({row['ratio']:.2f}x{faster})")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """The command line."""
    options = measuring.command_line(__doc__, RESULTS, 5.0).parse_args()
    if not measuring.begin(options, "reweighting benchmark", table):
        return
    measuring.measured(options, [(shape,) for shape in SHAPES], measure, table)


if __name__ == "__main__":
    main()
