"""The list of tasks, and data that is loaded once."""

import argparse
import hashlib
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import experiment_data
from multimax import cli, metrics
from multimax.cli import train as train_command
from multimax.experiments import models, results, tasks
from multimax.experiments import sweep as sweeps
from multimax.experiments.run import train
from multimax.experiments.settings import Settings, override, preset
from multimax.experiments.table import METRICS, markdown
from multimax.experiments.tasks import specs
from multimax.experiments.tasks.loading import DataCache, task_of
from multimax.experiments.tasks.task import Task

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what the Trainer uses

STEPS = {"max_steps": 2, "per_device_train_batch_size": 4, "per_device_eval_batch_size": 16, "logging_steps": 1}
STEPS |= {"eval_strategy": "steps", "eval_steps": 2, "save_steps": 2, "gradient_accumulation_steps": 1}
FEW = {"trainer": STEPS, "measured": 8, "tensorboard": False, "watch": 1}


@pytest.mark.parametrize("spec", tasks.SPECS, ids=tasks.names())
def test_a_spec_says_what_is_true(spec: tasks.TaskSpec) -> None:
    assert tasks.get(spec.name) is spec
    assert preset(spec.preset).task == spec.name
    kind = spec.kind()
    assert issubclass(kind, Task)
    assert {*spec.data, *spec.only} <= {*vars(Settings())}
    assert {spec.main} <= set(spec.metrics) <= set(METRICS)
    assert set(spec.measures) <= set(metrics.__all__)
    for name in spec.sizes:  # options that a configuration of its models knows
        models.configured(kind.classes[0].config_class, spec.size(name), {})
    with pytest.raises(ValueError, match=f"expected a size of {spec.name} out of {next(iter(spec.sizes))}"):
        spec.size("huge")


def test_an_unknown_task_is_an_error_that_names_the_known_ones() -> None:
    text = "multimax: expected task to be one of 'vision', 'language', 'translation', got 'speech'"
    settings = Settings()
    object.__setattr__(settings, "task", "speech")  # as if it had got past the check of the settings
    for wrong in (
        lambda: tasks.get("speech"),
        lambda: Settings(task="speech"),
        lambda: task_of(settings),
        lambda: train(settings, Path("never-made"), progress=False),
    ):
        with pytest.raises(ValueError, match=text):
            wrong()
    assert not Path("never-made").exists()


class Guess(Task):
    """A task of a user's."""


def test_a_further_task_needs_one_entry(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    guess = tasks.TaskSpec(
        name="guess",
        about="guess numbers",
        place=f"{__name__}:Guess",
        preset="cpu-digits",
        metrics={"luck": tasks.Metric("luck", 1, 1, "higher")},
        data=("data",),
        only=("multimax_lr_factor",),
    )
    more = (*specs.SPECS, guess)
    for module in (specs, tasks):
        monkeypatch.setattr(module, "SPECS", more)
    monkeypatch.setitem(METRICS, "luck", guess.metrics["luck"])
    assert Settings(task="guess", multimax_lr_factor=2.0).task == "guess"
    with pytest.raises(ValueError, match="multimax: expected multimax_lr_factor for guess, got it for language"):
        Settings(task="language", multimax_lr_factor=2.0)
    parser = argparse.ArgumentParser()
    train_command.add(parser.add_subparsers())
    assert parser.parse_args(["train", "guess"]).task == "guess"
    assert cli.main(["train", "guess"]) == 1
    assert "expected a preset for guess" in capsys.readouterr().err
    about = {"preset": "x", "task": "guess", "baseline": "a", "seeds": [0], "methods": {"a": {}}}
    found = {"status": "finished", "metrics": {"luck": 7.0, "sparsity": 0.5, "loss": 1.0}}
    table = markdown(results.Sweep(about, [results.Run("a", 0, {}, {}, found)]))
    assert table.startswith("| method | luck ↑ | sparsity ↑ | seeds |")


def text_settings(folder: Path) -> Settings:
    data = str(experiment_data.text(folder / "text"))
    return override(
        preset("cpu-wikitext2"),
        {"model": experiment_data.SMALL_GPT, "length": 16, "vocabulary": 300, "data": data, **FEW},
    )


def translation_settings(folder: Path) -> Settings:
    small = {"model": experiment_data.SMALL_MARIAN, "length": 24, "vocabulary": 120, "beams": 2}
    base = override(preset("cpu-multi30k"), {**small, **FEW})
    data = experiment_data.parallel(folder / "parallel", test=base.test_set or "test")
    return override(base, {"data": str(data)})


def image_settings(folder: Path) -> Settings:
    small = {"model": experiment_data.SMALL_VIT, "data": str(experiment_data.cifar(folder / "images"))}
    return override(preset("cpu-cifar10"), {**small, **FEW})


KINDS: dict[str, Callable[[Path], Settings]] = {
    "vision": image_settings,
    "language": text_settings,
    "translation": translation_settings,
}


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often data was read, and a tokenizer trained."""
    found: Counter[str] = Counter()

    def counted(module: Any, name: str) -> None:
        function = getattr(module, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            found[name] += 1
            return function(*args, **kwargs)

        monkeypatch.setattr(module, name, call)

    from multimax.experiments import tokenizers
    from multimax.experiments.tasks import language, translation, vision

    counted(vision, "load_images")
    counted(vision, "mean_and_std")
    counted(language, "load_text")
    counted(translation, "load_parallel")
    counted(tokenizers, "for_text")
    counted(tokenizers, "for_sentences")
    return found


ONCE = {
    "vision": {"load_images": 1, "mean_and_std": 1},
    "language": {"load_text": 1, "for_text": 1},
    "translation": {"load_parallel": 1, "for_sentences": 1},
}


def left(folder: Path) -> dict[str, Any]:
    """All that a run left and that must not depend on how it was run."""
    result = json.loads((folder / "result.json").read_text())
    files = [file for file in folder.rglob("*") if file.is_file() and file.suffix in (".safetensors", ".json", ".txt")]
    timed = ("result.json", "environment.json")
    hashes = {
        file.relative_to(folder).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in files
        if file.name not in timed
    }
    return {**hashes, **{name: value for name, value in result.items() if name not in ("minutes", "ms_per_step")}}


@pytest.mark.parametrize("task", tasks.names())
def test_a_sweep_loads_its_data_once(task: str, tmp_path: Path, loads: Counter[str]) -> None:
    base = KINDS[task](tmp_path)
    runs = sweeps.plan(sweeps.load_table("seeds"), base, [0, 1], tmp_path / "sweep")
    assert len(runs) == 4
    assert [done.status for done in sweeps.sweep(runs, progress=False)] == ["finished"] * 4
    assert loads == ONCE[task]
    # each run alone loads it again, and ends bitwise where the run of the sweep did
    last = runs[-1]
    train(last.settings, tmp_path / "alone", progress=False)
    assert loads == dict.fromkeys(ONCE[task], 2)
    assert left(tmp_path / "alone") == left(last.folder)
    # what is over loads nothing
    assert [done.status for done in sweeps.sweep(runs, progress=False)] == ["finished"] * 4
    assert loads == dict.fromkeys(ONCE[task], 2)


def test_the_command_loads_once_too(tmp_path: Path, loads: Counter[str], capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "base.json").write_text(json.dumps(vars(text_settings(tmp_path))))
    words = ["sweep", "seeds", "--preset", str(tmp_path / "base.json"), "--seeds", "1", "--quiet"]
    assert cli.main([*words, "--out", str(tmp_path / "sweep")]) == 0
    assert loads == ONCE["language"]  # the look at the data before anything is written included
    assert cli.main([*words, "--out", str(tmp_path / "sweep")]) == 0
    assert loads == ONCE["language"]


def test_other_data_settings_load_other_data(tmp_path: Path, loads: Counter[str]) -> None:
    base = text_settings(tmp_path)
    data = DataCache()
    for changes in ({}, {"seed": 3}, {"attention": "multimax"}, {"trainer": {"max_steps": 9}}):
        data.task(override(base, changes))
    assert loads["load_text"] == 1
    shorter = override(base, {"length": 8})
    assert len(data.task(shorter).train[0]["input_ids"]) == 8
    assert len(data.task(base).train[0]["input_ids"]) == 16
    assert loads["load_text"] == 2
    data.keep_for([shorter])
    data.task(shorter)
    assert loads["load_text"] == 2
    data.task(base)
    assert loads["load_text"] == 3


def test_a_sweep_keeps_only_what_later_runs_need(tmp_path: Path, loads: Counter[str]) -> None:
    base = text_settings(tmp_path)
    methods = {"softmax": {}, "shorter": {"length": 8}}
    table = sweeps.Table("own", "", methods, "softmax", 2)
    runs = sweeps.plan(table, base, [0, 1], tmp_path / "sweep")
    data, held = DataCache(), []
    for _ in sweeps.sweep(runs, progress=False, data=data):
        held.append(len(data.loaded))
    assert held == [1, 2, 2, 1]
    assert loads["load_text"] == 2
