"""The generated parts of README.md and docs/speed.md, and the picture: `python benchmarks/page.py` makes them anew."""

import re
from pathlib import Path
from typing import NamedTuple

import picture
import tables

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
README, PAGE, FIGURE = ROOT / "README.md", ROOT / "docs" / "speed.md", ROOT / "docs" / "figures" / "speed.svg"
PLACE = re.compile(r"(<!-- (summary|stands|ranges|tables)(?: (\w+))? -->\n)(.*?)(<!-- end -->)", re.DOTALL)
NOTHING = "Nothing has been measured yet: `make bench`."
BOTH, STEP = "forward+backward", "training step"
Runs = dict[str, dict[str, dict]]


class Line(NamedTuple):
    """One of the summary's: what it is called, and where its figures are."""

    label: str
    benchmark: str
    group: str
    case: str
    passed: str
    name: str


KERNEL, LOSS = "multimax (kernel)", "linear_multimax_cross_entropy"
DECODE = "1 x 8 heads of 128, 4 queries share each, 32768 keys, 1 query"
SUMMARY = [
    Line("rows of 1000, float32, forward", "rows", "float32", "(8192, 1000)", "forward", KERNEL),
    Line("rows of 1000, float32, with backward", "rows", "float32", "(8192, 1000)", BOTH, KERNEL),
    Line("rows of 1000, bfloat16, with backward", "rows", "bfloat16", "(8192, 1000)", BOTH, KERNEL),
    Line("attention, 1024 long, float32, with backward", "attention", "float32", "(2, 12, 1024, 64)", BOTH, KERNEL),
    Line(
        *("attention, 1024 long, causal, bfloat16, with backward", "attention"),
        *("bfloat16", "(2, 12, 1024, 64), causal", BOTH, KERNEL),
    ),
    Line(
        *("attention, 16384 long, causal, bfloat16, with backward", "attention"),
        *("bfloat16", "(1, 8, 16384, 64), causal", BOTH, KERNEL),
    ),
    Line("decode step, 32768 keys, bfloat16", "attention", "decode step, bfloat16", DECODE, "forward", KERNEL),
    Line("output loss, 32000 classes, bfloat16", "loss", "bfloat16", "32000 classes", BOTH, LOSS),
    Line("entmax15, rows of 1000, float32, with backward", "reweighting", "float32", "(8192, 1000)", BOTH, "entmax15"),
    Line("training step of a GPT2, float32", "models", "float32", "GPT2, 6 layers, 2 x 512 tokens", STEP, "MultiMax"),
]


def machine(runs: dict[str, dict]) -> dict:
    """Of a processor's runs: the newest one's."""
    return max((run["machine"] for run in runs.values()), key=lambda machine: machine["date"])


def heading(runs: dict[str, dict]) -> str:
    """A processor's column."""
    about = machine(runs)
    return f"{about['processor']}, {about['threads']} thread{'s' * (about['threads'] != 1)}"


def found(runs: dict[str, dict], line: Line) -> tuple[dict, dict] | None:
    """The case and the row of a line of the summary."""
    for case in runs.get(line.benchmark, {"cases": []})["cases"]:
        if (case["group"], case["case"]) == (line.group, line.case):
            row = tables.row_of(case, line.name, line.passed)
            return None if row is None else (case, row)
    return None


def summary(results: Runs) -> str:
    """At most ten lines, one column per processor: our time over torch's."""
    if not results:
        return NOTHING
    body = []
    for line in SUMMARY:
        cells = []
        for runs in results.values():
            of_line = found(runs, line)
            if of_line is None:
                cells.append("")
                continue
            case, row = of_line
            base = tables.row_of(case, case["baseline"], row["pass"])
            ours, theirs = tables.digits(row["ms"]), tables.digits(base["ms"])
            cells.append(f"{ours} / {theirs} ms = {tables.shown(case, row)}")
        body.append([line.label, *cells])
    return "\n".join(tables.lines(["ours / torch's", *map(heading, results.values())], body))


def stands(results: Runs) -> str:
    """Sentences: in how many lines of the summary torch is reached, and in which it is not."""
    said = []
    for runs in results.values():
        rows = {line.label: found(runs, line) for line in SUMMARY}
        ratios = {label: tables.ratio(*row) for label, row in rows.items() if row}
        if not ratios:
            continue
        slower = [f"{label} ({tables.times(ratio)})" for label, ratio in ratios.items() if round(ratio, 2) > 1]
        said.append(
            f"On {heading(runs)}, {len(ratios) - len(slower)} of {len(ratios)} take no longer than torch,"
            f" from {tables.times(min(ratios.values()))} to {tables.times(max(ratios.values()))}."
            + (f" Longer: {'; '.join(slower)}." if slower else "")
        )
    return "\n".join(said) or NOTHING


def ranges(results: Runs, benchmark: str) -> str:
    """What ours takes, from the least to the largest ratio and their geometric mean, processors side by side."""
    columns: dict[str, dict[str, list[float]]] = {}
    for folder, runs in results.items():
        for (group, which), cases in tables.grouped(runs.get(benchmark, {"cases": []})).items():
            for name in dict.fromkeys(name for case in cases for name in case["ours"]):
                what = f"{name}: {group}, {which}" if len(cases[0]["ours"]) > 1 else f"{group}, {which}"
                rows = [(case, tables.row_of(case, name, which)) for case in cases]
                ratios = [tables.ratio(case, row) for case, row in rows if row]
                if ratios:
                    columns.setdefault(what, {})[folder] = ratios
    if not columns:
        return NOTHING
    body = []
    for what, by_folder in columns.items():
        cells = []
        for folder in results:
            ratios = by_folder.get(folder, [])
            text = "" if not ratios else f"{tables.times(min(ratios))} to {tables.times(max(ratios))}"
            if len(ratios) > 1:
                text += f", mean {tables.times(tables.geometric_mean(ratios))}"
            cells.append(tables.times(ratios[0]) if len(ratios) == 1 else text)
        body.append([what, *cells])
    return "\n".join(tables.lines(["our time as a multiple of torch's", *map(heading, results.values())], body))


def all_tables(results: Runs, benchmark: str) -> str:
    """Every processor's tables."""
    parts = [tables.tables(runs[benchmark]) for runs in results.values() if benchmark in runs]
    return "\n\n".join(parts) or NOTHING


def filled(text: str, results: Runs) -> str:
    """A document with its places made anew."""

    def made(match: re.Match[str]) -> str:
        begin, kind, benchmark, _, end = match.groups()
        if kind in ("summary", "stands"):
            return f"{begin}{(summary if kind == 'summary' else stands)(results)}\n{end}"
        return f"{begin}{(ranges if kind == 'ranges' else all_tables)(results, benchmark)}\n{end}"

    return PLACE.sub(made, text)


def figure(results: Runs) -> str:
    """The summary's ratios as bars."""
    series = {}
    for runs in results.values():
        rows = [found(runs, line) for line in SUMMARY]
        series[heading(runs)] = [tables.ratio(*row) if row else None for row in rows]
    title = "Time as a multiple of torch's for softmax: shorter is faster"
    return picture.bars(title, [line.label for line in SUMMARY], series)


def main() -> None:
    """Writes all three."""
    results = tables.read(RESULTS)
    for path in (README, PAGE):
        path.write_text(filled(path.read_text(encoding="utf-8"), results), encoding="utf-8")
    FIGURE.write_text(figure(results), encoding="utf-8")


if __name__ == "__main__":
    main()
