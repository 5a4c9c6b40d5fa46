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
SHARED = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024, "gfx942": 64 * 1024}  # of one program, at most
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
            found.append(Launch(function, named, rest))

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
