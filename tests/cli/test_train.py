"""`multimax train`: words in, files and words out."""

import json
from pathlib import Path

import pytest

import experiment_data
from multimax import cli
from multimax.experiments.run import result_of
from multimax.experiments.settings import preset
from tiny_runs import TINY

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what the Trainer uses


def test_train_says_what_came_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "vision", "--attention", "multimax", "--order", "1", "--seed", "3", *TINY]
    words += ["--learning-rate", "0.01", "--out", str(tmp_path / "run")]
    assert cli.main(words) == 0
    said = capsys.readouterr().out
    assert "MultiMax attention, order 1, seed 3: accuracy " in said
    assert str(tmp_path / "run") in said
    config = json.loads((tmp_path / "run/config.json").read_text())
    assert (config["attention"], config["order"], config["seed"], config["preset"]) == ("multimax", 1, 3, "cpu-digits")
    assert config["trainer"]["learning_rate"] == 0.01
    assert config["trainer"]["max_steps"] == 2
    assert config["model"]["num_hidden_layers"] == 1
    assert config["model"]["patch_size"] == 2  # the preset's
    assert cli.main(words) == 0  # found finished
    assert capsys.readouterr().out == said


def test_a_run_lands_in_a_folder_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", "vision", *TINY]) == 0
    assert result_of(tmp_path / "runs/cpu-digits/softmax/seed-0")["status"] == "finished"


def test_epochs_come_before_the_steps_of_a_preset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = experiment_data.text(tmp_path / "data")
    words = ["train", "language", "--data", str(data), "--epochs", "1", "--batch-size", "64", "--length", "32"]
    words += ["--quiet", "--measured", "0", "--watch", "0", "--out", str(tmp_path / "run"), "--no-tensorboard"]
    assert preset("cpu-text").trainer["max_steps"] == 500
    assert cli.main([*words, "--set", "model.n_embd=16", "model.n_layer=1"]) == 0
    result = result_of(tmp_path / "run")
    assert 1 <= result["steps"] < 10
    assert result["layers"] == {}
