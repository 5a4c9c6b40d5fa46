"""The models of a report, and what is measured of them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from multimax.convert import from_pretrained
from multimax.experiments.results import Run, Sweep
from multimax.experiments.run import CONFIG, FINISHED, learned, task_of
from multimax.experiments.settings import read_json
from multimax.experiments.task import Task
from multimax.experiments.trainer import measure, spread
from multimax.metrics import AttentionStatistics
from multimax.plots import attention_of, class_activation
from multimax.plots.style import words
from multimax.report.sources import Group, Source

PICTURES = 6  # photos that Grad-CAM is shown of
FIGURES_NEED = ("histogram", "rollout_discrepancy")


@dataclass
class Photos:
    """What is shown of a model of images.

    Attributes:
        pixels: (n, channels, height, width), as the model takes them.
        names: of their classes.
        activation: Grad-CAM of each, (n, rows, columns).
        attention: weights of the first photo, (heads, queries, keys), by layer: the first, the middle, the last.
        grid: rows and columns of patches.
    """

    pixels: Tensor
    names: list[str]
    activation: Tensor
    attention: dict[str, Tensor]
    grid: tuple[int, int]


@dataclass
class Measured:
    """A model that was loaded and, if there is data, run.

    Attributes:
        model: in evaluation mode.
        statistics: of its attention, None without data.
        photos: None but for images.
    """

    model: PreTrainedModel
    statistics: AttentionStatistics | None = None
    photos: Photos | None = None


def load(folder: Path) -> PreTrainedModel:
    """A model that transformers has saved, converted by MultiMax or not; the class is one of transformers' own.

    Args:
        folder: with config.json and weights as safetensors.
    """
    config = read_json(folder / CONFIG)
    named = config.get("architectures") or ["none"]
    cls = getattr(transformers, str(named[0]), None)
    if not isinstance(cls, type) or not issubclass(cls, PreTrainedModel):
        raise ValueError(
            f"multimax: expected a model of transformers in {str(folder)!r}, got architectures {', '.join(named)}"
        )
    if config.get("multimax") is not None:
        model: PreTrainedModel = from_pretrained(cls, folder, use_safetensors=True)
    else:
        model = cls.from_pretrained(folder, use_safetensors=True)
    model.eval()
    return model


def task_for(source: Source) -> Task:
    """The data of a source, read as its model takes it."""
    settings, folder = source.settings, source.model
    assert settings is not None
    assert folder is not None
    size = read_json(folder / CONFIG).get("image_size")
    if settings.task == "vision" and isinstance(size, int):
        settings = replace(settings, image_size=size)
    # a model for text brings its tokenizer
    return task_of(replace(settings, start=str(folder)))


def _grid(model: PreTrainedModel, pixels: Tensor) -> tuple[int, int]:
    patch = model.config.patch_size
    height, width = (patch, patch) if isinstance(patch, int) else patch
    return pixels.shape[-2] // height, pixels.shape[-1] // width


def _photos(model: PreTrainedModel, task: Task) -> Photos:
    dataset: Any = task.test
    examples = [dataset[i] for i in spread(dataset, PICTURES)]
    pixels = torch.stack([own["pixel_values"] for own in examples])
    names = [str(task.classes[int(own["labels"])]) for own in examples]  # type: ignore[attr-defined]
    found = attention_of(model, pixels[:1])
    layers = list(found)
    shown = dict.fromkeys((layers[0], layers[len(layers) // 2], layers[-1]))
    grid = _grid(model, pixels)
    activation = class_activation(model, pixels, grid=grid)
    return Photos(pixels, names, activation, {name: found[name][0] for name in shown}, grid)


def measured(source: Source, task: Task | None, examples: int) -> Measured:
    """Loads the model, and runs it on examples that are spread over the test set.

    Args:
        source: with a model.
        task: its data; None to leave it out.
        examples: how many.
    """
    assert source.model is not None
    model = load(source.model)
    if task is None:
        return Measured(model)
    task.use(model)
    batch = int(task.settings.trainer.get("per_device_eval_batch_size", 16))
    statistics = measure(model, task, task.test, examples, min(batch, examples), others=FIGURES_NEED)
    return Measured(model, statistics, _photos(model, task) if task.settings.task == "vision" else None)


def parameters_of(group: Group, found: Mapping[str, Measured]) -> Sweep:
    """What runs and models have learned, as the runs of a sweep."""
    runs = [] if group.sweep is None else list(group.sweep.runs)
    there = {run.label for run in runs}
    for label, own in found.items():
        if label not in there:
            result = {"status": FINISHED, "metrics": {}, "parameters": learned(own.model)}
            runs.append(Run(label, 0, {}, {}, result))
    return Sweep({"methods": dict.fromkeys(run.label for run in runs)}, runs, planned=False)


def measures_of(found: Iterable[tuple[str, Measured]]) -> list[list[str]]:
    """A table of what was measured, the head first: means over the layers."""
    found = [(label, own) for label, own in found if own.statistics is not None]
    names: dict[str, None] = {}
    for _, own in found:
        for layer in own.statistics.layers.values():  # type: ignore[union-attr]
            names |= dict.fromkeys(layer.measures)
    table = [["model", "parameters", "attention layers", *map(words, names)]]
    for label, own in found:
        assert own.statistics is not None
        row = [label, f"{sum(p.numel() for p in own.model.parameters()):,}", str(len(own.statistics.layers))]
        for name in names:
            layers = [layer.measures[name] for layer in own.statistics.layers.values() if name in layer.measures]
            means = [layer.mean for layer in layers if layer.count]
            row.append(f"{sum(means) / len(means):.4f}" if means else "-")
        table.append(row)
    return table
