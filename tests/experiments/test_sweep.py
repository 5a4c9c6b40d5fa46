"""The tables of methods, and the runs that they plan."""

import json
from pathlib import Path

import pytest

from multimax.experiments import sweep as sweeps
from multimax.experiments.settings import override, preset


@pytest.mark.parametrize("name", sweeps.table_names())
def test_every_table_has_settings_that_can_be(name: str, tmp_path: Path) -> None:
    table = sweeps.load_table(name)
    assert table.baseline in table.methods
    base = override(preset("cpu-digits"), {"start": "models/{seed}"} if name == "retrofit" else {})
    runs = sweeps.plan(table, base, range(3), tmp_path)
    assert len({run.folder for run in runs}) == 3 * len(table.methods)
    assert [run.seed for run in runs] == sorted(run.seed for run in runs)  # seed by seed
    if table.paper is not None:
        assert set(table.paper["values"]) <= set(table.methods)
    if name == "retrofit":
        assert {run.settings.start for run in runs} == {"models/0", "models/1", "models/2"}


def test_tables_of_ones_own(tmp_path: Path) -> None:
    table = {"about": "", "baseline": "a", "seeds": 1, "methods": {"a": {}, "b": {"attention": "sparsemax"}}}
    (tmp_path / "own.json").write_text(json.dumps(table))
    assert sweeps.load_table(str(tmp_path / "own.json")).methods == table["methods"]
    for wrong, text in (
        ({"baseline": "c"}, "expected baseline to be one of the methods"),
        ({"methods": None}, "methods"),
    ):
        (tmp_path / "wrong.json").write_text(json.dumps(table | wrong))
        with pytest.raises((ValueError, TypeError), match=text):
            sweeps.load_table(str(tmp_path / "wrong.json"))
    (tmp_path / "short.json").write_text("{}")
    with pytest.raises(ValueError, match="got no about, methods, baseline, seeds"):
        sweeps.load_table(str(tmp_path / "short.json"))
