"""The Triton kernels: where they run, why they cannot, and the check that they pass before they are trusted.

Triton is imported when a call first needs it, never with this library. Kernels are in ``triton/kernels.py`` of each
room; they go through `launch`, which is where tools see what is launched.
"""

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from multimax.ops import dtypes
from multimax.ops.kernels import INTERPRETED, Unavailable
from multimax.ops.operators import LIBRARY

# ROCm's devices are called cuda too.
KEYS = {"cuda": "CUDA", "xpu": "XPU"} | ({"cpu": "CPU"} if INTERPRETED else {})

AMD = torch.version.hip is not None

# What a small input's results may differ by from the reference in float64, relative to the largest of them: enough for
# rounding, far too little for a wrong kernel.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def missing() -> str | None:
    """Why Triton cannot be used at all, or None."""
    return _missing()


# As for `_broken`, below.
missing._dynamo_marked_constant = True  # type: ignore[attr-defined]


@cache
def _missing() -> str | None:
    try:
        import_module("triton.language")
    except Exception as error:  # a broken installation raises whatever it likes
        return Unavailable(
            f"Triton cannot be imported ({type(error).__name__}: {error}); install it with `pip install triton`"
        )
    return None


def why_not(device: torch.device, unable: str | None = None) -> str | None:
    """Why the kernels cannot run a call on that device; ``unable`` is the reason for this call in particular."""
    if torch.autograd.forward_ad._current_level >= 0:  # torch.func.jvp opens such a level too
        return "it has no forward-mode derivatives; use 'auto'"
    if device.type not in KEYS:
        hint = (
            "set TRITON_INTERPRET=1 and MULTIMAX_IMPL=triton to interpret the kernels; " if device.type == "cpu" else ""
        )
        return f"the input is on {device}; {hint}use 'auto' or 'reference'"
    return unable or missing()


def guard(device: torch.device) -> AbstractContextManager[Any]:
    """Triton launches on the current device: within this, that of the tensors."""
    if device.type == "cpu":
        return nullcontext()
    result: AbstractContextManager[Any] = getattr(torch, device.type).device(device)
    return result


def register(name: str, module: str, function: str) -> None:
    """Makes a function of a module, which is imported when it is first called, the implementation of an operator on
    every kind of device that Triton has here."""

    def implementation(*args: Any) -> Any:
        first = next(arg for arg in args if isinstance(arg, Tensor))
        with guard(first.device):
            return getattr(import_module(module), function)(*args)

    for key in KEYS.values():
        LIBRARY.impl(name, implementation, key)


def launch(kernel: Any, grid: Any, *args: Any, **options: Any) -> None:
    """Launches a kernel, unless there is nothing to do. grid: as Triton takes it."""
    if callable(grid) or all(grid):
        kernel[grid](*args, enable_fp_fusion=True, **options)


def wide(dtype: torch.dtype) -> Any:
    """The dtype that kernels compute in, as Triton calls it."""
    language = import_module("triton.language")
    return language.float64 if dtypes.compute_dtype(dtype) == torch.float64 else language.float32


def one_of(configs: list[Any], _: dict[str, Any], **__: Any) -> list[Any]:
    """The configurations that the autotuner times. Where results have to be the same in every process, and where there
    is nothing to time, that is the first."""
    return configs[:1] if INTERPRETED or torch.are_deterministic_algorithms_enabled() else configs


def capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured: then nothing may be read."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


_checked: dict[tuple[str, str, torch.dtype], str | None] = {}

# A room's comparison with its reference: results and judges, of a small input on that device in that dtype.
Comparison = Callable[[torch.device, torch.dtype], list[tuple[str, Tensor, Tensor]]]


def broken(operation: str, device: torch.device, dtype: torch.dtype, compare: Comparison) -> str | None:
    """Why an operation's kernels cannot be trusted on that device, after comparing them once with the reference."""
    if INTERPRETED:  # tests do that, and at length
        return None
    return _broken(operation, str(device), dtype, compare)


def _broken(operation: str, device: str, dtype: torch.dtype, compare: Comparison) -> str | None:
    key = (operation, device, dtype)
    if key not in _checked:
        where = torch.device(device)
        if capturing(where):
            return None
        _checked[key] = _first_use(operation, where, dtype, compare)
    return _checked[key]


# While a graph is traced, these run for real: what torch.compiler.assume_constant_result does, which would import the
# compiler.
missing._dynamo_marked_constant = _broken._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _first_use(operation: str, device: torch.device, dtype: torch.dtype, compare: Comparison) -> str | None:
    """Compiles and compares."""
    remedy = "please report it with the output of `multimax check`"
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(enabled=False):
            warnings.simplefilter("ignore")
            results = compare(device, dtype)
    except Exception as error:
        text = (str(error).strip().splitlines() or [""])[0]
        return Unavailable(
            f"the Triton kernels of {operation} do not work on {device} in {dtype} ({type(error).__name__}: {text}); "
            f"{remedy}"
        )
    for name, result, judge in results:
        # parameters may be of a coarser dtype, and so are their gradients then
        why = differs(result, judge, max(TOLERANCE[dtype], TOLERANCE[result.dtype]))
        if why:
            return Unavailable(
                f"the Triton kernels of {operation} give a wrong {name} on {device} in {dtype} ({why}); {remedy}"
            )
    return None


def draws(*shapes: tuple[int, ...]) -> list[Tensor]:
    """Random numbers of the same kind every time, without touching torch's generator."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def gradients(
    run: Callable[[Any], Any], call: Any, names: tuple[str, ...], grad: Tensor, device: torch.device | None
) -> dict[str, Tensor]:
    """An operation's first result and its gradients by those fields of a call, on that device; None for what they
    should be, which is found on the CPU and in float64."""
    where = device or torch.device("cpu")
    fields: dict[str, Any] = {}
    for name, value in call._asdict().items():
        if isinstance(value, Tensor):
            value = value.detach().to(where)
            value = value.double() if device is None and value.is_floating_point() else value
        fields[name] = value.requires_grad_() if name in names and value is not None else value
    with torch.enable_grad():
        result = run(type(call)(**fields))
        result = result if isinstance(result, Tensor) else result[0]
        upstream = grad.to(device=where, dtype=result.dtype)
        found = torch.autograd.grad(result, [fields[name] for name in names], upstream)
    return {"result": result.detach()} | dict(zip(names, found, strict=True))


def differs(result: Tensor, judge: Tensor, tolerance: float) -> str | None:
    """How a result differs from what it should be by more than a share of the largest entry, or None."""
    result, judge = result.detach().cpu().double(), judge.detach().cpu().double()
    if result.shape != judge.shape:
        return f"shape {tuple(result.shape)} instead of {tuple(judge.shape)}"
    if not torch.equal(result.isnan(), judge.isnan()):
        return "NaN in other places"
    error = (result - judge).nan_to_num().abs().max().item() if judge.numel() else 0.0
    allowed = tolerance * max(1e-3, judge.nan_to_num().abs().max().item() if judge.numel() else 0.0)
    return None if error <= allowed else f"off by {error:.3g}, {allowed:.3g} allowed"


def overrule(reason: str) -> bool:
    """Lets kernels run whose first use failed for that reason, for `multimax check`, which judges every result itself.
    Returns whether there are such."""
    keys = [key for key, why in _checked.items() if why == reason]
    _checked.update(dict.fromkeys(keys))
    return bool(keys)
