"""`multimax presets`."""

import pytest

from multimax import cli
from multimax.experiments import sweep as sweeps
from multimax.experiments.settings import preset, preset_names


def test_presets_and_tables_with_what_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["presets"]) == 0
    said = capsys.readouterr().out
    entries = " ".join(said.split())
    for name in preset_names():
        needs = "" if preset(name).data else " Needs --data."
        assert f"{name} {preset(name).about}.{needs}" in entries
    for name in sweeps.table_names():
        assert f"{name} {sweeps.load_table(name).about}. " in entries
    assert "Taken unless --preset is given: multimax train vision." in entries
    assert max(map(len, said.splitlines())) <= 100
