"""Runs: every preset, interruptions, and all that may go wrong on the way."""

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForImageClassification, TrainerCallback

import experiment_data
import multimax
from multimax import cli
from multimax.experiments import checkpoints, methods, run
from multimax.experiments.checkpoints import DamagedCheckpoint
from multimax.experiments.run import Busy, check_folder, result_of, train
from multimax.experiments.settings import Settings, as_dict, method, override, preset, preset_names
from multimax.experiments.tasks.loading import task_of
from multimax.experiments.trainer import Diverged

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what the Trainer uses

STEPS = {
    "max_steps": 2,
    "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 16,
    "dataloader_num_workers": 0,
}
STEPS |= {
    "gradient_accumulation_steps": 1,
    "logging_steps": 1,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "save_steps": 2,
}
FEW = {"trainer": STEPS, "measured": 8, "tensorboard": False, "watch": 1}


def small(name: str, folder: Path) -> Settings:
    """A preset with a tiny model, on data made for it."""
    settings = override(preset(name), FEW)
    if settings.task == "vision":
        settings = override(settings, {"model": experiment_data.SMALL_VIT})
        kinds = {"fashion": experiment_data.idx, "cifar10": experiment_data.cifar}
        if name.endswith("digits"):
            return settings
        data = kinds.get(name.partition("-")[2], experiment_data.tree)(folder / "data")
        if "deit" in name:
            settings = override(settings, {"image_size": 32})
    elif settings.task == "language":
        rotary = settings.positions == "rotary"
        model = experiment_data.SMALL_VIT if rotary else experiment_data.SMALL_GPT
        settings = override(settings, {"model": model, "length": 16, "vocabulary": 300})
        settings = override(settings, {"longer": 64} if rotary else {})
        if name == "cpu-text":
            return settings
        data = experiment_data.text(folder / "data")
    else:
        settings = override(
            settings, {"model": experiment_data.SMALL_MARIAN, "length": 24, "vocabulary": 120, "beams": 2}
        )
        data = experiment_data.parallel(folder / "data", test=settings.test_set or "test")
    return override(settings, {"data": str(data)})


BOTH = {"attention": "multimax", "output": "multimax"}


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_trains(name: str, tmp_path: Path) -> None:
    settings = override(small(name, tmp_path), BOTH)
    result = train(settings, tmp_path / "run", progress=False)
    assert result["status"] == "finished"
    assert result["steps"] == 2
    main = {"vision": "accuracy", "language": "perplexity", "translation": "bleu"}[settings.task]
    assert result["metrics"][main] >= 0
    assert {"multi_modality", "sparsity", "loss"} <= set(result["metrics"])
    assert ("patch_similarity" in result["metrics"]) == (settings.task == "vision")
    assert all(set(symbols) == {"t_b", "t_d", "b", "d"} for symbols in result["parameters"].values())
    files = {file.name for file in (tmp_path / "run").iterdir()}
    assert {"config.json", "environment.json", "metrics.jsonl", "result.json", "model"} <= files
    assert "checkpoints" not in files
    assert not list((tmp_path / "run").rglob("*.bin"))  # no pickle stays
    entries = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert any("loss" in entry for entry in entries)
    assert any(name.startswith("measures/") for entry in entries for name in entry)
    assert any(name.startswith("multimax/") for entry in entries for name in entry)
    # found finished, and given back, without any training
    assert train(settings, tmp_path / "run", progress=False) == result


def test_longer_texts(tmp_path: Path) -> None:
    settings = override(
        small("recipe-wikitext2", tmp_path), {"patience": 0, "trainer": {"max_steps": 8, "eval_steps": 8}}
    )
    result = train(settings, tmp_path / "run", progress=False)
    metrics = result["metrics"]
    for name in ("perplexity", "token_perplexity", "loss", "sparsity", "multi_modality", "entropy"):
        assert {name, f"{name}@32", f"{name}@64"} <= set(metrics)
        assert f"{name}@128" not in metrics
    # more keys to attend to
    assert metrics["entropy"] < metrics["entropy@32"] < metrics["entropy@64"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run/model").eval()
    task = task_of(settings)
    text = (tmp_path / "data/test.txt").read_text()
    words = len(text.split()) + text.count("\n")
    for length in (16, 64):  # from a fresh model, whose rotary embeddings have seen no other length
        again = model if length == 16 else AutoModelForCausalLM.from_pretrained(tmp_path / "run/model").eval()
        dataset = task.test if length == 16 else task.others["64"]
        total = 0.0
        with torch.no_grad():
            for i in range(len(dataset)):
                labels = dataset[i]["labels"][1:]
                logs = again(input_ids=dataset[i]["input_ids"][None]).logits[0, :-1].log_softmax(-1)
                total -= logs.gather(1, labels.clamp(min=0)[:, None])[:, 0][labels >= 0].double().sum().item()
        name = "perplexity" if length == 16 else "perplexity@64"
        assert metrics[name] == pytest.approx(torch.tensor(total / words).exp().item(), rel=1e-4)
    with pytest.raises(ValueError, match="expected rotary positions for longer, got learned ones"):
        task_of(override(small("cpu-text", tmp_path), {"longer": 64}))


STOPPING = {"max_steps": 80, "eval_steps": 2, "save_steps": 2, "learning_rate": 0.1}
STOPPING |= {"warmup_steps": 0, "lr_scheduler_type": "constant"}


def test_patience(tmp_path: Path) -> None:
    changes = {"patience": 2, "positions": "rotary", "model": experiment_data.SMALL_VIT, "trainer": STOPPING}
    data = experiment_data.text(tmp_path / "data", n=60)
    settings = override(override(preset("recipe-wikitext2"), FEW), {**changes, "length": 16, "vocabulary": 300})
    settings = override(settings, {"data": str(data), "longer": 0})
    result = train(settings, tmp_path / "run", progress=False)
    entries = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    losses = {entry["step"]: entry["eval_loss"] for entry in entries if "eval_loss" in entry}
    best = min(losses, key=losses.__getitem__)
    assert result["best_step"] == best
    assert result["steps"] == best + 2 * 2 < 80  # two evaluations later
    # the best model is the one that is kept, and evaluated
    task = task_of(settings)
    kept = AutoModelForCausalLM.from_pretrained(tmp_path / "run/model").eval()
    batch = task.collate([task.evaluation[i] for i in range(len(task.evaluation))])
    with torch.no_grad():
        assert kept(**batch).loss.item() == pytest.approx(losses[best], rel=1e-3)
    # the last step counts, also where no evaluation was due
    short = override(settings, {"trainer": {"max_steps": 3, "learning_rate": 0.01}, "patience": 5})
    assert train(short, tmp_path / "short", progress=False)["best_step"] == 3
    # a run that is killed where it stops, before its result is there, is over when it goes on
    with pytest.raises(Kill.Killed):
        train(settings, tmp_path / "again", progress=False, callbacks=[KillAtEnd()])
    assert train(settings, tmp_path / "again", progress=False)["metrics"] == result["metrics"]
    with pytest.raises(ValueError, match="expected no patience: evaluation is on the test set, got it set"):
        train(override(small("cpu-digits", tmp_path), {"patience": 2}), tmp_path / "images", progress=False)


def test_attention_in_one_place_alone(tmp_path: Path) -> None:
    settings = override(small("recipe-multi30k", tmp_path), {"attention": "multimax", "init": "deit_small"})
    places = {"encoder": "encoder.layers.0.self_attn", "decoder": "decoder.layers.0.self_attn"}
    for where, name in {**places, "cross": "decoder.layers.0.encoder_attn"}.items():
        chosen = override(settings, {"attention_in": where})
        assert method(chosen) == f"MultiMax attention, in {where}"
        _, _, model = run.prepared(chosen, tmp_path / "run")
        assert [key.removeprefix("model.") for key in run.learned(model)] == [name]
    with pytest.raises(ValueError, match="expected attention_in for translation, got it for vision"):
        override(preset("cpu-digits"), {"attention_in": "cross"})


def test_the_test_part_is_never_read(tmp_path: Path) -> None:
    for name, parts in (
        ("recipe-wikitext2", ["test.txt"]),
        ("recipe-fashion", ["t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"]),
        ("recipe-cifar10", ["test_batch.bin"]),
        ("recipe-multi30k", ["test_2016_flickr.de", "test_2016_flickr.en"]),
    ):
        (tmp_path / name).mkdir()
        settings = override(small(name, tmp_path / name), {"test": False})
        for part in parts:
            (tmp_path / name / "data" / part).unlink()
        result = train(settings, tmp_path / name / "run", progress=False)
        assert result["data"].endswith(" (validation part)")
        entries = [json.loads(line) for line in (tmp_path / name / "run/metrics.jsonl").read_text().splitlines()]
        losses = [entry["eval_loss"] for entry in entries if "eval_loss" in entry]
        assert result["metrics"]["loss"] == pytest.approx(losses[-1], rel=1e-4)  # of the same examples
        assert not {"bleu", "chrf"} & set(result["metrics"])
        with pytest.raises((FileNotFoundError, ValueError), match=re.escape(parts[0].partition(".")[0])):
            task_of(override(settings, {"test": True}))


def test_the_saved_model_is_the_one_that_was_evaluated(tmp_path: Path) -> None:
    settings = override(small("cpu-digits", tmp_path), {**BOTH, "trainer": {"max_steps": 30, "eval_steps": 30}})
    result = train(settings, tmp_path / "run", progress=False)
    model = multimax.from_pretrained(AutoModelForImageClassification, tmp_path / "run/model").eval()
    task = task_of(settings)
    batch = task.collate([task.test[i] for i in range(len(task.test))])
    with torch.no_grad():
        found = model(pixel_values=batch["pixel_values"]).logits.argmax(-1)
    assert (found == batch["labels"]).double().mean().item() == pytest.approx(result["metrics"]["accuracy"])


def test_perplexity_is_that_of_all_words(tmp_path: Path) -> None:
    settings = override(small("cpu-wikitext2", tmp_path), {"trainer": {"max_steps": 8, "eval_steps": 8}})
    result = train(settings, tmp_path / "run", progress=False)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run/model").eval()
    task = task_of(settings)
    ids, text = task.test.ids, (tmp_path / "data/test.txt").read_text()
    assert task.tokenizer.decode(ids) == text
    total, done, length = 0.0, 1, settings.length
    with torch.no_grad():
        while done < len(ids):  # windows that overlap by one token, the last one moved back to the end
            start = min(done - 1, len(ids) - length)
            window = ids[start : start + length]
            logs = model(input_ids=window[None]).logits[0, :-1].log_softmax(-1)
            new = torch.arange(done - start - 1, length - 1)
            total -= logs[new, window[1:][new]].double().sum().item()
            done = start + length
    words = len(text.split()) + text.count("\n")
    assert result["metrics"]["perplexity"] == pytest.approx(torch.tensor(total / words).exp().item(), rel=1e-4)
    tokens = torch.tensor(total / (len(ids) - 1)).exp().item()
    assert result["metrics"]["token_perplexity"] == pytest.approx(tokens, rel=1e-4)


class Kill(TrainerCallback):
    """Ends training after so many steps, as a signal would, as far as the files are concerned."""

    class Killed(BaseException):
        pass

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args, state, control, **_) -> None:
        if state.global_step == self.step:
            raise self.Killed


class KillAtEnd(TrainerCallback):
    """As if the process had been killed between the end of training and the result."""

    def on_train_end(self, args, state, control, **_) -> None:
        raise Kill.Killed


INTERRUPTED = {
    "cpu-cifar10": {**BOTH, "stochastic_depth": 0.2},
    "cpu-wikitext2": {**BOTH, "model": {"resid_pdrop": 0.1, "attn_pdrop": 0.1}},
    "cpu-multi30k": {"attention": "multimax", "model": {"dropout": 0.1}},
}


@pytest.mark.parametrize("name", INTERRUPTED)
def test_interrupted_runs_end_bitwise_where_others_do(name: str, tmp_path: Path) -> None:
    settings = override(small(name, tmp_path), INTERRUPTED[name])
    trainer = {"max_steps": 25, "save_steps": 3, "logging_steps": 3, "eval_steps": 5, "gradient_accumulation_steps": 2}
    settings = override(settings, {"trainer": trainer})
    whole = train(settings, tmp_path / "whole", progress=False)
    for step in (2, 4, 11, 15, 16, 25):  # before a checkpoint, after it, in later epochs, at the end
        with pytest.raises(Kill.Killed):
            train(settings, tmp_path / "pieces", progress=False, callbacks=[Kill(step)])
        assert result_of(tmp_path / "pieces") is None
    pieces = train(settings, tmp_path / "pieces", progress=False)
    timing = ("minutes", "ms_per_step")
    assert {k: v for k, v in pieces.items() if k not in timing} == {k: v for k, v in whole.items() if k not in timing}
    one, other = (load_file(tmp_path / folder / "model/model.safetensors") for folder in ("whole", "pieces"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)
    logs = []
    for folder in ("whole", "pieces"):
        lines = (tmp_path / folder / "metrics.jsonl").read_text().splitlines()
        entries = [json.loads(line) for line in lines]
        timed = ("second", "runtime", "flos")
        logs.append([{k: v for k, v in e.items() if not any(t in k for t in timed)} for e in entries])
    assert logs[0] == logs[1]


def test_an_evaluation_that_is_not_repeated_changes_nothing(tmp_path: Path) -> None:
    """At the end of an epoch the checkpoint comes first, and a run that goes on from it does not evaluate again."""
    trainer = {"max_steps": 25, "save_steps": 10, "eval_strategy": "epoch", "logging_steps": 10}
    settings = override(small("cpu-cifar10", tmp_path), {"stochastic_depth": 0.5, "trainer": trainer})
    whole = train(settings, tmp_path / "whole", progress=False)
    with pytest.raises(Kill.Killed):
        train(settings, tmp_path / "pieces", progress=False, callbacks=[Kill(13)])
    assert checkpoints.last(tmp_path / "pieces/checkpoints").name == "checkpoint-10"  # ten steps are an epoch
    assert train(settings, tmp_path / "pieces", progress=False)["metrics"] == whole["metrics"]


@pytest.mark.parametrize(("save", "log"), [(2, 5), (3, 4), (5, 3)])
def test_what_is_logged_does_not_depend_on_interruptions(tmp_path: Path, save: int, log: int) -> None:
    """Checkpoints between two logs: losses are means since the last log, and times are added up."""
    trainer = {"max_steps": 13, "save_steps": save, "logging_steps": log, "eval_strategy": "no"}
    settings = override(small("cpu-digits", tmp_path), {"trainer": trainer, "watch": 0, "measured": 0})
    train(settings, tmp_path / "whole", progress=False)
    for step in (save + 1, 2 * save + 1, 12):
        with pytest.raises(Kill.Killed):
            train(settings, tmp_path / "pieces", progress=False, callbacks=[Kill(step)])
    train(settings, tmp_path / "pieces", progress=False)
    losses = []
    for folder in ("whole", "pieces"):
        entries = [json.loads(line) for line in (tmp_path / folder / "metrics.jsonl").read_text().splitlines()]
        losses.append([(e["step"], e.get("loss"), e.get("train_loss")) for e in entries])
    assert losses[0] == losses[1]
    assert len(losses[0]) == 13 // log + 2  # with the mean of all, and the last evaluation


def test_times_go_on_from_the_checkpoint(tmp_path: Path) -> None:
    trainer = {"max_steps": 4, "save_steps": 2, "logging_steps": 100, "eval_strategy": "no"}
    settings = override(small("cpu-digits", tmp_path), {"trainer": trainer, "watch": 0, "measured": 0})
    with pytest.raises(Kill.Killed):
        train(settings, tmp_path / "run", progress=False, callbacks=[Kill(3)])
    checkpoint = tmp_path / "run/checkpoints/checkpoint-2"
    sums = json.loads((checkpoint / "sums.json").read_text())
    assert 0 < sums["step_seconds"] <= sums["seconds"]
    (checkpoint / "sums.json").write_text(json.dumps({**sums, "seconds": 6000.0, "step_seconds": 4000.0}))
    checkpoints.seal(checkpoint)
    result = train(settings, tmp_path / "run", progress=False)
    assert 100 <= result["minutes"] < 110
    assert 1_000_000 <= result["ms_per_step"] < 1_100_000  # over four steps


class Final(BaseException):
    pass


@pytest.mark.parametrize("moment", ["evaluation", "model", "result"])
def test_runs_that_end_at_their_end(moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed after the last step: nothing is trained again."""
    settings = override(small("cpu-cifar10", tmp_path), {"trainer": {"max_steps": 5, "save_steps": 2, "eval_steps": 5}})
    whole = train(settings, tmp_path / "whole", progress=False)

    def killed(*_: object, **__: object) -> None:
        raise Final

    with monkeypatch.context() as patch:
        name = {"evaluation": "_evaluate", "model": "_save", "result": "write_json"}[moment]
        write = run.write_json
        fails = killed if moment != "result" else lambda p, v: killed() if p.name == "result.json" else write(p, v)
        patch.setattr(run, name, fails)
        with pytest.raises(Final):
            train(settings, tmp_path / "pieces", progress=False)
    pieces = train(settings, tmp_path / "pieces", progress=False)
    assert (pieces["steps"], pieces["metrics"]) == (whole["steps"], whole["metrics"])
    one, other = (load_file(tmp_path / folder / "model/model.safetensors") for folder in ("whole", "pieces"))
    assert all(torch.equal(one[key], other[key]) for key in one)


def test_what_a_killed_process_left_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = small("cpu-digits", tmp_path)
    folder = tmp_path / "run"

    def killed(path: Path, **_: object) -> None:
        if path.name == "checkpoints":
            raise Final

    with monkeypatch.context() as patch:  # behind the result
        patch.setattr(run.shutil, "rmtree", killed)
        with pytest.raises(Final):
            train(settings, folder, progress=False)
    (folder / "result.json.99.partial").write_text("{")
    assert (folder / "checkpoints").is_dir()
    assert train(settings, folder, progress=False)["status"] == "finished"
    assert not (folder / "checkpoints").exists()
    assert not list(folder.glob("*.partial"))


def test_what_a_killed_process_left_is_removed_when_the_run_goes_on(begun: tuple[Settings, Path]) -> None:
    settings, folder = begun
    (folder.parent / "config.json.99.partial").write_text("{")
    (folder.parent / "model.partial").mkdir()
    (folder.parent / "model.partial/model.safetensors").write_text("x")
    train(settings, folder.parent, progress=False)
    assert not list(folder.parent.glob("*.partial"))


def test_a_full_disk_leaves_nothing_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the model at the end, and of files of JSON."""
    settings, folder = small("cpu-digits", tmp_path), tmp_path / "run"
    whole = train(settings, tmp_path / "whole", progress=False)

    def full(self: object, output_dir: str, **_: object) -> None:
        Path(output_dir).mkdir()
        (Path(output_dir) / "model.safetensors").write_text("x")
        raise SafetensorError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(run.RunTrainer, "save_model", lambda self, d, **o: full(self, d) if "partial" in d else None)
        patch.setattr(run.RunTrainer, "_save_checkpoint", lambda *_: None)
        with pytest.raises(OSError, match=r"multimax: expected to write .*run/model', got: No space .* make room"):
            train(settings, folder, progress=False)
    assert not list(folder.glob("*.partial"))
    assert train(settings, folder, progress=False)["metrics"] == whole["metrics"]
    monkeypatch.setattr(checkpoints.os, "fsync", lambda _: (_ for _ in ()).throw(OSError("No space left on device")))
    with pytest.raises(OSError, match="No space"):
        checkpoints.write_json(tmp_path / "x.json", {})
    assert not list(tmp_path.glob("x.json*"))


def test_old_checkpoints_go_when_the_new_one_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = override(small("cpu-digits", tmp_path), {"trainer": {"max_steps": 9, "save_steps": 1, "eval_steps": 9}})
    seen = []
    seal = checkpoints.seal

    def look(folder: Path) -> None:
        sealed = [seal.parent.name for seal in folder.parent.glob(f"*/{checkpoints.SEAL}")]
        seen.append(len(sealed))
        seal(folder)

    monkeypatch.setattr(checkpoints, "seal", look)
    train(settings, tmp_path / "run", progress=False)
    assert seen == [0, 1, 2, 2, 2, 2, 2, 2, 2]  # never less than two to go back to


def test_accumulated_steps_are_means(tmp_path: Path) -> None:
    """Two batches of four accumulated: the gradient is the mean of theirs, and the loss that is logged too."""
    for name in ("cpu-digits", "cpu-multi30k"):
        (tmp_path / name).mkdir()
        settings = override(small(name, tmp_path / name), {"trainer": {"max_steps": 1, "max_grad_norm": 0}})
        settings = override(
            settings,
            {"trainer": {"label_smoothing_factor": 0.0}, "model": {"dropout": 0.0}}
            if settings.task == "translation"
            else {},
        )
        norms = {}
        for accumulated in (1, 2):
            steps = {"gradient_accumulation_steps": accumulated, "per_device_train_batch_size": 8 // accumulated}
            train(override(settings, {"trainer": steps}), tmp_path / name / str(accumulated), progress=False)
            lines = (tmp_path / name / str(accumulated) / "metrics.jsonl").read_text().splitlines()
            norms[accumulated] = next(json.loads(line)["loss"] for line in lines if '"loss"' in line)
        assert 0.7 < norms[2] / norms[1] < 1.4


def command(*arguments: object, **environment: str) -> dict:
    words = [sys.executable, "-m", "multimax", *map(str, arguments)]
    return {"args": words, "env": {**os.environ, "OMP_NUM_THREADS": "1", **environment}}


def test_a_killed_process_goes_on(tmp_path: Path) -> None:
    words = ["train", "vision", "--attention", "multimax", "--size", "digits", "--quiet", "--no-tensorboard"]
    words += ["--set", "trainer.save_steps=5", "trainer.max_steps=40", "model.hidden_size=32", "trainer.eval_steps=20"]
    with subprocess.Popen(**command(*words, "--out", tmp_path / "killed"), stderr=subprocess.DEVNULL) as process:
        folder = tmp_path / "killed/checkpoints"
        deadline = time.monotonic() + 120
        while checkpoints.last(folder) is None:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
    assert result_of(tmp_path / "killed") is None
    torch.set_num_threads(1)  # as the process had
    for name in ("killed", "whole"):
        assert cli.main([*words, "--out", str(tmp_path / name)]) == 0
    killed, whole = (result_of(tmp_path / name) for name in ("killed", "whole"))
    assert killed["metrics"] == whole["metrics"]
    assert killed["parameters"] == whole["parameters"]


@pytest.fixture
def begun(tmp_path: Path) -> tuple[Settings, Path]:
    """A run that was interrupted after two checkpoints."""
    settings = override(small("cpu-digits", tmp_path), {"trainer": {"max_steps": 9, "save_steps": 2, "eval_steps": 9}})
    with pytest.raises(Kill.Killed):
        train(settings, tmp_path / "run", progress=False, callbacks=[Kill(5)])
    folder = tmp_path / "run/checkpoints"
    assert sorted(checkpoint.name for checkpoint in folder.iterdir()) == ["checkpoint-2", "checkpoint-4"]
    return settings, folder


def test_a_checkpoint_that_was_being_written_is_left_out(begun: tuple[Settings, Path]) -> None:
    settings, folder = begun
    (folder / "checkpoint-4" / checkpoints.SEAL).unlink()
    weights = folder / "checkpoint-4/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    result = train(settings, folder.parent, progress=False)
    assert result["status"] == "finished"


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "rng_state.pth", "trainer_state.json"])
@pytest.mark.parametrize("damage", ["byte", "cut", "gone"])
def test_a_damaged_checkpoint_is_named(begun: tuple[Settings, Path], name: str, damage: str) -> None:
    settings, folder = begun
    file = folder / "checkpoint-4" / name
    content = bytearray(file.read_bytes())
    if damage == "byte":
        content[len(content) // 2] ^= 1
    file.write_bytes(content[:-1] if damage == "cut" else content)
    if damage == "gone":
        file.unlink()
    with pytest.raises(DamagedCheckpoint, match=rf"(?s)multimax: expected .*{name}.* delete the folder"):
        train(settings, folder.parent, progress=False)
    checkpoints.verify(folder / "checkpoint-2")  # as it was
    shutil.rmtree(folder / "checkpoint-4")  # the remedy
    assert train(settings, folder.parent, progress=False)["status"] == "finished"


@pytest.mark.parametrize("content", ["", "[1]", '{"a": 1}'])
def test_a_damaged_seal_is_named(begun: tuple[Settings, Path], content: str) -> None:
    settings, folder = begun
    (folder / "checkpoint-4" / checkpoints.SEAL).write_text(content)
    with pytest.raises(DamagedCheckpoint, match=r"complete\.json"):
        train(settings, folder.parent, progress=False)


class NoRoom(TrainerCallback):
    """From some step on no file may be larger than this."""

    def __init__(self, step: int, size: int) -> None:
        self.step, self.size = step, size

    def on_step_end(self, args, state, control, **_) -> None:
        if state.global_step == self.step:
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.size, resource.RLIM_INFINITY))


@pytest.mark.parametrize("size", [0, 10_000, 60_000])  # nothing, some of the weights, some of the optimizer's state
def test_a_full_disk_leaves_earlier_checkpoints(tmp_path: Path, size: int) -> None:
    settings = override(small("cpu-digits", tmp_path), {"trainer": {"max_steps": 6, "save_steps": 2, "eval_steps": 6}})
    settings = override(settings, {"watch": 0, "trainer": {"logging_steps": 100}})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with pytest.raises(OSError, match=r"multimax: expected to write .*checkpoint-4.* make room"):
            train(settings, tmp_path / "run", progress=False, callbacks=[NoRoom(3, size)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert checkpoints.last(tmp_path / "run/checkpoints").name == "checkpoint-2"
    whole = train(settings, tmp_path / "whole", progress=False)
    assert train(settings, tmp_path / "run", progress=False)["metrics"] == whole["metrics"]


class Spoil(TrainerCallback):
    """Makes a parameter NaN."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args, state, control, model=None, **_) -> None:
        if state.global_step == self.step:
            next(model.parameters()).data.fill_(torch.nan)


@pytest.mark.parametrize(("step", "words"), [(3, "got nan in step 4"), (4, "got NaN or infinity in .* after step 4")])
def test_a_loss_that_is_no_number_stops_the_run(tmp_path: Path, step: int, words: str) -> None:
    settings = override(small("cpu-digits", tmp_path), {"trainer": {"max_steps": 9, "save_steps": 2, "eval_steps": 9}})
    with pytest.raises(Diverged, match=rf"multimax: expected .*{words}"):
        train(settings, tmp_path / "run", progress=False, callbacks=[Spoil(step)])
    result = result_of(tmp_path / "run")
    assert result["status"] == "diverged"
    assert result["reason"].startswith("multimax: expected")
    assert checkpoints.last(tmp_path / "run/checkpoints").name == "checkpoint-2"


# The command, and then a look at Gloo's threads: with one of them still there, Python's end aborts now and then.
COMMAND = """
import sys
from pathlib import Path
from multimax.cli import main
code = main()
names = [file.read_text() for file in Path("/proc/self/task").glob("*/comm")]
sys.exit(f"threads that are left: {names}" if any("gloo" in name for name in names) else code)
"""


def test_two_processes_train_together(tmp_path: Path) -> None:
    script = tmp_path / "command.py"
    script.write_text(COMMAND)
    data = experiment_data.cifar(tmp_path / "data")
    methods = {
        "MultiMax": BOTH,
        "diverse": {**BOTH, "patch_diversification": 1.0},
        "too hot": {"trainer": {"learning_rate": 1e30}},
    }
    table = {"about": "", "baseline": "MultiMax", "seeds": 1, "methods": methods}
    (tmp_path / "own.json").write_text(json.dumps(table))
    words = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
    words += ["--rdzv-endpoint", "localhost:0", str(script), "sweep", str(tmp_path / "own.json")]
    words += ["--preset", "cpu-cifar10", "--data", str(data), "--steps", "4", "--quiet", "--batch-size", "4"]
    words += ["--measured", "8", "--out", str(tmp_path / "sweep"), "--set", "model.hidden_size=24"]
    words += ["model.num_hidden_layers=2", "trainer.save_steps=2", "trainer.warmup_steps=0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("accuracy") == 2  # one process speaks
    assert "too hot, seed 0: diverged" in done.stdout
    for name in ("multimax", "diverse"):
        folder = tmp_path / "sweep" / name / "seed-0"
        result = result_of(folder)
        assert (result["status"], result["steps"]) == ("finished", 4)
        assert json.loads((folder / "environment.json").read_text())["processes"] == 2
        assert json.loads((folder / "begun.json").read_text())["devices"] == 2
        multimax.from_pretrained(AutoModelForImageClassification, folder / "model")


def test_other_settings_in_the_same_folder(tmp_path: Path) -> None:
    settings = small("cpu-digits", tmp_path)
    train(settings, tmp_path / "run", progress=False)
    with pytest.raises(ValueError, match=r"got others \(order: 2 there, 1 now\); choose another folder"):
        train(override(settings, {"order": 1}), tmp_path / "run", progress=False)
    with pytest.raises(ValueError, match=r"got others \(trainer.learning_rate: 0.001 there, 1 now\)"):
        train(override(settings, {"trainer": {"learning_rate": 1}}), tmp_path / "run", progress=False)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.tex").write_text("x")
    with pytest.raises(ValueError, match="expected a new folder"):
        train(settings, tmp_path / "mine", progress=False)
    assert [file.name for file in (tmp_path / "mine").iterdir()] == ["thesis.tex"]


def test_a_folder_that_is_in_use(tmp_path: Path) -> None:
    settings = small("cpu-digits", tmp_path)
    with run._alone(tmp_path / "run"), pytest.raises(Busy, match="another process works in"):
        train(settings, tmp_path / "run", progress=False)
    check_folder(settings, tmp_path / "run")


def test_bad_data_leaves_nothing_behind(tmp_path: Path) -> None:
    settings = override(small("cpu-fashion", tmp_path), {"data": str(tmp_path / "nowhere")})
    with pytest.raises((ValueError, OSError), match="nowhere"):
        train(settings, tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()


def test_the_optimizer_has_groups_for_the_functions(tmp_path: Path) -> None:
    settings = override(
        small("cpu-digits", tmp_path), {**BOTH, "multimax_lr_factor": 3.0, "trainer": {"weight_decay": 0.1}}
    )
    seen = {}

    class Look(TrainerCallback):
        def on_step_begin(self, args, state, control, model=None, optimizer=None, **_) -> None:
            names = {p: name for name, p in model.named_parameters()}
            for group in optimizer.param_groups:
                for p in group["params"]:
                    seen[names[p]] = (group["initial_lr"], group["weight_decay"])

    train(settings, tmp_path / "run", progress=False, callbacks=[Look()])
    reweighting = {name for name in seen if name.endswith(("coefs", "knots"))}
    assert len(reweighting) == 6
    assert {seen[name] for name in reweighting} == {(3 * 0.001, 0.0)}
    others = {value for name, value in seen.items() if name not in reweighting}
    assert others == {(0.001, 0.1), (0.001, 0.0)}
    assert all(value[1] == 0 for name, value in seen.items() if name.endswith("bias") or "layernorm" in name)


def test_checkpoints_with_older_groups_go_on(tmp_path: Path) -> None:
    """Groups that know nothing of Muon, as they were once saved."""
    settings = override(small("cpu-digits", tmp_path), {**BOTH, "trainer": {"max_steps": 5, "weight_decay": 0.1}})
    whole = train(settings, tmp_path / "whole", progress=False)
    with pytest.raises(Kill.Killed):
        train(settings, tmp_path / "pieces", progress=False, callbacks=[Kill(3)])
    checkpoint = checkpoints.last(tmp_path / "pieces/checkpoints")
    assert checkpoint is not None
    state = torch.load(checkpoint / "optimizer.pt", weights_only=True)
    *others, reweighting = state["param_groups"]
    assert [group["weight_decay"] for group in state["param_groups"]] == [0.1, 0.0, 0.0]
    assert reweighting.pop("use_muon") is False
    assert not any("use_muon" in group for group in others)
    torch.save(state, checkpoint / "optimizer.pt")
    checkpoints.seal(checkpoint)
    pieces = train(settings, tmp_path / "pieces", progress=False)
    assert (pieces["metrics"], pieces["parameters"]) == (whole["metrics"], whole["parameters"])


def test_initial_weights_are_the_same_for_all_methods(tmp_path: Path) -> None:
    plain = small("cpu-digits", tmp_path)
    weights = []
    for changes in ({}, BOTH, {"attention": "entmax15"}):
        task = task_of(override(plain, changes))
        torch.manual_seed(3)
        model = task.model()
        methods.convert(model, override(plain, changes))
        weights.append({n: p.clone() for n, p in model.named_parameters() if not n.endswith(("coefs", "knots"))})
    for other in weights[1:]:
        assert weights[0].keys() == other.keys()
        assert all(torch.equal(weights[0][name], other[name]) for name in other)


METHODS = {
    "a temperature": {"temperature": 0.5},
    "a trained one": {"temperature": "trained", "output_temperature": "trained"},
    "per head": {"attention": "multimax", "per_head": True, "order": 1, "terms": "lower"},
    "two functions": {"attention": "entmax15", "output": "multimax"},
    "top-k": {"attention": "topk", "attention_options": {"k": 3}},
    "AttnScale": {"attention": "attnscale"},
    "Patch Diversification": {"patch_diversification": 1.0},
    "Patch Diversification, class token": {"patch_diversification": 1.0, "pooling": "class"},
    "class token": {"pooling": "class", **BOTH},
    "sparsemax output": {"output": "sparsemax"},
    "Ev-SoftMax both": {"attention": "evsoftmax", "output": "evsoftmax"},
}


@pytest.mark.parametrize("name", METHODS)
def test_methods_on_images(name: str, tmp_path: Path) -> None:
    settings = override(small("cpu-digits", tmp_path), METHODS[name])
    result = train(settings, tmp_path / "run", progress=False)
    assert result["status"] == "finished"
    assert len(result["layers"]) == 2
    state = load_file(tmp_path / "run/model/model.safetensors")
    assert not any("patch_classifier" in key for key in state)


@pytest.mark.parametrize("output", ["entmax15", "sparsemax", "evsoftmax"])
@pytest.mark.parametrize("name", ["cpu-wikitext2", "cpu-multi30k"])
def test_sparse_outputs_on_text(name: str, output: str, tmp_path: Path) -> None:
    result = train(override(small(name, tmp_path), {"output": output}), tmp_path / "run", progress=False)
    assert result["status"] == "finished"
    value = result["metrics"]["token_perplexity"]
    assert value == "inf" or value > 1  # a sparse function may give a token no weight at all


def test_retrofit(tmp_path: Path) -> None:
    base = small("cpu-digits", tmp_path)
    longer = {
        "max_steps": 200,
        "eval_steps": 200,
        "save_steps": 200,
        "per_device_train_batch_size": 16,
        "learning_rate": 0.01,
    }
    before = train(override(base, {"trainer": longer}), tmp_path / "softmax", progress=False)
    start = {"start": str(tmp_path / "softmax/model"), "only_reweighting": True, "init": "identity"}
    same = train(override(base, start), tmp_path / "same", progress=False)
    assert same["metrics"]["accuracy"] == before["metrics"]["accuracy"]
    assert same["steps"] == 0
    after = train(override(base, {**start, **BOTH, "trainer": {"warmup_steps": 0}}), tmp_path / "after", progress=False)
    weights = load_file(tmp_path / "softmax/model/model.safetensors")
    trained = load_file(tmp_path / "after/model/model.safetensors")
    added = trained.keys() - weights.keys()
    assert len(added) == 6
    assert all(torch.equal(weights[key], trained[key]) for key in weights)
    assert any(bool(trained[key].any()) for key in added if key.endswith("coefs"))
    assert after["steps"] == 2
    with pytest.raises(ValueError, match="expected start to be a model with softmax, got a converted one"):
        train(override(base, {**start, **BOTH, "start": str(tmp_path / "after/model")}), tmp_path / "x", progress=False)
    with pytest.raises(ValueError, match="expected start to be the folder of a saved model"):
        train(override(base, {**start, "start": str(tmp_path / "none")}), tmp_path / "x", progress=False)


def test_bf16(tmp_path: Path) -> None:
    settings = override(small("cpu-wikitext2", tmp_path), {**BOTH, "trainer": {"bf16": True}})
    assert train(settings, tmp_path / "run", progress=False)["status"] == "finished"


def test_tensorboard(tmp_path: Path) -> None:
    settings = override(small("cpu-digits", tmp_path), {**BOTH, "tensorboard": True})
    train(settings, tmp_path / "run", progress=False)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "run/tensorboard")).Reload()
    tags = events.Tags()["scalars"]
    assert {"train/loss", "test/accuracy"} <= set(tags)
    assert any("t_b_1" in tag for tag in tags)
    assert any("multi_modality" in tag for tag in tags)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"task": "vison"}, "expected task to be one of 'vision'"),
        ({"attention": "maxout"}, "expected attention to be one of 'softmax'"),
        ({"output": "topk"}, "expected output to be one of"),
        ({"temperature": "warm"}, "expected temperature to be a number or 'trained'"),
        ({"task": "translation", "languages": "german"}, "expected languages such as 'de-en'"),
        ({"only_reweighting": True}, "expected start, a trained model"),
        ({"length": 0}, "expected length of at least 2"),
        ({"seed": -1}, "expected seed of at least 0"),
        ({"seed": 2**32}, "expected a seed below"),
        ({"order": 0}, "expected order of at least 1"),
        ({"multimax_lr_factor": float("nan")}, "expected multimax_lr_factor of at least 0"),
        ({"temperature": 0.0}, "temperature"),
        ({"temperature": 0.5, "attention": "multimax"}, "expected temperature with softmax, got it with multimax"),
        ({"attention_options": {"k": 3}}, "expected attention_options of another function"),
        ({"patch_diversification": 1.0, "task": "language"}, "expected patch_diversification for vision"),
        ({"beams": 3}, "expected beams for translation, got it for vision"),
        ({"length": 64}, "expected length for language or translation, got it for vision"),
        ({"pooling": "class", "task": "translation"}, "expected pooling for vision, got it for translation"),
        ({"trainer": {"max_steps": 0}}, "expected max_steps above 0"),
        ({"trainer": {"learning_rate": float("nan")}}, "expected learning_rate above 0"),
        ({"trainer": {"per_device_train_batch_size": 0}}, "expected per_device_train_batch_size above 0"),
    ],
)
def test_settings_that_cannot_be(values: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Settings(**values)


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


@pytest.mark.parametrize("values", [{"order": "2"}, {"per_head": 1}, {"seed": True}, {"trainer": []}, {"order": 2.0}])
def test_settings_of_another_type(values: dict) -> None:
    with pytest.raises(TypeError, match=f"expected the setting {next(iter(values))} to be of type"):
        Settings(**values)


def test_presets_are_found_by_name_and_as_files(tmp_path: Path) -> None:
    digits = preset("cpu-digits")
    (tmp_path / "mine.json").write_text(json.dumps(as_dict(digits)))
    assert preset(str(tmp_path / "mine.json")) == digits
    with pytest.raises(ValueError, match="expected a preset out of cpu-cifar10"):
        preset("nope")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(ValueError, match=r"bad\.json"):
        preset(str(tmp_path / "bad.json"))
    (tmp_path / "other.json").write_text('{"learning_rate": 1}')
    with pytest.raises(ValueError, match=r"expected settings out of .*got learning_rate"):
        preset(str(tmp_path / "other.json"))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"trainer": {"learning": 1}}, "expected options of transformers' TrainingArguments, got learning"),
        ({"trainer": {"seed": 1}}, "expected options that a run does not set itself, got seed"),
        ({"model": {"depth": 1}}, "expected options of IJepaConfig as model, got depth"),
        ({"model": {"image_size": 8}}, "expected image_size to come from the data"),
        ({"augmentation": {"zoom": 1}}, "zoom"),
        ({"stochastic_depth": 1.0}, "expected stochastic_depth in"),
        ({"trainer": {"lr_scheduler_type": "up"}}, "expected options that transformers' TrainingArguments take, got"),
        ({"model": {"hidden_act": "nope"}}, "expected options of a model that can be built, got"),
        ({"trainer": {"load_best_model_at_end": True}}, "evaluation is on the test set"),
        ({"trainer": {"save_strategy": "best"}}, "expected trainer.metric_for_best_model beside"),
        ({"trainer": {"metric_for_best_model": "eval_f1"}}, "to be one of loss, accuracy, got 'eval_f1'"),
    ],
)
def test_options_that_nobody_knows(values: dict, words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"multimax: .*{words}"):
        train(override(small("cpu-digits", tmp_path), values), tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()
