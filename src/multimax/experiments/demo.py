"""`multimax demo`: softmax and MultiMax trained side by side, in a minute or two."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm  # type: ignore[import-untyped]
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from multimax.experiments import results
from multimax.experiments import sweep as sweeps
from multimax.experiments import table as tables
from multimax.experiments.run import result_of
from multimax.experiments.settings import override, preset
from multimax.experiments.speaking import note, on_terminal

SHOWN = ("accuracy", "multi_modality", "sparsity", "patch_similarity", "ms_per_step")
LEGEND = """
Accuracy is that on 450 digits that were not trained with. Multi-modality and sparsity are the paper's measures of the
attention weights, patch similarity is how alike the patches have become; all are means over the layers, and differ with
the scores that each model has learned. A few seeds of a tiny model prove nothing: docs/results.md has longer runs.
"""


class Bar(TrainerCallback):
    """One bar over the steps of all runs.

    Args:
        bar: of tqdm.
        words: what is trained now.
    """

    def __init__(self, bar: Any, words: str) -> None:
        self.bar, self.words = bar, words

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Says what is trained."""
        self.bar.set_description(self.words)
        self.bar.update(state.global_step)  # of a run that goes on

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """A step more."""
        self.bar.update()


def demo(folder: Path, seeds: int, options: Sequence[tuple[str, Any]] = ()) -> str:
    """Trains both methods on digits with each seed, and returns the table and what MultiMax has learned.

    Args:
        folder: for the runs; those that are over are not done again.
        seeds: how many.
        options: settings to change in the preset.
    """
    table = sweeps.load_table("seeds")
    base = override(preset("cpu-digits"), {"tensorboard": False, **dict(options)})
    runs = sweeps.plan(table, base, list(range(seeds)), folder)
    sweeps.note(table, base, list(range(seeds)), folder)
    waiting = [run for run in runs if result_of(run.folder) is None]
    steps = int(base.trainer.get("max_steps", 0))
    if steps <= 0:
        batch = base.trainer["per_device_train_batch_size"]
        steps = -(-TRAINED_WITH // batch) * int(base.trainer["num_train_epochs"])
    lines = not on_terminal()  # in a file, or for another program, a bar would be a mess
    with tqdm(total=steps * len(waiting), unit="step", disable=lines or not waiting) as bar:
        done = sweeps.sweep(
            waiting, progress=False, callbacks=lambda run: [Bar(bar, f"{run.label:<8} seed {run.seed}")]
        )
        for number, each in enumerate(done, start=1):
            if lines:
                note(f"{number} of {len(waiting)}: {each.run.label}, seed {each.run.seed}: {_in_words(each)}")
    found = results.read(folder)
    learned = tables.parameters_markdown(found, "MultiMax")
    return f"{tables.markdown(found, SHOWN)}\n{LEGEND}\nWhat MultiMax has learned, layer by layer:\n\n{learned}"


def _in_words(done: sweeps.Done) -> str:
    accuracy = (done.result or {}).get("metrics", {}).get("accuracy")
    return done.reason or (done.status if accuracy is None else f"accuracy {accuracy:.4f}")


TRAINED_WITH = 1347  # digits
