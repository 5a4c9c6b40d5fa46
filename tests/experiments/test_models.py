"""The model that a run starts from: it must be what the settings say, and fit the data."""

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import experiment_data
from multimax import cli
from multimax.experiments.run import train
from multimax.experiments.settings import Settings, override, preset
from tiny_runs import TINY

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what the Trainer uses

STEPS = {"max_steps": 1, "per_device_train_batch_size": 4, "per_device_eval_batch_size": 64, "eval_strategy": "no"}
FEW = {"trainer": STEPS, "measured": 0, "tensorboard": False, "watch": 0}


@pytest.fixture
def trained(tmp_path: Path) -> tuple[Settings, Path]:
    settings = override(preset("cpu-digits"), {"model": experiment_data.SMALL_VIT, **FEW})
    folder = tmp_path / "trained"
    train(settings, folder, progress=False)
    return settings, folder


OTHERS = {
    "pooling": ({"pooling": "class"}, r"pooling: 'average' there, 'class' here"),
    "model": ({"model": {"hidden_size": 32}}, r"model\.hidden_size: 16 there, 32 here"),
    "dropout": ({"model": {"hidden_dropout_prob": 0.5}}, r"model\.hidden_dropout_prob: 0\.0 there, 0\.5 here"),
    "image size": ({"image_size": 16}, r"image_size: 8 there, 16 here"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_settings_that_a_model_has_not(name: str, trained: tuple[Settings, Path], tmp_path: Path) -> None:
    settings, folder = trained
    values, words = OTHERS[name]
    start = override(settings, {"start": str(folder / "model"), **values})
    remedy = rf"as with --preset {folder}/config\.json"
    with pytest.raises(ValueError, match=rf"that fit the model in .* got others \({words}\); .*{remedy}"):
        train(start, tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()
    train(override(settings, {"start": str(folder / "model")}), tmp_path / "run", progress=False)


def test_data_that_a_model_does_not_take(trained: tuple[Settings, Path], tmp_path: Path) -> None:
    settings, folder = trained
    start = override(settings, {"start": str(folder / "model")})
    colour = override(start, {"data": str(experiment_data.tree(tmp_path / "tree"))})
    with pytest.raises(ValueError, match=r"num_channels: 1 there, 3 here; num_labels: 10 there, 2 here"):
        train(colour, tmp_path / "run", progress=False)
    text = {"model": {}, **FEW, "start": str(folder / "model")}
    with pytest.raises(ValueError, match="expected start to be a model for language, got IJepaConfig"):
        train(override(preset("cpu-text"), text), tmp_path / "run", progress=False)
    with pytest.raises(ValueError, match=rf"expected start to be the folder of a saved model, .*name '{folder}/model'"):
        train(override(start, {"start": str(folder)}), tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()


def test_more_positions_than_a_model_has(tmp_path: Path) -> None:
    for name, small, words in (
        ("cpu-wikitext2", experiment_data.SMALL_GPT, "expected length of at most 16, the positions of the model"),
        ("cpu-multi30k", experiment_data.SMALL_MARIAN, "expected length below 17, the positions of the model"),
    ):
        folder = tmp_path / name
        folder.mkdir()
        base = override(preset(name), {"model": small, "length": 16, "vocabulary": 120, **FEW})
        kind = experiment_data.text if base.task == "language" else experiment_data.parallel
        options = {} if base.task == "language" else {"test": base.test_set}
        base = override(base, {"data": str(kind(folder / "data", **options))})
        train(base, folder / "run", progress=False)
        start = override(base, {"start": str(folder / "run/model"), "length": 17})
        with pytest.raises(ValueError, match=words):
            train(start, folder / "further", progress=False)
        assert not (folder / "further").exists()


def test_weights_that_are_missing(trained: tuple[Settings, Path], tmp_path: Path) -> None:
    settings, folder = trained
    model = shutil.copytree(folder / "model", tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    save_file(
        {k: v for k, v in weights.items() if k != "classifier.bias"}, model / "model.safetensors", {"format": "pt"}
    )
    with pytest.raises(ValueError, match=r"expected all weights in .*, got none of classifier\.bias"):
        train(override(settings, {"start": str(model)}), tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()


def test_a_sweep_looks_for_all_its_models_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = ["sweep", "seeds", "--preset", "cpu-digits", *TINY, "--out", str(tmp_path / "digits"), "--seeds", "2"]
    assert cli.main([*sweep, "--methods", "softmax"]) == 0
    retrofit = ["sweep", "retrofit", "--preset", "cpu-digits", *TINY, "--out", str(tmp_path / "retrofit")]
    retrofit += ["--start", str(tmp_path / "digits/softmax/seed-{seed}/model")]
    assert cli.main([*retrofit, "--seeds", "3"]) == 1
    assert "expected start to be the folder of a saved model, got" in capsys.readouterr().err
    assert not (tmp_path / "retrofit").exists()
    assert cli.main([*retrofit, "--seeds", "2", "--methods", "softmax as it was"]) == 0


def test_a_tokenizer_beside_a_model_that_brings_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for option in ("--tokenizer=word", "--vocabulary=9"):
        assert cli.main(["train", "language", "--start", str(tmp_path), option]) == 1
        word = option.partition("=")[0]
        assert f"expected {word} without --start, whose model brings its tokenizer" in capsys.readouterr().err
