"""Searches: what is tried, what goes on, and what is chosen."""

import json
import math
import shutil
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import experiment_data
from multimax import cli
from multimax.cli import sweep as sweep_command
from multimax.experiments import results, search
from multimax.experiments import sweep as sweeps
from multimax.experiments.checkpoints import locked
from multimax.experiments.results import Run, Sweep
from multimax.experiments.search import Group, Rung, Search
from multimax.experiments.settings import override, preset
from tiny_runs import TINY

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what the Trainer uses

RECIPE = sweeps.load_table("recipe").search
OWN = {
    "about": "a small search",
    "baseline": "softmax",
    "seeds": 1,
    "methods": {"softmax": {}},
    "search": {
        "rungs": [{"share": 0.5, "seeds": 1}, {"share": 1, "seeds": 2}],
        "keep": 2,
        "confirm": {"MultiMax both": {"attention": "multimax", "output": "multimax"}},
        "groups": {
            "MultiMax": {
                "settings": {"attention": "multimax"},
                "axes": {"multimax_lr_factor": [1, 30], "per_head": [False, True]},
                "without": [{"multimax_lr_factor": 1, "per_head": True}],
            },
            "temperature": {"settings": {"temperature": "trained"}, "axes": {"multimax_lr_factor": [10]}},
        },
    },
}


def test_what_is_drawn_is_balanced() -> None:
    for name in ("MultiMax attention", "MultiMax output", "MultiMax both"):
        group = RECIPE.groups[name]
        drawn = search.combinations(group)
        assert len(drawn) == len({tuple(each.items()) for each in drawn}) == group.draw
        assert drawn == search.combinations(group)
        for axis, values in group.axes.items():
            counts = Counter(each[axis] for each in drawn)
            assert set(counts) == set(values)
            if axis not in ("init", "monotone"):  # of which some combinations cannot be
                assert max(counts.values()) - min(counts.values()) <= 2
    attention = search.combinations(RECIPE.groups["MultiMax attention"])
    assert not any(each["monotone"] and each["init"] in ("deit_small", "wikitext103_lm") for each in attention)
    temperatures = search.combinations(RECIPE.groups["trained temperature both"])
    assert len(temperatures) == 8


def test_how_much_work_it_is() -> None:
    sizes = [len(labels) for labels in search.candidates(RECIPE).values()]
    works = search.works(RECIPE, 2)
    assert works[0] == pytest.approx(0.1 * (2 + sum(sizes)))
    assert works[1] == pytest.approx(0.3 * 2 * (2 + sum(math.ceil(size / 3) for size in sizes)))
    assert len(works) == len(RECIPE.rungs)


def test_a_rung_is_shorter_and_reads_no_test_part() -> None:
    steps = search.shortened(preset("recipe-text"), 0.1)
    assert steps.trainer["max_steps"] == preset("recipe-text").trainer["max_steps"] // 10
    assert not steps.test
    assert not steps.longer
    epochs = search.shortened(preset("recipe-fashion"), 0.5)
    assert epochs.trainer["num_train_epochs"] == preset("recipe-fashion").trainer["num_train_epochs"] / 2
    assert (
        search.shortened(override(preset("recipe-text"), {"trainer": {"max_steps": 3}}), 0.01).trainer["max_steps"] == 1
    )


def _sweep(losses: dict[str, list[float | None]]) -> Sweep:
    """A rung with these validation losses by seed; None for a run that diverged."""
    about = {"baseline": "softmax", "methods": {label: {} for label in losses}, "seeds": [0, 1]}
    runs = [
        Run(label, seed, {}, {}, {"status": "diverged", "metrics": {}} if loss is None else
            {"status": "finished", "metrics": {"loss": loss}})
        for label, values in losses.items() for seed, loss in enumerate(values)
    ]  # fmt: skip
    return Sweep(about, runs)


def test_who_goes_on() -> None:
    rung = _sweep({
        "softmax": [1.0, 3.0],
        "worse": [1.1, 3.1],
        "better": [0.8, 2.9],
        "diverged": [0.1, None],
        "better, too": [0.9, 2.8],
        "no number": [math.nan, 0.0],
    })  # fmt: skip
    labels = ["worse", "diverged", "better, too", "better", "no number"]
    found = search.standings(rung, labels)
    # equals keep their order
    assert [each.label for each in found][:3] == ["better, too", "better", "worse"]
    assert found[0].difference == pytest.approx(-0.15)
    assert found[2].difference == pytest.approx(0.1)
    assert found[3].difference == found[4].difference == math.inf
    assert search.going_on(rung, {"one": labels, "other": ["diverged"]}, 3) == {
        "one": ["better, too", "better"],
        "other": ["diverged"],
    }


@pytest.mark.parametrize(
    "wrong",
    [
        [],
        {"rungs": [], "keep": 2},
        {"rungs": [], "keep": 2, "groups": {"a": {"settings": {}, "axes": {"order": [1]}}}},
        {"rungs": [{"share": 2, "seeds": 1}], "keep": 2, "groups": {"a": {"settings": {}, "axes": {"order": [1]}}}},
        {"rungs": [{"share": 1, "seeds": 1}], "keep": 1, "groups": {"a": {"settings": {}, "axes": {"order": [1]}}}},
        {"rungs": [{"share": 1, "seeds": 1}], "keep": 2, "groups": {"a": {"settings": {}, "axes": {"order": []}}}},
        {"rungs": [{"share": 1, "seeds": 1}], "keep": 2, "groups": {"a": {"axis": {}}}},
        {"rungs": [{"share": 1, "seeds": 1}], "keep": 2, "groups": {}},
    ],
)
def test_a_search_that_cannot_be(wrong: Any) -> None:
    with pytest.raises(ValueError, match="expected the search in own to have rungs"):
        search.read(wrong, "own")


def test_what_is_chosen(tmp_path: Path) -> None:
    base, own = preset("cpu-digits"), search.read(OWN["search"], "")
    labels = search.candidates(own)
    best = {"MultiMax": search.Standing(-0.1, "MultiMax, rate x30, per head")}
    best["temperature"] = search.Standing(0.1, next(iter(labels["temperature"])))
    search.finish(tmp_path, base, own, best, "softmax")
    chosen = preset(str(tmp_path / "chosen.json"))
    assert (chosen.attention, chosen.multimax_lr_factor, chosen.per_head, chosen.test) == ("multimax", 30, True, True)
    table = sweeps.load_table(str(tmp_path / "confirm.json"))
    assert table.methods == {
        "softmax": {},
        "MultiMax both": {"attention": "multimax", "output": "multimax"},
        "MultiMax, recipe": {"attention": "multimax", "multimax_lr_factor": 30, "per_head": True},
        "temperature, recipe": {"temperature": "trained", "multimax_lr_factor": 10},
    }
    # the best of all, whichever group it is in
    best["temperature"] = best["temperature"]._replace(difference=-0.2)
    search.finish(tmp_path, base, own, best, "softmax")
    assert preset(str(tmp_path / "chosen.json")).temperature == "trained"
    best["temperature"] = best["temperature"]._replace(difference=0.1)
    # nothing better than the baseline: it stays
    best["MultiMax"] = best["MultiMax"]._replace(difference=0.0)
    search.finish(tmp_path, base, own, best, "softmax")
    assert preset(str(tmp_path / "chosen.json")).attention == "softmax"
    alone = Search([Rung(1, 1)], 2, {"rate": Group({}, {"trainer.learning_rate": [0.5, 0.6]})})
    (tmp_path / "tuned").mkdir()
    search.finish(tmp_path / "tuned", base, alone, {"rate": search.Standing(-1, "rate, learning rate 0.6")}, "softmax")
    assert preset(str(tmp_path / "tuned/chosen.json")).trainer == {**base.trainer, "learning_rate": 0.6}
    assert not (tmp_path / "tuned/confirm.json").exists()


def test_a_search_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.json").write_text(json.dumps(OWN))
    data = experiment_data.idx(tmp_path / "data")
    for file in data.glob("t10k-*"):
        file.rename(tmp_path / file.name)  # the test part: nothing of the search may need it
    words = ["sweep", str(tmp_path / "own.json"), "--preset", "recipe-fashion", "--data", str(data), *TINY]
    words += ["--out", str(tmp_path / "search")]
    assert cli.main([*words, "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "rung 1 of 2: 5 methods, 1 seeds, 0.5 of the steps" in said
    assert "in all as much work as 10.5 runs of full length" in said
    assert not (tmp_path / "search").exists()
    assert cli.main(words) == 0
    assert "best of MultiMax: MultiMax, rate x" in capsys.readouterr().out
    first, last = (results.read(tmp_path / f"search/rung-{n}") for n in (1, 2))
    assert (len(first.runs), len(last.runs)) == (5, 8)
    assert {run.result["steps"] for run in first.runs} == {1}
    assert {run.result["steps"] for run in last.runs} == {2}
    assert not first.missing + last.missing
    assert all(run.result["data"] == "data (validation part)" for run in first.runs + last.runs)
    assert (
        search.standings(first, ["MultiMax, rate x1", "MultiMax, rate x30", "MultiMax, rate x30, per head"])[0].label
        in last.labels
    )
    # again: nothing is trained
    times = {file: file.stat().st_mtime_ns for file in tmp_path.glob("search/*/*/*/result.json")}
    assert cli.main(words) == 0
    assert {file: file.stat().st_mtime_ns for file in tmp_path.glob("search/*/*/*/result.json")} == times
    # one run is at work in another process: the search waits, and does it itself if the other gives up
    busy = tmp_path / "search/rung-1/multimax-rate-x30/seed-0"
    shutil.rmtree(busy)
    release, taken = threading.Event(), threading.Event()

    def hold() -> None:
        with locked(busy):
            taken.set()
            release.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert taken.wait(60)
    monkeypatch.setattr(sweep_command.time, "sleep", lambda _: (release.set(), thread.join()))
    capsys.readouterr()
    assert cli.main(words) == 0
    assert release.is_set()
    assert "waiting for runs in other processes" in capsys.readouterr().out
    assert (busy / "result.json").is_file()
    capsys.readouterr()
    assert cli.main(["table", str(tmp_path / "search")]) == 0
    printed = capsys.readouterr().out
    assert printed.count("learned, by layer") == 2
    assert "t_b1 " in printed
    # with the test part, new seeds, and what was chosen
    for file in tmp_path.glob("t10k-*"):
        file.rename(data / file.name)
    words = ["sweep", str(tmp_path / "search/confirm.json"), "--preset", "recipe-fashion", "--data", str(data), *TINY]
    assert cli.main([*words, "--seeds", "1", "--first-seed", "100", "--out", str(tmp_path / "confirm")]) == 0
    assert {run.seed for run in results.read(tmp_path / "confirm").runs} == {100}
    capsys.readouterr()
    assert cli.main([*words[:1], "recipe", *words[2:], "--seeds", "2"]) == 1
    assert "expected --seeds to be left to the search" in capsys.readouterr().err
