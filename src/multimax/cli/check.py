"""`multimax check`: every operation on this machine against the formulas in float64, and its speed."""

import argparse
import importlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import textwrap
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from multimax import __version__
from multimax.cli import layout
from multimax.cli.checking import cases, compare, speed
from multimax.cli.checking.cases import Case
from multimax.cli.checking.compare import Outcome, Ratio
from multimax.cli.errors import Refused
from multimax.ops import dispatch, gpu, kernels, probe

TEXT = """\
Runs every operation on this machine, compares results and gradients with the formulas in float64, and times it.
The report is meant to be pasted into an issue. Less than two minutes; the exit code is 1 if anything failed.

what is compared:
  rows        multimax, log_multimax, modulate
  attention   masks, windows, bias, dropout, GQA, decoding, log-sums;
              varlen: packed sequences
  loss        multimax_cross_entropy;
              linear loss: linear_multimax_cross_entropy
  entmax      sparsemax, entmax15, entmax with a learned alpha

An error against float64 may be twice that of plain PyTorch in the same dtype on the same device for results, three
times for gradients; less than half a rounding is no error. The median over several draws counts.

columns:
  cases       how many ran
  worst       the largest multiple of plain PyTorch's error, the multiple that
              is allowed, and where it was
  repeat      whether the same call twice gave the same bits, results and
              gradients
  ratio       in the table of speed: time over that of torch's function for
              softmax (attention: SDPA); flex: FlexAttention compiled with the
              same function of the scores; "-" where something does not work
  MiB         memory at the peak of forward and backward, on CUDA

examples:
  multimax check                            the best device here, every
                                            implementation but the reference
  multimax check --impl triton --no-speed   the Triton kernels alone
  multimax check --interpret                the Triton kernels without a GPU,
                                            by Triton's interpreter
"""
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
KERNELS = ("cpu", "triton")  # whose results are the same bit by bit; plain PyTorch's are not on every device
SHOWN = 5  # failures of a line
THIRD = 3
COMPARING = 95.0  # seconds for an interpreter, which takes most of a second for some cases
FLEX_UNTIL = 80.0  # seconds from the start: later there is no time to compile FlexAttention


def add(commands: Any) -> None:
    """Adds the subcommand."""
    command = layout.command(
        commands, "check", "compare every operation here with the formulas, in less than two minutes", TEXT
    )
    command.add_argument(
        "--device", help="such as cuda, cuda:1, xpu or cpu; the first of these that is here unless given"
    )
    command.add_argument(
        "--impl",
        choices=(*dispatch.NAMES, "all"),
        default="all",
        help="one implementation, or all (which it is unless given) but the reference, with which they are compared",
    )
    command.add_argument("--quick", action="store_true", help="smaller sizes")
    command.add_argument("--no-speed", dest="speed", action="store_false", help="compare, but do not time")
    command.add_argument(
        "--interpret",
        action="store_true",
        help="run the Triton kernels in Triton's interpreter, on the CPU, with tiny sizes and no timing",
    )
    command.set_defaults(function=check)


def check(options: argparse.Namespace) -> int:
    """Compares, times and prints; 1 if anything failed."""
    if options.interpret and not kernels.INTERPRETED:
        return _interpreted()
    start = time.perf_counter()
    device = _device(options.device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what cannot be used is part of the report
        remedy = _remedy(device)
        impls = [options.impl] if options.impl != "all" else _all()
        if options.interpret:
            impls = ["triton"]
        _print(_header(device, remedy))
        outcomes = _compare(device, impls, options.quick, start)
        lines, failed = _report(outcomes)
        _print(["", *lines])
        if options.speed and not kernels.INTERPRETED:
            impl = "auto" if options.impl == "all" else options.impl
            _print(["", *_speed(device, impl, start + FLEX_UNTIL)])
    print(f"\n{'FAILED' if failed else 'ok'}, {time.perf_counter() - start:.0f} seconds")
    return 1 if failed else 0


def _print(lines: Iterable[str]) -> None:
    """Lines as they are, for a file; on a terminal, the ends of long ones below them."""
    if sys.stdout.isatty():
        room = shutil.get_terminal_size().columns
        lines = (
            textwrap.fill(line, room, subsequent_indent=" " * 13, drop_whitespace=len(line) > room) for line in lines
        )
    print("\n".join(lines), flush=True)


def _interpreted() -> int:
    """The same command in a process whose CPU tensors belong to Triton's interpreter."""
    if importlib.util.find_spec("triton") is None:
        raise Refused("multimax: expected Triton to be installed for --interpret, got none; pip install triton")
    variables = {"TRITON_INTERPRET": "1", dispatch.VARIABLE: "triton"}
    command = [sys.executable, "-m", "multimax", "check", "--interpret", "--device", "cpu"]
    return subprocess.run(command, env={**os.environ, **variables}, check=False).returncode


def _device(name: str | None) -> torch.device:
    """The device of that name, or the best."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "xpu" if torch.xpu.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise Refused(
            f"multimax: expected a device that torch can use, got {name!r} ({compare.first_line(error)}); "
            "leave out --device for the best one here"
        ) from error
    return device


def _all() -> list[str]:
    """Every implementation of any operation but the reference."""
    names = dict.fromkeys(name for implementations in dispatch.TABLE.values() for name in implementations)
    return [name for name in names if name != "reference"]


def _remedy(device: torch.device) -> str | None:
    """Sets what lets torch's bfloat16 products live on this processor, before the first of them; says so."""
    if device.type != "cpu" or probe.VARIABLE in os.environ:
        return None
    found = probe.bfloat16_products()
    os.environ.update(found.remedy)
    if found.outcome == "work":
        return None
    return f"{found}{', which was done here' if found.remedy else ''}"


def _header(device: torch.device, remedy: str | None) -> list[str]:
    """What the figures were taken on."""
    try:
        triton = str(importlib.import_module("triton").__version__)
    except Exception as error:  # a broken installation raises whatever it likes
        triton = f"none ({compare.first_line(error)})"
    rooms = ", ".join(f"{room} {cases.in_use(room, device)}" for room in dispatch.TABLE)
    found = {
        "multimax": f"{__version__}, torch {torch.__version__}, triton {triton}, python {platform.python_version()}",
        "device": _about(device),
        "cpu kernels": kernels.unavailable or kernels.use_isa(),
        "auto takes": rooms,
    }
    if kernels.INTERPRETED:
        found["kernels"] = "by Triton's interpreter, with tiny sizes"
    if remedy:
        found["bf16 products"] = remedy
    return [f"{name + ':':<14} {value}" for name, value in found.items()]


def _about(device: torch.device) -> str:
    """A device's name, and what its driver says."""
    if device.type == "cpu":
        return f"cpu, {platform.machine()}, {torch.get_num_threads()} threads, {platform.system()}"
    module = getattr(torch, device.type)
    found = [str(device)]
    for ask in ("get_device_name", "get_device_capability"):
        try:
            found.append(f"{ask.removeprefix('get_device_')} {getattr(module, ask)(device)}")
        except Exception as error:  # each kind of device has other questions
            found.append(f"{ask}: {compare.first_line(error)}")
    version = torch.version
    found.append(f"CUDA {version.cuda}" if version.cuda else f"ROCm {version.hip}" if version.hip else "")
    found.append(_driver())
    return ", ".join(text for text in found if text)


def _driver() -> str:
    """NVIDIA's driver, where its tool is."""
    try:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return f"driver {(done.stdout.split() or ['unknown'])[0]}"


def _progress(items: Iterable[Any], total: int, what: str) -> Iterator[Any]:
    """The items, with a bar where somebody is watching, or with lines where there is no tqdm."""
    if not sys.stderr.isatty():
        yield from items
        return
    try:
        tqdm = importlib.import_module("tqdm").tqdm
    except ImportError:
        for number, item in enumerate(items):
            if number % 20 == 0:
                print(f"{what}: {number} of {total}", file=sys.stderr, flush=True)
            yield item
        return
    yield from tqdm(items, total=total, desc=what, leave=False)


def _compare(device: torch.device, impls: Sequence[str], quick: bool, start: float) -> list[Outcome]:
    """All cases in all dtypes."""
    sizes = cases.QUICK if quick else cases.MEDIUM if device.type == "cpu" else cases.FULL
    sizes = cases.TINY if kernels.INTERPRETED else sizes
    where = compare.place(device)
    jobs: list[tuple[Case, torch.dtype]] = []
    for number, case in enumerate(cases.cases(sizes)):
        for dtype in DTYPES:
            # an interpreter has no time for every case in every dtype
            if dtype == torch.float32 or not kernels.INTERPRETED or number % THIRD == 0:
                jobs.append((case, dtype))
    if where.judge != where.device:
        jobs = [(case, dtype) for case, dtype in jobs if dtype != torch.float64]
    if kernels.INTERPRETED:
        jobs.sort(key=lambda job: DTYPES.index(job[1]))  # every case in float32 before anything else
    state = torch.get_rng_state()  # dropout is drawn from it
    found = []
    for case, dtype in _progress(jobs, len(jobs), "comparing"):
        if kernels.INTERPRETED and time.perf_counter() - start > COMPARING:
            found += [Outcome(case, dtype, impl, not_run="there was no time left for all cases") for impl in impls]
            continue
        found += compare.compare(case, dtype, impls, where, sizes.draws)
    torch.set_rng_state(state)
    return found


class Line(NamedTuple):
    """One line of the report, and the failures that belong to it."""

    text: str
    failures: list[str]


def _report(outcomes: Sequence[Outcome]) -> tuple[list[str], bool]:
    """The table, what failed and what was not run; and whether something failed."""
    groups: dict[tuple[str, str, torch.dtype], list[Outcome]] = {}
    for outcome in outcomes:
        if outcome.not_run is None:
            groups.setdefault((outcome.case.operation, outcome.impl, outcome.dtype), []).append(outcome)
    order = list(dict.fromkeys(operation for operation, *_ in groups))
    keys = sorted(groups, key=lambda key: (order.index(key[0]), key[1], DTYPES.index(key[2])))
    lines = [_line(*key, groups[key]) for key in keys]
    text = [f"{'operation':<12} {'impl':<10} {'dtype':<9} {'cases':>5}  {'repeat':<6}  {'result':<7} worst"]
    text += [line.text for line in lines]
    failures = [failure for line in lines for failure in line.failures]
    if failures:
        text += ["", "failures:", *failures]
    declined = _declined(outcomes)
    if declined:
        text += ["", "not run:", *declined]
    if not groups:
        text += ["", "FAILED: nothing was checked, for none of these implementations can run here"]
    return text, bool(failures) or not groups


def _line(operation: str, impl: str, dtype: torch.dtype, group: Sequence[Outcome]) -> Line:
    """An operation in one dtype by one implementation."""
    name = str(dtype).removeprefix("torch.")
    failures = []
    worst: tuple[float, Ratio, str] | None = None
    for outcome in group:
        if outcome.failure:
            failures.append(f"{operation}, {impl}, {name}, {outcome.case.name}: {outcome.failure}")
        elif outcome.repeatable is False and impl in KERNELS:
            told = "expected the same call to give the same bits, got others"
            failures.append(f"{operation}, {impl}, {name}, {outcome.case.name}: {told}")
        if outcome.worst is not None:
            share = outcome.worst.value / outcome.worst.limit
            if worst is None or not share <= worst[0]:
                worst = (share, outcome.worst, outcome.case.name)
    repeatable = [outcome.repeatable for outcome in group if outcome.repeatable is not None]
    repeats = "-" if not repeatable else "yes" if all(repeatable) else "no"
    told = "-"
    if worst is not None:
        _, ratio, where = worst
        told = f"{ratio.value:.2f} of {ratio.limit:g}: {ratio.of}, {where}"
    result = "FAILED" if failures else "ok"
    text = f"{operation:<12} {impl:<10} {name:<9} {len(group):>5}  {repeats:<6}  {result:<7} {told}"
    if len(failures) > SHOWN:
        failures = [*failures[:SHOWN], f"{operation}, {impl}, {name}: and {len(failures) - SHOWN} more"]
    return Line(text, failures)


def _declined(outcomes: Sequence[Outcome]) -> list[str]:
    """What implementations said that they cannot run, by the reason."""
    reasons: dict[tuple[str, str], dict[str, list[str]]] = {}
    ran = {(o.case.operation, o.impl) for o in outcomes if o.not_run is None}
    for outcome in outcomes:
        if outcome.not_run is not None:
            operation, dtype = outcome.case.operation, str(outcome.dtype).removeprefix("torch.")
            words = reasons.setdefault((outcome.impl, outcome.not_run), {}).setdefault(operation, [])
            if (operation, outcome.impl) in ran and dtype not in words:
                words.append(dtype)
    lines = []
    for (impl, reason), operations in reasons.items():
        where = [f"{name} in {', '.join(words)}" if words else name for name, words in operations.items()]
        lines.append(f"{impl}: {', '.join(where)}: {reason}")
    return lines


def _speed(device: torch.device, impl: str, flex_until: float) -> list[str]:
    """The table of times."""
    sizes = speed.ON_CPU if device.type == "cpu" else speed.ON_GPU
    with gpu.guard(device):  # events are recorded on the current device
        found = speed.everything(sizes, device, impl, flex_until)
        rows = list(_progress(found, speed.count(sizes, device), "timing"))
    return [
        f"times of impl={impl!r} in milliseconds, median; torch: softmax by torch's own function",
        *speed.table(rows),
    ]
