"""One training run in a folder of its own: begun, resumed, or found finished."""

import gc
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState, TrainingArguments, set_seed
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from transformers.utils import logging as quiet

from multimax.experiments import begun, checkpoints, methods, results, tasks
from multimax.experiments.checkpoints import write_json
from multimax.experiments.environment import environment
from multimax.experiments.progress import Bar, Lines
from multimax.experiments.settings import CONFIG, Settings, as_dict, differences, read_json
from multimax.experiments.speaking import note, on_terminal
from multimax.experiments.tasks.loading import DataCache, check_data, check_start
from multimax.experiments.tasks.task import Task
from multimax.experiments.trainer import (
    SECONDS,
    STEP_SECONDS,
    Clock,
    Diverged,
    Order,
    Patience,
    RunTrainer,
    measure,
    writing,
)
from multimax.reweighting import learned as learned_by
from multimax.reweighting.layer import SYMBOLS, MultiMax
from multimax.training.callback import MultiMaxCallback
from multimax.training.groups import reweighting_modules, reweighting_parameters, train_only_reweighting_

RESULT, ENVIRONMENT, METRICS, MODEL = "result.json", "environment.json", "metrics.jsonl", "model"
CHECKPOINTS = "checkpoints"
OTHER_FOLDER = "choose another folder with --out"
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


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keeps other processes out of the folder; the lock goes with the process, however it ends."""
    busy = f"multimax: expected {str(folder)!r} to be free, got one that another process works in"
    if not is_first():
        if _agreed(None) == busy:
            raise Busy(busy)
        yield
        return
    with ExitStack() as stack:
        try:
            stack.enter_context(checkpoints.locked(folder, wait=False))
        except BlockingIOError:
            _agreed(busy)
            raise Busy(busy) from None
        _agreed(None)
        yield


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
    return results.read_result(folder) if (folder / RESULT).is_file() else None


def check_folder(settings: Settings, folder: Path) -> None:
    """Raises if a folder holds something other than this run, begun or finished."""
    config = folder / CONFIG
    if config.is_file():
        before, now = read_json(config), as_dict(settings)
        if not isinstance(before, Mapping):
            raise ValueError(
                f"multimax: expected the settings of a run in {str(config)!r}, got {type(before).__name__}; choose "
                "another folder with --out"
            )
        other = [f"{name}: {there!r} there, {here!r} now" for name, there, here in differences(before, now)]
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


def arguments(settings: Settings, folder: Path, bars: bool = False) -> TrainingArguments:
    """transformers' TrainingArguments, from the settings."""
    known = {option.name for option in fields(TrainingArguments)}
    unknown = sorted(set(settings.trainer) - known)
    if unknown:
        raise ValueError(f"multimax: expected options of transformers' TrainingArguments, got {', '.join(unknown)}")
    taken = sorted(set(settings.trainer) & set(OURS))
    if taken:
        raise ValueError(f"multimax: expected options that a run does not set itself, got {', '.join(taken)}")
    _check_best(settings)
    best: dict[str, Any] = {}
    if settings.patience:
        best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": False}
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
        **best,
        **settings.trainer,
    }
    if settings.patience:
        options["save_strategy"] = options["eval_strategy"]
    with told("expected options that transformers' TrainingArguments take"):
        return TrainingArguments(
            output_dir=str(folder / CHECKPOINTS),
            seed=settings.seed,
            data_seed=settings.seed,
            report_to=[],
            disable_tqdm=not bars,
            remove_unused_columns=False,
            label_names=["labels"],
            **options,
        )


def _check_best(settings: Settings) -> None:
    """What checkpoints are chosen by must be a metric of the evaluations during training."""
    best, metric = settings.trainer.get("save_strategy") == "best", settings.trainer.get("metric_for_best_model")
    spec = tasks.get(settings.task)
    known = ("loss", *(name for name in spec.metrics if name not in spec.at_end))
    if best and metric is None:
        raise ValueError(
            "multimax: expected trainer.metric_for_best_model beside trainer.save_strategy=best, got none; choose one "
            f"of {', '.join(known)}"
        )
    if metric is not None and str(metric).removeprefix("eval_") not in known:
        raise ValueError(
            f"multimax: expected trainer.metric_for_best_model to be one of {', '.join(known)}, got {metric!r}"
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
        self.trainer.restore_sums()
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


def check(settings: Settings, folder: Path) -> None:
    """Raises for what can be wrong with a run, as far as that shows without its data."""
    check_folder(settings, folder)
    arguments(settings, folder)
    check_data(settings)
    check_start(settings)


class Prepared(NamedTuple):
    """All that a run needs, before anything of it is written."""

    args: TrainingArguments
    task: Task
    model: PreTrainedModel


def prepared(settings: Settings, folder: Path, data: DataCache | None = None, bars: bool = False) -> Prepared:
    """Options, data and model of a run: whatever is wrong with them shows here.

    Args:
        settings: of the run.
        folder: that it will write to.
        data: that other runs have loaded already; what this one loads is kept in it.
        bars: whether it will draw bars.
    """
    quiet.disable_progress_bar()  # of every file that is saved or loaded
    args = arguments(settings, folder, bars)
    check_start(settings)
    task = (data or DataCache()).task(settings)
    set_seed(settings.seed)
    with told("expected options of a model that can be built"):
        model = task.model()
        methods.convert(model, settings)
    return Prepared(args, task, model)


def state_of(folder: Path) -> str:
    """What `train` would do in a folder, in words."""
    done = result_of(folder)
    if done is not None:
        return f"already {done['status']}"
    last = checkpoints.last(folder / CHECKPOINTS)
    if last is not None:
        return f"resumes from step {checkpoints.step_of(last)}"
    return "begins again, for there is no checkpoint yet" if (folder / CONFIG).is_file() else "new"


def outlook(settings: Settings, folder: Path, data: DataCache | None = None) -> str:
    """What `train` would do, in words, after all that it checks; nothing is written.

    Args:
        settings: of the run.
        folder: new, empty, or that of the same run.
        data: that was loaded already.
    """
    check_folder(settings, folder)
    state = state_of(folder)
    args, task, model = prepared(settings, folder, data)
    now = begun.begun_with(task, args)
    if checkpoints.last(folder / CHECKPOINTS) is not None:
        begun.check(folder, now, OTHER_FOLDER)
    begun.check_others(settings, folder, now)
    examples = len(task.sampler(args.train_batch_size))  # type: ignore[arg-type]
    per_step = args.per_device_train_batch_size * now["devices"] * args.gradient_accumulation_steps
    steps = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * math.ceil(examples / per_step))
    weights = sum(p.numel() for p in model.parameters())
    return (
        f"{state}; {task.data_name} with {examples:,} examples to train on, a model of {weights:,} parameters, "
        f"{steps:,} steps of {per_step:,} examples"
    )


def train(
    settings: Settings,
    folder: Path,
    *,
    progress: bool = True,
    bars: bool = True,
    callbacks: Sequence[TrainerCallback] = (),
    data: DataCache | None = None,
) -> dict[str, Any]:
    """Trains in a folder, from the beginning or from where it was interrupted; a run that is over is left as it is.

    Args:
        settings: of the run.
        folder: new, empty, or that of the same run.
        progress: whether to say on standard error what happens.
        bars: whether to draw bars, too, where that is a terminal.
        callbacks: of the Trainer, besides the run's own.
        data: that other runs have loaded already; what this one loads is kept in it.

    Returns:
        What result.json holds: status, metrics, steps, minutes, ms_per_step, parameters and layers.
    """
    check_folder(settings, folder)
    done = result_of(folder)
    if done is not None and processes() == 1:  # several have to agree on it
        return _over(done, folder, progress)
    bars = progress and bars and on_terminal()
    ready = prepared(settings, folder, data, bars)
    with _alone(folder):
        check_folder(settings, folder)  # again: another run may have come and gone
        done = _agreed(result_of(folder))
        if done is not None:
            return _over(done, folder, progress)
        return _train(settings, ready, folder, Shown(progress, bars), callbacks)


def _over(done: dict[str, Any], folder: Path, progress: bool) -> dict[str, Any]:
    """A run that is over: what a process left that was killed behind its end is removed."""
    if is_first():
        if progress:
            note(f"{folder}: already {done['status']}, not trained again")
        left = [*folder.glob(f"*{checkpoints.PARTIAL}"), *folder.glob(CHECKPOINTS)]
        if left and done["status"] == FINISHED:
            with suppress(OSError):  # of a folder that is kept read-only
                shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
                checkpoints.remove_partial(folder)
    return done


class Shown(NamedTuple):
    """What a run shows of itself: lines, and bars above which they stand."""

    lines: bool
    bars: bool


def _train(
    settings: Settings, ready: Prepared, folder: Path, shown: Shown, callbacks: Sequence[TrainerCallback]
) -> dict[str, Any]:
    args, task, model = ready
    nothing = settings.only_reweighting and next(reweighting_parameters(model), None) is None
    if settings.only_reweighting and not nothing:
        train_only_reweighting_(model)
    resumed = checkpoints.last(folder / CHECKPOINTS)
    now = begun.begun_with(task, args)
    if resumed is not None:
        begun.check(folder, now, OTHER_FOLDER)
    begun.check_others(settings, folder, now)
    if is_first():
        checkpoints.remove_unsealed(folder / CHECKPOINTS)
        checkpoints.remove_partial(folder)
        write_json(folder / CONFIG, as_dict(settings))
        write_json(folder / begun.BEGUN, now)
        _note_environment(folder)
        task.save(folder)
        if resumed is not None and shown.lines:
            note(f"{folder}: resuming from step {checkpoints.step_of(resumed)}")
    trainer = RunTrainer(task, settings, model=model, args=args)
    log = _add_callbacks(trainer, folder, shown)
    trainer.clock, trainer.resumed = log, resumed
    for callback in callbacks:
        trainer.add_callback(callback)
    try:
        with _events(trainer, folder, resumed):
            if not nothing:  # softmax as it was is only evaluated
                trainer.train(resume_from_checkpoint=None if resumed is None else str(resumed))
            result = _evaluate(trainer, log, folder, shown.bars)
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

    step = None if resumed is None else checkpoints.step_of(resumed)
    with SummaryWriter(str(folder / "tensorboard"), purge_step=step) as writer:
        trainer.add_callback(Events(writer))
        yield


def _add_callbacks(trainer: RunTrainer, folder: Path, shown: Shown) -> Log:
    log = Log(trainer, folder)
    for callback in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(callback)
    if shown.bars:
        trainer.add_callback(Bar())
    if shown.lines:
        trainer.add_callback(Lines(trainer.task.spec.main))
    trainer.add_callback(log)
    trainer.add_callback(Order(trainer.order))
    if trainer.settings.patience:
        trainer.add_callback(Patience(trainer.settings.patience))
    model = trainer.model
    assert model is not None
    if trainer.settings.watch and next(reweighting_parameters(model), None) is not None:
        trainer.add_callback(MultiMaxCallback(trainer, every=trainer.settings.watch, measures=()))
    return log


def _evaluate(trainer: RunTrainer, log: Log, folder: Path, bars: bool) -> dict[str, Any]:
    """The last evaluation, and the measures."""
    task, settings = trainer.task, trainer.settings
    seconds, steps = log.seconds, trainer.state.global_step
    metrics = _metrics(trainer, task.test)
    model = trainer.accelerator.unwrap_model(trainer.model_wrapped).eval()
    task.trained(model)
    layers: dict[str, dict[str, float]] = {}
    if is_first():
        metrics |= task.final(model, folder, bars)
        if settings.measured:
            layers = by_layer(measure(model, task, task.test, settings.measured, trainer.args.eval_batch_size))
            metrics |= _over_layers(task, layers)
    # all of one before the next, the longest last: rotary embeddings that adapt to a text stay so for shorter ones
    for place, dataset in task.others.items():
        found = _metrics(trainer, dataset)
        if is_first() and settings.measured:
            # as many rows of attention as above, or fewer
            examples = max(1, settings.measured * len(dataset) // len(task.test))  # type: ignore[arg-type]
            batch = max(1, trainer.args.eval_batch_size // 4)
            found |= _over_layers(task, by_layer(measure(model, task, dataset, examples, batch)))
        metrics |= {f"{name}@{place}": value for name, value in found.items()}
    trainer.accelerator.wait_for_everyone()
    return {
        "status": FINISHED,
        "metrics": plain(metrics),
        "steps": steps,
        **({"best_step": trainer.state.best_global_step} if settings.patience else {}),
        "minutes": seconds / 60,
        "ms_per_step": 1000 * log.steps / max(steps, 1),
        "data": task.data_name,
        "model_parameters": sum(p.numel() for p in model.parameters()),
        "parameters": learned(model),
        "layers": plain(layers),
    }


def _metrics(trainer: RunTrainer, dataset: Any) -> dict[str, float]:
    """Of an evaluation, without times."""
    timing = ("runtime", "samples_per_second", "steps_per_second", "model_preparation_time")
    found = trainer.evaluate(dataset, metric_key_prefix="test")
    metrics = {name.removeprefix("test_"): value for name, value in found.items() if name.startswith("test_")}
    return {name: value for name, value in metrics.items() if name not in timing}


def _over_layers(task: Task, layers: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """The mean of each of the task's measures over the layers."""
    found = {name: [means[name] for means in layers.values() if name in means] for name in task.spec.measures}
    return {name: math.fsum(values) / len(values) for name, values in found.items() if values}


def _save(trainer: RunTrainer, task: Task, folder: Path) -> None:
    """The trained model with all that is needed to load it, whole or not at all."""
    partial = folder / f"{MODEL}{checkpoints.PARTIAL}"
    if is_first():
        shutil.rmtree(partial, ignore_errors=True)
    trainer.accelerator.wait_for_everyone()
    try:
        with writing(folder / MODEL):
            trainer.save_model(str(partial))
            if is_first():
                (partial / "training_args.bin").unlink(missing_ok=True)  # a pickle, and config.json says the same
                task.save(partial)
    except OSError:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    if is_first():
        shutil.rmtree(folder / MODEL, ignore_errors=True)
        partial.rename(folder / MODEL)
