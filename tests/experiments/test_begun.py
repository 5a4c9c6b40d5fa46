"""What a run must find again when it goes on: its data, and as many devices."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import TrainerCallback

import experiment_data
from multimax import cli
from multimax.experiments import begun
from multimax.experiments.data import fingerprint, load_images
from multimax.experiments.data.images import ImageSet
from multimax.experiments.run import outlook, train
from multimax.experiments.settings import Settings, override, preset
from multimax.experiments.tasks.loading import task_of
from tiny_runs import TINY

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what the Trainer uses

STEPS = {"max_steps": 4, "per_device_train_batch_size": 4, "per_device_eval_batch_size": 16, "save_steps": 1}
FEW = {"trainer": {**STEPS, "eval_strategy": "no"}, "measured": 0, "tensorboard": False, "watch": 0}


class Stop(TrainerCallback):
    """Ends training after two steps, as a signal would."""

    class Stopped(BaseException):
        pass

    def on_step_end(self, args, state, control, **_) -> None:
        if state.global_step == 2:
            raise self.Stopped


def text(folder: Path) -> Settings:
    data = experiment_data.text(folder / "data")
    small = {"model": experiment_data.SMALL_GPT, "length": 16, "vocabulary": 300, "data": str(data)}
    return override(preset("cpu-wikitext2"), {**small, **FEW})


def interrupted(settings: Settings, folder: Path) -> None:
    with pytest.raises(Stop.Stopped):
        train(settings, folder, progress=False, callbacks=[Stop()])


def times(folder: Path) -> dict[Path, int]:
    """When each file was written, but for the lock."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.name != ".lock"}


def test_a_run_does_not_go_on_with_other_data(tmp_path: Path) -> None:
    settings, run = text(tmp_path), tmp_path / "run"
    interrupted(settings, run)
    before = json.loads((run / begun.BEGUN).read_text())
    assert before["data"] == task_of(settings).fingerprint
    assert before["devices"] == 1
    file = tmp_path / "data/valid.txt"
    content = file.read_text()
    file.write_text(content.replace("dog", "cow"))  # as long as it was
    files = times(run)
    words = r"expected the data of the run in .*run', got other data \(valid: [\d,]+ characters, .* now\); put it back"
    for go_on in (lambda: train(settings, run, progress=False), lambda: outlook(settings, run)):
        with pytest.raises(ValueError, match=words):
            go_on()
    assert times(run) == files
    file.write_text(content)
    assert train(settings, run, progress=False)["status"] == "finished"


def test_a_run_without_a_checkpoint_begins_anew(tmp_path: Path) -> None:
    settings, run = text(tmp_path), tmp_path / "run"
    interrupted(settings, run)
    shutil.rmtree(run / "checkpoints")
    with (tmp_path / "data/train.txt").open("a") as file:
        file.write("a further line\n" * 9)
    assert train(settings, run, progress=False)["status"] == "finished"
    assert json.loads((run / begun.BEGUN).read_text())["data"] == task_of(settings).fingerprint


def test_a_sweep_does_not_mix_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = experiment_data.idx(tmp_path / "data", size=8)
    words = ["sweep", "seeds", "--preset", "cpu-digits", "--data", str(data), *TINY, "--out", str(tmp_path / "sweep")]
    assert cli.main([*words, "--seeds", "1"]) == 0
    shutil.rmtree(data)
    experiment_data.idx(data, n=50, size=8)
    capsys.readouterr()
    assert cli.main([*words, "--seeds", "2"]) == 1
    said = capsys.readouterr().err
    assert "got other data (train: 40 examples, checksum" in said
    assert "runs of one sweep must have these alike" in said
    assert not list((tmp_path / "sweep").glob("*/seed-1/result.json"))


def test_a_run_does_not_go_on_with_other_processes(tmp_path: Path) -> None:
    settings, run = text(tmp_path), tmp_path / "run"
    interrupted(settings, run)
    file = run / begun.BEGUN
    content = json.loads(file.read_text())
    file.write_text(json.dumps({**content, "devices": 2}))  # as torchrun would have it
    with pytest.raises(ValueError, match=r"expected 2 processes or GPUs .* got 1, .* torchrun --nproc-per-node 2, or"):
        train(settings, run, progress=False)
    file.write_text(json.dumps([]))
    with pytest.raises(ValueError, match=r"expected what the run began with in .*begun\.json', got \[\]"):
        train(settings, run, progress=False)
    file.write_text(json.dumps(content))
    assert train(settings, run, progress=False)["status"] == "finished"


@pytest.mark.parametrize("kind", [experiment_data.idx, experiment_data.cifar, experiment_data.tree])
def test_images_are_told_apart(kind: Callable[[Path], Path], tmp_path: Path) -> None:
    folder = kind(tmp_path / "one")
    data = load_images(folder)
    found = fingerprint.of_images(data)
    assert {part: found[part]["examples"] for part in found} == {"train": len(data.train), "test": len(data.test)}
    moved = shutil.copytree(folder, tmp_path / "moved")
    assert fingerprint.of_images(load_images(moved)) == found
    for changed in (other_label, other_pixel):
        assert fingerprint.differences(found, fingerprint.of_images(data)) == []
        undo = changed(data.train)
        (difference,) = fingerprint.differences(found, fingerprint.of_images(data))
        assert difference.startswith(f"train: {len(data.train)} examples, checksum ")
        undo()


def other_label(images: ImageSet) -> Callable[[], object]:
    images.labels[3] += 1
    return lambda: images.labels[3].sub_(1)


def other_pixel(images: ImageSet) -> Callable[[], object]:
    if not hasattr(images, "paths"):
        images.images[3, 0, 2, 2] ^= 1
        return lambda: images.images[3, 0, 2, 2].bitwise_xor_(torch.tensor(1, dtype=torch.uint8))
    content = images.paths[3].read_bytes()
    images.paths[3].write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    return lambda: images.paths[3].write_bytes(content)


def test_parts_that_differ_are_named() -> None:
    one = {"train": {"pairs": 29000, "sha256": "a" * 64}, "test": {"pairs": 5, "sha256": "b" * 64}}
    other = {"train": {"pairs": 28000, "sha256": "c" * 64}, "valid": {"pairs": 5, "sha256": "b" * 64}}
    assert fingerprint.differences(one, other) == [
        "train: 29,000 pairs, checksum aaaaaaaaaaaa there, 28,000 pairs, checksum cccccccccccc now",
        "valid: none there, 5 pairs, checksum bbbbbbbbbbbb now",
        "test: 5 pairs, checksum bbbbbbbbbbbb there, none now",
    ]
