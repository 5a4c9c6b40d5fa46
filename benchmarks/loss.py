"""Times the fused output loss, forward and backward, against torch's losses for softmax, interleaved.

    python benchmarks/loss.py                      everything: about ten minutes
    python benchmarks/loss.py --quick              torch's fused losses and the kernel only
    python benchmarks/loss.py --table FILE.json    print the table of a saved run
    python benchmarks/loss.py --readme FILE.json   put it into the README

2048 tokens of 512 entries. torch's F.linear_cross_entropy comes three times: with its defaults (it then holds the
logits), with its default options for chunks, and with the chunks that ours takes. cut-cross-entropy
(its form for torch.compile; `pip install cut-cross-entropy`, which needs Triton) is left out where it is not
installed. Every competitor is checked against the float64 reference before it is timed. Memory is the peak of the
process above its state before the call, gradients included.
"""

import importlib.util
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import LinearCrossEntropyOptions

import measuring
import multimax

TOKENS, WIDTH = 2048, 512
CLASSES = (32000, 128256)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
RESULTS = Path(__file__).parent / "results" / "loss.json"
TORCH, CHUNKED, SAME_CHUNKS = "F.linear_cross_entropy", "the same, in its chunks", "the same, in our chunks"
KERNEL = "linear_multimax_cross_entropy"
LOGITS, LOGITS_MULTIMAX = "F.linear, F.cross_entropy", "F.linear, multimax_cross_entropy"
CCE = "cut-cross-entropy, torch.compile"
SOFTMAX = (TORCH, CHUNKED, SAME_CHUNKS, LOGITS, CCE)
Function = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def competitors(quick: bool) -> dict[str, Function]:
    """Names and functions of hidden states, weight, target, coefs and knots; all are compared with the first."""
    ours = LinearCrossEntropyOptions(batch_chunk_size=WIDTH // 2, chunking_method=None)
    functions: dict[str, Function] = {
        TORCH: lambda h, w, y, c, k: F.linear_cross_entropy(h, w, y),
        CHUNKED: lambda h, w, y, c, k: F.linear_cross_entropy(h, w, y, options=LinearCrossEntropyOptions()),
        SAME_CHUNKS: lambda h, w, y, c, k: F.linear_cross_entropy(h, w, y, options=ours),
        KERNEL: lambda h, w, y, c, k: multimax.linear_multimax_cross_entropy(h, w, y, c, k, impl="cpu"),
    }
    if quick:
        return functions
    functions[LOGITS] = lambda h, w, y, c, k: F.cross_entropy(F.linear(h, w), y)
    functions[LOGITS_MULTIMAX] = lambda h, w, y, c, k: multimax.multimax_cross_entropy(F.linear(h, w), y, c, k)
    if importlib.util.find_spec("cut_cross_entropy"):
        from cut_cross_entropy import linear_cross_entropy

        functions[CCE] = lambda h, w, y, c, k: linear_cross_entropy(h, w, y, impl="torch_compile")
    else:
        print(f"{CCE} is not installed and is left out: pip install cut-cross-entropy")
    return functions


def check(name: str, function: Function, tensors: list[Tensor], target: Tensor) -> None:
    """Refuses to time what is wrong, in the loss of the first rows or in a gradient."""
    dtype, target = tensors[0].dtype, target[:64]
    given = [t.detach()[:64] if i == 0 else t.detach() for i, t in enumerate(tensors)]
    exact_given = [t.double().requires_grad_() for t in given]
    given = [t.requires_grad_() for t in given]
    hidden, linear_weight, coefs, knots = exact_given
    coefs = torch.zeros_like(coefs) if name in SOFTMAX else coefs
    exact = multimax.multimax_cross_entropy(F.linear(hidden, linear_weight), target, coefs, knots, impl="reference")
    loss = function(given[0], given[1], target, *given[2:])
    count = 2 if name in SOFTMAX else 4
    pairs = [(loss, exact)]
    pairs += zip(torch.autograd.grad(loss, given[:count]), torch.autograd.grad(exact, exact_given[:count]), strict=True)
    errors = [((a.double() - b).norm() / b.norm()).item() for a, b in pairs]
    if not max(errors) <= (0.03 if dtype == torch.bfloat16 else 1e-4):
        raise AssertionError(f"{name} is off by {errors} in the loss and its gradients, {dtype}")


def measure(classes: int, dtype: torch.dtype, tokens: int, seconds: float, quick: bool) -> list[dict]:
    """One row per competitor."""
    torch.manual_seed(0)
    coefs, knots = multimax.from_paper(*multimax.presets["wikitext103_lm"][5])
    tensors = [torch.randn(tokens, WIDTH).to(dtype), (torch.randn(classes, WIDTH) / 20).to(dtype), coefs, knots]
    for tensor in tensors:
        tensor.requires_grad_()
    hidden, linear_weight = tensors[:2]
    target = torch.randint(classes, (tokens,))

    def run(function: Function) -> None:
        for tensor in tensors:
            tensor.grad = None
        function(hidden, linear_weight, target, coefs, knots).backward()

    torch._dynamo.reset()
    functions = competitors(quick)
    memory = {}
    for name, function in functions.items():
        check(name, function, tensors, target)
        run(function)
        for tensor in tensors:
            tensor.grad = None
        memory[name] = measuring.peak_memory(lambda function=function: run(function))
    calls = {name: (lambda function=function: run(function)) for name, function in functions.items()}
    times, _ = measuring.interleaved(calls, seconds, rounds=3, slow=[CHUNKED, LOGITS, LOGITS_MULTIMAX, CCE])
    rows = []
    for name, values in times.items():
        ratio = statistics.median(time / soft for time, soft in zip(values, times[TORCH], strict=False))
        rows.append(
            {
                "name": name,
                "classes": classes,
                "tokens": tokens,
                "dtype": str(dtype).removeprefix("torch."),
                "ms": statistics.median(values) * 1e3,
                "rounds": len(values),
                "ratio": ratio,
                "peak_bytes": memory[name],
            }
        )
    return rows


def table(run: dict) -> str:
    """A saved run as Markdown."""
    about = run["machine"]
    cases = list(dict.fromkeys((row["dtype"], row["classes"]) for row in run["rows"]))
    lines = [
        f"{about['cpu']}, {about['threads']} threads, {about['isa']} kernels, torch {about['torch']}, {about['date']}.",
        "",
        "| forward+backward | " + " | ".join(f"{dtype}, {classes} classes" for dtype, classes in cases) + " |",
        "|---|" + "---|" * len(cases),
    ]
    for name in dict.fromkeys(row["name"] for row in run["rows"]):
        cells = []
        for case in cases:
            of_case = [row for row in run["rows"] if (row["dtype"], row["classes"]) == case and row["name"] == name]
            if not of_case:
                cells.append("")
                continue
            row = of_case[0]
            memory = "" if row["peak_bytes"] is None else f", {row['peak_bytes'] / 2**20:.0f} MiB"
            cells.append(f"{row['ms']:.0f} ms ({row['ratio']:.2f}x){memory}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """The command line."""
    options = measuring.command_line(__doc__, RESULTS, 5.0).parse_args()
    if not measuring.begin(options, "loss benchmark", table):
        return
    cases = [(classes, dtype, TOKENS) for dtype in DTYPES.values() for classes in CLASSES]
    measuring.measured(options, cases, measure, table)


if __name__ == "__main__":
    main()
