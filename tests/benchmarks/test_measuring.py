"""How times are taken and saved, with a clock of our own."""

import argparse
import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

CPUINFO = "processor : 0\nvendor_id : {}\ncpu family : {}\nmodel : {}\nmodel name : AMD EPYC\n"
CODE = "0123456789abcdef"


@pytest.fixture
def measuring(benchmark: Any) -> Any:
    return importlib.import_module("measuring")


class Clock:
    """Time passes in calls only."""

    def __init__(self, measuring: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.made = 0.0, []
        monkeypatch.setattr(measuring.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(measuring, "page_faults", lambda: 0)

    def call(self, name: object, *seconds: float) -> Callable[[], None]:
        """Takes these seconds, one after the other, over and over."""
        state = {"count": 0}

        def run() -> None:
            self.now += seconds[state["count"] % len(seconds)]
            state["count"] += 1
            self.made.append(name)

        return run


@pytest.fixture
def clock(measuring: Any, monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(measuring, monkeypatch)


def test_rounds_are_interleaved_and_rotate(measuring: Any, clock: Clock) -> None:
    calls = {name: clock.call(name, 0.25) for name in "abc"}
    times, faults = measuring.interleaved(calls, 0.0)
    assert times == {name: [0.25] * measuring.FEWEST for name in "abc"}
    assert faults == {name: [0] * measuring.FEWEST for name in "abc"}
    assert "".join(clock.made) == "abc" + "aabbcc" + "bbccaa" + "ccaabb"


def test_long_calls_are_made_once_and_slow_rivals_take_part_in_few_rounds(measuring: Any, clock: Clock) -> None:
    calls = {"torch": clock.call("torch", 0.125), "rival": clock.call("rival", 3.0), "slow": clock.call("slow", 0.5)}
    times, _ = measuring.interleaved(calls, 2.0, ["torch"])
    assert {name: len(values) for name, values in times.items()} == {"torch": 8, "rival": 1, "slow": 3}
    assert clock.made.count("rival") == 2  # one before the first round
    assert clock.made.count("slow") == 1 + 2 * 3


def test_calls_settle_before_the_first_round(measuring: Any, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = iter([0, 5000, 5000, 5000, *range(6000, 6100)])
    monkeypatch.setattr(measuring, "page_faults", lambda: next(pages))
    measuring.settle(clock.call("a", 1.0))
    assert clock.made == ["a", "a"]


def test_a_case(measuring: Any, clock: Clock) -> None:
    calls = {
        ("torch", "forward"): clock.call("t", 2.0),
        ("torch", "forward+backward"): clock.call("tb", 4.0),
        ("ours", "forward"): clock.call("o", 9.0, 1.0, 2.0, 3.0, 4.0, 5.0),
        ("ours", "forward+backward"): clock.call("ob", 5.0),
    }
    figures = measuring.compare(calls, 4.0, "torch", ["ours"])
    assert (figures["baseline"], figures["ours"]) == ("torch", ["ours"])
    row = figures["rows"][2]
    assert (row["name"], row["pass"], row["rounds"]) == ("ours", "forward", 3)
    assert row["ms"] == 2000  # of 1, 2 and 3 s; the call before the first round took 9
    assert row["quartiles_ms"] == [1500, 2500]
    assert row["ratio_quartiles"] == [0.75, 1.25]
    assert "ratio" not in row


def test_what_is_wrong_is_not_timed(measuring: Any, clock: Clock) -> None:
    def check(name: str) -> None:
        raise AssertionError(f"{name} is off")

    with pytest.raises(AssertionError, match="torch is off"):
        measuring.compare({("torch", "forward"): clock.call("t", 2.0)}, 0.0, "torch", [], check=check)
    assert clock.made == []


@pytest.mark.parametrize(
    ("vendor", "family", "model", "name", "slug"),
    [
        ("AuthenticAMD", 26, 2, "AMD Zen 5", "amd-zen5"),
        ("AuthenticAMD", 25, 17, "AMD Zen 4", "amd-zen4"),
        ("AuthenticAMD", 25, 1, "AMD Zen 3", "amd-zen3"),
        ("GenuineIntel", 6, 207, "Intel Emerald Rapids", "intel-emerald-rapids"),
        ("GenuineIntel", 6, 143, "Intel Sapphire Rapids", "intel-sapphire-rapids"),
        ("GenuineIntel", 19, 1, "Intel family 19 model 1", "intel-family-19-model-1"),
        ("HygonGenuine", 24, 4, "HygonGenuine family 24 model 4", "hygongenuine-family-24-model-4"),
    ],
)
def test_processors(measuring: Any, vendor: str, family: int, model: int, name: str, slug: str) -> None:
    processor = measuring.processors.parse(CPUINFO.format(vendor, family, model))
    assert (processor.name, processor.slug) == (name, slug)
    assert processor[1:] == ("AMD EPYC", family, model)


def test_processors_without_such_numbers(measuring: Any) -> None:
    assert measuring.processors.parse("CPU implementer : 0x41\nCPU part : 0xd0c\n").slug == "arm-0x41-0xd0c"
    assert measuring.processors.parse("").slug


@pytest.fixture
def options(measuring: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> argparse.Namespace:
    monkeypatch.setattr(measuring, "in_child", lambda measure, *arguments: measure(*arguments))
    monkeypatch.setattr(measuring, "RESULTS", tmp_path)
    monkeypatch.setattr(measuring, "code", lambda: CODE)
    return argparse.Namespace(out=None, quick=False, seconds=1.0, only="")


def figures(*arguments: object) -> dict:
    row = {"name": "torch", "pass": "forward", "ms": 2.0, "quartiles_ms": [2.0, 2.0], "rounds": 9, "page_faults": 0}
    return {"baseline": "torch", "ours": [], "others_share": 0.0, "rows": [{**row, "ratio_quartiles": [1.0, 1.0]}]}


def test_a_run_that_is_stopped_goes_on(
    measuring: Any, options: argparse.Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = [measuring.Case("float32", name, (name,)) for name in ("one", "two", "three")]
    seen: list[str] = []

    def measure(name: str, seconds: float, quick: bool) -> dict:
        seen.append(name)
        if seen == ["one", "two"]:
            raise KeyboardInterrupt
        return figures()

    out = tmp_path / measuring.processors.here().slug / "rows.json"
    with pytest.raises(KeyboardInterrupt):
        measuring.measured(options, "rows", cases, measure)
    assert not out.exists()
    assert [case["case"] for case in json.loads(out.with_suffix(".part").read_text())["cases"]] == ["one"]
    measuring.measured(options, "rows", cases, measure)
    assert seen == ["one", "two", "two", "three"]
    assert [case["case"] for case in json.loads(out.read_text())["cases"]] == ["one", "two", "three"]
    assert not out.with_suffix(".part").exists()
    out.rename(out.with_suffix(".part"))
    monkeypatch.setattr(measuring, "code", lambda: "another")
    measuring.measured(options, "rows", cases[:1], measure)
    assert seen[4:] == ["one"], "other code's cases are not taken over"


def test_what_is_saved_where(measuring: Any, options: argparse.Namespace, tmp_path: Path) -> None:
    cases = [measuring.Case("float32", "one", ()), measuring.Case("bfloat16", "one", ())]
    options.quick = True
    measuring.measured(options, "rows", cases, figures)
    options.quick, options.only = False, "bfloat16"
    measuring.measured(options, "rows", cases, figures)
    assert not list(tmp_path.iterdir())
    options.out = tmp_path / "mine.json"
    measuring.measured(options, "rows", cases, figures)
    assert [case["group"] for case in json.loads(options.out.read_text())["cases"]] == ["bfloat16"]
    saved = json.loads(options.out.read_text())
    saved["machine"]["threads"] += 62
    options.out.write_text(json.dumps(saved))
    with pytest.raises(SystemExit, match=r"holds figures of .* Save them elsewhere: --out"):
        measuring.measured(options, "rows", cases, figures)
    assert json.loads(options.out.read_text()) == saved


def test_what_a_run_of_all_has_done(benchmark: Any, tmp_path: Path) -> None:
    everything = importlib.import_module("everything")
    done = everything.Done(tmp_path / "new" / "done.part", "this code")
    assert done.names() == []
    done.add("rows")
    done.add("loss")
    assert everything.Done(done.path, "this code").names() == ["rows", "loss"]
    assert everything.Done(done.path, "other code").names() == []
