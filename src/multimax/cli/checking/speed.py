"""How fast the operations are next to torch's own for softmax, in a few rows."""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from multimax.ops.attention.api import multimax_attention
from multimax.ops.loss.api import multimax_cross_entropy
from multimax.ops.parameters import from_paper
from multimax.ops.presets import presets
from multimax.ops.rows.api import multimax

ROUNDS = 7
SECONDS = 0.25  # for each function of a row
TURN = 2e-3  # as long as one turn should take at least: events of a GPU are not exact to less
OURS, TORCH, FLEX = "multimax", "torch", "flex"
DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


class Sizes(NamedTuple):
    """Shapes to time."""

    attention: list[tuple[int, int, int, int]]
    rows: list[tuple[int, int]]
    logits: list[tuple[int, int]]


ON_GPU = Sizes([(4, 12, 1024, 64), (2, 12, 4096, 64)], [(16384, 1024), (4096, 32000)], [(4096, 32000)])
ON_CPU = Sizes([(2, 4, 128, 64), (1, 4, 512, 64)], [(2048, 197), (128, 8000)], [(128, 8000)])


class Row(NamedTuple):
    """Milliseconds of each function, None where it failed, and where they are counted the bytes at the peak."""

    what: str
    ms: dict[str, float | None]
    peak: dict[str, int | None]


def timed(calls: dict[str, Callable[[], object]], device: torch.device, seconds: float) -> dict[str, float]:
    """The median milliseconds of each call, in rotating order: a change of the machine's speed affects all alike."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    repeats = {}
    for name, call in calls.items():
        call()
        repeats[name] = max(1, min(50, int(TURN / _turn(call, 1, device)))) if device.type != "cpu" else 1
    order = list(calls)
    start = time.perf_counter()
    while len(times[order[0]]) < 3 or (
        time.perf_counter() - start < seconds * len(calls) and len(times[order[0]]) < 10 * ROUNDS
    ):
        for name in order:
            times[name].append(_turn(calls[name], repeats[name], device))
        order = order[1:] + order[:1]
    return {name: statistics.median(values) * 1e3 for name, values in times.items()}


def _turn(call: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Seconds of one call: by the device's own clock, where it has one."""
    if device.type == "cpu":
        begin = time.perf_counter()
        for _ in range(repeats):
            call()
        return (time.perf_counter() - begin) / repeats
    module = getattr(torch, device.type)
    first, last = (module.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(repeats):
        call()
    last.record()
    module.synchronize()
    return max(float(first.elapsed_time(last)) / 1e3 / repeats, 1e-9)


def peak(call: Callable[[], object], device: torch.device) -> int | None:
    """The most bytes that a call needs above what was there before; None where nobody counts them."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated(device) - before


def passes(function: Callable[[], Tensor], leaves: list[Tensor], backward: bool) -> Callable[[], object]:
    """The forward, or forward and backward to all leaves."""

    def forward() -> None:
        with torch.no_grad():
            function()

    def both() -> None:
        out = function()
        out.backward(torch.ones_like(out))
        for leaf in leaves:  # what is left over would count as there before, for the peak of the next call
            leaf.grad = None

    return both if backward else forward


def _row(what: str, calls: dict[str, Callable[[], object]], device: torch.device, memory: bool) -> Row:
    """Times those that work."""
    working, peaks = {}, {}
    for name, call in calls.items():
        try:
            call()
            peaks[name] = peak(call, device) if memory else None
        except Exception:  # it is not there, or there is no memory for it: shown as such
            continue
        working[name] = call
    found = timed(working, device, SECONDS) if working else {}
    return Row(what, {name: found.get(name) for name in calls}, {name: peaks.get(name) for name in calls})


def _sigma(coefs: Tensor, knots: Tensor) -> Callable[..., Tensor]:
    """The modulator as FlexAttention's score function."""
    below, above, b, d = ([float(v) for v in t] for t in (*coefs.unbind(-1), *knots.unbind(-1)))

    def sigma(x: Tensor, *_: Tensor) -> Tensor:
        result = x
        for n in range(len(b)):
            lower, upper = torch.relu(b[n] - x), torch.relu(x - d[n])
            result = result + below[n] * lower ** (n + 1) + above[n] * upper ** (n + 1)
        return result

    return sigma


def flex(coefs: Tensor, knots: Tensor, length: int, causal: bool, device: torch.device) -> Callable[..., Tensor]:
    """FlexAttention compiled with the same sigma, whose numbers it takes as constants: they get no gradient."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask = None
    if causal:
        mask = create_block_mask(lambda _b, _h, i, j: i >= j, None, None, length, length, device=str(device))
    torch._dynamo.reset()  # else the compiler gives up after a few shapes
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    score_mod = _sigma(coefs.detach(), knots.detach())
    return lambda query, key, value: compiled(query, key, value, score_mod=score_mod, block_mask=mask)


def parameters(device: torch.device) -> tuple[Tensor, Tensor]:
    """Those of the paper's eleventh DeiT-small layer: all terms are active."""
    coefs, knots = from_paper(*presets["deit_small"][10])
    return coefs.to(device).requires_grad_(), knots.to(device).requires_grad_()


def attention(sizes: Sizes, device: torch.device, impl: str, flex_until: float) -> Iterator[Row]:
    """Attention against torch's, and on a GPU against FlexAttention, if there is time to compile it."""
    gpu = device.type != "cpu"
    coefs, knots = parameters(device)
    for dtype, short in DTYPES.items():
        if dtype == torch.float16 and not gpu:
            continue
        for shape in sizes.attention:
            query, key, value = (torch.randn(shape, device=device, dtype=dtype).requires_grad_() for _ in range(3))
            leaves = [query, key, value, coefs, knots]
            for causal in (False, True):

                def ours(leaves: list[Tensor] = leaves, causal: bool = causal) -> Tensor:
                    query, key, value, *params = leaves
                    return multimax_attention(query, key, value, *params, is_causal=causal, impl=impl)

                def theirs(leaves: list[Tensor] = leaves, causal: bool = causal) -> Tensor:
                    query, key, value, *_ = leaves
                    return F.scaled_dot_product_attention(query, key, value, is_causal=causal)

                functions = {OURS: ours, TORCH: theirs}
                if gpu and dtype == torch.bfloat16 and time.perf_counter() < flex_until:
                    with suppress(Exception):  # an older torch, or one whose compiler does not work here
                        functions[FLEX] = partial(flex(coefs, knots, shape[2], causal, device), query, key, value)
                for backward in (False, True):
                    calls = {name: passes(function, leaves, backward) for name, function in functions.items()}
                    what = f"attention {short} {shape} {'causal' if causal else 'full'} {_pass(backward)}"
                    yield _row(what, calls, device, memory=backward)


def rows(sizes: Sizes, device: torch.device, impl: str) -> Iterator[Row]:
    """The row function against torch.softmax."""
    coefs, knots = parameters(device)
    for dtype in (torch.float32, torch.bfloat16):
        for shape in sizes.rows:
            x = torch.randn(shape, device=device, dtype=dtype).requires_grad_()

            def ours(x: Tensor = x) -> Tensor:
                return multimax(x, coefs, knots, impl=impl)

            def theirs(x: Tensor = x) -> Tensor:
                return torch.softmax(x, -1)

            for backward in (False, True):
                calls = {OURS: passes(ours, [x, coefs, knots], backward), TORCH: passes(theirs, [x], backward)}
                yield _row(f"rows {DTYPES[dtype]} {shape} {_pass(backward)}", calls, device, memory=False)


def losses(sizes: Sizes, device: torch.device, impl: str) -> Iterator[Row]:
    """The loss against F.cross_entropy."""
    coefs, knots = parameters(device)
    for dtype in (torch.float32, torch.bfloat16):
        for shape in sizes.logits:
            x = torch.randn(shape, device=device, dtype=dtype).requires_grad_()
            target = torch.randint(shape[1], shape[:1], device=device)

            def ours(x: Tensor = x, target: Tensor = target) -> Tensor:
                return multimax_cross_entropy(x, target, coefs, knots, impl=impl)

            def theirs(x: Tensor = x, target: Tensor = target) -> Tensor:
                return F.cross_entropy(x, target)

            for backward in (False, True):
                calls = {
                    OURS: passes(ours, [x, coefs, knots], backward),
                    TORCH: passes(theirs, [x], backward),
                }
                yield _row(f"loss {DTYPES[dtype]} {shape} {_pass(backward)}", calls, device, memory=False)


def _pass(backward: bool) -> str:
    return "fwd+bwd" if backward else "fwd"


def everything(sizes: Sizes, device: torch.device, impl: str, flex_until: float) -> Iterator[Row]:
    """All rows, one after the other."""
    yield from attention(sizes, device, impl, flex_until)
    yield from rows(sizes, device, impl)
    yield from losses(sizes, device, impl)


def count(sizes: Sizes, device: torch.device) -> int:
    """How many rows there will be."""
    return 4 * len(sizes.attention) * (2 if device.type == "cpu" else 3) + 4 * len(sizes.rows) + 4 * len(sizes.logits)


def table(found: list[Row]) -> list[str]:
    """The rows as lines: milliseconds, ratios to torch's, memory where it was counted."""
    with_flex = any(FLEX in row.ms for row in found)
    with_peak = any(value is not None for row in found for value in row.peak.values())
    heads = [
        "ms",
        "torch",
        "ratio",
        *(["flex", "ratio"] if with_flex else []),
        *(["MiB", "torch"] if with_peak else []),
    ]
    width = max(len(row.what) for row in found)
    lines = [f"{'speed':<{width}} " + " ".join(f"{head:>8}" for head in heads)]
    for row in found:
        base, ours = row.ms.get(TORCH), row.ms.get(OURS)
        cells = [_number(ours), _number(base), _ratio(ours, base)]
        if with_flex:
            cells += [_number(row.ms.get(FLEX)), _ratio(row.ms.get(FLEX), base)]
        if with_peak:
            cells += [_mib(row.peak.get(OURS)), _mib(row.peak.get(TORCH))]
        lines.append(f"{row.what:<{width}} " + " ".join(f"{cell:>8}" for cell in cells))
    return lines


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _ratio(value: float | None, base: float | None) -> str:
    return "-" if value is None or not base else f"{value / base:.2f}x"


def _mib(value: int | None) -> str:
    return "-" if value is None else f"{value / 2**20:.0f}"
