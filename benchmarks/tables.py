"""Saved runs as Markdown. Ratios, rates and shares are computed here, from the times beside them, and nowhere else."""

import json
import math
import statistics
from pathlib import Path

NOISE = 0.2  # quartiles of the quotients, round by round, that lie further apart than this share of the ratio
OTHERS = 0.1  # the share of the machine that other processes took meanwhile
ENOUGH = 5  # rounds; fewer are shown
PASSES = ("forward", "forward+backward", "training step")
LEGEND = (
    "Each cell is the median time and, in brackets, its quotient by the first column's. ~: the rounds disagree, the"
    f" quartiles of their quotients are more than {NOISE:.0%} apart, or other processes took over {OTHERS:.0%} of the"
    " machine. Slow rivals take part in few rounds, whose number is given then."
)


def read(folder: Path) -> dict[str, dict[str, dict]]:
    """The runs that are saved: by processor's folder, then by benchmark."""
    found: dict[str, dict[str, dict]] = {}
    for path in sorted(folder.glob("*/*.json")):
        found.setdefault(path.parent.name, {})[path.stem] = json.loads(path.read_text(encoding="utf-8"))
    return found


def row_of(case: dict, name: str, which: str) -> dict | None:
    """A competitor's figures."""
    return next((row for row in case["rows"] if (row["name"], row["pass"]) == (name, which)), None)


def ratio(case: dict, row: dict) -> float:
    """Its time over that of the baseline in the same pass."""
    base = row_of(case, case["baseline"], row["pass"])
    assert base
    return row["ms"] / base["ms"]


def noisy(case: dict, row: dict) -> bool:
    """Whether the rounds disagree too much to believe the ratio."""
    low, high = row["ratio_quartiles"]
    middle = ratio(case, row)
    return high - low > NOISE * middle or (case["others_share"] or 0) > OTHERS


def digits(value: float) -> str:
    """Three of them, without an exponent: 0.0123, 1.23, 12.3, 123, 1234."""
    if value == 0:
        return "0"
    decimals = max(2 - math.floor(math.log10(abs(float(f"{value:.3g}")))), 0)
    return f"{value:.{decimals}f}"


def times(value: float) -> str:
    """A ratio: two decimals, and from 10 on three digits."""
    return f"{value:.2f}x" if value < 9.995 else f"{digits(value)}x"


def shown(case: dict, row: dict) -> str:
    """A ratio with its doubts."""
    few = "" if row["rounds"] >= ENOUGH else f", {row['rounds']} round" + "s" * (row["rounds"] > 1)
    return f"{'~' * noisy(case, row)}{times(ratio(case, row))}{few}"


def cell(case: dict, row: dict | None) -> str:
    """Time, ratio, and what else is known."""
    if row is None:
        return ""
    about = [] if row["name"] == case["baseline"] else [shown(case, row)]
    read = row_of(case, case["read"], row["pass"]) if "read" in case else None
    if read is row and read:
        about = [f"{digits(case['read_bytes'] / row['ms'] / 1e6)} GB/s"]
    elif read:
        about.append(f"{read['ms'] / row['ms']:.0%} of the read rate")
    if "bytes" in row:
        about.append(f"{digits(row['bytes'] / row['ms'] / 1e6)} GB/s")
    return f"{digits(row['ms'])} ms" + (f" ({', '.join(about)})" if about else "")


def lines(head: list[str], body: list[list[str]]) -> list[str]:
    """A table."""
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *body)]


def geometric_mean(values: list[float]) -> float:
    """The mean that ratios have."""
    return math.exp(statistics.fmean(map(math.log, values)))


def grouped(run: dict) -> dict[tuple[str, str], list[dict]]:
    """Cases by what one table shows: group and pass."""
    found: dict[tuple[str, str], list[dict]] = {}
    for case in run["cases"]:
        for which in PASSES:
            if any(row["pass"] == which for row in case["rows"]):
                found.setdefault((case["group"], which), []).append(case)
    return found


def named(cases: list[dict], which: str) -> list[str]:
    """The competitors, in order."""
    return list(dict.fromkeys(row["name"] for case in cases for row in case["rows"] if row["pass"] == which))


def table(group: str, which: str, cases: list[dict]) -> list[str]:
    """One line per case, one column per competitor, and the mean."""
    names = named(cases, which)
    body = [[case["case"], *(cell(case, row_of(case, name, which)) for name in names)] for case in cases]
    if len(cases) > 1:
        means = []
        for name in names:
            rows = [row_of(case, name, which) for case in cases]
            full = all(rows) and not any(name in (case["baseline"], case.get("read")) for case in cases)
            pairs = zip(cases, rows, strict=True)
            means.append(times(geometric_mean([ratio(case, row) for case, row in pairs if row])) if full else "")
        body.append(["geometric mean", *means])
    return lines([f"{group}, {which}", *names], body)


def memory(group: str, which: str, cases: list[dict]) -> list[str]:
    """The peaks, where they were measured."""
    cases = [case for case in cases if any("peak_bytes" in row for row in case["rows"] if row["pass"] == which)]
    if not cases:
        return []
    names = named(cases, which)
    body = []
    for case in cases:
        rows = [row_of(case, name, which) for name in names]
        peaks = [f"{row['peak_bytes'] / 2**20:.0f} MiB" if row and "peak_bytes" in row else "" for row in rows]
        body.append([case["case"], *peaks])
    return lines([f"{group}, {which}, memory at the peak", *names], body)


def about(machine: dict) -> str:
    """What the figures were taken on, in a line."""
    model = "" if machine["model"] is None else f", family {machine['family']}, model {machine['model']}"
    said = (
        f"{machine['processor']} ({machine['cpu']}{model}), {machine['threads']} threads,"
        f" {machine['isa']} kernels, torch {machine['torch']}, {machine['date']}."
    )
    if machine["onednn_max_cpu_isa"]:
        said += f" ONEDNN_MAX_CPU_ISA={machine['onednn_max_cpu_isa']}."
    if not machine["keep_memory"]:
        said += " Freed memory was not kept: page faults count."
    return said


def tables(run: dict) -> str:
    """A saved run: all its tables."""
    found = grouped(run)
    parts = [[about(run["machine"]) + " Without the rivals (--quick)." * run["quick"]]]
    parts += [table(*key, cases) for key, cases in found.items()]
    parts += [memory(*key, cases) for key, cases in found.items()]
    return "\n\n".join("\n".join(part) for part in parts if part)
