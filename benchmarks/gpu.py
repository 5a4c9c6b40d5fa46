"""Times all operations on a GPU against torch's for softmax and against FlexAttention, interleaved.

    python benchmarks/gpu.py                         everything: about half an hour
    python benchmarks/gpu.py --quick                 bfloat16 and head size 64 only: a few minutes
    python benchmarks/gpu.py --only rows decode      some of attention, decode, varlen, rows, loss
    python benchmarks/gpu.py --table FILE.json       print the tables of a saved run

Times are medians by the device's own clock; the ratio is to the first competitor of its table, torch's own for softmax.
MultiMax is timed with the parameters of the paper's eleventh DeiT-small layer (order 2), and with their first terms
(order 1); its backward gives gradients to the parameters, too. FlexAttention is compiled with the same function of the
scores, whose numbers it takes as constants. SDPA comes as torch chooses, and with each of its backends. What does
not work, and what needs more memory than there is, is shown as "-". Results are compared with the float64 reference
before anything is timed, in the first head. Memory is the peak above the inputs, results and gradients included.
"""

import argparse
import datetime
import json
import platform
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from tqdm import tqdm

import multimax
from multimax.cli.checking import speed
from multimax.cli.checking.compare import first_line
from multimax.ops.gpu import guard

RESULTS = Path(__file__).parent / "results" / "gpu.json"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
TOKENS = 16384  # of all sequences of a batch, as the length grows
MODEL = 1024  # heads x head size
CACHES = (1024, 4096, 16384, 65536)
ROWS = ((65536, 197), (16384, 1024), (4096, 32000), (512, 128256))
LOSSES = ((4096, 1024, 32000), (4096, 1024, 128256))
BACKENDS = {
    "SDPA, flash": SDPBackend.FLASH_ATTENTION,
    "SDPA, efficient": SDPBackend.EFFICIENT_ATTENTION,
    "SDPA, cuDNN": SDPBackend.CUDNN_ATTENTION,
    "SDPA, math": SDPBackend.MATH,
}
SDPA, FLEX = "SDPA (softmax)", "FlexAttention, order 2"
MULTIMAX = {"multimax, order 1": 1, "multimax, order 2": 2}
MATRIX = 2**31  # bytes of scores: beyond, SDPA's math backend is left out
TOLERANCE = {torch.float32: 5e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}  # float32 may be TF32
Function = Callable[[], Tensor]


class Bench:
    """Where and how long, and the rows so far."""

    def __init__(self, device: torch.device, impl: str, seconds: float) -> None:
        self.device, self.impl, self.seconds = device, impl, seconds
        coefs, knots = (t.detach() for t in speed.parameters(device))
        self.parameters = {n: [t[:n].clone().requires_grad_() for t in (coefs, knots)] for n in (1, 2)}
        self.rows: list[dict] = []

    def normal(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Random numbers that get a gradient."""
        return torch.randn(shape, device=self.device, dtype=dtype).requires_grad_()

    def measure(self, what: dict, functions: dict[str, Function], leaves: list[Tensor], backward: bool) -> None:
        """Times those that work, and adds one row for each function."""
        calls, memory, failed = {}, {}, {}
        for name, function in functions.items():
            call = speed.passes(function, [*leaves, *self.parameters[1], *self.parameters[2]], backward)
            try:
                call()
                memory[name] = speed.peak(call, self.device)
            except Exception as error:
                failed[name] = first_line(error)
                continue
            calls[name] = call
        times = speed.timed(calls, self.device, self.seconds) if calls else {}
        base = times.get(next(iter(functions)))
        for name in functions:
            ms = times.get(name)
            row = {**what, "pass": "forward+backward" if backward else "forward", "name": name, "ms": ms}
            row |= {"ratio": ms / base if ms and base else None, "peak_bytes": memory.get(name)}
            self.rows.append(row | ({"error": failed[name]} if name in failed else {}))


def check(name: str, result: Tensor, exact: Tensor) -> None:
    """Refuses to time what is wrong."""
    error = ((result.double() - exact).norm() / exact.norm()).item()
    if not error <= TOLERANCE[result.dtype]:
        raise AssertionError(f"{name} is off by {error:.3g} (relative) in {result.dtype}")


def _with_backend(backend: SDPBackend, function: Function) -> Tensor:
    with sdpa_kernel(backend):
        return function()


def attention(bench: Bench, length: int, width: int, dtype: torch.dtype, causal: bool) -> None:
    """Forward, and forward and backward."""
    heads = MODEL // width
    shape = (max(TOKENS // length, 1), heads, length, width)
    query, key, value = leaves = [bench.normal(*shape, dtype=dtype) for _ in range(3)]
    sdpa = partial(F.scaled_dot_product_attention, query, key, value, is_causal=causal)
    functions: dict[str, Function] = {SDPA: sdpa}
    for name, backend in BACKENDS.items():
        if backend != SDPBackend.MATH or shape[0] * heads * length**2 * 4 <= MATRIX:
            functions[name] = partial(_with_backend, backend, sdpa)
    for name, order in MULTIMAX.items():
        params = bench.parameters[order]
        functions[name] = partial(
            multimax.multimax_attention, query, key, value, *params, is_causal=causal, impl=bench.impl
        )
    try:
        functions[FLEX] = partial(speed.flex(*bench.parameters[2], length, causal, bench.device), query, key, value)
    except Exception as error:
        print(f"FlexAttention is left out: {first_line(error)}", file=sys.stderr)
    if length <= 4096:
        first = [t.detach()[:1, :1].double() for t in leaves]
        with torch.no_grad():
            for name in (*MULTIMAX, FLEX):
                params = [p.double() for p in bench.parameters[MULTIMAX.get(name, 2)]]
                exact = multimax.multimax_attention(*first, *params, is_causal=causal, impl="reference")
                try:
                    result = functions[name]()
                except Exception:
                    continue  # measure() will say so
                check(name, result[:1, :1], exact)
    for backward in (False, True):
        what = {"group": "attention", "shape": list(shape), "dtype": _short(dtype), "causal": causal}
        bench.measure(what, functions, leaves, backward)


def decode(bench: Bench, keys: int, dtype: torch.dtype) -> None:
    """One query for each of 8 sequences, 32 heads that share 8 key heads."""
    query = bench.normal(8, 32, 1, 128, dtype=dtype)
    key, value = (bench.normal(8, 8, keys, 128, dtype=dtype) for _ in range(2))
    functions: dict[str, Function] = {SDPA: partial(F.scaled_dot_product_attention, query, key, value, enable_gqa=True)}
    for name, order in MULTIMAX.items():
        functions[name] = partial(
            multimax.multimax_attention,
            *(query, key, value, *bench.parameters[order]),
            window=(None, 0),
            enable_gqa=True,
            impl=bench.impl,
        )
    what = {"group": "decode", "shape": [8, 32, 1, keys, 128], "dtype": _short(dtype), "causal": False}
    bench.measure(what, functions, [query, key, value], False)


def varlen(bench: Bench, longest: int, dtype: torch.dtype) -> None:
    """Sixteen sequences of 1/16 to 16/16 of the longest, packed; torch's varlen, and SDPA on padded ones."""
    lengths = [longest * (i + 1) // 16 for i in range(16)]
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=bench.device)
    leaves = [bench.normal(sum(lengths), 16, 64, dtype=dtype) for _ in range(3)]
    padded = [bench.normal(16, 16, longest, 64, dtype=dtype) for _ in range(3)]
    functions: dict[str, Function] = {
        "SDPA, padded (softmax)": partial(F.scaled_dot_product_attention, *padded, is_causal=True)
    }
    try:
        from torch.nn.attention.varlen import varlen_attn

        functions["varlen_attn (softmax)"] = partial(
            varlen_attn, *leaves, starts, starts, longest, longest, window_size=(-1, 0)
        )
    except ImportError:
        pass  # an older torch
    for name, order in MULTIMAX.items():
        functions[name] = partial(
            multimax.multimax_attention_varlen,
            *(*leaves, *bench.parameters[order], starts, starts),
            is_causal=True,
            impl=bench.impl,
        )
    what = {"group": "varlen", "shape": [sum(lengths), 16, longest, 64], "dtype": _short(dtype), "causal": True}
    for backward in (False, True):
        bench.measure(what, functions, [*leaves, *padded], backward)


def rows(bench: Bench, shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Weights along the last dim."""
    x = bench.normal(*shape, dtype=dtype)
    functions: dict[str, Function] = {"torch.softmax": partial(torch.softmax, x, -1)}
    for name, order in MULTIMAX.items():
        functions[name] = partial(multimax.multimax, x, *bench.parameters[order], impl=bench.impl)
        sample = x.detach()[:8]
        exact = multimax.multimax(sample.double(), *(p.double() for p in bench.parameters[order]), impl="reference")
        try:
            result = functions[name]()
        except Exception:
            continue
        check(name, result.detach()[:8], exact.detach())
    for backward in (False, True):
        what = {"group": "rows", "shape": list(shape), "dtype": _short(dtype), "causal": False}
        bench.measure(what, functions, [x], backward)


def loss(bench: Bench, sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    """The loss of a linear layer's logits, forward and backward."""
    tokens, width, classes = sizes
    hidden, weight = bench.normal(tokens, width, dtype=dtype), bench.normal(classes, width, dtype=dtype)
    target = torch.randint(classes, (tokens,), device=bench.device)
    functions: dict[str, Function] = {
        "F.linear, F.cross_entropy": lambda: F.cross_entropy(F.linear(hidden, weight), target)
    }
    if hasattr(F, "linear_cross_entropy"):
        functions["F.linear_cross_entropy"] = partial(F.linear_cross_entropy, hidden, weight, target)
    for name, order in MULTIMAX.items():
        functions[name] = partial(
            multimax.linear_multimax_cross_entropy, hidden, weight, target, *bench.parameters[order], impl=bench.impl
        )
    what = {"group": "loss", "shape": list(sizes), "dtype": _short(dtype), "causal": False}
    bench.measure(what, functions, [hidden, weight], True)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def cases(bench: Bench, quick: bool, longest: int, only: list[str] | None) -> list[Callable[[], None]]:
    """Everything to measure."""
    dtypes = [torch.bfloat16] if quick else list(DTYPES.values())
    lengths = [length for length in LENGTHS if length <= longest]
    found: dict[str, list[Callable[[], None]]] = {
        "attention": [
            partial(attention, bench, length, width, dtype, causal)
            for dtype in dtypes
            for width in ((64,) if quick else (64, 128))
            for length in lengths
            for causal in (False, True)
        ],
        "decode": [partial(decode, bench, keys, dtype) for dtype in dtypes for keys in CACHES if keys <= 4 * longest],
        "varlen": [partial(varlen, bench, n, dtype) for dtype in dtypes for n in (1024, 4096) if n <= longest],
        "rows": [partial(rows, bench, shape, dtype) for dtype in dtypes for shape in ROWS],
        "loss": [partial(loss, bench, sizes, dtype) for dtype in dtypes for sizes in LOSSES],
    }
    return [case for name, of_name in found.items() if not only or name in only for case in of_name]


def machine(device: torch.device, impl: str) -> dict:
    """What the figures were taken on."""
    module = getattr(torch, device.type, None)
    name = module.get_device_name(device) if module and hasattr(module, "get_device_name") else platform.processor()
    try:
        import triton

        version = triton.__version__
    except ImportError:
        version = None
    return {
        "device": f"{device.type}, {name}",
        "capability": list(torch.cuda.get_device_capability(device)) if device.type == "cuda" else None,
        "cuda": torch.version.cuda or torch.version.hip,
        "torch": torch.__version__,
        "triton": version,
        "multimax": multimax.__version__,
        "impl": impl,
        "tf32": torch.backends.cuda.matmul.allow_tf32,
        "date": datetime.date.today().isoformat(),
    }


def table(run: dict) -> str:
    """A saved run as Markdown: one table for each operation, dtype and pass, with time, ratio and memory."""
    about = run["machine"]
    lines = [
        f"{about['device']}, torch {about['torch']}, Triton {about['triton']}, {about['date']}. Milliseconds, the "
        "ratio to the first row, and memory at the peak.",
        "",
    ]
    for key in dict.fromkeys((row["group"], row["dtype"], row["pass"]) for row in run["rows"]):
        of_key = [row for row in run["rows"] if (row["group"], row["dtype"], row["pass"]) == key]
        columns = list(dict.fromkeys((tuple(row["shape"]), row["causal"]) for row in of_key))
        heads = [f"{shape}{', causal' if causal else ''}" for shape, causal in columns]
        lines += [f"| {', '.join(key)} | " + " | ".join(heads) + " |", "|---|" + "---|" * len(heads)]
        for name in dict.fromkeys(row["name"] for row in of_key):
            found = {(tuple(row["shape"]), row["causal"]): row for row in of_key if row["name"] == name}
            lines.append(f"| {name} | " + " | ".join(_cell(found.get(column)) for column in columns) + " |")
        lines.append("")
    return "\n".join(lines).strip()


def _cell(row: dict | None) -> str:
    if row is None or row["ms"] is None:
        return "-"
    ratio = "" if row["ratio"] is None else f" ({row['ratio']:.2f}x)"
    memory = "" if row["peak_bytes"] is None else f", {row['peak_bytes'] / 2**20:.0f} MiB"
    return f"{row['ms']:.3f}{ratio}{memory}"


def main() -> int:
    """The command line; 1 where there is nothing to measure on."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", help="cuda, or xpu where that is all there is; cpu only to try this program")
    parser.add_argument("--impl", default="auto", help="of MultiMax; auto, which takes Triton on a GPU, unless given")
    parser.add_argument("--quick", action="store_true", help="bfloat16 and head size 64 only")
    parser.add_argument("--seconds", type=float, default=0.3, help="time for each function of a case (default 0.3)")
    parser.add_argument("--longest", type=int, default=LENGTHS[-1], help="leave out longer sequences")
    parser.add_argument("--only", nargs="+", choices=("attention", "decode", "varlen", "rows", "loss"))
    parser.add_argument("--out", type=Path, default=RESULTS, help="where to save the figures as JSON")
    parser.add_argument("--table", type=Path, metavar="FILE", help="print the tables of a saved run and stop")
    options = parser.parse_args()
    if options.table:
        print(table(json.loads(options.table.read_text())))
        return 0
    name = options.device or ("cuda" if torch.cuda.is_available() else "xpu" if torch.xpu.is_available() else None)
    if name is None:
        print(
            f"expected a GPU, got none that torch {torch.__version__} can use; the CPU has benchmarks of its own: "
            "rows.py, attention.py, loss.py",
            file=sys.stderr,
        )
        return 1
    device = torch.device(name)
    bench = Bench(device, options.impl, options.seconds)
    run = {"machine": machine(device, options.impl), "rows": bench.rows}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for case in tqdm(cases(bench, options.quick, options.longest, options.only), unit="case"):
        torch.manual_seed(0)
        try:
            with guard(device):  # events are recorded on the current device
                case()
        except torch.OutOfMemoryError as error:  # of the inputs themselves
            print(f"left out: {case.args[1:]}: {str(error).splitlines()[0]}", file=sys.stderr)
        options.out.write_text(json.dumps(run, indent=1) + "\n")
    print(table(run))
    print(f"\nsaved to {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
