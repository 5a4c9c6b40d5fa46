"""What the benchmarks share: turns, memory, the machine, the README."""

import argparse
import ctypes
import datetime
import json
import os
import platform
import resource
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from tqdm import tqdm

from multimax.ops import kernels, probe

SLOW = 0.2  # seconds


def interleaved(
    calls: dict[str, Callable[[], object]], seconds: float, rounds: int, slow: Sequence[str] = ()
) -> tuple[dict[str, list[float]], dict[str, list[int]]]:
    """Times and page faults of each call, in rotating order, for at least that many seconds and rounds.

    A turn is two calls, of which the second counts: the first replaces what the previous turn left in caches and freed
    memory. Calls that are named in `slow`, and take long, get only two turns.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    faults: dict[str, list[int]] = {name: [] for name in calls}
    order = list(calls)
    start = time.perf_counter()
    while time.perf_counter() - start < seconds or any(
        len(values) < rounds for name, values in times.items() if name not in slow
    ):
        for name in order:
            if name in slow and len(times[name]) >= 2 and times[name][-1] > SLOW:
                continue
            if not times[name] or times[name][-1] < 1:  # caches matter little to calls that take seconds
                calls[name]()
            before, begin = page_faults(), time.perf_counter()
            calls[name]()
            times[name].append(time.perf_counter() - begin)
            faults[name].append(page_faults() - before)
        order = order[1:] + order[:1]
    return times, faults


def peak_memory(run: Callable[[], object]) -> int | None:
    """The most bytes by which the process grows while it runs; None where the system does not say."""

    def status(field: str) -> int:
        line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
        return int(line.split()[1]) * 1024

    try:
        ctypes.CDLL(None).malloc_trim(0)  # memory that was kept for reuse must count again
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
        before = status("VmRSS")
        run()
        return max(status("VmHWM") - before, 0)
    except (OSError, AttributeError, StopIteration):
        return None


def keep_memory() -> None:
    """Tells the C library to keep what is freed."""
    libc = ctypes.CDLL(None)
    trim_threshold, mmap_max = -1, -4  # as in malloc.h
    if not (libc.mallopt(trim_threshold, -1) and libc.mallopt(mmap_max, 0)):
        raise OSError("mallopt refused: --keep-memory needs glibc")


def page_faults() -> int:
    """How many pages the system has had to provide so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def machine(kept: bool) -> dict:
    """What the figures were taken on."""
    cpu = platform.processor()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if "model name" in line]
        cpu = names[0] if names else cpu
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "isa": kernels.use_isa(),
        "onednn_max_cpu_isa": os.environ.get(probe.VARIABLE),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
        "keep_memory": kept,
    }


def command_line(about: str | None, results: Path, seconds: float) -> argparse.ArgumentParser:
    """The options that all benchmarks have."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="only torch's function and the kernel")
    parser.add_argument("--seconds", type=float, default=seconds, help=f"time for each case (default {seconds:g})")
    parser.add_argument("--threads", type=int, default=None, help="torch threads (default: torch's choice)")
    parser.add_argument("--out", type=Path, default=results, help="where to save the figures as JSON")
    parser.add_argument("--table", type=Path, metavar="FILE", help="print the table of a saved run and stop")
    parser.add_argument("--readme", type=Path, metavar="FILE", help="put the table of a saved run into the README")
    return parser


def begin(options: argparse.Namespace, mark: str, table: Callable[[dict], str]) -> bool:
    """Handles options that need no measuring; otherwise sets the threads and, where bfloat16 products die, the remedy.

    Returns whether there is something to measure.
    """
    if options.table:
        print(table(json.loads(options.table.read_text())))
    if options.readme:
        into_readme(mark, table(json.loads(options.readme.read_text())))
    if options.table or options.readme:
        return False
    found = probe.bfloat16_products()
    os.environ.update(found.remedy)  # oneDNN reads it at the first product of this process
    if found.remedy:
        print(f"bf16 products: die with SIGILL here; measured with {probe.VARIABLE}={probe.LIMIT}")
    if options.threads:
        torch.set_num_threads(options.threads)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    return True


def measured(
    options: argparse.Namespace,
    cases: Sequence[tuple],
    measure: Callable[..., list[dict]],
    table: Callable[[dict], str],
    kept: bool = False,
) -> None:
    """Measures case by case, saves after each, and prints the table."""
    run: dict = {"machine": machine(kept), "rows": []}
    for case in tqdm(cases, unit="case"):
        run["rows"] += measure(*case, options.seconds, options.quick)
        options.out.write_text(json.dumps(run, indent=1) + "\n")
    print(table(run))
    print(f"\nsaved to {options.out}")


def into_readme(mark: str, text: str) -> None:
    """Puts a table between two marks of the README."""
    path = Path(__file__).parent.parent / "README.md"
    before, rest = path.read_text().split(f"<!-- {mark} -->\n")
    after = rest.split(f"<!-- /{mark} -->")[1]
    path.write_text(f"{before}<!-- {mark} -->\n{text}\n<!-- /{mark} -->{after}")
