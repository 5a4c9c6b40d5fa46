"""`multimax sweep`, and `multimax table` of what it gave."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from multimax import cli
from multimax.cli import sweep
from multimax.experiments.results import read
from multimax.experiments.run import _alone
from multimax.experiments.sweep import Done
from tiny_runs import TINY

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what the Trainer uses


def test_sweep_and_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "sweep"
    words = ["sweep", "main", "--preset", "cpu-digits", *TINY, "--out", str(folder)]
    assert cli.main([*words, "--seeds", "1", "--methods", "softmax", "MultiMax both"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"1 of 2: softmax, seed 0: accuracy .*; about \d+ (second|minute)s left", said[0])
    assert said[1].startswith("2 of 2: MultiMax both, seed 0: accuracy")
    assert "left" not in said[1]
    assert {(run.label, run.seed) for run in read(folder).runs} == {("softmax", 0), ("MultiMax both", 0)}
    with _alone(folder / "multimax-output/seed-1"):  # as another process would
        assert cli.main([*words, "--seeds", "2"]) == 0
    said = capsys.readouterr().out
    assert "MultiMax output, seed 1: running in another process" in said
    assert "1 runs are still running in other processes" in said
    assert len(read(folder).runs) == 7
    assert cli.main([*words, "--seeds", "2"]) == 0
    assert len(read(folder).runs) == 8
    capsys.readouterr()
    assert cli.main(["table", str(folder), "--save", str(tmp_path / "all.json"), "--parameters", "MultiMax both"]) == 0
    printed = capsys.readouterr().out
    assert "| MultiMax attention " in printed
    assert "t_b" in printed
    assert cli.main(["table", str(tmp_path / "all.json"), "--parameters", "MultiMax both"]) == 0
    assert capsys.readouterr().out == printed
    assert str(tmp_path) not in (tmp_path / "all.json").read_text()
    curves = [tmp_path / "curves.svg", tmp_path / "again.svg"]
    for file in curves:
        assert cli.main(["table", str(folder), "--parameters", "MultiMax both", "--curves", str(file)]) == 0
    assert curves[0].read_bytes() == curves[1].read_bytes()
    capsys.readouterr()
    assert cli.main(["table", str(folder), "--parameters", "softmax", "--curves", str(tmp_path / "none.svg")]) == 1
    assert not (tmp_path / "none.svg").exists()
    capsys.readouterr()
    # other settings in the same folder
    assert cli.main([*words, "--seeds", "2", "--order", "1"]) == 1
    assert "got another (order: 2 there, 1 now)" in capsys.readouterr().err


def test_dry_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["sweep", "seeds", "--preset", "cpu-digits", *TINY, "--out", str(tmp_path / "sweep"), "--seeds", "1"]
    assert cli.main([*words, "--dry-run"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("1 of 2: softmax, seed 0: new; digits with 1,347 examples to train on")
    assert said[1:] == ["2 of 2: MultiMax, seed 0: new", str(tmp_path / "sweep")]
    assert not (tmp_path / "sweep").exists()


def test_the_time_that_is_left() -> None:
    pace = sweep.Pace(7)
    run = Done(None, "finished", {}, trained=True, seconds=600.0)
    assert pace.left(replace(run, trained=False, seconds=0.0)) == ""  # found finished
    assert pace.left(run) == "; about 60 minutes left"
    assert pace.left(replace(run, seconds=1800.0)) == "; about 2 hours left"  # 5 of 20 minutes each
    assert pace.left(Done(None, "busy", None)) == ""  # not ours to do
    assert pace.left(replace(run, seconds=0.0)) == "; about 40 minutes left"
    for _ in range(2):
        pace.left(replace(run, seconds=0.0))
    assert pace.left(run) == ""


def test_runs_of_a_sweep_that_diverge_are_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["sweep", "seeds", "--preset", "cpu-digits", *TINY, "--out", str(tmp_path / "sweep"), "--seeds", "1"]
    words += ["--steps", "30", "--learning-rate", "1e30", "--set", "trainer.max_grad_norm=0", "trainer.warmup_steps=0"]
    assert cli.main(words) == 0
    assert "softmax, seed 0: diverged" in capsys.readouterr().out
    assert {run.result["status"] for run in read(tmp_path / "sweep").runs} == {"diverged"}
    assert cli.main(["table", str(tmp_path / "sweep")]) == 0
    assert "1 of 1 diverged" in capsys.readouterr().out
