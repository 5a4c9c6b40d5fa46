"""tools/recipe_runs.sh: its commands, as it would give them, on tiny data."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import experiment_data
from multimax import cli
from multimax.experiments import search
from multimax.experiments import sweep as sweeps
from multimax.experiments.settings import preset

SCRIPT = Path(__file__).parents[2] / "tools/recipe_runs.sh"
STAGES = ("tune", "search", "roles", "pilot", "confirm-text", "confirm-wikitext2", "confirm-digits")
STAGES += ("confirm-fashion", "confirm-cifar10", "confirm-multi30k")


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Data of every task, and the folder of the results, in which the searches are over."""
    data, out = tmp_path_factory.mktemp("data"), tmp_path_factory.mktemp("out")
    experiment_data.text(data / "wikitext-2", n=4000)
    (data / "tinyshakespeare").mkdir()
    shutil.copy(data / "wikitext-2/train.txt", data / "tinyshakespeare/input.txt")
    experiment_data.idx(data / "fashion-mnist")
    experiment_data.cifar(data / "cifar10")
    experiment_data.parallel(data / "multi30k-de-en", test="test_2016_flickr")
    recipe = sweeps.load_table("recipe").search
    best = {name: search.Standing(-1.0, next(iter(labels))) for name, labels in search.candidates(recipe).items()}
    for task in ("text", "cifar10", "multi30k"):
        (out / f"search-{task}").mkdir()
        search.finish(out / f"search-{task}", preset(f"recipe-{task}"), recipe, best, "softmax")
    return data, out


def commands(stage: str, data: Path, out: Path) -> list[list[str]]:
    """What a stage would run."""
    mine = {"DRY": "1", "MULTIMAX": "echo multimax", "PYTHON": sys.executable}
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **mine}
    given = ["bash", SCRIPT, stage, data, out]
    said = subprocess.run(given, env=environment, capture_output=True, text=True, check=True).stdout
    return [shlex.split(line)[1:] for line in said.splitlines()]


@pytest.mark.parametrize("stage", STAGES)
def test_every_command_of_a_stage_can_be_given(
    stage: str, places: tuple[Path, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = commands(stage, *places)
    assert found
    for words in found:
        assert words[0] == "sweep"
        assert words[-1] == "--dry-run"
        if stage.startswith("confirm"):
            # echo takes the quotes away
            assert words[words.index("--first-seed") + 1] == "100"
            words = [*words[: words.index("--methods")], "--dry-run"] if "--methods" in words else words
        else:
            assert stage in ("tune", "search") or "--no-test" in words
        assert cli.main(words) == 0, capsys.readouterr().err
        said = capsys.readouterr().out
        assert ": new; " in said


def test_an_unknown_stage(tmp_path: Path) -> None:
    done = subprocess.run(["bash", SCRIPT, "all", tmp_path, tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "usage: " in done.stderr
    assert "confirm-multi30k" in done.stderr
