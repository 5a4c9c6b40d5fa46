"""What the benchmarks share: how times are taken, memory, the machine, the command line, saving.

One definition for all. In each round each competitor makes two calls, of which the second is timed: the first replaces
what the previous one left in caches and freed memory. (Calls of over a second are made once.) Forward, and forward with
backward, are taken in the same rounds. The order rotates, so a change in the machine's speed affects all alike. A time
is the median over the rounds, a ratio the quotient of two such times; it is computed where it is shown, and not saved.
Its spread is: the quartiles of the quotients round by round.

The C library is told to keep what is freed, and a round before the first one is not counted. That is a training loop's
steady state: memory of the last step serves the next. Otherwise most of the time of any large result would go into
fresh pages from the system. Each case has a process of its own, so that it finds memory as if it were the only one.
"""

import argparse
import ctypes
import datetime
import hashlib
import json
import multiprocessing
import os
import platform
import resource
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from tqdm import tqdm

import multimax
import processors
import tables
from multimax.ops import kernels, probe

RESULTS = Path(__file__).parent / "results"
FORWARD, BACKWARD = "forward", "forward+backward"
ROUNDS, FEWEST = 5, 3  # at least; FEWEST after four times the time that was given
LONG = 1.0  # seconds: to calls that take as long, caches matter little
SLOW = 2.0  # seconds: rivals that take longer take part in one round
SETTLED = 256  # page faults: as good as none
Key = TypeVar("Key", bound=object)
Call = Callable[[], object]


class Case(NamedTuple):
    """One line of a table: the table and the line's name, and what is handed to the benchmark's `measure`."""

    group: str
    name: str
    arguments: tuple


def turns(call: float, seconds: float) -> int:
    """In how many rounds a rival takes part, if its call takes that long: for a quarter of the time, or few."""
    return 1 if call > SLOW else max(FEWEST, int(seconds / 4 / (2 * call)))


def interleaved(
    calls: Mapping[Key, Call], seconds: float, always: Collection[Key] | None = None
) -> tuple[dict[Key, list[float]], dict[Key, list[int]]]:
    """Times and page faults of each call, round by round, until those in `always` have taken that many seconds.

    The others may end early (`turns`). `always` is all, unless given.
    """
    always = calls if always is None else always
    times: dict[Key, list[float]] = {key: [] for key in calls}
    faults: dict[Key, list[int]] = {key: [] for key in calls}
    last = {key: settle(call) for key, call in calls.items()}
    order = list(calls)
    rounds, spent = 0, 0.0
    while not ((rounds >= ROUNDS and spent >= seconds) or (rounds >= FEWEST and spent >= 4 * seconds)):
        for key in order:
            if key not in always and rounds >= turns(last[key], seconds):
                continue
            begin = time.perf_counter()
            if last[key] < LONG:
                calls[key]()
            last[key], pages = timed(calls[key])
            times[key].append(last[key])
            faults[key].append(pages)
            if key in always:
                spent += time.perf_counter() - begin
        rounds += 1
        order = order[1:] + order[:1]
    return times, faults


def settle(call: Call) -> float:
    """Calls it until it needs no fresh pages, three times at most, or once if it is slow; the last call's seconds."""
    for _ in range(3):
        seconds, pages = timed(call)
        if pages <= SETTLED or seconds > SLOW:
            break
    return seconds


def timed(call: Call) -> tuple[float, int]:
    """Seconds and page faults."""
    faults, begin = page_faults(), time.perf_counter()
    call()
    return time.perf_counter() - begin, page_faults() - faults


def compare(
    calls: Mapping[tuple[str, str], Call],
    seconds: float,
    baseline: str,
    ours: Sequence[str],
    compiled: Collection[str] = (),
    memory: str | None = None,
    check: Callable[[str], None] | None = None,
) -> dict:
    """A case's figures.

    Args:
        calls: by name and pass.
        seconds: for all of them together.
        baseline: the name that the others are compared with.
        ours: the names that are this library's.
        compiled: names whose first call compiles, which is not what memory is measured on.
        memory: the pass whose peak of memory is measured.
        check: raises an error if what has this name computes something wrong.
    """
    peaks = {}
    for (name, which), call in calls.items():
        if name in compiled:
            call()
        if which == memory:
            peaks[name, which] = peak_memory(call)
    keep_memory()
    for name in dict.fromkeys(name for name, _ in calls):
        if check:
            check(name)
    busy, own, start = busy_seconds(), sum(os.times()[:4]), time.perf_counter()
    times, faults = interleaved(calls, seconds, [key for key in calls if key[0] in (baseline, *ours)])
    available = (time.perf_counter() - start) * (os.cpu_count() or 1)
    others = None if busy is None else max(busy_seconds() - busy - (sum(os.times()[:4]) - own), 0) / available
    rows = []
    for (name, which), values in times.items():
        ratios = [value / base for value, base in zip(values, times[baseline, which], strict=False)]
        row = {
            "name": name,
            "pass": which,
            "ms": rounded(statistics.median(values) * 1e3),
            "quartiles_ms": [rounded(q * 1e3) for q in quartiles(values)],
            "ratio_quartiles": [rounded(q) for q in quartiles(ratios)],
            "rounds": len(values),
            "page_faults": statistics.median_low(faults[name, which]),
        }
        if peaks.get((name, which)) is not None:
            row["peak_bytes"] = peaks[name, which]
        rows.append(row)
    others = None if others is None else rounded(others)
    return {"baseline": baseline, "ours": list(ours), "others_share": others, "rows": rows}


def passes(name: str, function: Callable[[], Tensor], leaves: Sequence[Tensor], grad: Tensor) -> dict:
    """The calls for forward alone, without gradients, and for forward and backward."""

    def forward() -> None:
        with torch.no_grad():
            function()

    def backward() -> None:
        for leaf in leaves:
            leaf.grad = None
        function().backward(grad)
        for leaf in leaves:  # as an optimizer does after its step: else other competitors would run beside them
            leaf.grad = None

    return {(name, FORWARD): forward, (name, BACKWARD): backward}


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """The first and the third."""
    if len(values) == 1:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def rounded(value: float) -> float:
    """To five digits: what is saved is what can be shown."""
    return float(f"{value:.5g}")


def peak_memory(run: Call) -> int | None:
    """The most bytes by which the process grows while it runs, results included; None where the system does not say."""

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
    """Tells the C library to keep what is freed, from now on."""
    if can_keep_memory():
        trim_threshold, mmap_max = -1, -4  # as in malloc.h
        ctypes.CDLL(None).mallopt(trim_threshold, -1)
        ctypes.CDLL(None).mallopt(mmap_max, 0)


def can_keep_memory() -> bool:
    """Whether it is glibc."""
    try:
        return hasattr(ctypes.CDLL(None), "mallopt")
    except OSError:
        return False


def page_faults() -> int:
    """How many pages the system has had to provide so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def busy_seconds() -> float | None:
    """How long all cores together have been busy, or taken away by the host; None where the system does not say."""
    try:
        user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    except (OSError, ValueError):
        return None
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def code() -> str:
    """A digest of this library's Python and compiled files."""
    package = Path(multimax.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(path for path in package.rglob("*") if path.suffix in (".py", ".so")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def machine() -> dict:
    """What the figures were taken on."""
    processor = processors.here()
    return {
        "processor": processor.name,
        "cpu": processor.product,
        "family": processor.family,
        "model": processor.model,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "isa": kernels.use_isa(),
        "onednn_max_cpu_isa": os.environ.get(probe.VARIABLE),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "code": code(),
        "date": datetime.date.today().isoformat(),
        "keep_memory": can_keep_memory(),
    }


def command_line(about: str | None, seconds: float) -> argparse.ArgumentParser:
    """The options that all benchmarks have."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="only torch's function and ours; not saved without --out")
    parser.add_argument("--seconds", type=float, default=seconds, help=f"time for each case (default {seconds:g})")
    parser.add_argument("--threads", type=int, default=None, help="torch threads (default: torch's choice)")
    parser.add_argument("--only", metavar="TEXT", default="", help="only cases with this text in their name")
    parser.add_argument(
        "--out", type=Path, help="where to save the figures (default: benchmarks/results/PROCESSOR/BENCHMARK.json)"
    )
    parser.add_argument("--table", type=Path, metavar="FILE", help="print the tables of a saved run and stop")
    return parser


def begin(options: argparse.Namespace) -> bool:
    """Handles `--table`; otherwise sets the threads and, where bfloat16 products die, the remedy.

    Returns whether there is something to measure.
    """
    if options.table:
        print(tables.tables(json.loads(options.table.read_text())))
        return False
    found = probe.bfloat16_products()
    os.environ.update(found.remedy)  # oneDNN reads it at the first product of this process; children inherit it
    if found.remedy:
        print(f"bf16 products: die with SIGILL here; measured with {probe.VARIABLE}={probe.LIMIT}")
    if options.threads:
        torch.set_num_threads(options.threads)
    if not can_keep_memory():
        print("freed memory cannot be kept without glibc: page faults count here")
    return True


def measured(options: argparse.Namespace, name: str, cases: Sequence[Case], measure: Callable[..., dict]) -> None:
    """Measures case by case, prints the tables and saves them.

    Each case is saved as soon as it is measured, beside the file, which is replaced when all are. If the run is
    stopped, the same command continues it, unless anything has changed.
    """
    run: dict = {"benchmark": name, "machine": machine(), "quick": options.quick}
    run |= {"seconds": options.seconds, "only": options.only, "cases": []}
    out = options.out
    if out is None and not (options.quick or options.only):
        out = RESULTS / processors.here().slug / f"{name}.json"
    part = out and out.with_suffix(".part")
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        refuse_another_machine(out, run["machine"])
        run = continued(part, run)
    done = {(case["group"], case["case"]) for case in run["cases"]}
    cases = [case for case in cases if options.only in f"{case.group}, {case.name}"]
    left = [case for case in cases if (case.group, case.name) not in done]
    if done:
        print(f"{name}: {len(done)} cases were measured before")
    tqdm.monitor_interval = 0  # no thread
    bar = tqdm(left, unit="case", desc=name, initial=len(done), total=len(done) + len(left))
    for case in bar:
        bar.set_postfix_str(f"{case.group}, {case.name}")
        figures = in_child(measure, *case.arguments, options.seconds, options.quick)
        run["cases"].append({"group": case.group, "case": case.name, **figures})
        if part:
            part.write_text(json.dumps(run, indent=1) + "\n")
    print(tables.tables(run))
    if out and part.exists():
        part.replace(out)
        print(f"\nsaved to {out}")


def in_child(measure: Callable[..., dict], *arguments: object) -> dict:
    """What it returns in a process of its own. This one has no threads yet, so a fork is safe, and starts at once."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=lambda: sender.send(measure(*arguments)))
    child.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        child.join()
        raise SystemExit(f"the case's process ended with exit code {child.exitcode}") from None
    finally:
        child.join()


def continued(part: Path, run: dict) -> dict:
    """The run that was stopped, if it was the same one on the same machine with the same code; else this one."""
    if not part.exists():
        return run
    before = json.loads(part.read_text())
    same = {**before, "cases": [], "machine": {**before["machine"], "date": run["machine"]["date"]}} == run
    return before if same else run


def refuse_another_machine(out: Path, here: dict) -> None:
    """Figures are replaced by newer ones of the same machine only."""
    if not out.exists():
        return
    there = json.loads(out.read_text())["machine"]
    if any(there[key] != here[key] for key in ("processor", "cores", "threads")):
        said = [f"{m['processor']} with {m['threads']} threads on {m['cores']} cores" for m in (there, here)]
        raise SystemExit(
            f"{out} holds figures of {said[0]}; this is {said[1]}. Save them elsewhere:"
            f" --out {out.parent}-{here['threads']}-threads/{out.name}"
        )


def main(name: str, about: str | None, seconds: float, cases: Sequence[Case], measure: Callable[..., dict]) -> None:
    """The command line of a benchmark without options of its own."""
    options = command_line(about, seconds).parse_args()
    if begin(options):
        measured(options, name, cases, measure)
