"""Tables from runs: what is read, what is kept in a file, and the numbers and words of the tables."""

import json
import math
import re
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import results_tables
from multimax.experiments import results
from multimax.experiments.results import Run, Sweep, read, save
from multimax.experiments.table import (
    detection,
    learned_layers,
    line_of,
    markdown,
    paired_difference,
    parameters_markdown,
    pooled_deviation,
    power,
    seeds_to_see,
)

ENVIRONMENT = {
    "versions": {"torch": "2.13.0", "multimax": "0.1.0"},
    "cpu": "Some CPU @ 2 GHz",
    "threads": 2,
    "commit": "0123456789abcdef0123456789abcdef01234567",
}
ACCURACY = {"softmax": [0.970, 0.974, 0.972], "MultiMax attention": [0.981, 0.979, 0.985]}


def about(labels: Any = ("softmax", "MultiMax attention"), seeds: Any = (0, 1, 2), **others: Any) -> dict[str, Any]:
    return {
        "table": "main",
        "preset": "cpu-digits",
        "task": "vision",
        "about": "a test",
        "methods": {label: {"attention": label} for label in labels},
        "seeds": list(seeds),
        "baseline": "softmax",
        **others,
    }


def result(status: str = "finished", **metrics: Any) -> dict[str, Any]:
    return {"status": status, "metrics": metrics, "steps": 600, "minutes": 1.5, "ms_per_step": 35.12}


def run(label: str, seed: int, found: dict[str, Any], **config: Any) -> Run:
    return Run(label, seed, {"label": label, "seed": seed, "data": "digits", **config}, ENVIRONMENT, found)


def sweep(values: dict[str, list[Any]], metric: str = "accuracy", **others: Any) -> Sweep:
    seeds = range(max(map(len, values.values())))
    runs = [
        run(label, seed, result(**{metric: v})) for label, column in values.items() for seed, v in enumerate(column)
    ]
    return Sweep(about(values, seeds, **others), runs)


def write(folder: Path, example: Sweep) -> Path:
    """The folder that a sweep would have written."""
    folder.mkdir(exist_ok=True)
    (folder / "sweep.json").write_text(json.dumps(example.about))
    for each in example.runs:
        place = folder / re.sub(r"\W+", "-", each.label.lower()) / f"seed-{each.seed}"
        place.mkdir(parents=True)
        for name in results.FILES:
            (place / f"{name}.json").write_text(json.dumps(getattr(each, name)))
    return folder


def edit(file: Path, **values: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def cells(text: str) -> list[list[str]]:
    """The table's cells as Markdown has them: a bar that is not escaped ends one."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in re.split(r"(?<!\\)(?:\\\\)*\|", line)[1:-1]] for line in lines]
    assert set("".join(rows[1])) == {"-"}
    assert len({len(line) for line in lines}) == 1  # it reads well as it is
    assert len({len(row) for row in rows}) == 1
    return [rows[0], *rows[2:]]


def notes(text: str) -> str:
    head, _, rest = text.partition("\n\n")
    assert all(line.startswith("|") for line in head.splitlines())
    assert all(line.startswith("- ") for line in rest.splitlines())
    return rest


# reading


def test_reads_the_folder_in_the_order_of_the_sweep(tmp_path: Path) -> None:
    example = sweep({"softmax": [0.9, 0.8, 0.7], "b": [0.1, 0.2, 0.3], "a": [0.4, 0.5, 0.6]})
    folder = write(tmp_path / "s", example)
    (folder / "b" / "seed-1" / "result.json").unlink()  # has begun
    shutil.rmtree(folder / "a")  # has not
    (folder / "b" / "seed-0-old").mkdir()
    (folder / "logs").mkdir()
    (folder / "logs" / "seed-3").write_text("no folder")
    found = read(str(folder))
    assert found.about == example.about
    assert found.labels == ["softmax", "b", "a"]
    assert [(each.label, each.seed) for each in found.runs] == [
        ("softmax", 0),
        ("softmax", 1),
        ("softmax", 2),
        ("b", 0),
        ("b", 2),
    ]
    assert found.missing == [("b", 1), ("a", 0), ("a", 1), ("a", 2)]
    assert found.runs[3] == example.runs[3]
    assert read(write(tmp_path / "whole", example)) == example
    assert example.missing == []


def test_seeds_in_the_order_of_the_sweep(tmp_path: Path) -> None:
    runs = [run("softmax", seed, result(accuracy=0.5)) for seed in (2, 10, 1)]
    found = read(write(tmp_path, Sweep(about(["softmax"], [10, 2, 1]), runs)))
    assert [each.seed for each in found.runs] == [10, 2, 1]


def test_what_is_no_sweep(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"expected a sweep's folder with a file sweep\.json, got .*empty"):
        read(tmp_path / "empty")
    with pytest.raises(FileNotFoundError, match=r"got no .*nowhere"):
        read(tmp_path / "nowhere")
    other = tmp_path / "other.json"
    other.write_text("{}")
    with pytest.raises(ValueError, match=r"saved from one, got .*other\.json, which has no 'format'"):
        read(other)


def damaged(folder: Path) -> str:
    """What is wrong with the files of softmax with seed 1. It says what to do; the other runs are shown."""
    found = read(folder)
    assert found.missing == [("softmax", 1)]
    (text,) = found.damaged.values()
    assert list(found.damaged) == ["softmax/seed-1"]
    assert f"Damaged, and not in the table: {text.removeprefix('multimax: ')}." in notes(markdown(found))
    assert "; delete the " in text
    return text


@pytest.mark.parametrize("name", ["sweep.json", *(f"softmax/seed-1/{name}.json" for name in results.FILES)])
@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b'{"a": ', "expected JSON in .*{}, got a damaged file: Expecting value"),
        (b"\xff{}", "expected JSON in .*{}, got a damaged file: .*utf-8"),
        (b"", "expected JSON in .*{}, got a damaged file"),
        (b"[1]", "expected a JSON object in .*{}, got list"),
    ],
    ids=["cut", "no text", "empty", "a list"],
)
def test_damaged_files_are_named(tmp_path: Path, name: str, content: bytes, text: str) -> None:
    folder = write(tmp_path / "s", sweep(ACCURACY))
    (folder / name).write_bytes(content)
    if name == "sweep.json":
        with pytest.raises(ValueError, match=text.format(re.escape(name))):
            read(folder)
    else:
        assert re.search(text.format(re.escape(name)), damaged(folder))


@pytest.mark.parametrize("name", ["config", "environment"])
def test_a_run_that_is_over_has_all_its_files(tmp_path: Path, name: str) -> None:
    folder = write(tmp_path / "s", sweep(ACCURACY))
    (folder / "softmax" / "seed-1" / f"{name}.json").unlink()
    assert re.search(rf"expected a file .*seed-1/{name}\.json, got none", damaged(folder))


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"seed": 0}, r"expected seed 1 in .*softmax/seed-1/config\.json, got 0"),
        ({"seed": None}, "expected seed 1 in .*, got None"),
        ({"seed": True}, "expected the seed in .* to be one of the sweep, 0, 1, 2, got True"),
        ({"label": "sofmax"}, r"label in .*seed-1/config\.json .* 'softmax', 'MultiMax attention', got 'sofmax'"),
        ({"label": ["softmax"]}, r"expected the label in .*, got \['softmax'\]"),
    ],
)
def test_a_run_in_the_wrong_place(tmp_path: Path, values: dict[str, Any], text: str) -> None:
    folder = write(tmp_path / "s", sweep(ACCURACY))
    edit(folder / "softmax" / "seed-1" / "config.json", **values)
    with pytest.raises(ValueError, match=text):
        read(folder)


def test_a_seed_that_the_sweep_has_not(tmp_path: Path) -> None:
    folder = write(tmp_path / "s", sweep(ACCURACY))
    edit(folder / "sweep.json", seeds=[0, 1])
    with pytest.raises(ValueError, match=r"seed in .*seed-2/config\.json to be one of the sweep, 0, 1, got 2"):
        read(folder)


def test_one_folder_a_label(tmp_path: Path) -> None:
    folder = write(tmp_path / "s", sweep({"softmax": [0.1, 0.2, 0.3], "b": [0.4]}))
    edit(folder / "softmax" / "seed-2" / "config.json", label="b")
    with pytest.raises(ValueError, match=r"all runs of 'b' in .*/b, got one in .*/softmax|expected label 'softmax'"):
        read(folder)
    shutil.rmtree(folder / "b")
    with pytest.raises(ValueError, match=r"expected label 'softmax' in .*seed-2/config\.json, .*got 'b'"):
        read(folder)
    edit(folder / "softmax" / "seed-2" / "config.json", label="softmax")
    (folder / "other").mkdir()
    (folder / "softmax" / "seed-2").rename(folder / "other" / "seed-2")
    with pytest.raises(ValueError, match=r"expected all runs of 'softmax' in .*/other, got one in .*/softmax"):
        read(folder)


def test_two_runs_of_one_seed(tmp_path: Path) -> None:
    folder = write(tmp_path / "s", sweep(ACCURACY))
    shutil.copytree(folder / "softmax", folder / "copy")
    with pytest.raises(ValueError, match=r"one run of 'softmax' with seed 0, got two, .*/copy/.* and .*/softmax/"):
        read(folder)
    shutil.rmtree(folder / "copy")
    shutil.copytree(folder / "softmax" / "seed-1", folder / "softmax" / "seed-01")
    with pytest.raises(ValueError, match=r"'softmax' with seed 1, got two, .*seed-01/.* and .*seed-1/"):
        read(folder)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"methods": {}}, "expected 'methods' in .*sweep.json to be settings by label, got {}"),
        ({"methods": ["softmax"]}, "expected 'methods'"),
        ({"seeds": []}, r"expected 'seeds' in .* different whole numbers, got \[\]"),
        ({"seeds": [0, 0]}, "expected 'seeds'"),
        ({"seeds": [0.5]}, "expected 'seeds'"),
        ({"seeds": 3}, "expected 'seeds'"),
        ({"preset": None}, "expected 'preset' in .* to be a text, got None"),
        ({"task": 1}, "expected 'task'"),
        ({"baseline": None}, "expected 'baseline'"),
        ({"paper": {"metric": "accuracy"}}, "expected 'paper' in .* a metric, a setting and values by label"),
        ({"paper": {"metric": "accuracy", "setting": "x", "values": [1]}}, "expected 'paper'"),
        ({"paper": 1}, "expected 'paper'"),
        ({"paper": {"metric": "x", "setting": "x", "values": {}, "preset": 1}}, "expected 'paper'"),
    ],
)
def test_a_wrong_sweep_file(tmp_path: Path, values: dict[str, Any], text: str) -> None:
    folder = write(tmp_path / "s", sweep(ACCURACY))
    edit(folder / "sweep.json", **values)
    with pytest.raises(ValueError, match=text):
        read(folder)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (
            {"status": "running"},
            r"'status' in .*seed-1/result\.json to be one of 'finished', 'diverged', got 'running'",
        ),
        ({"metrics": None}, "expected 'metrics' in .* to be numbers by name, got None"),
        ({"metrics": {"accuracy": "0.9"}}, "expected 'accuracy' in .* to be a number, got '0.9'"),
        ({"metrics": {"accuracy": True}}, "expected 'accuracy' in .* to be a number, got True"),
        ({"minutes": "2"}, "expected 'minutes'"),
        ({"ms_per_step": []}, "expected 'ms_per_step'"),
        ({"parameters": {"layer": [1]}}, "expected 'parameters' in .* to be values by layer and name"),
    ],
)
def test_a_wrong_result(tmp_path: Path, values: dict[str, Any], text: str) -> None:
    folder = write(tmp_path / "s", sweep(ACCURACY))
    edit(folder / "softmax" / "seed-1" / "result.json", **values)
    assert re.search(text, damaged(folder))


# saving


def test_saved_and_read_again(tmp_path: Path) -> None:
    example = sweep({"softmax": [0.9, 0.8, "inf"], "b": [0.1], "a": [0.4, 0.5]})
    file = tmp_path / "sweep.json"
    save(example, str(file))
    found = read(file)
    assert found == example
    assert found.labels == ["softmax", "b", "a"]  # though the file's keys are sorted
    assert found.missing == example.missing == [("b", 1), ("b", 2), ("a", 2)]
    assert markdown(found) == markdown(example)
    assert [each.name for each in tmp_path.iterdir()] == ["sweep.json"]
    assert markdown(read(write(tmp_path / "s", example))) == markdown(example)


def test_the_file_does_not_depend_on_the_order_of_keys(tmp_path: Path) -> None:
    example = sweep(ACCURACY)
    turned = Sweep(
        dict(reversed(example.about.items())),
        [Run(o.label, o.seed, dict(reversed(o.config.items())), o.environment, o.result) for o in example.runs],
    )
    save(example, tmp_path / "a")
    save(turned, tmp_path / "b")
    save(read(tmp_path / "a"), tmp_path / "c")
    assert (tmp_path / "a").read_text() == (tmp_path / "b").read_text() == (tmp_path / "c").read_text()
    lines = (tmp_path / "a").read_text().splitlines()
    assert '   "seed": 2' in [line.rstrip(",") for line in lines]  # a line an entry
    changed = Sweep(example.about, [*example.runs[:-1], run("MultiMax attention", 2, result(accuracy=0.5))])
    save(changed, tmp_path / "a")
    assert sum(a != b for a, b in zip(lines, (tmp_path / "a").read_text().splitlines(), strict=True)) == 1


def test_the_file_is_strict_json(tmp_path: Path) -> None:
    found = {**result(accuracy=math.inf, loss=math.nan), "parameters": {"layer": {"t_b": [[-math.inf]]}}}
    save(Sweep(about(["softmax"], [0]), [run("softmax", 0, found)]), tmp_path / "a")

    def fail(word: str) -> None:
        raise AssertionError(word)

    content = json.loads((tmp_path / "a").read_text(), parse_constant=fail)
    assert content["runs"][0]["result"]["metrics"] == {"accuracy": "inf", "loss": "nan"}
    example = read(tmp_path / "a")
    assert cells(markdown(example))[1][1] == "- (1 of 1 not finite)"
    assert cells(parameters_markdown(example, "softmax"))[1] == ["layer", "nan"]


def test_lists_of_numbers_take_one_line(tmp_path: Path) -> None:
    found = {**result(), "parameters": {"layer": {"t_b": [[1.0, 2.0], [3.0, 4.0]]}}, "layers": {}}
    save(Sweep(about(["softmax"], [0]), [run("softmax", 0, found)]), tmp_path / "a")
    assert '"t_b": [[1.0, 2.0], [3.0, 4.0]]' in (tmp_path / "a").read_text()


@pytest.mark.parametrize(
    ("key", "value", "kept"),
    [
        ("data", "/home/someone/data/mnist", "mnist"),
        ("data", "/home/someone/data/mnist/", "mnist"),
        ("data", "data/mnist", "mnist"),
        ("data", "../../shared/mnist", "mnist"),
        ("data", "digits", "digits"),
        ("data", ".", "."),
        ("data", "hub:owner/name:config", "hub:owner/name:config"),
        ("data", "hub:/home/someone/mnist", "hub:mnist"),
        ("start", "/home/someone/run 1/model", "model"),
        ("start", "runs/../model", "model"),
        ("start", "~/run 1/model", "model"),
        ("start", "runs/model", "runs/model"),
        ("trainer", {"output_dir": "/somewhere/out", "steps": [1, "/a/b"]}, {"output_dir": "out", "steps": [1, "b"]}),
        ("languages", "de-en", "de-en"),
        ("about", "and so on ...", "and so on ..."),
        ("about", "see https://a.org/b/c, and/or 1 / 2", "see https://a.org/b/c, and/or 1 / 2"),
        ("about", "from '/home/someone/x' or --data=/home/someone/y ok", "from 'x' or --data=y ok"),
        ("order", 2, 2),
        ("nothing", None, None),
        ("flag", True, True),
    ],
)
def test_no_paths_of_the_machine(tmp_path: Path, key: str, value: Any, kept: Any) -> None:
    saved = Run("softmax", 0, {key: value}, {key: value}, {**result(), "notes": {key: value}})
    save(Sweep(about(["softmax"], [0], methods={"softmax": {key: value}}), [saved]), tmp_path / "a")
    found = read(tmp_path / "a")
    (saved,) = found.runs
    assert saved.config == {key: kept}
    if value != "data/mnist":  # of the setting alone
        assert found.about["methods"]["softmax"] == saved.environment == saved.result["notes"] == {key: kept}
    assert "someone" not in (tmp_path / "a").read_text()


def test_a_label_that_looks_like_a_path_stays(tmp_path: Path) -> None:
    example = sweep({"softmax": [0.5, 0.6], "/a/b": [0.5, 0.7]}, baseline="/a/b")
    save(example, tmp_path / "a")
    assert read(tmp_path / "a") == example


@pytest.mark.parametrize("content", ["", "[]", '{"format": "other"}', "my notes"])
def test_other_files_are_not_overwritten(tmp_path: Path, content: str) -> None:
    file = tmp_path / "notes.json"
    file.write_text(content)
    with pytest.raises(FileExistsError, match=r"expected .*notes\.json to be new or a saved sweep, got another file"):
        save(sweep(ACCURACY), file)
    assert file.read_text() == content
    with pytest.raises(FileExistsError, match="choose another name"):
        save(sweep(ACCURACY), tmp_path)
    with pytest.raises(FileNotFoundError, match=r"expected a folder .*nowhere"):
        save(sweep(ACCURACY), tmp_path / "nowhere" / "a.json")


def test_written_as_a_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.json"
    save(sweep(ACCURACY), file)
    before = file.read_text()

    def fail(source: Path, target: Path) -> None:
        assert Path(source).parent == Path(target).parent == tmp_path  # else it would be a copy
        assert file.read_text() == before
        raise OSError("no space")

    monkeypatch.setattr(results.os, "replace", fail)
    with pytest.raises(OSError, match="no space"):
        save(sweep({"softmax": [0.1]}), file)
    assert file.read_text() == before
    assert [each.name for each in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"order": ["softmax"]}, "expected 'order' in .*a.json to list the methods"),
        ({"order": [1, {}]}, "expected 'order'"),
        ({"runs": {}}, "expected 'runs' in .*a.json to be a list, got dict"),
        ({"runs": [1]}, r"expected config, environment and result in .*a.json, runs\[0\], got 1"),
        ({"runs": [{"label": "softmax", "seed": 0, "config": {}}]}, "expected config, environment and result"),
        ({"sweep": None}, "expected a JSON object in .*a.json, got NoneType"),
    ],
)
def test_a_saved_file_that_was_changed(tmp_path: Path, values: dict[str, Any], text: str) -> None:
    file = tmp_path / "a.json"
    save(sweep(ACCURACY), file)
    edit(file, **values)
    with pytest.raises(ValueError, match=text):
        read(file)


def test_a_saved_file_with_a_run_twice(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    save(sweep(ACCURACY), file)
    runs = json.loads(file.read_text())["runs"]
    edit(file, runs=[*runs, runs[0]])
    with pytest.raises(ValueError, match=r"'softmax' with seed 0, got two, .*runs\[0\] and .*runs\[6\]"):
        read(file)
    edit(file, runs=[{**runs[0], "label": "other"}])
    with pytest.raises(ValueError, match=r"label in .*runs\[0\] to be a method of the sweep"):
        read(file)
    edit(file, runs=[{**runs[0], "result": {"status": "gone"}}])
    with pytest.raises(ValueError, match=r"'status' in .*runs\[0\]"):
        read(file)


# the table


def test_means_deviations_and_differences() -> None:
    text = markdown(sweep(ACCURACY))
    assert cells(text) == [
        ["method", "accuracy, % ↑", "seeds", "difference to softmax (95%)"],
        ["softmax", "97.20 ± 0.20", "3", ""],
        # differences 1.1, 0.5, 1.3: mean 0.9667, deviation 0.4163, t = 4.3027, half = 4.3027 * 0.4163 / sqrt(3)
        ["MultiMax attention", "98.17 ± 0.31", "3", "+0.97 [-0.07, +2.00] (only 3 seeds)"],
    ]
    assert "accuracy, in percentage points" in notes(text)


numbers = st.floats(-1e4, 1e4)


@settings(deadline=None)
@given(st.lists(st.tuples(numbers, numbers), min_size=2, max_size=8))
def test_the_interval_is_that_of_the_paired_t_test(pairs: list[tuple[float, float]]) -> None:
    ours, base = (list(column) for column in zip(*pairs, strict=True))
    extra = {100: 3.0}  # a seed that the other has not
    found = paired_difference(dict(enumerate(ours)), {**dict(enumerate(base)), **extra})
    assert found is not None
    mean, low, high, n = found
    assert n == len(pairs)
    differences = [a - b for a, b in pairs]
    assert mean == pytest.approx(sum(differences) / n, abs=1e-9)
    if max(differences) - min(differences) > 1e-3:  # else scipy warns of what cancels
        interval = stats.ttest_rel(ours, base).confidence_interval(0.95)
        assert (low, high) == pytest.approx((interval.low, interval.high), rel=1e-6, abs=1e-6)
    else:
        assert high - low < 0.1
    turned = paired_difference(dict(enumerate(base)), dict(enumerate(ours)))
    assert turned is not None
    assert turned[:3] == pytest.approx((-mean, -high, -low), abs=1e-9)


def test_other_confidence() -> None:
    ours, base = {0: 1.0, 1: 3.0, 2: 2.5}, {0: 0.5, 1: 1.0, 2: 2.0}
    interval = stats.ttest_rel(list(ours.values()), list(base.values())).confidence_interval(0.8)
    found = paired_difference(ours, base, 0.8)
    assert found is not None
    assert found[1:3] == pytest.approx((interval.low, interval.high))
    assert paired_difference({0: 1.0, 1: 2.0}, {1: 1.0, 2: 2.0}) is None


@settings(deadline=None, max_examples=50)
@given(st.dictionaries(st.text(min_size=1), st.lists(st.floats(0, 1), min_size=1, max_size=4), min_size=1, max_size=4))
def test_any_sweep_gives_a_table(values: dict[str, list[float]]) -> None:
    example = sweep(values, baseline=next(iter(values)))
    rows = cells(markdown(example))
    assert len(rows) == len(values) + 1
    for row, (label, accuracies) in zip(rows[1:], values.items(), strict=True):
        assert re.sub(r"\\([\\|])", r"\1", row[0]) == " ".join(label.split())
        mean, _, deviation = row[1].partition(" ± ")
        assert float(mean) == pytest.approx(100 * statistics.fmean(accuracies), abs=0.00501)
        assert bool(deviation) == (len(accuracies) > 1)
        if deviation:
            assert float(deviation) == pytest.approx(100 * statistics.stdev(accuracies), abs=0.00501)
        assert row[2] == str(len(accuracies))


def test_one_seed_has_no_deviation_and_no_interval() -> None:
    rows = cells(markdown(sweep({"softmax": [0.9], "b": [0.91]})))
    assert rows[1:] == [["softmax", "90.00", "1", ""], ["b", "91.00", "1", "-"]]


def test_differences_are_of_common_seeds() -> None:
    example = sweep({"softmax": [0.90, 0.92], "b": [0.91, 0.94, 0.99]})
    assert cells(markdown(example))[2] == ["b", "94.67 ± 4.04", "3", "+1.50 [-4.85, +7.85] (only 2 seeds)"]
    assert "1 run is not over: softmax seed 2." in notes(markdown(example))
    runs = [each for each in example.runs if (each.label, each.seed) not in {("b", 0), ("b", 1)}]
    assert cells(markdown(Sweep(example.about, runs)))[2] == ["b", "99.00", "1", "-"]
    assert "3 runs are not over: softmax seed 2, b seeds 0, 1." in notes(markdown(Sweep(example.about, runs)))


def test_pairs_are_of_equal_seeds_whatever_the_order() -> None:
    values = {"softmax": [(2, 0.5), (1, 0.6), (0, 0.7)], "b": [(0, 0.71), (1, 0.62), (2, 0.53)]}
    runs = [run(label, seed, result(accuracy=v)) for label, column in values.items() for seed, v in column]
    assert cells(markdown(Sweep(about(values), runs)))[2][-1] == "+2.00 [-0.48, +4.48] (only 3 seeds)"


def test_another_baseline() -> None:
    rows = cells(markdown(sweep(ACCURACY), baseline="MultiMax attention"))
    assert rows[0][-1] == "difference to MultiMax attention (95%)"
    assert [row[-1] for row in rows[1:]] == ["-0.97 [-2.00, +0.07] (only 3 seeds)", ""]
    with pytest.raises(ValueError, match=r"baseline to be a method of the sweep, 'softmax', .*, got 'none'"):
        markdown(sweep(ACCURACY), baseline="none")
    with pytest.raises(ValueError, match="baseline to be a method of the sweep, 'b', got 'softmax'"):
        markdown(sweep({"b": [0.5]}))


def test_no_minus_before_zero_and_no_endless_numbers() -> None:
    example = sweep(
        {"softmax": [1.0, 2.0], "b": [1.0 - 1e-9, 2.0 - 1e-9], "c": [3e9, 1e30]}, "perplexity", task="language"
    )
    rows = cells(markdown(example))
    assert rows[2] == ["b", "1.50 ± 0.71", "2", "+0.00 [+0.00, +0.00] (only 2 seeds)"]
    assert rows[3][1] == "5e+29 ± 7.07e+29"


def test_diverged_runs_are_counted() -> None:
    example = sweep({"softmax": [0.9, 0.92, 0.91], "b": [0.93, 0.1, 0.1], "c": [0.1, 0.1, 0.1]})
    runs = []
    for each in example.runs:
        bad = each.label == "c" or (each.label == "b" and each.seed > 0)
        found = {**each.result, "status": "diverged", "reason": f"loss nan at step {each.seed}"} if bad else each.result
        if each.label == "c":
            del found["metrics"]
        runs.append(run(each.label, each.seed, found))
    text = markdown(Sweep(example.about, runs))
    assert cells(text)[1:] == [
        ["softmax", "91.00 ± 1.00", "3", ""],
        ["b", "93.00", "2 of 3 diverged", "-"],
        ["c", "-", "3 of 3 diverged", "-"],
    ]
    assert "Diverged, and in no mean: b seed 1 (loss nan at step 1), b seed 2 (loss nan at step 2), c seed 0" in text
    assert "not over" not in text
    assert "Diverged" not in markdown(example)


def test_diverged_baseline() -> None:
    example = sweep({"softmax": [0.9, 0.92, 0.5], "b": [0.93, 0.94, 0.96]})
    runs = [*example.runs[:2], run("softmax", 2, result("diverged", accuracy=0.5)), *example.runs[3:]]
    text = markdown(Sweep(example.about, runs))
    assert cells(text)[2][-1] == "+2.50 [-3.85, +8.85] (only 2 seeds)"
    assert "softmax seed 2 (no reason given)" in text


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, None, "nan", "inf", "-inf"])
def test_metrics_that_are_no_number_are_seen(bad: Any) -> None:
    rows = cells(markdown(sweep({"softmax": [0.9, 0.91, 0.92], "b": [0.93, bad, 0.94], "c": [bad, bad]})))
    assert rows[2] == ["b", "93.50 ± 0.71 (1 of 3 not finite)", "3", "+2.50 [-3.85, +8.85] (only 2 seeds)"]
    assert rows[3] == ["c", "- (2 of 2 not finite)", "2", "-"]


def test_metrics_by_default() -> None:
    measured = {"multi_modality": 0.5, "sparsity": 0.25, "patch_similarity": 0.75, "loss": 1.0}
    example = Sweep(about(["softmax", "b"], [0]), [run("softmax", 0, result(accuracy=0.5, **measured))])
    rows = cells(markdown(example))
    assert rows[0][1:5] == ["accuracy, % ↑", "multi-modality ↑", "sparsity ↑", "patch similarity ↓"]
    assert rows[1] == ["softmax", "50.00", "0.5000", "0.2500", "0.7500", "1", ""]
    assert rows[2] == ["b", "-", "-", "-", "-", "0", "-"]
    language = Sweep(
        {**example.about, "task": "language"}, [run("softmax", 0, result(perplexity=40.126, sparsity=0.5))]
    )
    assert cells(markdown(language))[0][1:3] == ["perplexity ↓", "sparsity ↑"]
    assert "percentage points" not in markdown(language)
    translation = Sweep({**example.about, "task": "translation"}, [run("softmax", 0, result(bleu=30.5))])
    assert cells(markdown(translation))[:2] == [
        ["method", "BLEU ↑", "seeds", "difference to softmax (95%)"],
        ["softmax", "30.50", "1", ""],
    ]
    with pytest.raises(ValueError, match="tasks vision, language, translation, got 'speech'; name the metrics"):
        markdown(Sweep({**example.about, "task": "speech"}, example.runs))


def test_metrics_by_name() -> None:
    example = Sweep(about(["softmax"], [0, 1]), [run("softmax", s, result(accuracy=0.5, loss=s + 1)) for s in (0, 1)])
    rows = cells(markdown(example, ["loss", "ms_per_step", "loss"]))
    assert rows[0][1:3] == ["loss ↓", "ms per step ↓"]
    assert rows[1] == ["softmax", "1.5000 ± 0.7071", "35.1 ± 0.0", "2", ""]
    with pytest.raises(ValueError, match=r"expected metrics out of accuracy, .*ms_per_step, got 'acuracy'"):
        markdown(example, ["acuracy"])
    with pytest.raises(ValueError, match="metrics that the runs have, accuracy, loss, ms_per_step, got 'bleu'"):
        markdown(example, ["bleu"])
    for wrong in ("accuracy", []):
        with pytest.raises(TypeError, match="expected metrics to be several names"):
            markdown(example, wrong)


def test_metrics_that_some_runs_have_not_measured() -> None:
    runs = [run("softmax", 0, result(accuracy=0.5, sparsity=0.5)), run("softmax", 1, result(accuracy=0.5))]
    row = cells(markdown(Sweep(about(["softmax"], [0, 1]), runs)))[1]
    assert row == ["softmax", "50.00 ± 0.00", "0.5000 (1 of 2 not measured)", "2", ""]


def test_no_run_is_over() -> None:
    example = Sweep(about(), [])
    text = markdown(example)
    assert cells(text)[1] == ["softmax", "-", "0", ""]
    assert "6 runs are not over: softmax seeds 0, 1, 2, MultiMax attention seeds 0, 1, 2." in text
    assert cells(markdown(example, ["bleu"]))[0][1] == "BLEU ↑"


def test_the_papers_column() -> None:
    """It stands beside runs of the paper's own preset, and below those of another task."""
    paper = {"metric": "accuracy", "setting": "DeiT-small, ImageNet-1k", "values": {"softmax": 80.4, "other": 1.0}}
    text = markdown(sweep(ACCURACY, paper={**paper, "preset": "cpu-digits"}))
    assert [row[-1] for row in cells(text)] == ["paper", "80.4", "-"]
    assert "- The column of the paper: accuracy of DeiT-small, ImageNet-1k, as printed there." in text
    for elsewhere in (paper, {**paper, "preset": "paper-deit-small"}):
        text = markdown(sweep(ACCURACY, paper=elsewhere))
        assert not [row for row in cells(text) if "paper" in row or "80.4" in row]
        assert (
            "- The paper has another task, to be compared by the direction alone: accuracy of DeiT-small, ImageNet-1k: "
            "softmax 80.4." in text
        )
    assert "paper" not in markdown(sweep(ACCURACY))
    assert "paper" not in markdown(sweep(ACCURACY, paper=None))


def test_what_it_cost_and_where_it_ran() -> None:
    text = notes(markdown(sweep(ACCURACY)))
    assert "- Preset cpu-digits, data digits, 600 steps, 1.5 minutes per run, 9.0 minutes in all.\n" in text
    assert "- Run with cpu Some CPU @ 2 GHz, threads 2, multimax 0.1.0, torch 2.13.0.\n" in text
    assert text.endswith("- Commit 0123456789.")


def test_runs_that_differ() -> None:
    example = sweep(ACCURACY)
    other = {
        **ENVIRONMENT,
        "threads": 4,
        "commit": "fedcba9876543210fedcba9876543210fedcba98-dirty",
        "python": "/a/b/py",
    }
    last = example.runs[-1]
    long = {**last.result, "steps": 12000, "minutes": 0.05}
    runs = [*example.runs[:-1], Run(last.label, last.seed, {"data": "/home/someone/mnist"}, other, long)]
    text = notes(markdown(Sweep(example.about, runs)))
    assert "data digits, mnist, 600 to 12,000 steps, 1.3 minutes per run, 7.5 minutes in all." in text
    assert "- 5 runs with cpu Some CPU @ 2 GHz, threads 2," in text
    assert "- 1 run with cpu Some CPU @ 2 GHz, python py, threads 4," in text
    assert text.endswith("- Commits 0123456789, fedcba9876-dirty.")
    assert "someone" not in text
    bare = [Run(each.label, each.seed, {}, {"commit": None}, {"status": "finished", "metrics": {}}) for each in runs]
    text = notes(markdown(Sweep(example.about, bare)))
    assert text.endswith("- Preset cpu-digits.\n- Commit unknown.")


def test_the_name_that_the_data_has(tmp_path: Path) -> None:
    runs = [run("softmax", seed, {**result(), "data": "owner/text"}, data="/home/someone/python") for seed in (0, 1)]
    runs.append(run("softmax", 2, result("diverged"), data="/home/someone/python"))  # did not get to the name
    runs.append(run("b", 0, result(), data="hub:owner/other"))
    example = Sweep(about(["softmax", "b"]), runs)
    assert "digits, data hub:owner/other, owner/text, 600 steps" in notes(markdown(example))
    save(example, tmp_path / "a")
    assert markdown(read(tmp_path / "a")) == markdown(example)


def test_runs_that_went_on_elsewhere() -> None:
    elsewhere = [{"threads": 8, "commit": None}, {"threads": 9, "gpu": None, "commit": "abc"}]
    resumed = Run("softmax", 0, {}, {"threads": 2, "commit": "abc", "resumed_on": elsewhere}, result())
    text = notes(markdown(Sweep(about(["softmax"], [0]), [resumed])))
    assert "- 1 run with threads 2.\n- 1 run with threads 8.\n- 1 run with threads 9.\n- Commits abc, unknown." in text
    assert "resumed_on" in resumed.environment  # is not changed


def test_labels_cannot_break_the_table() -> None:
    labels = ["softmax", "a|b", "c\\", "d\\|e", "f\ng", "| - |"]
    text = markdown(sweep({label: [0.5] for label in labels}))
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len(lines) == len(labels) + 2
    assert [line.split(" | 50.00")[0].removeprefix("| ").rstrip() for line in lines[2:]] == [
        "softmax",
        "a\\|b",
        "c\\\\",
        "d\\\\\\|e",
        "f g",
        "\\| - \\|",
    ]
    for line in lines:  # every bar that ends a cell stands alone
        assert len(re.findall(r"(?<!\\)\|", line)) == 5


# parameters


def parameters(**values: Any) -> dict[str, Any]:
    return {**result(accuracy=0.5), "parameters": values}


def test_learned_parameters() -> None:
    def of(shift: float) -> dict[str, Any]:
        return {"d": [4.0, 8.0], "b": [3.0, 7.0], "t_d": [2.0, 6.0], "t_b": [1.0 + shift, 5.0]}

    heads = {"t_b": [[1.0, 2.0], [3.0, 6.0]], "t_d": [[0.0, 0.0], [1.0, 1.0]], "b": [[1.0, 1.0]], "d": [[2.0, 2.0]]}
    runs = [
        run("softmax", 0, result()),
        run("b", 0, parameters(**{"layers.10": of(0), "layers.9": heads})),
        run("b", 1, parameters(**{"layers.10": of(2), "layers.9": heads})),
    ]
    text = parameters_markdown(Sweep(about(["softmax", "b"], [0, 1]), runs), "b")
    ten = "2.0000 ± 1.4142", *(f"{value}.0000 ± 0.0000" for value in (2, 5, 6, 3, 4, 7, 8))
    nine = [f"{value:.4f} ± 0.0000" for value in (2, 0.5, 4, 0.5, 1, 2, 1, 2)]
    assert cells(text) == [
        ["layer", "t_b1", "t_d1", "t_b2", "t_d2", "b1", "d1", "b2", "d2"],
        ["layer 10", *nine],
        ["layer 11", *ten],
    ]
    assert notes(text) == "- b: mean ± standard deviation over 2 seeds."


def test_parameters_of_other_functions_and_of_one_seed() -> None:
    example = Sweep(
        about(["softmax"], [0]), [run("softmax", 0, parameters(a={"temperature": [1.0, 2.0]}, b={"t_b": 0.5}))]
    )
    text = parameters_markdown(example, "softmax")
    assert cells(text) == [["layer", "t_b1", "temperature"], ["a", "-", "1.5000"], ["b", "0.5000", "-"]]
    assert notes(text) == "- softmax: one seed."


def test_an_encoder_comes_before_its_decoder_and_the_output_last() -> None:
    names = {
        "encoder.layers.2.attn": "encoder layer 3",
        "encoder.layers.10.attn": "encoder layer 11",
        "decoder.layers.0.self": "decoder layer 1",
        "decoder.layers.0.encoder_attn": "cross layer 1",
        "a": "a",
    }
    example = Sweep(about(["b"], [0]), [run("b", 0, parameters(**{name: {"t_b": 0.5} for name in reversed(names)}))])
    assert [row[0] for row in cells(parameters_markdown(example, "b"))[1:]] == list(names.values())


def test_what_a_line_of_the_figure_is() -> None:
    one = {"t_b": [1.0], "t_d": [1.0], "b": [0.0], "d": [0.0]}
    heads = {symbol: [value, value] for symbol, value in one.items()}
    for seeds, layer, words in ((1, one, "seed"), (3, one, "seed"), (1, heads, "head"), (2, heads, "seed and head")):
        runs = [run("b", seed, parameters(**{"layers.0": layer})) for seed in range(seeds)]
        example = Sweep(about(["b"], range(seeds)), runs)
        assert line_of(example, "b") == words
        assert list(learned_layers(example, "b")) == ["layer 1"]


def test_few_seeds_come_with_a_warning() -> None:
    for seeds, warned in ((2, True), (4, True), (5, False), (9, False)):
        values = {"softmax": [0.9 + 0.001 * n for n in range(seeds)], "b": [0.91 + 0.002 * n for n in range(seeds)]}
        text = markdown(sweep(values))
        assert cells(text)[2][-1].endswith(f"] (only {seeds} seeds)") == warned
        assert ("Fewer than 5 seeds" in notes(text)) == warned
    assert "Fewer than" not in markdown(sweep({"softmax": [0.9, 0.91]}))  # nothing is compared


def test_parameters_of_diverged_runs_and_nan() -> None:
    runs = [
        run("softmax", 0, parameters(a={"t_b": [1.0], "b": [2.0]}, c={"b": [1.0]})),
        run("softmax", 1, parameters(a={"t_b": [None], "b": [4.0]})),
        run("softmax", 2, {**parameters(a={"t_b": [9.0], "b": [9.0]}), "status": "diverged"}),
    ]
    text = parameters_markdown(Sweep(about(["softmax"], [0, 1, 2]), runs), "softmax")
    assert cells(text)[1:] == [["a", "nan", "3.0000 ± 1.4142"], ["c", "-", "1.0000 (n = 1)"]]
    assert notes(text).endswith("over 2 seeds; 1 diverged and not in it.")


def test_no_parameters_to_show() -> None:
    example = sweep(ACCURACY)
    with pytest.raises(ValueError, match="learned parameters of 'softmax', got a method that has learned none"):
        parameters_markdown(example, "softmax")
    with pytest.raises(ValueError, match=r"label to be a method of the sweep, 'softmax', .*, got 'x'"):
        parameters_markdown(example, "x")
    with pytest.raises(ValueError, match="learned parameters of 'softmax', got no run that is finished"):
        parameters_markdown(Sweep(example.about, []), "softmax")
    for wrong in ({"t_b": [[1.0, 2.0], [1.0]]}, {"t_b": "x"}, {"omega": []}, {"b": {"x": 1}}):
        broken = Sweep(about(["softmax"], [4]), [run("softmax", 4, parameters(layer=wrong))])
        with pytest.raises(ValueError, match="parameters of 'layer' in the run of 'softmax' with seed 4, got"):
            parameters_markdown(broken, "softmax")


def test_needs_no_transformers() -> None:
    code = "import sys, multimax; import multimax.experiments.table; print('transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_the_pages_show_what_the_runs_gave() -> None:
    folder = results_tables.FOLDER / "results"
    assert {path.stem for path in folder.glob("*.json")} <= results_tables.shown()
    for page in results_tables.PAGES:
        assert results_tables.anew(page) == page.read_text(encoding="utf-8")  # python tools/results_tables.py


def test_a_place_takes_the_arguments_of_the_command() -> None:
    """The table alone, of a chosen metric, against another method."""
    begin = '<!-- rows digits --metrics loss sparsity --baseline "MultiMax both" -->\n'
    made = results_tables.PLACE.sub(results_tables.made, f"before\n{begin}old\n<!-- end -->\nbehind")
    lines = made.splitlines()
    assert lines[:2] == ["before", begin.strip()]
    assert lines[-2:] == ["<!-- end -->", "behind"]
    assert all(line.startswith("|") for line in lines[2:-2])
    assert "difference to MultiMax both (95%)" in lines[2]
    assert "loss" in lines[2]


def test_how_many_seeds_show_a_difference() -> None:
    dice = numpy.random.default_rng(0)
    for seeds, effect in ((5, 1.0), (10, 0.5), (3, 3.0)):
        draws = dice.normal(effect, 1, (20000, seeds))
        edge = stats.t.ppf(0.975, seeds - 1) * draws.std(1, ddof=1) / math.sqrt(seeds)
        assert power(seeds, effect) == pytest.approx((abs(draws.mean(1)) > edge).mean(), abs=0.015)
    assert power(6, -0.7) == pytest.approx(power(6, 0.7))
    assert seeds_to_see(1.0) == 10
    assert power(10, 1.0) >= 0.8 > power(9, 1.0)
    assert seeds_to_see(0.01) is None


def test_pilots() -> None:
    found = sweep({"softmax": [0.90, 0.92], "one": [0.92, 0.93], "other": [0.91, 0.95]})
    deviation, freedom = pooled_deviation(found, "accuracy", "softmax")
    # differences of 2 and 1 points, and of 1 and 3
    assert deviation == pytest.approx(math.sqrt((0.5 + 2.0) / 2))
    assert freedom == 2
    said = detection(found, "0.4")
    assert said.startswith("accuracy: paired differences to softmax have a standard deviation of 1.1180 (2 degrees of ")
    assert f"; {seeds_to_see(0.4 / deviation)} seeds show a difference of 0.4000 with" in said
    assert "show a difference of 0.9100 with" in detection(found, "1%")
    with pytest.raises(ValueError, match=r"expected a difference such as 0.4 or 1.4%, got 'much'"):
        detection(found, "much")
    with pytest.raises(ValueError, match="expected a method with two seeds or more besides 'softmax', got none"):
        detection(sweep({"softmax": [0.9], "one": [0.9]}), "0.4")


def test_metrics_at_another_length() -> None:
    runs = [
        run(label, seed, result(**{"perplexity": 5.0 + seed, "perplexity@256": 6.0 + seed, "entropy@256": 1.0}))
        for label in ("softmax", "MultiMax")
        for seed in (0, 1)
    ]
    found = Sweep(about(("softmax", "MultiMax"), (0, 1), task="language"), runs)
    text = markdown(found, ["perplexity", "perplexity@256"])
    assert "| perplexity ↓ " in text
    assert "| perplexity at 256 ↓ " in text
    assert "| 6.50 ± 0.71" in text
    with pytest.raises(ValueError, match=r"expected metrics that the runs have, .*, got 'perplexity@512'"):
        markdown(found, ["perplexity@512"])


def test_what_was_learned_stands_beside_a_search() -> None:
    found = sweep({"softmax": [1.0, 1.1], "MultiMax": [0.9, 1.0]}, metric="loss", by="loss")
    for seed, each in enumerate(found.of("MultiMax")):
        slopes = {"t_b": [[1.0 + seed, 2.0], [1.0, 2.0]], "t_d": [[0.5, 1.0], [0.5, 1.0]]}
        knots = {"b": [[0.0, 0.0]] * 2, "d": [[0.0, 0.0]] * 2}
        each.result["parameters"] = {"layers.10": {**slopes, **knots}, "layers.9": {"t_b": [3.0], "t_d": [1.0]}}
    rows = [line.split("|") for line in markdown(found).split("\n\n")[0].splitlines()]
    assert [cell.strip() for cell in rows[0][1:3]] == ["method", "loss ↓"]
    assert rows[0][-2].strip() == "learned, by layer"
    assert rows[2][-2].strip() == ""
    assert rows[3][-2].strip() == "t_b1 3.00 1.25; t_d1 1.00 0.50; t_b2 2.00; t_d2 1.00"
