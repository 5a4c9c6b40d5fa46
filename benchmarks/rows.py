"""Times the row functions against torch.softmax and the other ways to compute MultiMax, in one interleaved run.

    python benchmarks/rows.py                      everything: a few minutes
    python benchmarks/rows.py --quick              softmax and the kernel only, under a minute
    python benchmarks/rows.py --table FILE.json    print the table of a saved run
    python benchmarks/rows.py --readme FILE.json   put it into the README

Every competitor is checked against the float64 reference before it is timed. In each round each competitor makes two
calls, of which the second is timed. The order rotates, so a change in the machine's speed affects all alike. The
median counts, with the quartiles as its spread. GB/s is what softmax has to move (forward 2 tensors, forward and
backward 5) divided by the time. Memory is the peak of the process above its state before the call, without the
results themselves.

The C library returns large results to the system when they are freed, so a call may spend most of its time on fresh
pages; the number of such page faults is saved with the time. With --keep-memory freed memory is kept: there are no page
faults then, and only the work itself differs.
"""

import math
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import measuring
import multimax
from multimax.ops.rows import reference

SHAPES = [(8, 6, 197, 197), (8192, 1000), (512, 32000), (4, 12, 1024, 1024)]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
EAGER = ("reference, eager", "published, torch.jit")
RESULTS = Path(__file__).parent / "results" / "rows.json"
Function = Callable[[Tensor, Tensor, Tensor], Tensor]


@torch.jit.script
def _published(x: Tensor, ranges: Tensor, ts: Tensor) -> Tensor:
    """As in the published code: one scripted expression, then torch's softmax."""
    lower = ts[0] * torch.relu(ranges[0] - x) + ts[2] * torch.relu(ranges[2] - x) ** 2
    upper = ts[1] * torch.relu(x - ranges[1]) + ts[3] * torch.relu(x - ranges[3]) ** 2
    return torch.softmax(x + lower + upper, dim=-1)


def competitors(quick: bool) -> dict[str, Function]:
    """Names and functions of x, coefs and knots; the first is what all are compared with."""
    functions: dict[str, Function] = {
        "torch.softmax": lambda x, coefs, knots: torch.softmax(x, -1),
        "multimax (kernel)": lambda x, coefs, knots: multimax.multimax(x, coefs, knots, impl="cpu"),
    }
    if not quick:
        compiled = torch.compile(reference.multimax, dynamic=False)
        functions |= {
            "reference, eager": lambda x, coefs, knots: multimax.multimax(x, coefs, knots, impl="reference"),
            "published, torch.jit": lambda x, coefs, knots: _published(x, knots.reshape(-1), coefs.reshape(-1)),
            "reference, torch.compile": lambda x, coefs, knots: compiled(x, coefs, knots),
        }
    return functions


def check(name: str, function: Function, x: Tensor, coefs: Tensor, knots: Tensor) -> None:
    """Refuses to time what is wrong."""
    sample = x.reshape(-1, x.shape[-1])[:8]
    expected = multimax.multimax(sample.double(), coefs.double(), knots.double(), impl="reference")
    if name == "torch.softmax":
        expected = torch.softmax(sample.double(), -1)
    error = (function(sample, coefs, knots).double() - expected).abs().max().item()
    tolerance = 0.05 if x.dtype == torch.bfloat16 else 1e-5
    if not error <= tolerance:
        raise AssertionError(f"{name} is off by {error} on {tuple(x.shape)} {x.dtype}")


def measure(shape: tuple[int, ...], dtype: torch.dtype, backward: bool, seconds: float, quick: bool) -> list[dict]:
    """One row per competitor."""
    torch.manual_seed(0)
    # the paper's eleventh DeiT-small layer: all terms are active
    coefs, knots = multimax.from_paper(*multimax.presets["deit_small"][10])
    x = torch.randn(shape).to(dtype)
    grad = torch.randn(shape).to(dtype)
    if backward:
        for tensor in (x, coefs, knots):
            tensor.requires_grad_()

    def run(function: Function) -> None:
        if not backward:
            with torch.no_grad():
                function(x, coefs, knots)
            return
        x.grad = coefs.grad = knots.grad = None
        function(x, coefs, knots).backward(grad)

    torch._dynamo.reset()  # else the compiler gives up after a few shapes, and plain PyTorch is timed instead
    functions = competitors(quick)
    memory = {}
    for name, function in functions.items():
        with torch.no_grad():
            check(name, function, x, coefs, knots)
        run(function)
        x.grad = None
        peak = measuring.peak_memory(lambda function=function: run(function))
        results = (2 if backward else 1) * x.numel() * x.element_size()
        memory[name] = None if peak is None else max(peak - results, 0)
    calls = {name: (lambda function=function: run(function)) for name, function in functions.items()}
    times, faults = measuring.interleaved(calls, seconds, rounds=9, slow=EAGER)
    base = statistics.median(times["torch.softmax"])
    moved = (5 if backward else 2) * x.numel() * x.element_size()
    rows = []
    for name, values in times.items():
        median = statistics.median(values)
        quartiles = statistics.quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3
        # the ratio is taken round by round: both of a pair ran on the machine in the same state
        ratio = statistics.median(time / soft for time, soft in zip(values, times["torch.softmax"], strict=False))
        rows.append(
            {
                "name": name,
                "shape": list(shape),
                "dtype": str(dtype).removeprefix("torch."),
                "pass": "forward+backward" if backward else "forward",
                "ms": median * 1e3,
                "quartiles_ms": [quartiles[0] * 1e3, quartiles[2] * 1e3],
                "rounds": len(values),
                "page_faults": statistics.median_low(faults[name]),
                "ratio": ratio,
                "ratio_of_medians": median / base,
                "gb_per_s": moved / median / 1e9,
                "extra_bytes": memory[name],
            }
        )
    return rows


def table(run: dict) -> str:
    """A saved run as Markdown."""
    about = run["machine"]
    lines = [
        f"{about['cpu']}, {about['threads']} threads, {about['isa']} kernels, torch {about['torch']}, {about['date']}.",
        "",
    ]
    for dtype in DTYPES:
        for which in ("forward", "forward+backward"):
            rows = [row for row in run["rows"] if row["dtype"] == dtype and row["pass"] == which]
            if not rows:
                continue
            shapes = list(dict.fromkeys(tuple(row["shape"]) for row in rows))
            lines.append(f"| {dtype}, {which} | " + " | ".join(str(shape) for shape in shapes) + " | geometric mean |")
            lines.append("|---|" + "---|" * (len(shapes) + 1))
            for name in dict.fromkeys(row["name"] for row in rows):
                of_name = [row for row in rows if row["name"] == name]
                cells = [f"{row['ms']:.2f} ms ({row['ratio']:.2f}x, {row['gb_per_s']:.1f} GB/s)" for row in of_name]
                mean = math.exp(statistics.fmean(math.log(row["ratio"]) for row in of_name))
                lines.append(f"| {name} | " + " | ".join(cells) + f" | {mean:.2f}x |")
            lines.append("")
    rows = [row for row in run["rows"] if row["dtype"] == "float32" and row["pass"] == "forward+backward"]
    if rows and rows[0]["extra_bytes"] is not None:
        shapes = list(dict.fromkeys(tuple(row["shape"]) for row in rows))
        lines.append("| float32, extra memory at the peak | " + " | ".join(str(shape) for shape in shapes) + " |")
        lines.append("|---|" + "---|" * len(shapes))
        for name in dict.fromkeys(row["name"] for row in rows):
            cells = [f"{row['extra_bytes'] / 2**20:.0f} MiB" for row in rows if row["name"] == name]
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines).strip()


def main() -> None:
    """The command line."""
    parser = measuring.command_line(__doc__, RESULTS, 3.0)
    parser.add_argument("--keep-memory", action="store_true", help="keep freed memory: no page faults")
    options = parser.parse_args()
    if not measuring.begin(options, "benchmark", table):
        return
    if options.keep_memory:
        measuring.keep_memory()
    cases = [(shape, dtype, back) for dtype in DTYPES.values() for back in (False, True) for shape in SHAPES]
    measuring.measured(options, cases, measure, table, options.keep_memory)


if __name__ == "__main__":
    main()
