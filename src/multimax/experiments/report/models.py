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
from multimax.convert.observable import observable_attention
from multimax.experiments import tasks
from multimax.experiments.report.sources import Group, Source
from multimax.experiments.results import Run, Sweep
from multimax.experiments.run import FINISHED, learned, told
from multimax.experiments.settings import CONFIG, read_json
from multimax.experiments.tasks.loading import DataCache
from multimax.experiments.tasks.task import Task
from multimax.experiments.trainer import measure, spread
from multimax.metrics import AttentionStatistics
from multimax.plots.style import words

PICTURES = 6  # photos that Grad-CAM is shown of
FIGURES_NEED = ("histogram", "rollout_discrepancy")


@dataclass
class Measured:
    """A model that was loaded and, if there is data, run.

    Attributes:
        model: in evaluation mode.
        data: the name of what it was run on.
        statistics: of its attention, None without data.
        pixels: some photos (n, channels, height, width), as the model takes them; None but for images.
    """

    model: PreTrainedModel
    data: str = ""
    statistics: AttentionStatistics | None = None
    pixels: Tensor | None = None

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        assert self.pixels is not None
        patch = getattr(self.model.config, "patch_size", None)
        if not isinstance(patch, int) and not (isinstance(patch, list | tuple) and len(patch) == 2):
            raise ValueError(f"multimax: expected a model with a size of patches, got patch_size {patch!r}")
        height, width = (patch, patch) if isinstance(patch, int) else patch
        return self.pixels.shape[-2] // height, self.pixels.shape[-1] // width


def load(folder: Path) -> PreTrainedModel:
    """A model that transformers has saved, converted by MultiMax or not; the class is one of transformers' own.

    Args:
        folder: with config.json and weights as safetensors.
    """
    config = _config(folder)
    named = config.get("architectures")
    name = named[0] if isinstance(named, list) and named else None
    cls = getattr(transformers, name, None) if isinstance(name, str) else None
    if not isinstance(cls, type) or not issubclass(cls, PreTrainedModel) or cls is PreTrainedModel:
        raise ValueError(f"multimax: expected a model of transformers in {str(folder)!r}, got architectures {named!r}")
    options: dict[str, Any] = {"use_safetensors": True, "output_loading_info": True}
    with told(f"expected a model that transformers can load in {str(folder)!r}"):
        found: Any = (
            from_pretrained(cls, folder, **options) if "multimax" in config else cls.from_pretrained(folder, **options)
        )
    model, info = found
    if info["missing_keys"]:  # transformers would draw them at random
        missing = ", ".join(sorted(info["missing_keys"]))
        raise ValueError(f"multimax: expected all weights of {name} in {str(folder)!r}, got none of {missing:.200}")
    loaded: PreTrainedModel = model
    loaded.eval()
    return loaded


def _config(folder: Path) -> dict[str, Any]:
    config = read_json(folder / CONFIG)
    if not isinstance(config, dict):
        raise ValueError(f"multimax: expected a model's settings in {str(folder / CONFIG)!r}, got {config!r:.60}")
    return config


class Tasks:
    """Data, read once for all models that take it alike."""

    def __init__(self) -> None:
        self.data = DataCache()
        self.first: dict[tuple[object, ...], str] = {}  # the folder of the first model that takes some data

    def of(self, source: Source) -> Task:
        """The data of a source, read as its model takes it."""
        settings, folder = source.settings, source.model
        assert settings is not None
        assert folder is not None
        settings = replace(settings, data=source.data)
        spec = tasks.get(settings.task)
        size = _config(folder).get("image_size")
        if spec.images and isinstance(size, int):
            settings = replace(settings, image_size=size)
        # a model for text brings its tokenizer, which is the same for all that were trained on the same data
        start = self.first.setdefault(spec.data_key(replace(settings, start="")), str(folder))
        with told(f"expected data of {settings.preset!r} for the model in {str(folder)!r}"):
            return self.data.task(replace(settings, start=start))


def measured(source: Source, task: Task | None, examples: int) -> Measured:
    """Loads the model, and runs it on examples that are spread over the test set.

    Args:
        source: with a model.
        task: its data; None to leave it out.
        examples: how many.
    """
    assert source.model is not None
    model = load(source.model)
    with observable_attention(model):  # raises if there is no attention
        pass
    if task is None:
        return Measured(model)
    task.use(model)
    batch = int(task.settings.trainer.get("per_device_eval_batch_size", 16))
    with told(f"expected the model in {str(source.model)!r} to take the data {task.data_name!r}"):
        statistics = measure(model, task, task.test, examples, min(batch, examples), others=FIGURES_NEED)
    pixels = None
    if task.spec.images:
        dataset: Any = task.test
        pixels = torch.stack([dataset[i]["pixel_values"] for i in spread(dataset, PICTURES)])
    return Measured(model, task.data_name, statistics, pixels)


def parameters_of(group: Group, found: Mapping[str, Measured]) -> Sweep:
    """What runs and models have learned, as the runs of a sweep."""
    runs = [] if group.sweep is None else list(group.sweep.runs)
    there = {run.label for run in runs}
    for label, model in found.items():
        if label not in there:
            result = {"status": FINISHED, "metrics": {}, "parameters": learned(model.model)}
            runs.append(Run(label, 0, {}, {}, result))
    return Sweep({"methods": dict.fromkeys(run.label for run in runs)}, runs, planned=False)


def measures_of(found: Iterable[tuple[str, Measured]]) -> list[list[str]]:
    """A table of what was measured, the head first: means over the layers."""
    found = [(label, model) for label, model in found if model.statistics is not None]
    names: dict[str, None] = {}
    for _, model in found:
        for layer in model.statistics.layers.values():  # type: ignore[union-attr]
            names |= dict.fromkeys(layer.measures)
    table = [["model", "parameters", "attention layers", *map(words, names)]]
    for label, model in found:
        assert model.statistics is not None
        row = [label, f"{sum(p.numel() for p in model.model.parameters()):,}", str(len(model.statistics.layers))]
        for name in names:
            layers = [layer.measures[name] for layer in model.statistics.layers.values() if name in layer.measures]
            means = [layer.mean for layer in layers if layer.count]
            row.append(f"{sum(means) / len(means):.4f}" if means else "-")
        table.append(row)
    return table
