"""What a run shows of itself while it trains."""

import sys
from typing import Any

from tqdm.auto import tqdm  # type: ignore[import-untyped]
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ProgressCallback

from multimax.experiments.speaking import note


class Bar(ProgressCallback):
    """transformers' bar, without what it says of the logs."""

    def on_log(self, *_: Any, **__: Any) -> None:
        """Nothing: :class:`Lines` does."""


class Lines(TrainerCallback):
    """A line for the loss and the metrics, and not for every parameter; above a bar, if there is one.

    Args:
        main: the metric to show.
    """

    def __init__(self, main: str) -> None:
        self.main = main

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **_: Any
    ) -> None:
        """The line."""
        shown = {name: logs[name] for name in ("loss", "eval_loss", f"eval_{self.main}") if name in logs}
        if state.is_world_process_zero and shown:
            values = "  ".join(f"{name} {value:.4f}" for name, value in shown.items())
            with tqdm.external_write_mode(file=sys.stderr):
                note(f"step {state.global_step:>6}  epoch {state.epoch or 0:6.2f}  {values}")
