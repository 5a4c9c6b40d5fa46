"""The tables of methods, and the runs that they plan."""

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from multimax import cli
from multimax.experiments import results
from multimax.experiments import search as searches
from multimax.experiments import sweep as sweeps
from multimax.experiments.checkpoints import locked
from multimax.experiments.settings import override, preset
from tiny_runs import TINY

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what the Trainer uses


@pytest.mark.parametrize("name", sweeps.table_names())
def test_every_table_has_settings_that_can_be(name: str, tmp_path: Path) -> None:
    table = sweeps.load_table(name)
    assert table.baseline in table.methods
    base = override(preset("cpu-digits"), {"start": "models/{seed}"} if name == "retrofit" else {})
    base = preset("cpu-multi30k") if name == "roles" else base
    runs = sweeps.plan(table, base, range(3), tmp_path)
    assert len({run.folder for run in runs}) == 3 * len(table.methods)
    assert [run.seed for run in runs] == sorted(run.seed for run in runs)  # seed by seed
    if table.paper is not None:
        assert set(table.paper["values"]) <= set(table.methods)
    if table.search is not None:
        for changes in (each for group in searches.candidates(table.search).values() for each in group.values()):
            override(base if name != "tune-language" else preset("recipe-text"), changes)
    if name == "retrofit":
        assert {run.settings.start for run in runs} == {"models/0", "models/1", "models/2"}


def test_tables_of_ones_own(tmp_path: Path) -> None:
    table = {"about": "", "baseline": "a", "seeds": 1, "methods": {"a": {}, "b": {"attention": "sparsemax"}}}
    (tmp_path / "own.json").write_text(json.dumps(table))
    assert sweeps.load_table(str(tmp_path / "own.json")).methods == table["methods"]
    for wrong, text in (
        ({"baseline": "c"}, "expected baseline to be one of the methods"),
        ({"baseline": ["a"]}, "expected baseline to be one of the methods"),
        ({"methods": None}, "expected methods by label"),
        ({"methods": {}}, "expected methods by label"),
        ({"methods": {"a": 5}}, "expected the settings that 'a' changes in .*, got 5"),
        ({"seeds": "3"}, "expected seeds to be a number of at least 1 in .*, got '3'"),
        ({"seeds": 0}, "expected seeds to be a number of at least 1"),
        ({"seeds": True}, "expected seeds to be a number of at least 1"),
        ({"about": 1}, "expected about to be a sentence"),
        ({"paper": {"metric": "accuracy"}}, "expected 'paper' in .* to have a metric, a setting and values"),
    ):
        (tmp_path / "wrong.json").write_text(json.dumps(table | wrong))
        with pytest.raises(ValueError, match=text):
            sweeps.load_table(str(tmp_path / "wrong.json"))
    (tmp_path / "short.json").write_text("{}")
    with pytest.raises(ValueError, match="got no about, methods, baseline, seeds"):
        sweeps.load_table(str(tmp_path / "short.json"))


def own(folder: Path, methods: dict[str, Any]) -> str:
    table = {"about": "", "baseline": next(iter(methods)), "seeds": 1, "methods": methods}
    (folder / "own.json").write_text(json.dumps(table))
    return str(folder / "own.json")


@pytest.mark.parametrize(
    ("label", "name"),
    [
        ("MultiMax, order 1", "multimax-order-1"),
        ("entmax-1.5", "entmax-1.5"),
        ("top_k", "top-k"),
        ("Überlänge", "überlänge"),
        ("日本語", "日本語"),
        ("../../softmax", "softmax"),
        ("/etc/passwd", "etc-passwd"),
        (".hidden.", "hidden"),
    ],
)
def test_labels_as_folders(label: str, name: str) -> None:
    assert sweeps.slug(label) == name


def test_labels_of_which_no_name_is_left() -> None:
    labels = ["..", ".", "", "🙂", "🙃", "a" * 300, "a" * 301, "日" * 300, "sweep.json"]
    names = [sweeps.slug(label) for label in labels]
    assert len(set(names)) == len(names)
    for name in names:
        assert 0 < len(name.encode()) <= sweeps.LONGEST
        assert Path("x", name).parent == Path("x")
        assert name not in (".", "..", "sweep.json")
    assert names == [sweeps.slug(label) for label in labels]


def test_runs_of_odd_labels_stay_in_their_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = own(tmp_path, {"..": {}, "日本語": {"attention": "sparsemax"}, "🙂": {"attention": "topk"}})
    folder = tmp_path / "in/sweep"
    assert cli.main(["sweep", table, "--preset", "cpu-digits", *TINY, "--out", str(folder)]) == 0
    assert [path.name for path in folder.parent.iterdir()] == ["sweep"]
    found = results.read(folder)
    assert found.missing == []
    assert [run.label for run in found.runs] == ["..", "日本語", "🙂"]


def test_settings_of_a_method_that_have_no_effect(tmp_path: Path) -> None:
    table = sweeps.load_table(own(tmp_path, {"softmax": {}, "first": {"attention": "topk", "order": 1}}))
    words = "expected order with multimax in attention or output, got it without in 'first' of the table own"
    with pytest.raises(ValueError, match=words):
        sweeps.plan(table, preset("cpu-digits"), [0], tmp_path)
    sweeps.plan(table, preset("cpu-digits"), [0], tmp_path, ["softmax"])


def test_seeds_of_two_terminals_add_up(tmp_path: Path) -> None:
    """The second waits for the first, and reads what that has written."""
    table, base = sweeps.load_table("seeds"), preset("cpu-digits")
    sweeps.note(table, base, [0], tmp_path / "sweep")
    (tmp_path / "sweep" / "sweep.json.123.partial").write_text("{")  # of a process that was killed
    with locked(tmp_path / "sweep"):
        second = threading.Thread(target=sweeps.note, args=(table, base, [2], tmp_path / "sweep"))
        second.start()
        time.sleep(0.2)  # it has read by now, or waits to
        file = tmp_path / "sweep" / "sweep.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "seeds": [0, 1]}))
    second.join()
    assert json.loads(file.read_text())["seeds"] == [0, 1, 2]
    assert {path.name for path in (tmp_path / "sweep").iterdir()} == {".lock", "sweep.json"}


def test_the_same_place_in_other_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    table, base = sweeps.load_table("seeds"), preset("cpu-text")
    sweeps.note(table, override(base, {"data": "d.txt"}), [0], Path("sweep"))
    for data in ("./d.txt", str(tmp_path / "d.txt"), "../" + tmp_path.name + "/d.txt"):
        sweeps.note(table, override(base, {"data": data}), [0], Path("sweep"))
    for data in ("e.txt", "hub:d.txt"):
        with pytest.raises(ValueError, match=r"got another \(data: 'd.txt' there, "):
            sweeps.note(table, override(base, {"data": data}), [0], Path("sweep"))
    sweeps.note(table, base, [0], Path("other"))  # Python's own text is no file
    with pytest.raises(ValueError, match=r"got another \(data: 'python' there, './python' now\)"):
        sweeps.note(table, override(base, {"data": "./python"}), [0], Path("other"))


@pytest.mark.parametrize("content", [b"", b'{"status": "fini', b"[]", b'{"status": "finished"}'])
def test_a_damaged_result_does_not_stop_a_sweep(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    folder = tmp_path / "sweep"
    table = own(tmp_path, {"softmax": {}, "topk": {"attention": "topk"}})
    words = ["sweep", table, "--preset", "cpu-digits", *TINY, "--out", str(folder)]
    assert cli.main([*words, "--methods", "softmax"]) == 0
    result = folder / "softmax/seed-0/result.json"
    result.write_bytes(content)
    capsys.readouterr()
    assert cli.main(words) == 1
    said = capsys.readouterr().out
    assert "1 of 2: softmax, seed 0: damaged: multimax: expected" in said
    assert "delete the file, and give the run's command again" in said
    assert "2 of 2: topk, seed 0: accuracy" in said
    assert result.read_bytes() == content
    result.unlink()  # the remedy
    assert cli.main(words) == 0
    assert results.read(folder).missing == []
