"""`multimax train`: words in, files and words out."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import experiment_data
from multimax import cli
from multimax.experiments import speaking
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
    assert cli.main(words) == 0
    again = capsys.readouterr()
    assert again.out == said
    assert again.err == f"{tmp_path / 'run'}: already finished, not trained again\n"


def test_what_is_said_on_the_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Lines, with and without --quiet; no bars where there is no terminal."""
    for quiet in ([], ["--quiet"]):
        words = ["train", "vision", *(word for word in TINY if word != "--quiet"), *quiet]
        assert cli.main([*words, "--set", "trainer.logging_steps=1", "--out", str(tmp_path / f"run{len(quiet)}")]) == 0
        lines = capsys.readouterr().err.splitlines()
        assert [line[:12] for line in lines] == ["step      1 ", "step      2 ", "step      2 "]
        assert "loss 2." in lines[0]
        assert "eval_accuracy 0." in lines[2]


def test_bars_on_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("multimax.experiments.run.on_terminal", lambda: True)
    words = ["train", "vision", *(word for word in TINY if word != "--quiet"), "--set", "trainer.logging_steps=1"]
    assert cli.main([*words, "--out", str(tmp_path / "bars")]) == 0
    said = capsys.readouterr().err
    assert "2/2" in said
    assert "step      1 " in said
    assert cli.main([*words, "--quiet", "--out", str(tmp_path / "quiet")]) == 0
    assert "2/2" not in capsys.readouterr().err


def test_dry_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "vision", *TINY, "--out", str(tmp_path / "run")]
    assert cli.main([*words, "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "softmax, seed 0: new; digits with 1,347 examples to train on, a model of " in said
    assert "2 steps of 4 examples" in said
    assert not (tmp_path / "run").exists()
    epochs = ["train", "vision", "--dry-run", "--epochs", "2", "--batch-size", "100", "--out", str(tmp_path / "run")]
    assert cli.main(epochs) == 0
    assert "28 steps of 100 examples" in capsys.readouterr().out
    assert cli.main(words) == 0
    capsys.readouterr()
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert cli.main([*words, "--dry-run"]) == 0
    assert "seed 0: already finished; " in capsys.readouterr().out
    assert cli.main([*words, "--dry-run", "--set", "model.hidden_size=17"]) == 1
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == files


def test_a_run_that_goes_on_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "vision", *TINY, "--steps", "4", "--out", str(tmp_path / "run")]

    class Full(OSError):
        pass

    def killed(*_: object) -> None:
        raise Full("no room")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("multimax.experiments.run._evaluate", killed)
        assert cli.main(words) == 1
    capsys.readouterr()
    assert cli.main([*words, "--dry-run"]) == 0
    assert "seed 0: resumes from step 4; " in capsys.readouterr().out
    assert cli.main(words) == 0
    assert f"{tmp_path / 'run'}: resuming from step 4\n" in capsys.readouterr().err


def test_a_diverged_run_says_why_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "vision", *TINY, "--steps", "30", "--learning-rate", "1e30", "--out", str(tmp_path / "run")]
    words += ["--set", "trainer.max_grad_norm=0", "trainer.warmup_steps=0", "trainer.eval_steps=100"]
    assert cli.main(words) == 1
    assert "multimax: expected" in capsys.readouterr().err
    assert cli.main(words) == 1
    said = capsys.readouterr()
    assert "softmax, seed 0: diverged: expected " in said.out
    assert "; a smaller learning rate" in said.out
    assert f"multimax: delete the folder {tmp_path / 'run'} to train it again" in said.err


def test_a_reader_that_goes_away_does_not_end_training(tmp_path: Path) -> None:
    """`multimax train ... 2>&1 | head -1`"""
    words = ["train", "vision", *TINY, "--set", "trainer.logging_steps=1", "--out", str(tmp_path / "run")]
    command = f"{shlex.join([sys.executable, '-m', 'multimax', *words])} 2>&1 | head -c 0; exit ${{PIPESTATUS[0]}}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(["bash", "-c", command], timeout=120, env=environment)
    assert done.returncode == 0
    assert result_of(tmp_path / "run")["status"] == "finished"


def test_a_stream_that_nobody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, speak in (("stdout", speaking.say), ("stderr", speaking.note)):
        read, write = os.pipe()
        os.close(read)
        with os.fdopen(write, "w") as stream:
            monkeypatch.setattr(sys, name, stream)
            speak("the first")
            speak("the second")


def test_options_of_other_tasks(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["vision", "--beams", "3"], ["language", "--pooling", "class"], ["translation", "--stride", "3"]):
        with pytest.raises(SystemExit) as stop:
            cli.main(["train", *words])
        assert stop.value.code == 2
        assert f"unrecognized arguments: {words[1]}" in capsys.readouterr().err


def test_the_same_data_in_other_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    experiment_data.idx(tmp_path / "images", size=8)
    words = ["train", "vision", *TINY, "--out", "run"]
    assert cli.main([*words, "--data", "images"]) == 0
    for same in ("./images", "images/", str(tmp_path / "images")):
        assert cli.main([*words, "--data", same]) == 0
    capsys.readouterr()
    assert cli.main([*words, "--data", "other"]) == 1
    assert "(data: 'images' there, 'other' now)" in capsys.readouterr().err


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
