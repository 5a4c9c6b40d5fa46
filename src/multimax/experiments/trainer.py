"""transformers' Trainer with what a run needs besides: whole checkpoints, an order of the data that survives a restart,
a stop where the loss is no number, and MultiMax's parameters in a group of their own."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_model, save_model
from torch import Tensor, nn
from torch.utils.data import Dataset, Sampler
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_pt_utils import nested_gather

from multimax import metrics
from multimax.convert.observable import observable_attention
from multimax.experiments import checkpoints
from multimax.experiments.settings import Settings, read_json
from multimax.experiments.tasks.task import Task
from multimax.metrics.evaluation import evaluating
from multimax.training.groups import clip_grad_norm_, param_groups, reweighting_parameters

SECONDS, STEP_SECONDS = "seconds", "step_seconds"
SUMS = "sums.json"  # in a checkpoint
WEIGHTS = "model.safetensors"
# What torch says, in a RuntimeError, where a file cannot be written.
NOT_WRITTEN = ("iostream error", "PytorchStreamWriter", "unexpected pos", "write")


class Diverged(RuntimeError):
    """The loss, or a parameter, is NaN or infinite."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns the many errors of a file that cannot be written into one."""
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not any(words in str(error) for words in NOT_WRITTEN):
            raise
        raise OSError(
            f"multimax: expected to write {str(path)!r}, got: {error}; checkpoints before it are as they were: make "
            "room, and give the same command again to go on from there"
        ) from error


class RunTrainer(Trainer):
    """The Trainer of a run.

    Args:
        task: with its data.
        settings: of the run.
        kwargs: of transformers' Trainer.
    """

    def __init__(self, task: Task, settings: Settings, **kwargs: Any) -> None:
        self.task, self.settings = task, settings
        self.clock: Clock | None = None  # of the run, for its checkpoints
        self.resumed: Path | None = None  # the checkpoint that it goes on from
        self.clipped: tuple[nn.Module, nn.Module] | None = None  # the model that is trained, wrapped and not
        super().__init__(
            train_dataset=task.train,
            eval_dataset=task.evaluation,
            data_collator=task.collate,
            compute_metrics=self._metrics,
            preprocess_logits_for_metrics=task.reduce_logits,
            **kwargs,
        )
        self.order = task.sampler(self.args.train_batch_size)

    def _metrics(self, prediction: Any) -> dict[str, float]:
        return self.task.metrics(prediction.predictions, prediction.label_ids)

    def _get_train_sampler(self, train_dataset: Dataset[Any] | None = None) -> Sampler[int]:
        return self.order

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """transformers' groups, and one more, the last: that of the reweighting functions' parameters."""
        made = self.optimizer is not None
        optimizer: torch.optim.Optimizer = super().create_optimizer(model)
        whole = self.model if model is None else model
        assert whole is not None
        if made or next(reweighting_parameters(whole), None) is None:
            return optimizer
        _, reweighting = param_groups(
            whole,
            lr=self.args.learning_rate,
            weight_decay=self.args.weight_decay,
            multimax_lr_factor=self.settings.multimax_lr_factor,
        )
        moved = set(reweighting["params"])
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if p not in moved]
        optimizer.add_param_group(reweighting)
        # a group without parameters, as when only the functions are trained, is of no use to anybody
        optimizer.param_groups = [group for group in optimizer.param_groups if group["params"]]
        return optimizer

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        self.accelerator.unscale_gradients()
        # accelerate looks for packages on the disk whenever it unwraps: a twentieth of a small model's step
        if self.clipped is None or self.clipped[0] is not model:
            self.clipped = model, self.accelerator.unwrap_model(model)
        return clip_grad_norm_(self.clipped[1], self.args.max_grad_norm)

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The task's loss, or else transformers'."""
        found = self.task.loss(model, inputs)
        if found is None:
            self.loss_is_scaled_for_ga = None
            smoother = self.label_smoother
            self.label_smoother = smoother if model.training else None  # smoothed labels are for training
            try:
                return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
            finally:
                self.label_smoother = smoother
        self.loss_is_scaled_for_ga = False
        return found if return_outputs else found[0]

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Stops where the loss is no number."""
        loss: Tensor = super().training_step(*args, **kwargs)
        finite = torch.isfinite(loss).float()
        if self.args.world_size > 1:  # all processes stop together
            torch.distributed.all_reduce(finite, torch.distributed.ReduceOp.MIN)
        if not finite:
            raise Diverged(
                f"multimax: expected a finite loss, got {loss.item()} in step {self.state.global_step + 1}; a smaller "
                "learning rate, or longer warm-up, may help; checkpoints before it are as they were"
            )
        return loss

    def evaluate(self, eval_dataset: Any = None, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Tells the task what is evaluated."""
        self.task.evaluated = self.task.evaluation if eval_dataset is None else eval_dataset
        # a loader draws a seed: a run that goes on behind an evaluation must find the same random numbers
        with torch.random.fork_rng(devices=[]):
            found: dict[str, float] = super().evaluate(eval_dataset, *args, **kwargs)
        return found

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        over = self.state.global_step >= self.state.max_steps
        if over or self.control.should_training_stop:  # resumed behind its end, where it would do a step more
            self.control.should_training_stop = True
            return
        super()._run_epoch(*args, **kwargs)

    # transformers writes some weights, those of IJepa among them, under other names than the model's, and its Trainer
    # reads them back under the model's own: what it does not find stays as it was initialised, with a warning. Hence
    # checkpoints have the model's names here, and none may be missing. Shards of FSDP are accelerate's, and have them.
    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        if output_dir is None or state_dict is not None or not checkpoints.FOLDER.fullmatch(Path(output_dir).name):
            super()._save(output_dir, state_dict)
            return
        Path(output_dir).mkdir(parents=True, exist_ok=True)
        save_model(self.accelerator.unwrap_model(self.model), str(Path(output_dir) / WEIGHTS))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        file = Path(resume_from_checkpoint) / WEIGHTS
        if file.is_file():
            whole = self.model if model is None else model
            assert whole is not None
            load_model(whole, file)
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        for name, parameter in self.accelerator.unwrap_model(model).named_parameters():
            if not torch.isfinite(parameter).all():
                raise Diverged(
                    f"multimax: expected finite parameters, got NaN or infinity in {name} after step "
                    f"{self.state.global_step}; a smaller learning rate may help; checkpoints before it are as they "
                    "were"
                )
        folder = Path(self.args.output_dir or "") / f"checkpoint-{self.state.global_step}"
        limit, self.args.save_total_limit = self.args.save_total_limit, None  # older ones go when this one is whole
        sums = self._sums()
        try:
            with writing(folder):
                super()._save_checkpoint(model, trial)
                self.accelerator.wait_for_everyone()
                if self.args.should_save:
                    checkpoints.write_json(folder / SUMS, sums)
                    checkpoints.seal(folder)
                    checkpoints.rotate(folder.parent, limit, self.state.best_model_checkpoint)
                self.accelerator.wait_for_everyone()
        finally:
            self.args.save_total_limit = limit

    # The Trainer logs the mean loss since the last log, and forgets what it has added up when a run goes on from a
    # checkpoint that was written in between.
    def _sums(self) -> dict[str, float]:
        """What is added up from one log to the next, and over the run; all processes must ask."""
        loss = nested_gather(self._tr_loss, self.args.parallel_mode).mean().item()
        sums = {"loss": loss, "total_loss": self._total_loss_scalar, "logged": self._globalstep_last_logged}
        if self.clock is not None:
            sums |= {SECONDS: self.clock.seconds, STEP_SECONDS: self.clock.steps}
        return sums

    def restore_sums(self) -> None:
        """Goes on with the sums of the checkpoint."""
        file = None if self.resumed is None else self.resumed / SUMS
        if file is None or not file.is_file():
            return
        sums = read_json(file)
        self._tr_loss += sums["loss"]
        self._total_loss_scalar, self._globalstep_last_logged = sums["total_loss"], sums["logged"]
        if self.clock is not None and SECONDS in sums:
            self.clock.before, self.clock.steps = sums[SECONDS], sums[STEP_SECONDS]

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """transformers' mean loss is that since the run went on; here it is that of the whole run."""
        if "train_loss" in logs:
            logs["train_loss"] = self._total_loss_scalar / max(self.state.global_step, 1)
        super().log(logs, *args, **kwargs)


class Order(TrainerCallback):
    """Tells the sampler the epoch: accelerate does not when it skips the batches that a run has seen."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def on_epoch_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """The epoch that begins, or is resumed."""
        self.sampler.set_epoch(math.floor(state.epoch or 0))


class Patience(TrainerCallback):
    """Stops where the validation loss has stopped falling. It looks at the log, which checkpoints have: a run that goes
    on stops where it would have stopped.

    Args:
        evaluations: how many without a better loss end the training.
    """

    def __init__(self, evaluations: int) -> None:
        self.evaluations = evaluations

    def _look(self, state: TrainerState, control: TrainerControl) -> None:
        losses = [entry["eval_loss"] for entry in state.log_history if "eval_loss" in entry]
        if losses and len(losses) - 1 - losses.index(min(losses)) >= self.evaluations:
            control.should_training_stop = True

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """It may have been stopped before it was interrupted."""
        self._look(state, control)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """The last step may be the best, and would not be looked at between two evaluations."""
        if state.global_step >= state.max_steps:
            control.should_evaluate = True

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Whether to go on."""
        self._look(state, control)


class Clock(TrainerCallback):
    """Adds up the time of training, over all the pieces of a run that was interrupted."""

    def __init__(self) -> None:
        self.before = self.steps_before = 0.0
        self.began = self.step_began = time.perf_counter()
        self.steps = 0.0

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Goes on from what the checkpoint says."""
        for entry in state.log_history:
            self.before = entry.get(SECONDS, self.before)
            self.steps = entry.get(STEP_SECONDS, self.steps)
        self.began = time.perf_counter()

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """A step, with forward, backward and optimizer."""
        self.step_began = time.perf_counter()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Its end."""
        self.steps += time.perf_counter() - self.step_began

    @property
    def seconds(self) -> float:
        """Since the beginning of the run."""
        return self.before + time.perf_counter() - self.began


def spread(dataset: Any, examples: int) -> list[int]:
    """Numbers of so many examples, all over a dataset."""
    step = max(len(dataset) // examples, 1)
    return list(range(0, len(dataset), step))[:examples]


@torch.no_grad()
def measure(
    model: Any, task: Task, dataset: Any, examples: int, batch: int, others: tuple[str, ...] = ()
) -> metrics.AttentionStatistics:
    """The measures of attention on examples that are spread over a dataset.

    Args:
        model: not wrapped.
        task: with its measures.
        dataset: examples.
        examples: how many of them to take.
        batch: how many at a time.
        others: measures besides the task's.
    """
    chosen = spread(dataset, examples)
    device = next(model.parameters()).device
    with (
        evaluating(model),
        observable_attention(model),
        metrics.collect(model, (*task.spec.measures, *others)) as found,
    ):
        for first in range(0, len(chosen), batch):
            inputs = task.collate([dataset[i] for i in chosen[first : first + batch]])
            model(**{name: value.to(device) for name, value in inputs.items() if name != "labels"})
    return found
