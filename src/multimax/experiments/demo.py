"""`multimax demo`: softmax and MultiMax trained side by side, in a minute or two."""

import textwrap
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tqdm.auto import tqdm  # type: ignore[import-untyped]
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from multimax.experiments import results
from multimax.experiments import sweep as sweeps
from multimax.experiments import table as tables
from multimax.experiments.run import result_of
from multimax.experiments.settings import override, preset
from multimax.experiments.speaking import note, on_terminal
from multimax.metrics.layer_names import layer_names
from multimax.training.monitor import SigmaFalls

SHOWN = ("accuracy", "multi_modality", "sparsity", "patch_similarity", "ms_per_step")
LEGEND = """\
Accuracy is that on 450 digits that were not trained with: one digit is 0.22 points. Multi-modality and sparsity are the
paper's measures of the attention weights, patch similarity is how alike the patches have become; all are means over the
layers, and differ with the scores that each model has learned. A few seeds of a tiny model prove nothing:
docs/results.md has longer runs."""


class Demo(NamedTuple):
    """What came out: the tables, and a line of warning, if there is reason for one."""

    text: str
    warning: str


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


def demo(folder: Path, seeds: int, options: Sequence[tuple[str, Any]] = (), width: int | None = None) -> Demo:
    """Trains both methods on digits with each seed, and returns the table and what MultiMax has learned.

    Args:
        folder: for the runs; those that are over are not done again.
        seeds: how many.
        options: settings to change in the preset.
        width: of the terminal that shows it; None for Markdown.
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
    with _falling() as layers, tqdm(total=steps * len(waiting), unit="step", disable=lines or not waiting) as bar:
        done = sweeps.sweep(
            waiting, progress=False, callbacks=lambda run: [Bar(bar, f"{run.label:<8} seed {run.seed}")]
        )
        falling: dict[str, list[str]] = {}
        for number, each in enumerate(done, start=1):
            for layer in layers:
                falling.setdefault(layer, []).append(str(each.run.seed))
            layers.clear()
            if lines:
                note(f"{number} of {len(waiting)}: {each.run.label}, seed {each.run.seed}: {_in_words(each)}")
    found = results.read(folder)
    learned = tables.parameters_text(found, "MultiMax", width)
    legend = textwrap.fill(LEGEND, 80 if width is None else width)
    parts = (tables.text(found, SHOWN, width=width), legend, "What MultiMax has learned, layer by layer:", learned)
    return Demo("\n\n".join(parts), _warning(falling))


@contextmanager
def _falling() -> Iterator[list[str]]:
    """Gathers the layers in which sigma falls, which would otherwise be told in the midst of the bar."""
    layers: list[str] = []
    with warnings.catch_warnings():
        show = warnings.showwarning

        def gather(message: Warning | str, *rest: Any) -> None:
            if isinstance(message, SigmaFalls):
                layers.append(message.layer)
            else:
                show(message, *rest)

        warnings.simplefilter("always", SigmaFalls)
        warnings.showwarning = gather  # type: ignore[assignment]
        yield layers


def _warning(falling: Mapping[str, Sequence[str]]) -> str:
    """One line for all layers in which sigma falls."""
    if not falling:
        return ""
    names = layer_names(falling)
    where = "; ".join(f"{names[layer]}, seed {', '.join(falling[layer])}" for layer in names)
    return f"Sigma falls (docs/training.md) in {where}."


def _in_words(done: sweeps.Done) -> str:
    accuracy = (done.result or {}).get("metrics", {}).get("accuracy")
    return done.reason or (done.status if accuracy is None else f"accuracy {accuracy:.4f}")


TRAINED_WITH = 1347  # digits
