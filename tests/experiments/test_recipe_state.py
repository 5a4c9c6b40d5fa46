"""tools/recipe_state.py: a search goes on elsewhere from its numbers alone."""

import json
from pathlib import Path

import pytest

import experiment_data
import recipe_state
from multimax import cli
from multimax.experiments import results
from tiny_runs import TINY


def test_a_search_goes_on_from_its_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    experiment_data.idx(Path("data/fashion-mnist"))
    out, kept = Path("runs/all"), Path("kept")
    rates = {"settings": {}, "axes": {"trainer.learning_rate": [0.001, 0.002]}}
    search = {"rungs": [{"share": 0.5, "seeds": 1}, {"share": 1, "seeds": 1}], "keep": 2, "groups": {"rates": rates}}
    table = {"about": "a search", "baseline": "softmax", "seeds": 1, "methods": {"softmax": {}}, "search": search}
    Path("table.json").write_text(json.dumps(table))
    searched = ["sweep", "table.json", "--preset", "recipe-fashion", "--data", "data/fashion-mnist", *TINY]
    searched += ["--out", str(out / "tune-fashion")]
    assert cli.main(searched) == 0
    later = ["sweep", "seeds", "--preset", str(out / "tune-fashion/chosen.json"), "--data", "data/fashion-mnist"]
    later += [*TINY, "--no-test", "--seeds", "1", "--out", str(out / "pilot-fashion")]
    assert cli.main(later) == 0
    chosen = (out / "tune-fashion/chosen.json").read_text()
    names = {"tune-fashion.rung-1", "tune-fashion.rung-2", "pilot-fashion"}
    number = recipe_state.save(out, kept)
    assert {path.stem for path in kept.iterdir()} == names
    before = {name: results.read(out.joinpath(*name.split("."))) for name in names}
    assert number == sum(len(sweep.runs) for sweep in before.values())

    out.rename("elsewhere")
    Path("data").rename("other")
    assert recipe_state.restore(out, Path("other"), kept) == number
    assert recipe_state.restore(out, Path("other"), kept) == 0  # it is there
    for name, sweep in before.items():
        again = results.read(out.joinpath(*name.split(".")))
        assert [run.result for run in again.runs] == [run.result for run in sweep.runs]
    times = {file: file.stat().st_mtime_ns for file in out.rglob("result.json")}
    moved = {"data/fashion-mnist": "other/fashion-mnist"}
    for command in (searched, later):
        assert cli.main([moved.get(word, word) for word in command]) == 0, capsys.readouterr().err
    assert {file: file.stat().st_mtime_ns for file in out.rglob("result.json")} == times  # nothing was run again
    assert (out / "tune-fashion/chosen.json").read_text() == chosen.replace("data/fashion", "other/fashion")


def test_the_name_of_data_must_be_its_own(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "input.txt").touch()
    assert recipe_state.place_of("digits", tmp_path) == "digits"
    with pytest.raises(SystemExit, match=r"expected one input\.txt below"):
        recipe_state.place_of("input.txt", tmp_path)
