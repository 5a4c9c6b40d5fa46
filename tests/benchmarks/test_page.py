"""What is shown of saved results: it equals them, and no ratio contradicts the times beside it."""

import importlib
import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from places import ROOT

NUMBER = r"[\d.]+"
CELL = re.compile(rf"(?P<ms>{NUMBER}) ms(?: \(~?(?P<ratio>{NUMBER})x)?")
QUOTIENT = re.compile(rf"(?P<a>{NUMBER}) / (?P<b>{NUMBER}) ms = ~?(?P<ratio>{NUMBER})x")


@pytest.fixture
def page(benchmark: Any) -> Any:
    return importlib.import_module("page")


def off(text: str) -> float:
    """By how much what is shown may have been rounded."""
    return 0.5 * 10.0 ** -len(text.partition(".")[2]) * (1 + 1e-9)


def agrees(ratio: str, a: str, b: str) -> bool:
    low = (float(a) - off(a)) / (float(b) + off(b)) - off(ratio)
    high = (float(a) + off(a)) / (float(b) - off(b)) + off(ratio)
    return low <= float(ratio) <= high


def contradictions(text: str) -> list[str]:
    """Ratios that are not the quotient of the times beside them, and how many were looked at."""
    wrong, looked = [], 0
    for line in text.splitlines():
        for found in QUOTIENT.finditer(line):
            looked += 1
            wrong += [line] * (not agrees(found["ratio"], found["a"], found["b"]))
        cells = [CELL.match(cell.strip()) for cell in line.strip("|").split("|")[1:]]
        base = next((cell for cell in cells if cell), None)
        for cell in cells:
            if cell and cell["ratio"]:
                looked += 1
                wrong += [line] * (not agrees(cell["ratio"], cell["ms"], base["ms"]))
    return wrong if looked else ["no ratio at all"]


def made_up(page: Any, processor: str, factor: float) -> dict[str, dict]:
    """Runs with all that the summary shows."""
    machine = {"processor": processor, "cpu": "CPU", "family": 6, "model": 1, "cores": 2, "threads": 2, "isa": "avx512"}
    machine |= {"onednn_max_cpu_isa": None, "torch": "2.13", "date": "2026-01-02", "keep_memory": True}
    runs: dict[str, dict] = {}
    threads = page.Line("one and more", "threads", "rows, float32", "(1, 10)", "forward", "2 threads")
    for number, line in enumerate([*page.SUMMARY, threads], 1):
        run = runs.setdefault(line.benchmark, {"machine": machine, "quick": False, "cases": []})
        case = next((c for c in run["cases"] if (c["group"], c["case"]) == (line.group, line.case)), None)
        if case is None:
            case = {"group": line.group, "case": line.case, "baseline": "torch", "ours": [line.name]}
            case |= {"others_share": 0.0, "rows": []}
            run["cases"].append(case)
        for name, ms in (("torch", number * 1.2345), (line.name, number * 1.2345 * factor)):
            ratio = ms / (number * 1.2345)
            row = {"name": name, "pass": line.passed, "ms": ms, "quartiles_ms": [ms, ms], "rounds": 9, "page_faults": 0}
            case["rows"].append({**row, "ratio_quartiles": [ratio, ratio], "peak_bytes": 2**20 * number})
    return runs


@pytest.fixture
def results(page: Any, tmp_path: Path) -> dict:
    """Two processors', written to a folder and read from it."""
    for folder, name, factor in (("amd-zen9", "AMD Zen 9", 0.777), ("intel-x", "Intel X", 1.313)):
        (tmp_path / folder).mkdir()
        for benchmark, run in made_up(page, name, factor).items():
            (tmp_path / folder / f"{benchmark}.json").write_text(json.dumps(run))
    return page.tables.read(tmp_path)


def test_documents_show_the_saved_results(page: Any) -> None:
    results = page.tables.read(page.RESULTS)
    for path in (page.README, page.PAGE):
        text = path.read_text(encoding="utf-8")
        assert page.filled(text, results) == text, "run python benchmarks/page.py"
        assert page.PLACE.search(text)
    assert page.FIGURE.read_text(encoding="utf-8") == page.figure(results), "run python benchmarks/page.py"


def test_no_ratio_contradicts_the_times_beside_it(page: Any) -> None:
    if not page.tables.read(page.RESULTS):
        pytest.skip("nothing is saved")
    for path in (page.README, page.PAGE):
        assert contradictions(path.read_text(encoding="utf-8")) == []


def test_contradictions_are_found() -> None:
    assert contradictions("| eager | 23.34 ms | 488.14 ms (56.22x) |")
    assert contradictions("| a | 7.23 / 5.98 ms = 1.11x |")
    assert not contradictions("| eager | 23.34 ms | 488.14 ms (20.91x, 3 rounds) | |")
    assert not contradictions("| a | 7.23 / 5.98 ms = ~1.21x, 3 rounds |")


def test_backward_takes_time_in_saved_results(page: Any) -> None:
    for runs in page.tables.read(page.RESULTS).values():
        for run in runs.values():
            for case in run["cases"]:
                for row in case["rows"]:
                    forward = page.tables.row_of(case, row["name"], "forward")
                    if row["pass"] == "forward+backward" and forward and not page.tables.noisy(case, row):
                        assert row["ms"] > forward["ms"], (run["benchmark"], case["case"], row["name"])


def test_saved_results_know_their_folder_and_definition(page: Any) -> None:
    processors = importlib.import_module("processors")
    for path in page.RESULTS.glob("*/*.json"):
        run = json.loads(path.read_text())
        assert path.stem == run["benchmark"]
        machine = run["machine"]
        processor = processors.Processor(machine["processor"], machine["cpu"], machine["family"], machine["model"])
        assert path.parent.name.startswith(processor.slug)
        assert not any("ratio" in row for case in run["cases"] for row in case["rows"])


def test_without_results(page: Any, tmp_path: Path) -> None:
    results = page.tables.read(tmp_path / "none")
    assert results == {}
    filled = page.filled(page.PAGE.read_text(encoding="utf-8"), results)
    assert filled.count(page.NOTHING) == len(page.PLACE.findall(filled)) == 13
    assert page.filled(filled, results) == filled
    assert ElementTree.fromstring(page.figure(results)).tag.endswith("svg")


def test_several_processors_stand_side_by_side(page: Any, results: dict) -> None:
    summary = page.summary(results).splitlines()
    assert summary[0] == "| ours / torch's | AMD Zen 9, 2 threads | Intel X, 2 threads |"
    assert len(summary) == 2 + len(page.SUMMARY) <= 12
    assert summary[2] == f"| {page.SUMMARY[0].label} | 0.959 / 1.23 ms = 0.78x | 1.62 / 1.23 ms = 1.31x |"
    stands = page.stands(results).splitlines()
    assert stands[0] == "On AMD Zen 9, 2 threads, 10 of 10 take no longer than torch, from 0.78x to 0.78x."
    assert stands[1].startswith(
        "On Intel X, 2 threads, 0 of 10 take no longer than torch, from 1.31x to 1.31x. Longer: "
    )
    assert "| bfloat16, forward+backward | 0.78x to 0.78x, mean 0.78x | 1.31x to 1.31x, mean 1.31x |" in page.ranges(
        results, "attention"
    )
    shown = page.filled(page.PAGE.read_text(encoding="utf-8"), results)
    assert contradictions(shown) == []
    assert page.NOTHING not in shown
    assert shown.count("Intel X (CPU, family 6, model 1), 2 threads, avx512 kernels") == 6


def test_a_processor_with_some_benchmarks_only(page: Any, results: dict) -> None:
    del results["intel-x"]["models"], results["intel-x"]["rows"]
    summary = page.summary(results).splitlines()
    assert summary[2].endswith("| 0.959 / 1.23 ms = 0.78x |  |")
    assert page.ranges(results, "rows").splitlines()[2].endswith("|  |")
    assert "0 of 6" in page.stands(results)


def test_doubts_are_shown(page: Any, results: dict) -> None:
    case = results["amd-zen9"]["rows"]["cases"][0]
    ours = case["rows"][1]
    assert page.tables.cell(case, ours) == "0.959 ms (0.78x)"
    assert page.tables.cell(case, {**ours, "rounds": 3}) == "0.959 ms (0.78x, 3 rounds)"
    assert page.tables.cell(case, {**ours, "rounds": 1}) == "0.959 ms (0.78x, 1 round)"
    assert page.tables.cell(case, {**ours, "ratio_quartiles": [0.6, 0.9]}) == "0.959 ms (~0.78x)"
    assert page.tables.cell({**case, "others_share": 0.2}, ours) == "0.959 ms (~0.78x)"
    assert page.tables.cell({**case, "others_share": None}, ours) == "0.959 ms (0.78x)"


def test_rates_are_of_the_times_shown(page: Any, results: dict) -> None:
    case = results["amd-zen9"]["rows"]["cases"][0]
    ours = {**case["rows"][1], "ms": 2.0, "bytes": 10**8}
    assert page.tables.cell(case, ours).endswith(", 50.0 GB/s)")
    read = {**ours, "name": "read", "ms": 1.0}
    del ours["bytes"], read["bytes"]
    case = {**case, "rows": [case["rows"][0], ours, read], "read": "read", "read_bytes": 10**8}
    assert page.tables.cell(case, ours).endswith(", 50% of the read rate)")
    assert page.tables.cell(case, read) == "1.00 ms (100 GB/s)"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.0, "0"),
        (0.01234, "0.0123"),
        (0.9996, "1.00"),
        (1.234, "1.23"),
        (99.96, "100"),
        (123.4, "123"),
        (1234.5, "1234"),
    ],
)
def test_digits(page: Any, value: float, shown: str) -> None:
    assert page.tables.digits(value) == shown


def test_the_picture(page: Any, results: dict) -> None:
    drawn = ElementTree.fromstring(page.figure(results))
    space = "{http://www.w3.org/2000/svg}"
    bars = [r for r in drawn.iter(f"{space}rect") if r.get("class") in ("s0", "s1") and r.get("height") != "12"]
    assert len(bars) == 2 * len(page.SUMMARY)
    (one,) = [line for line in drawn.iter(f"{space}line") if line.get("class") == "one"]
    per_unit = float(one.get("x1")) - float(bars[0].get("x"))
    assert float(bars[0].get("width")) == pytest.approx(0.777 * per_unit, abs=0.1)
    assert float(bars[1].get("width")) == pytest.approx(1.313 * per_unit, abs=0.1)
    numbers = [part for part in drawn if part.get("class") == "value"]
    assert len(numbers) == len(bars)
    assert list(drawn).index(numbers[0]) > list(drawn).index(one)  # which a number may cover, and is not crossed by
    texts = [text.text for text in drawn.iter(f"{space}text")]
    assert {line.label for line in page.SUMMARY} < set(texts)
    assert texts.count("0.78x") == texts.count("1.31x") == len(page.SUMMARY)
    assert "prefers-color-scheme:dark" in page.figure(results)


def test_the_pages_link_to_what_is_there() -> None:
    assert "docs/figures/speed.svg" in (ROOT / "README.md").read_text()
    assert "figures/speed.svg" in (ROOT / "docs" / "speed.md").read_text()
