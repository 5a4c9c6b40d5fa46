"""One training run in a folder of its own: begun, resumed, or found finished."""

import fcntl
import gc
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState, TrainingArguments, set_seed
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from transformers.utils import logging as quiet

from multimax.experiments import checkpoints, methods
from multimax.experiments.checkpoints import write_json
from multimax.experiments.environment import environment
from multimax.experiments.settings import Settings, as_dict, read_json
from multimax.experiments.tasks.loading import DataCache
from multimax.experiments.tasks.task import Task
from multimax.experiments.trainer import SECONDS, STEP_SECONDS, Clock, Diverged, Order, RunTrainer, measure
from multimax.reweighting import learned as learned_by
from multimax.reweighting.layer import SYMBOLS, MultiMax
from multimax.training.callback import MultiMaxCallback
from multimax.training.groups import reweighting_modules, reweighting_parameters, train_only_reweighting_

CONFIG, RESULT, ENVIRONMENT, METRICS, MODEL = (
    "config.json",
    "result.json",
    "environment.json",
    "metrics.jsonl",
    "model",
)
CHECKPOINTS = "checkpoints"
FINISHED, DIVERGED = "finished", "diverged"
# What a run gives to TrainingArguments itself.
OURS = ("output_dir", "seed", "data_seed", "report_to", "disable_tqdm", "remove_unused_columns", "label_names")


class Busy(RuntimeError):
    """Another process is at work in the folder."""


def processes() -> int:
    """How many train together."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first() -> bool:
    """Whether this is the process that writes."""
    return int(os.environ.get("RANK", "0")) == 0


_held: set[Any] = set()  # locks of this process
os.register_at_fork(after_in_child=lambda: [lock.close() for lock in _held])  # workers outlive a process that is killed


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keeps other processes out of the folder; the lock goes with the process, however it ends."""
    busy = f"multimax: expected {str(folder)!r} to be free, got one that another process works in"
    if not is_first():
        if _agreed(None) == busy:
            raise Busy(busy)
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / checkpoints.LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _agreed(busy)
            raise Busy(busy) from None
        _agreed(None)
        _held.add(file)
        try:
            yield
        finally:
            _held.discard(file)


def _agreed(value: Any) -> Any:
    """What the first process says, to all that train together."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return value
    said = [value]
    torch.distributed.broadcast_object_list(said)
    return said[0]


def part() -> None:
    """Ends what processes did together. Threads of Gloo's that are still there when Python ends can abort it."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        gc.collect()  # a model in DistributedDataParallel holds the group, and so its threads
        torch.distributed.destroy_process_group()


def result_of(folder: Path) -> dict[str, Any] | None:
    """The result of a run that is over, None for one that is not."""
    path = folder / RESULT
    if not path.is_file():
        return None
    found: dict[str, Any] = read_json(path)
    return found


def check_folder(settings: Settings, folder: Path) -> None:
    """Raises if a folder holds something other than this run, begun or finished."""
    config = folder / CONFIG
    if config.is_file():
        before, now = read_json(config), as_dict(settings)
        other = [f"{name}: {there!r} there, {here!r} now" for name, there, here in _differences(before, now)]
        if other:
            raise ValueError(
                f"multimax: expected the settings of the run that is in {str(folder)!r}, got others "
                f"({'; '.join(other)}); choose another folder with --out"
            )
    elif not checkpoints.is_empty(folder):
        raise ValueError(
            f"multimax: expected a new folder, an empty one, or one with a run, got {str(folder)!r}; choose another "
            "with --out"
        )


def _differences(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Names and values of what differs, in parts of settings too."""
    for name in [*now, *(name for name in before if name not in now)]:
        there, here = before.get(name), now.get(name)
        if isinstance(there, Mapping) and isinstance(here, Mapping):
            yield from _differences(there, here, f"{prefix}{name}.")
        elif there != here:
            yield f"{prefix}{name}", there, here


def arguments(settings: Settings, folder: Path, progress: bool) -> TrainingArguments:
    """transformers' TrainingArguments, from the settings."""
    known = {option.name for option in fields(TrainingArguments)}
    unknown = sorted(set(settings.trainer) - known)
    if unknown:
        raise ValueError(f"multimax: expected options of transformers' TrainingArguments, got {', '.join(unknown)}")
    taken = sorted(set(settings.trainer) & set(OURS))
    if taken:
        raise ValueError(f"multimax: expected options that a run does not set itself, got {', '.join(taken)}")
    gpu = torch.cuda.is_available()
    options: dict[str, Any] = {
        "eval_strategy": "epoch",
        "save_strategy": "steps",
        "save_total_limit": 2,
        "logging_steps": 50,
        "use_cpu": not gpu,
        "ddp_backend": "gloo" if not gpu and processes() > 1 else None,
        "ddp_find_unused_parameters": False,  # there are none, and Patch Diversification cannot be searched
        "dataloader_pin_memory": gpu,
        "log_level": "error",
        "logging_nan_inf_filter": False,  # a loss that is no number stops the run
        **settings.trainer,
    }
    with told("expected options that transformers' TrainingArguments take"):
        return TrainingArguments(
            output_dir=str(folder / CHECKPOINTS),
            seed=settings.seed,
            data_seed=settings.seed,
            report_to=[],
            disable_tqdm=not progress,
            remove_unused_columns=False,
            label_names=["labels"],
            **options,
        )


@contextmanager
def told(expected: str) -> Iterator[None]:
    """What a library says of a wrong option, with a word on what was expected."""
    try:
        yield
    except Exception as error:
        if str(error).startswith("multimax:"):
            raise
        raise ValueError(f"multimax: {expected}, got: {error}") from error


class Progress(ProgressCallback):
    """transformers' bar, with a line for the loss and the metrics, and not for every parameter.

    Args:
        main: the metric to show.
    """

    def __init__(self, main: str) -> None:
        super().__init__()
        self.main = main

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **_: Any
    ) -> None:
        """A line above the bar."""
        shown = {name: logs[name] for name in ("loss", "eval_loss", f"eval_{self.main}") if name in logs}
        if state.is_world_process_zero and self.training_bar is not None and shown:
            values = "  ".join(f"{name} {value:.4f}" for name, value in shown.items())
            self.training_bar.write(f"step {state.global_step:>6}  epoch {state.epoch or 0:6.2f}  {values}")


class Log(Clock):
    """Writes what the Trainer logs into a file, a line of JSON each, and the measures of attention at evaluations.

    Args:
        trainer: of the run.
        folder: of the run.
    """

    def __init__(self, trainer: RunTrainer, folder: Path) -> None:
        super().__init__()
        self.trainer, self.path = trainer, folder / METRICS

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """What came after the checkpoint is not in its history, and comes again."""
        super().on_train_begin(args, state, control)
        if state.is_world_process_zero:
            self.path.write_text("".join(_line(entry) for entry in state.log_history), encoding="utf-8")

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **_: Any
    ) -> None:
        """The last entry of the history, with the time of training."""
        state.log_history[-1][SECONDS] = self.seconds
        state.log_history[-1][STEP_SECONDS] = self.steps
        if state.is_world_process_zero:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(_line(state.log_history[-1]))

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """The measures, by layer."""
        trainer = self.trainer
        examples = trainer.settings.measured
        if not examples or not trainer.is_in_train:
            return
        model = trainer.accelerator.unwrap_model(trainer.model_wrapped)
        found = measure(model, trainer.task, trainer.task.evaluation, examples, args.eval_batch_size)
        trainer.log(
            {f"measures/{layer}/{name}": v for layer, means in by_layer(found).items() for name, v in means.items()}
        )


def _line(entry: Mapping[str, Any]) -> str:
    return json.dumps(plain(entry)) + "\n"


def plain(value: Any) -> Any:
    """Numbers as JSON has them: NaN and infinity as words."""
    if isinstance(value, Mapping):
        return {name: plain(part) for name, part in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def by_layer(found: Any) -> dict[str, dict[str, float]]:
    """The mean of each measure in each layer."""
    return {
        layer: {name: measure.mean for name, measure in statistics.measures.items() if measure.count}
        for layer, statistics in found.layers.items()
    }


def learned(model: nn.Module) -> dict[str, dict[str, Any]]:
    """What the reweighting functions have learned, by layer, MultiMax in the paper's symbols."""
    found: dict[str, dict[str, Any]] = {}
    for name, module in reweighting_modules(model):
        layer = name.rpartition(".")[0]
        if isinstance(module, MultiMax):
            found[layer] = {symbol: getattr(module, symbol).detach().tolist() for symbol in SYMBOLS}
        elif next(module.parameters(), None) is not None:
            found[layer] = {symbol: value.detach().tolist() for symbol, value in learned_by(module).items()}
    return found


def train(
    settings: Settings,
    folder: Path,
    *,
    progress: bool = True,
    callbacks: Sequence[TrainerCallback] = (),
    data: DataCache | None = None,
) -> dict[str, Any]:
    """Trains in a folder, from the beginning or from where it was interrupted; a run that is over is left as it is.

    Args:
        settings: of the run.
        folder: new, empty, or that of the same run.
        progress: whether to show bars.
        callbacks: of the Trainer, besides the run's own.
        data: that other runs have loaded already; what this one loads is kept in it.

    Returns:
        What result.json holds: status, metrics, steps, minutes, ms_per_step, parameters and layers.
    """
    check_folder(settings, folder)
    done = result_of(folder)
    if done is not None and processes() == 1:  # several have to agree on it
        return done
    # all that can be wrong with data, options and model shows before anything is written
    quiet.disable_progress_bar()  # of every file that is saved
    args = arguments(settings, folder, progress)
    task = (data or DataCache()).task(settings)
    set_seed(settings.seed)
    with told("expected options of a model that can be built"):
        model = task.model()
        methods.convert(model, settings)
    with _alone(folder):
        check_folder(settings, folder)  # again: another run may have come and gone
        done = _agreed(result_of(folder))
        return done if done is not None else _train(settings, task, model, args, folder, progress, callbacks)


def _train(
    settings: Settings,
    task: Task,
    model: PreTrainedModel,
    args: TrainingArguments,
    folder: Path,
    progress: bool,
    callbacks: Sequence[TrainerCallback],
) -> dict[str, Any]:
    nothing = settings.only_reweighting and next(reweighting_parameters(model), None) is None
    if settings.only_reweighting and not nothing:
        train_only_reweighting_(model)
    resumed = checkpoints.last(folder / CHECKPOINTS)
    if is_first():
        checkpoints.remove_unsealed(folder / CHECKPOINTS)
        write_json(folder / CONFIG, as_dict(settings))
        _note_environment(folder)
        task.save(folder)
    trainer = RunTrainer(task, settings, model=model, args=args)
    log = _add_callbacks(trainer, folder, progress)
    for callback in callbacks:
        trainer.add_callback(callback)
    try:
        with _events(trainer, folder, resumed):
            if not nothing:  # softmax as it was is only evaluated
                trainer.train(resume_from_checkpoint=None if resumed is None else str(resumed))
            result = _evaluate(trainer, log, folder, progress)
    except Diverged as error:
        result = {"status": DIVERGED, "reason": str(error), "metrics": {}, "steps": trainer.state.global_step}
        result["minutes"] = log.seconds / 60
        if is_first():
            write_json(folder / RESULT, result)
        raise
    _save(trainer, task, folder)
    if is_first():
        write_json(folder / RESULT, result)
        shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
    trainer.accelerator.wait_for_everyone()
    return result


def _note_environment(folder: Path) -> None:
    """Where the run began, and where else it went on."""
    path, now = folder / ENVIRONMENT, environment()
    if not path.is_file():
        write_json(path, now)
        return
    first = read_json(path)
    others = first.pop("resumed_on", [])
    if now != first and now not in others:
        write_json(path, {**first, "resumed_on": [*others, now]})


@contextmanager
def _events(trainer: RunTrainer, folder: Path, resumed: Path | None) -> Iterator[None]:
    """TensorBoard's event files, of the training and the last evaluation."""
    if not trainer.settings.tensorboard or not is_first():
        yield
        return
    from torch.utils.tensorboard import SummaryWriter
    from transformers.integrations.integration_utils import TensorBoardCallback

    class Events(TensorBoardCallback):
        def on_train_end(self, *_: Any, **__: Any) -> None:
            """Leaves the writer open: the last evaluation comes afterwards."""

    step = None if resumed is None else int(resumed.name.rpartition("-")[2])
    with SummaryWriter(str(folder / "tensorboard"), purge_step=step) as writer:
        trainer.add_callback(Events(writer))
        yield


def _add_callbacks(trainer: RunTrainer, folder: Path, progress: bool) -> Log:
    log = Log(trainer, folder)
    for callback in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(callback)
    if progress:
        trainer.add_callback(Progress(trainer.task.spec.main))
    trainer.add_callback(log)
    trainer.add_callback(Order(trainer.order))
    model = trainer.model
    assert model is not None
    if trainer.settings.watch and next(reweighting_parameters(model), None) is not None:
        trainer.add_callback(MultiMaxCallback(trainer, every=trainer.settings.watch, measures=()))
    return log


def _evaluate(trainer: RunTrainer, log: Log, folder: Path, progress: bool) -> dict[str, Any]:
    """The last evaluation, and the measures."""
    task, settings = trainer.task, trainer.settings
    seconds, steps = log.seconds, trainer.state.global_step
    found = trainer.evaluate(task.test, metric_key_prefix="test")
    timing = ("runtime", "samples_per_second", "steps_per_second", "model_preparation_time")
    metrics = {name.removeprefix("test_"): value for name, value in found.items() if name.startswith("test_")}
    metrics = {name: value for name, value in metrics.items() if name not in timing}
    model = trainer.accelerator.unwrap_model(trainer.model_wrapped).eval()
    task.trained(model)
    layers: dict[str, dict[str, float]] = {}
    if is_first():
        metrics |= task.final(model, folder, progress)
        if settings.measured:
            layers = by_layer(measure(model, task, task.test, settings.measured, trainer.args.eval_batch_size))
            for name in task.spec.measures:
                values = [means[name] for means in layers.values() if name in means]
                if values:
                    metrics[name] = math.fsum(values) / len(values)
    trainer.accelerator.wait_for_everyone()
    return {
        "status": FINISHED,
        "metrics": plain(metrics),
        "steps": steps,
        "minutes": seconds / 60,
        "ms_per_step": 1000 * log.steps / max(steps, 1),
        "data": task.data_name,
        "model_parameters": sum(p.numel() for p in model.parameters()),
        "parameters": learned(model),
        "layers": plain(layers),
    }


def _save(trainer: RunTrainer, task: Task, folder: Path) -> None:
    """The trained model with all that is needed to load it, whole or not at all."""
    partial = folder / f"{MODEL}.partial"
    if is_first():
        shutil.rmtree(partial, ignore_errors=True)
    trainer.accelerator.wait_for_everyone()
    trainer.save_model(str(partial))
    if is_first():
        (partial / "training_args.bin").unlink(missing_ok=True)  # a pickle, and config.json says the same
        task.save(partial)
        shutil.rmtree(folder / MODEL, ignore_errors=True)
        partial.rename(folder / MODEL)
