"""The monitor as a callback of transformers' Trainer. The only file that imports transformers' Trainer."""

from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from multimax.training.monitor import Monitor


class MultiMaxCallback(TrainerCallback):
    """A :class:`multimax.Monitor` for transformers' ``Trainer``: it logs to whatever the Trainer reports to.

    Values are logged by ``trainer.log``, and so are also in ``trainer.state.log_history``, under the number of steps
    done before. They are not printed, since there are too many. Reporters put ``train/`` before the names.

    A step is observed from its first micro-batch to the optimizer. The Trainer clips before it calls any callback: with
    ``max_grad_norm`` above 0, ``grad_norm`` is the norm after clipping.

    Args:
        trainer: the Trainer to add it to.
        options: of :class:`multimax.Monitor`, such as ``every``.

    Example:
        >>> import tempfile, torch, transformers, multimax
        >>> class Model(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.head = multimax.MultiMaxHead(8, 10, init="identity")
        ...     def forward(self, x, labels):
        ...         return {"loss": self.head(x, labels)}
        >>> data = [{"x": torch.randn(8), "labels": torch.tensor(i)} for i in range(10)]
        >>> options = {"max_steps": 3, "report_to": [], "disable_tqdm": True, "dataloader_pin_memory": False}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     arguments = transformers.TrainingArguments(folder, **options)
        ...     trainer = transformers.Trainer(Model(), arguments, train_dataset=data)
        ...     trainer.add_callback(multimax.MultiMaxCallback(trainer, every=2, measures=()))
        ...     output = trainer.train()  # doctest: +ELLIPSIS
        {'train_runtime': ...}
        >>> [log["step"] for log in trainer.state.log_history if "multimax/head/t_b_1" in log]
        [0, 2]
    """

    def __init__(self, trainer: Trainer, **options: Any) -> None:
        self.trainer, self.options = trainer, options
        self.monitor: Monitor | None = None

    def _log(self, values: dict[str, float], step: int) -> None:
        handler = self.trainer.callback_handler
        everybody = handler.callbacks
        handler.callbacks = [other for other in everybody if not isinstance(other, PrinterCallback | ProgressCallback)]
        try:
            self.trainer.log(dict(values))
        finally:
            handler.callbacks = everybody

    def _close(self) -> None:
        """Leaves a step that an error, or the user, interrupted."""
        if self.monitor is not None:
            self.monitor.close()

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Looks for the reweighting modules."""
        self._close()
        # the wrapped one, which shows whether it is compiled
        self.monitor = Monitor(self.trainer.model_wrapped, self._log, **self.options)

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Before the first micro-batch of a step."""
        self._close()
        if self.monitor is not None:
            self.monitor.step = state.global_step
            self.monitor.__enter__()

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """After the last backward of a step, with its gradients still there."""
        if self.monitor is not None:
            self.monitor.__exit__(None, None, None)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Removes the hooks, if there are any."""
        self._close()
