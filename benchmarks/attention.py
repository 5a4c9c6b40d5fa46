"""Times MultiMax attention against torch's softmax attention and other ways to use a score function, interleaved.

    python benchmarks/attention.py                      everything: about half an hour
    python benchmarks/attention.py --quick              torch's attention and the kernel only: about ten minutes
    python benchmarks/attention.py --resume             continue a run that was stopped
    python benchmarks/attention.py --tiles              what skipping tiles saves with the paper's parameters
    python benchmarks/attention.py --table FILE.json    print the table of a saved run
    python benchmarks/attention.py --readme FILE.json   put it into the README

Every competitor is checked against the float64 reference before it is timed, except where that would not fit into
memory. Competitors that hold the score matrix are left out where it alone would take over 2
GB. Memory is the peak of the
process above its state before the call, results included.
"""

import json
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

import measuring
import multimax
from multimax.ops.rows import reference

SHAPES = [(8, 6, 197, 64), (2, 12, 1024, 64), (1, 8, 4096, 64), (1, 8, 16384, 64)]
DECODE = (4, 12, 4096, 64)  # one query each against a cache of that length
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
RESULTS = Path(__file__).parent / "results" / "attention.json"
TORCH, KERNEL = "torch SDPA (softmax)", "multimax (kernel)"
MATRIX = ("reference, eager", "reference, torch.compile", "entmax15 (entmax)")
Function = Callable[..., Tensor]


def _reference(query: Tensor, key: Tensor, value: Tensor, coefs: Tensor, knots: Tensor, causal: bool) -> Tensor:
    """Attention as people write it."""
    scores = (query * query.shape[-1] ** -0.5) @ key.transpose(-1, -2)
    mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril() if causal else None
    return reference.multimax(scores, coefs, knots, mask=mask) @ value


def _entmax(query: Tensor, key: Tensor, value: Tensor, coefs: Tensor, knots: Tensor, causal: bool) -> Tensor:
    from entmax import entmax15

    scores = (query * query.shape[-1] ** -0.5) @ key.transpose(-1, -2)
    if causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -1e4)
    return entmax15(scores.float(), -1).to(value.dtype) @ value


def _flex(query: Tensor, key: Tensor, value: Tensor, coefs: Tensor, knots: Tensor, causal: bool) -> Tensor:
    """FlexAttention with sigma as its score function."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    c, e, b, d = (t.tolist() for t in (*coefs.unbind(-1), *knots.unbind(-1)))

    def sigma(x: Tensor, *_: Tensor) -> Tensor:
        lower, upper = (torch.relu(b[n] - x) for n in range(2)), (torch.relu(x - d[n]) for n in range(2))
        return (
            x
            + sum(c[n] * u ** (n + 1) for n, u in enumerate(lower))
            + sum(e[n] * v ** (n + 1) for n, v in enumerate(upper))
        )

    mask = None
    if causal:
        length = query.shape[-2]
        mask = create_block_mask(lambda _b, _h, i, j: i >= j, None, None, length, length, device="cpu")
    compiled = torch.compile(flex_attention, dynamic=False)
    return compiled(query, key, value, score_mod=sigma, block_mask=mask)


def competitors(quick: bool, backward: bool, matrix: bool) -> dict[str, Function]:
    """Names and functions of query, key, value, coefs, knots and causal; the first is what all are compared with."""
    functions: dict[str, Function] = {
        TORCH: lambda q, k, v, coefs, knots, causal: F.scaled_dot_product_attention(q, k, v, is_causal=causal),
        KERNEL: lambda q, k, v, coefs, knots, causal: multimax.multimax_attention(
            q, k, v, coefs, knots, is_causal=causal, impl="cpu"
        ),
    }
    if quick:
        return functions
    functions["multimax, zero coefs"] = lambda q, k, v, coefs, knots, causal: multimax.multimax_attention(
        q, k, v, torch.zeros_like(coefs), knots, is_causal=causal, impl="cpu"
    )
    if matrix:
        functions |= dict(zip(MATRIX, (_reference, torch.compile(_reference, dynamic=False), _entmax), strict=True))
    if not backward:  # it has none on a CPU
        functions["FlexAttention"] = _flex
    return functions


def check(name: str, function: Function, tensors: list[Tensor], causal: bool) -> None:
    """Refuses to time what is wrong."""
    query, key, value, *params = (t.detach() for t in tensors)
    if "entmax" in name or query.shape[-2] * key.shape[-2] * query.shape[1] > 2**24:
        return
    sample = [t[:1].double() for t in (query, key, value)]
    exact = _reference(*sample, *(p.double() for p in params), causal)
    if name in (TORCH, "multimax, zero coefs"):
        exact = F.scaled_dot_product_attention(*sample, is_causal=causal)
    with torch.no_grad():
        error = (function(query, key, value, *params, causal)[:1].double() - exact).abs().max().item()
    if not error <= (0.05 if query.dtype == torch.bfloat16 else 1e-4):
        raise AssertionError(f"{name} is off by {error} on {tuple(query.shape)} {query.dtype}")


def measure(
    shape: tuple[int, ...], queries: int, dtype: torch.dtype, causal: bool, backward: bool, seconds: float, quick: bool
) -> list[dict]:
    """One row per competitor."""
    torch.manual_seed(0)
    b, h, length, width = shape
    # the paper's eleventh DeiT-small layer: all terms are active
    coefs, knots = multimax.from_paper(*multimax.presets["deit_small"][10])
    tensors = [torch.randn(b, h, n, width).to(dtype) for n in (queries, length, length)] + [coefs, knots]
    grad = torch.randn(tensors[0].shape).to(dtype)
    if backward:
        for tensor in tensors:
            tensor.requires_grad_()

    def run(function: Function) -> None:
        if not backward:
            with torch.no_grad():
                function(*tensors, causal)
            return
        for tensor in tensors:
            tensor.grad = None
        function(*tensors, causal).backward(grad)

    torch._dynamo.reset()
    functions = competitors(quick or queries == 1, backward, b * h * queries * length * 4 <= 2**31)
    memory = {}
    for name, function in functions.items():
        check(name, function, tensors, causal)
        run(function)
        for tensor in tensors:
            tensor.grad = None
        memory[name] = measuring.peak_memory(lambda function=function: run(function))
    calls = {name: (lambda function=function: run(function)) for name, function in functions.items()}
    times, _ = measuring.interleaved(
        calls, seconds, rounds=2 if length > 8192 else 5, slow=[*MATRIX, "FlexAttention", "multimax, zero coefs"]
    )
    rows = []
    for name, values in times.items():
        ratio = statistics.median(time / soft for time, soft in zip(values, times[TORCH], strict=False))
        rows.append(
            {
                "name": name,
                "shape": [b, h, queries, length, width],
                "dtype": str(dtype).removeprefix("torch."),
                "causal": causal,
                "pass": "forward+backward" if backward else "forward",
                "ms": statistics.median(values) * 1e3,
                "rounds": len(values),
                "ratio": ratio,
                "peak_bytes": memory[name],
            }
        )
    return rows


def tiles(seconds: float) -> None:
    """Time with the paper's learned parameters, as a multiple of the time with zero coefs, layer by layer.

    Once for tokens in no order, where every tile has some large score, and once for the most favourable order: two
    groups of tokens, one after the other, whose scores are about 8 within a group and about -8 across.
    """
    torch.manual_seed(0)
    query, key, value, grad = torch.randn(4, 1, 8, 4096, 64).unbind(0)
    group = (torch.arange(4096) < 2048).float()[:, None] * 2 - 1
    grouped = [0.5 * t + group * torch.eye(64)[0] * 8 for t in (query, key)]
    data = {"no order": (query, key, 0.5), "two groups": (*grouped, 0.125)}
    print("| layer | " + " | ".join(f"{name}, forward | forward+backward" for name in data) + " |\n|---|" + "---|" * 4)
    layers = [("deit_small", n) for n in range(12)] + [("wikitext103_lm", n) for n in range(6)]
    for name, layer in layers:
        coefs, knots = multimax.from_paper(*multimax.presets[name][layer])
        ratios = []
        for q, k, scale in data.values():
            for backward in (False, True):

                def call(coefs: Tensor, q: Tensor = q, k: Tensor = k, scale: float = scale, backward: bool = backward):
                    leaves = [t.detach().requires_grad_(backward) for t in (q, k, value, coefs, knots)]  # noqa: B023
                    out = multimax.multimax_attention(*leaves, scale=scale)
                    if backward:
                        out.backward(grad)

                calls = {"zero": lambda: call(torch.zeros_like(coefs)), "learned": lambda: call(coefs)}  # noqa: B023
                times, _ = measuring.interleaved(calls, seconds, rounds=3)
                ratios.append(statistics.median(b / a for a, b in zip(times["zero"], times["learned"], strict=True)))
        print(f"| {name} {layer + 1} | " + " | ".join(f"{ratio:.2f}x" for ratio in ratios) + " |", flush=True)


def table(run: dict) -> str:
    """A saved run as Markdown."""
    about = run["machine"]
    lines = [
        f"{about['cpu']}, {about['threads']} threads, {about['isa']} kernels, torch {about['torch']}, {about['date']}.",
        "Shapes are (batch, heads, length, head size).",
        "",
    ]
    for dtype in DTYPES:
        for which in ("forward", "forward+backward"):
            rows = [row for row in run["rows"] if (row["dtype"], row["pass"]) == (dtype, which) and row["shape"][2] > 1]
            cases = list(dict.fromkeys((tuple(row["shape"]), row["causal"]) for row in rows))
            if not cases:
                continue
            heads = [f"({s[0]}, {s[1]}, {s[3]}, {s[4]}){', causal' if causal else ''}" for s, causal in cases]
            lines.append(f"| {dtype}, {which} | " + " | ".join(heads) + " |")
            lines.append("|---|" + "---|" * len(cases))
            for name in dict.fromkeys(row["name"] for row in rows):
                cells = []
                for case in cases:
                    of_case = [r for r in rows if r["name"] == name and (tuple(r["shape"]), r["causal"]) == case]
                    cells.append(f"{of_case[0]['ms']:.1f} ms ({of_case[0]['ratio']:.2f}x)" if of_case else "")
                lines.append(f"| {name} | " + " | ".join(cells) + " |")
            lines.append("")
    memory = [r for r in run["rows"] if r["dtype"] == "float32" and r["pass"] == "forward+backward" and not r["causal"]]
    memory = [r for r in memory if r["peak_bytes"] is not None]
    if memory:
        shapes = list(dict.fromkeys(tuple(row["shape"]) for row in memory))
        lines.append("| float32, memory at the peak | " + " | ".join(f"{s[3]} long" for s in shapes) + " |")
        lines.append("|---|" + "---|" * len(shapes))
        for name in dict.fromkeys(row["name"] for row in memory):
            found = {tuple(row["shape"]): row["peak_bytes"] for row in memory if row["name"] == name}
            cells = [f"{found[s] / 2**20:.0f} MiB" if s in found else "" for s in shapes]
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
        lines.append("")
    for row in run["rows"]:
        if row["shape"][2] == 1 and row["name"] == KERNEL:
            b, h, _, keys, width = row["shape"]
            lines.append(
                f"One decode step, {b} x {h} queries of {width} against {keys} keys, {row['dtype']}: "
                f"{row['ms']:.2f} ms ({row['ratio']:.2f}x)."
            )
    return "\n".join(lines).strip()


def main() -> None:
    """The command line."""
    parser = measuring.command_line(__doc__, RESULTS, 2.0)
    parser.add_argument("--longest", type=int, default=SHAPES[-1][2], help="leave out longer sequences")
    parser.add_argument("--resume", action="store_true", help="keep the figures in the file, and measure the rest")
    parser.add_argument("--tiles", action="store_true", help="what skipping tiles saves, layer by layer of the paper")
    options = parser.parse_args()
    if not measuring.begin(options, "attention benchmark", table):
        return
    if options.tiles:
        tiles(options.seconds)
        return
    cases = [
        (shape, shape[2], dtype, causal, backward)
        for shape in SHAPES
        if shape[2] <= options.longest
        for dtype in DTYPES.values()
        for causal in (False, True)
        for backward in (False, True)
    ]
    cases += [(DECODE, 1, dtype, False, False) for dtype in DTYPES.values()]
    run: dict = {"machine": measuring.machine(False), "rows": []}
    if options.resume:
        run = json.loads(options.out.read_text())
    done = {(*row["shape"], row["dtype"], row["causal"], row["pass"]) for row in run["rows"]}
    for case in tqdm(cases, unit="case"):
        (b, h, keys, width), queries, dtype, causal, backward = case
        name = str(dtype).removeprefix("torch.")
        if (b, h, queries, keys, width, name, causal, "forward+backward" if backward else "forward") in done:
            continue
        run["rows"] += measure(*case, options.seconds, options.quick)
        options.out.write_text(json.dumps(run, indent=1) + "\n")
    print(table(run))
    print(f"\nsaved to {options.out}")


if __name__ == "__main__":
    main()
