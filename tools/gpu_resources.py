"""What the Triton kernels take of a GPU, from compiling them: registers, spills, shared memory, instructions per score.

No GPU is needed. Operations are called on CPU tensors with `gpu.launch` replaced, so that what is compiled is what
would be launched, in every configuration that the autotuner may choose.

    python tools/gpu_resources.py            prints the table of docs/gpu.md
    python tools/gpu_resources.py --write    and writes it there
"""

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from multimax.ops import gpu

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
SHARED = {
    "sm_80": 163 * 1024,
    "sm_90": 227 * 1024,
    "sm_100": 227 * 1024,
    "gfx942": 64 * 1024,
}  # of one program, at most
BIN = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
TYPES = {
    torch.bool: "i1",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
}


class Launch(NamedTuple):
    """A kernel with the arguments of one launch, in one configuration."""

    kernel: Any  # a JITFunction
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    options: dict[str, Any]

    @property
    def name(self) -> str:
        """Its function's."""
        name: str = self.kernel.fn.__name__
        return name


class Resources(NamedTuple):
    """What a compiled kernel takes."""

    registers: int
    spills: int  # bytes
    shared: int  # bytes
    loop: int  # instructions of its hottest loop, for one thread
    products: int  # of them, matrix products


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Launches are noted instead of made."""
    found: list[Launch] = []

    def launch(kernel: Any, grid: Any, *args: Any, **options: Any) -> None:
        function = kernel
        while not isinstance(function, triton.JITFunction):
            function = function.fn
        for config in getattr(kernel, "configs", [None]):
            given = options | (config.all_kwargs() if config else {})
            named = dict(zip(function.arg_names, args, strict=False))
            named |= {name: value for name, value in given.items() if name in function.arg_names}
            rest = {name: value for name, value in given.items() if name not in function.arg_names}
            found.append(Launch(function, grid(given) if callable(grid) else grid, named, rest))

    before, gpu.launch = gpu.launch, launch  # type: ignore[assignment]
    try:
        yield found
    finally:
        gpu.launch = before


def launches(function: Callable[..., Any], *args: Any) -> list[Launch]:
    """What a call of an operator's implementation would launch."""
    with recorded() as found:
        function(*args)
    return found


def source_of(launch: Launch) -> ASTSource:
    """As Triton specialises it: numbers that are 1 are constants, multiples of 16 are known as such."""
    signature: dict[str, str] = {}
    constants: dict[Any, Any] = {}
    attributes: dict[Any, Any] = {}
    for index, (name, parameter) in enumerate(zip(launch.kernel.arg_names, launch.kernel.params, strict=True)):
        value = launch.arguments[name]
        if parameter.is_constexpr or (isinstance(value, int) and value == 1):
            signature[name] = "constexpr"
            constants[(index,)] = value
        elif isinstance(value, Tensor):
            signature[name] = f"*{TYPES[value.dtype]}"
            if value.data_ptr() % 16 == 0:
                attributes[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0:
                attributes[(index,)] = [["tt.divisibility", 16]]
    return ASTSource(launch.kernel, signature, constants, attributes)


def compiled(launch: Launch, target: str) -> Any:
    """A kernel, compiled for a target."""
    return triton.compile(source_of(launch), target=TARGETS[target], options=launch.options)


def resources(launch: Launch, target: str) -> Resources:
    """What it takes there."""
    kernel = compiled(launch, target)
    if target.startswith("gfx"):
        text = kernel.asm["amdgcn"]

        def number(key: str) -> int:
            return int(re.search(rf"\.{key}:\s+(\d+)", text)[1])

        # scalar registers go to lanes of vector registers, not to memory
        spills = int(re.search(r"; ScratchSize: (\d+)", text)[1])
        loop, products = hottest_loop(_amd_lines(text), "v_mfma")
        return Resources(number("vgpr_count"), spills, kernel.metadata.shared, loop, products)
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(kernel.asm["cubin"])
        sass = _run("nvdisasm", "-c", cubin)
        usage = _run("cuobjdump", "--dump-resource-usage", cubin)
    registers, stack, local = (int(re.search(rf"{key}:(\d+)", usage)[1]) for key in ("REG", "STACK", "LOCAL"))
    loop, products = hottest_loop(_nvidia_lines(sass), r"HMMA|HGMMA|UTCHMMA|UTCQMMA|QGMMA")
    return Resources(registers, stack + local, kernel.metadata.shared, loop, products)


def _run(tool: str, *args: Any) -> str:
    """What one of Triton's own tools prints."""
    return subprocess.run([BIN / tool, *args], capture_output=True, text=True, check=True).stdout


def _nvidia_lines(sass: str) -> list[tuple[str | None, str]]:
    """Labels and instructions of a disassembly, in order."""
    found: list[tuple[str | None, str]] = []
    for line in sass.splitlines():
        if label := re.match(r"\s*(\.L_[\w]+):", line):
            found.append((label[1], ""))
        elif code := re.search(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            found.append((None, code[1]))
    return found


def _amd_lines(text: str) -> list[tuple[str | None, str]]:
    found: list[tuple[str | None, str]] = []
    for line in text.splitlines():
        if label := re.match(r"(\.LBB\w+):", line):
            found.append((label[1], ""))
        elif code := re.match(r"\t([a-z]\w+.*)", line):
            found.append((None, code[1].split(";")[0]))
    return found


def hottest_loop(lines: list[tuple[str | None, str]], product: str) -> tuple[int, int]:
    """Instructions, and matrix products among them, of the innermost loop with the most products per instruction that
    has no edge to look after: the shortest of those with as many products."""
    labels = {label: index for index, (label, _) in enumerate(lines) if label}
    loops = []
    for index, (_, code) in enumerate(lines):
        if re.search(r"\b(BRA|s_cbranch_\w+|s_branch)\b", code):
            target = re.search(r"(\.L_\w+|\.LBB\w+)", code)
            begin = labels.get(target[1]) if target else None
            if begin is not None and begin < index:
                loops.append((begin, index))
    best = (0, 0)
    for begin, end in loops:
        if any(begin <= other and stop <= end and (other, stop) != (begin, end) for other, stop in loops):
            continue
        body = [code for label, code in lines[begin : end + 1] if not label and not code.startswith("NOP")]
        products = sum(bool(re.search(product, code)) for code in body)
        if products and (products > best[1] or (products == best[1] and len(body) < best[0])):
            best = (len(body), products)
    return best


# --- what is compiled

WIDTHS = (64, 128)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LENGTH = 2048


def attention(dtype: torch.dtype, width: int, order: int = 2, **options: Any) -> list[Launch]:
    """Forward and backward of causal attention, in every configuration."""
    from multimax.ops.attention.call import AttentionBackwardCall, AttentionCall
    from multimax.ops.attention.triton import launch

    queries = options.pop("queries", LENGTH)
    query, key = torch.zeros(1, 2, queries, width, dtype=dtype), torch.zeros(1, 2, LENGTH, width, dtype=dtype)
    params = torch.zeros(order, 2)
    fields: dict[str, Any] = dict.fromkeys(("mask", "bias", "query_starts", "key_starts", "seed", "grad_lse"))
    fields |= {"query": query, "key": key, "value": key, "coefs": params, "knots": params}
    fields |= {"dropout_p": 0.0, "scale": 0.125, "causal": False, "left": -1, "right": 0, **options}
    call = AttentionCall(**{name: fields[name] for name in AttentionCall._fields})
    found = launches(launch.forward, *call, True)
    if queries == LENGTH:
        rest = query if dtype != torch.float32 else query.new_empty(0)
        stats = torch.zeros(2, *query.shape[:3])
        fields |= {"grad_out": query, "out": query, "stats": stats, "rest": rest}
        fields |= {"params_grad": order > 0, "bias_grad": fields["bias"] is not None}
        back = AttentionBackwardCall(**{name: fields[name] for name in AttentionBackwardCall._fields})
        found += launches(launch.backward, *back)
    return found


def few_queries(dtype: torch.dtype, width: int) -> list[Launch]:
    """A step of decoding, with the keys split."""
    return attention(dtype, width, queries=1)


def with_bias(dtype: torch.dtype, width: int) -> list[Launch]:
    """What a bias with a gradient takes besides."""
    bias = torch.zeros(1, 2, LENGTH, LENGTH, dtype=dtype)
    return [each for each in attention(dtype, width, bias=bias) if each.name == "of_bias"]


def rows(dtype: torch.dtype, length: int) -> list[Launch]:
    """The row functions."""
    from multimax.ops.rows.call import RowsBackwardCall, RowsCall, saves
    from multimax.ops.rows.triton import launch

    x, params = torch.zeros(64, length, dtype=dtype), torch.zeros(2, 2)
    found = []
    for kind in range(3):
        saved = {"output": x, "stats": torch.zeros(2, 64), None: None}[saves(x, kind)]
        found += launches(launch.forward, *RowsCall(x, params, params, None, 1, kind))
        found += launches(launch.backward, *RowsBackwardCall(x, x, saved, params, params, None, 1, kind, True))
    return found


def loss(dtype: torch.dtype, classes: int) -> list[Launch]:
    """The row part of the losses."""
    from multimax.ops.loss.call import Logits, Setting
    from multimax.ops.loss.triton import launch

    x, params, each = torch.zeros(64, classes, dtype=dtype), torch.zeros(2, 2), torch.zeros(64)
    logits = Logits(x, torch.zeros(64, dtype=torch.int64), params, params, Setting(None, -100, 0.0, "triton", False))
    found = launches(launch.sums, logits)
    return found + launches(launch.gradients, logits, torch.zeros(7, 64), each, each, True, x)


def entmax(dtype: torch.dtype, length: int) -> list[Launch]:
    """Sparsemax, entmax15 and entmax."""
    from multimax.ops.entmax.call import EntmaxBackwardCall, EntmaxCall
    from multimax.ops.entmax.triton import launch

    x, alpha, stats = torch.zeros(64, length, dtype=dtype), torch.zeros(64), torch.zeros(64, 2)
    found = []
    for kind in range(3):
        of_rows = alpha if kind == 2 else None
        found += launches(launch.forward, *EntmaxCall(x, of_rows, None, kind))
        found += launches(launch.backward, *EntmaxBackwardCall(x, x, None, stats, of_rows, None, kind, 0.0, kind == 2))
    return found


OPERATIONS: dict[str, tuple[Callable[..., list[Launch]], tuple[int, ...]]] = {
    "attention": (attention, WIDTHS),
    "few queries": (few_queries, WIDTHS),
    "bias": (with_bias, WIDTHS),
    "rows": (rows, (197, 32000)),
    "loss": (loss, (32000,)),
    "entmax": (entmax, (197, 32000)),
}


@contextmanager
def configured_for(target: str) -> Iterator[None]:
    """The configurations, and the products of float32, of that target's vendor."""
    from multimax.ops.attention.triton import launch

    before, gpu.AMD = gpu.AMD, target.startswith("gfx")
    launch.tuned.cache_clear()
    try:
        yield
    finally:
        gpu.AMD = before
        launch.tuned.cache_clear()


def per_score(launch: Launch, target: str, instructions: int) -> float:
    """Instructions of one thread for each score that it handles."""
    tile = launch.arguments["BLOCK_M"] * launch.arguments["BLOCK_N"]
    return instructions * launch.options["num_warps"] * TARGETS[target].warp_size / tile


# --- the tables

DOCUMENT = Path(__file__).parents[1] / "docs" / "gpu.md"
KERNELS = ("forward", "of_query", "of_key")


def resource_table() -> str:
    """Of attention's kernels, in the configuration that is taken first."""
    lines = ["| kernel | dtype | head | " + " | ".join(TARGETS) + " |", "|---|---|---|" + "---|" * len(TARGETS)]
    for dtype in (torch.bfloat16, torch.float32):
        for width in WIDTHS:
            cells: dict[str, list[str]] = {name: [] for name in KERNELS}
            for target in TARGETS:
                with configured_for(target):
                    first: dict[str, Launch] = {}
                    for launch in attention(dtype, width):
                        first.setdefault(launch.name, launch)
                for name in KERNELS:
                    used = resources(first[name], target)
                    arguments = first[name].arguments
                    cells[name].append(
                        f"{arguments['BLOCK_M']}x{arguments['BLOCK_N']}: {used.registers} registers, "
                        f"{used.shared // 1024} KiB, {per_score(first[name], target, used.loop):.1f}"
                    )
                    assert not used.spills, (name, dtype, width, target)
            lines += [
                f"| {name} | {str(dtype).removeprefix('torch.')} | {width} | {' | '.join(row)} |"
                for name, row in cells.items()
            ]
    return "\n".join(lines)


def ratio_table() -> str:
    """Instructions per score against those of softmax: the same kernels without sigma."""
    lines = [
        "| target | forward: softmax | order 1 | order 2 | backward: softmax | order 1 | order 2 |",
        "|---|---|---|---|---|---|---|",
    ]
    for target in ("sm_80", "sm_90", "sm_100"):
        forward, backward = [], []
        with configured_for(target):
            for order in range(3):
                counts: dict[str, float] = {}
                for launch in attention(torch.bfloat16, 64, order):
                    if launch.name in KERNELS and launch.name not in counts:
                        counts[launch.name] = per_score(launch, target, resources(launch, target).loop)
                forward.append(counts["forward"])
                backward.append(counts["of_query"] + counts["of_key"])
        cells = [
            f"{value:.1f}" if i == 0 else f"{value:.1f} ({value / of[0]:.2f})"
            for of in (forward, backward)
            for i, value in enumerate(of)
        ]
        lines.append(f"| {target} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Prints the tables, or writes them to the document."""
    import sys

    tables = {"resources": resource_table(), "ratios": ratio_table()}
    text = DOCUMENT.read_text()
    for name, table in tables.items():
        print(table, end="\n\n")
        marks = f"<!-- {name} -->\n", f"\n<!-- end of {name} -->"
        text = text[: text.index(marks[0]) + len(marks[0])] + table + text[text.index(marks[1]) :]
    if "--write" in sys.argv:
        DOCUMENT.write_text(text)


if __name__ == "__main__":
    main()
