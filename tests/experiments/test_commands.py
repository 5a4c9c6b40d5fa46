"""`multimax train`, `sweep`, `table` and `demo`: words in, files and words out."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import experiment_data
import results_tables
from multimax import cli
from multimax.experiments import sweep as sweeps
from multimax.experiments.commands import method
from multimax.experiments.demo import demo
from multimax.experiments.results import read
from multimax.experiments.run import _alone, result_of
from multimax.experiments.settings import Settings, override, preset

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what the Trainer uses

TINY = ["--quiet", "--no-tensorboard", "--measured", "8", "--steps", "2", "--batch-size", "4"]
TINY += ["--set", "model.hidden_size=16", "model.num_hidden_layers=1", "model.num_attention_heads=2"]
TINY += ["model.intermediate_size=16", "trainer.eval_steps=2", "trainer.save_steps=2"]


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


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["train", "vision", "--preset", "cpu-text"], "expected a preset for vision"),
        (["train", "vision", "--preset", "nope"], "expected a preset out of cpu-cifar10"),
        (["train", "vision", "--attention", "nope"], "expected attention to be one of"),
        (["train", "vision", "--set", "nope=1"], "expected settings out of"),
        (["train", "vision", "--set", "seed.x=1"], "expected a setting with parts"),
        (["train", "vision", "--set", "trainer.nope=1"], "expected options of transformers' TrainingArguments"),
        (["train", "vision", "--size", "huge"], "expected a size of vision out of digits"),
        (["train", "translation"], "expected data"),
        (["train", "language", "--data", "/nowhere/at/all"], "/nowhere/at/all"),
        (["sweep", "nope", "--preset", "cpu-digits"], "expected a table out of ablation"),
        (["sweep", "main", "--preset", "cpu-digits", "--methods", "sparsemax"], "expected methods of the table main"),
        (["sweep", "main", "--preset", "cpu-digits", "--seeds", "0"], "expected at least one seed"),
        (["sweep", "main", "--preset", "cpu-digits", "--seed", "3"], "expected --seeds, how many"),
        (["sweep", "main", "--preset", "cpu-digits", "--attention", "multimax"], "expected attention to be left to"),
        (["sweep", "main", "--preset", "cpu-fashion", "--data", "/nowhere/at/all"], "/nowhere/at/all"),
        (["train", "vision", "--out", "/dev/null/x"], "expected files that can be read and written"),
        (["demo", "--seeds", "0"], "expected at least one seed"),
        (["table", "/nowhere/at/all"], "/nowhere/at/all"),
    ],
)
def test_mistakes_are_told_in_a_sentence(
    words: list[str], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(words) == 1
    said = capsys.readouterr()
    assert said.err.startswith("multimax: expected")
    assert text in said.err
    assert said.err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_epochs_come_before_the_steps_of_a_preset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = experiment_data.text(tmp_path / "data")
    words = ["train", "language", "--data", str(data), "--epochs", "1", "--batch-size", "64", "--length", "32"]
    words += ["--quiet", "--measured", "0", "--watch", "0", "--out", str(tmp_path / "run"), "--no-tensorboard"]
    assert preset("cpu-text").trainer["max_steps"] == 500
    assert cli.main([*words, "--set", "model.n_embd=16", "model.n_layer=1"]) == 0
    result = result_of(tmp_path / "run")
    assert 1 <= result["steps"] < 10
    assert result["layers"] == {}


def test_sweep_and_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "sweep"
    words = ["sweep", "main", "--preset", "cpu-digits", *TINY, "--out", str(folder)]
    assert cli.main([*words, "--seeds", "1", "--methods", "softmax", "MultiMax both"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("1 of 2: softmax, seed 0: accuracy")
    assert said[1].startswith("2 of 2: MultiMax both, seed 0: accuracy")
    assert {(run.label, run.seed) for run in read(folder).runs} == {("softmax", 0), ("MultiMax both", 0)}
    with _alone(folder / "multimax-output/seed-1"):  # as another process would
        assert cli.main([*words, "--seeds", "2"]) == 0
    said = capsys.readouterr().out
    assert "MultiMax output, seed 1: at work in another process" in said
    assert "1 runs are at work in other processes" in said
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
    assert "got another (settings differ)" in capsys.readouterr().err


def test_runs_of_a_sweep_that_diverge_are_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["sweep", "seeds", "--preset", "cpu-digits", *TINY, "--out", str(tmp_path / "sweep"), "--seeds", "1"]
    words += ["--steps", "30", "--learning-rate", "1e30", "--set", "trainer.max_grad_norm=0", "trainer.warmup_steps=0"]
    assert cli.main(words) == 0
    assert "softmax, seed 0: diverged" in capsys.readouterr().out
    assert {run.result["status"] for run in read(tmp_path / "sweep").runs} == {"diverged"}
    assert cli.main(["table", str(tmp_path / "sweep")]) == 0
    assert "1 of 1 diverged" in capsys.readouterr().out


def test_the_page_of_results_shows_what_the_runs_gave() -> None:
    page = results_tables.PAGE.read_text(encoding="utf-8")
    shown = {match[3] for match in results_tables.PLACE.finditer(page)}
    assert shown == {path.stem for path in (results_tables.FOLDER / "results").glob("*.json")}
    assert results_tables.page() == page  # python tools/results_tables.py


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


def test_a_reader_that_has_seen_enough() -> None:
    file = results_tables.FOLDER / "results" / "digits.json"
    code = f"import sys; from multimax import cli; sys.exit(cli.main(['table', *[{str(file)!r}] * 20]))"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().startswith("| method")
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 0


def test_tables_of_ones_own(tmp_path: Path) -> None:
    own = {"about": "", "baseline": "a", "seeds": 1, "methods": {"a": {}, "b": {"attention": "sparsemax"}}}
    (tmp_path / "own.json").write_text(json.dumps(own))
    assert sweeps.load_table(str(tmp_path / "own.json")).methods == own["methods"]
    for wrong, text in (
        ({"baseline": "c"}, "expected baseline to be one of the methods"),
        ({"methods": None}, "methods"),
    ):
        (tmp_path / "wrong.json").write_text(json.dumps(own | wrong))
        with pytest.raises((ValueError, TypeError), match=text):
            sweeps.load_table(str(tmp_path / "wrong.json"))
    (tmp_path / "short.json").write_text("{}")
    with pytest.raises(ValueError, match="got no about, methods, baseline, seeds"):
        sweeps.load_table(str(tmp_path / "short.json"))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "softmax"),
        ({"attention": "multimax"}, "MultiMax attention"),
        ({"output": "multimax"}, "MultiMax output"),
        ({"attention": "multimax", "output": "multimax"}, "MultiMax both"),
        ({"attention": "entmax15", "output": "multimax"}, "entmax15 attention, MultiMax output"),
        ({"temperature": 0.5}, "softmax, temperature 0.5"),
        ({"attention": "multimax", "order": 1, "per_head": True}, "MultiMax attention, order 1, per head"),
        ({"attention": "topk", "attention_options": {"k": 8}}, "topk attention, k 8"),
    ],
)
def test_methods_in_words(settings: dict, words: str) -> None:
    assert method(Settings(**settings)) == words


def test_demo(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    few = {"num_train_epochs": 1, "eval_steps": 100}
    options = [("model", small), ("trainer", few), ("measured", 8)]
    text = demo(tmp_path / "demo", 2, options)
    bar = capsys.readouterr().err
    assert "88/88" in bar  # 2 methods, 2 seeds, 22 steps
    assert "| softmax " in text
    assert "| MultiMax " in text
    assert "ms a step" in text
    assert "layers.0" in text
    assert demo(tmp_path / "demo", 2, options) == text  # nothing is trained again
    monkeypatch.setattr("multimax.experiments.demo.demo", lambda folder, seeds: demo(folder, seeds, options))
    assert cli.main(["demo", "--seeds", "2", "--out", str(tmp_path / "demo")]) == 0
    page = tmp_path / "demo" / "report.html"
    assert f"A page with all figures, for the browser: {page}\n" in capsys.readouterr().out
    assert "data:image/svg+xml" in page.read_text(encoding="utf-8")
