"""The list of tasks, from which settings, commands, tables and reports take what they need."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from multimax.ops import checks

MEASURES = ("multi_modality", "sparsity", "entropy")


class Metric(NamedTuple):
    """How a metric is shown: its title, what it is multiplied with, digits after the point, which way is better."""

    title: str
    factor: float
    digits: int
    better: Literal["higher", "lower"]


@dataclass(frozen=True)
class TaskSpec:
    """What is to be known of a task before its data is loaded.

    Attributes:
        name: in settings, commands and tables.
        about: what its model does, in two words.
        place: the module and the class of its :class:`~multimax.experiments.tasks.task.Task`.
        preset: that it takes unless told.
        metrics: of its evaluations, the first of them that by which methods are compared.
        data: names of the settings that decide what is loaded.
        needs: what data it takes, in words.
        included: the name of data that comes with a package, if there is such.
        sizes: of its model by name: options of transformers' configuration.
        measures: of attention, by names of :mod:`multimax.metrics`.
        only: names of settings that no task may set but those that list them.
        at_end: those of its metrics that only the last evaluation has.
        images: whether its examples are images, as figures show them.
    """

    name: str
    about: str
    place: str
    preset: str
    metrics: Mapping[str, Metric]
    data: tuple[str, ...]
    needs: str = "a folder, a file, or hub:owner/name"
    included: str = ""
    sizes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    measures: tuple[str, ...] = MEASURES
    only: tuple[str, ...] = ()
    at_end: tuple[str, ...] = ()
    images: bool = False

    @property
    def main(self) -> str:
        """The metric by which methods are compared."""
        return next(iter(self.metrics))

    def kind(self) -> Any:
        """Its class, which needs transformers: imported when it is asked for."""
        module, _, name = self.place.partition(":")
        return getattr(importlib.import_module(module), name)

    def data_key(self, settings: object) -> tuple[object, ...]:
        """Equal for settings that load the same data."""
        return (self.name, *(getattr(settings, name) for name in self.data))

    def size(self, name: str) -> Mapping[str, Any]:
        """The options of a size by name."""
        if name not in self.sizes:
            raise ValueError(f"multimax: expected a size of {self.name} out of {', '.join(self.sizes)}, got {name!r}")
        return self.sizes[name]


def _vit(width: int, layers: int, heads: int) -> dict[str, Any]:
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    return {**sizes, "intermediate_size": 4 * width}


def _gpt(width: int, layers: int, heads: int) -> dict[str, Any]:
    return {"n_embd": width, "n_layer": layers, "n_head": heads, "n_inner": 4 * width}


def _marian(width: int, layers: int, heads: int, inner: int) -> dict[str, Any]:
    both = {"layers": layers, "attention_heads": heads, "ffn_dim": inner}
    return {"d_model": width} | {f"{side}_{key}": v for side in ("encoder", "decoder") for key, v in both.items()}


SPECS = (
    TaskSpec(
        name="vision",
        about="classify images",
        place="multimax.experiments.tasks.vision:Vision",
        preset="cpu-digits",
        metrics={"accuracy": Metric("accuracy, %", 100, 2, "higher")},
        data=("data", "test"),
        needs="a folder of images, hub:owner/name, or digits, for which there is nothing to download",
        included="digits",
        sizes={
            "digits": _vit(64, 4, 4),
            "mini": _vit(96, 6, 3),
            "deit-tiny": _vit(192, 12, 3),
            "deit-small": _vit(384, 12, 6),
            "deit-base": _vit(768, 12, 12),
        },
        measures=(*MEASURES, "patch_similarity"),
        only=("patch_diversification", "pooling", "stochastic_depth", "image_size", "augmentation"),
        images=True,
    ),
    TaskSpec(
        name="language",
        about="model language",
        place="multimax.experiments.tasks.language:Language",
        preset="cpu-text",
        metrics={
            "perplexity": Metric("perplexity", 1, 2, "lower"),
            "token_perplexity": Metric("perplexity per token", 1, 2, "lower"),
        },
        data=("data", "test", "tokenizer", "vocabulary", "length", "stride", "longer", "start"),
        needs="a file or folder of text, hub:owner/name, or python, for which there is nothing to download",
        included="python",
        only=("tokenizer", "vocabulary", "length", "stride", "longer", "positions"),
        sizes={"mini": _gpt(128, 4, 4), "small": _gpt(256, 6, 8), "paper": _gpt(512, 6, 8)},
    ),
    TaskSpec(
        name="translation",
        about="translate sentences",
        place="multimax.experiments.tasks.translation:Translation",
        preset="cpu-multi30k",
        metrics={
            "bleu": Metric("BLEU", 1, 2, "higher"),
            "chrf": Metric("chrF", 1, 2, "higher"),
            "token_perplexity": Metric("perplexity per token", 1, 2, "lower"),
        },
        data=("data", "test", "test_set", "languages", "vocabulary", "length", "start"),
        needs="a folder of parallel text such as train.de and train.en, or hub:owner/name",
        only=("test_set", "languages", "beams", "vocabulary", "length", "attention_in"),
        at_end=("bleu", "chrf"),
        sizes={
            "mini": _marian(128, 3, 4, 256),
            "small": _marian(256, 4, 4, 512),
            "paper": _marian(512, 6, 4, 1024),
        },
    ),
)


def names() -> tuple[str, ...]:
    """Of all tasks."""
    return tuple(spec.name for spec in SPECS)


def get(name: str) -> TaskSpec:
    """A task by name.

    Example:
        >>> from multimax.experiments import tasks
        >>> tasks.get("translation").main
        'bleu'
    """
    checks.choice("task", name, names())
    return next(spec for spec in SPECS if spec.name == name)


def takers(setting: str) -> tuple[str, ...]:
    """The tasks that take a setting, if it is not for all.

    Example:
        >>> from multimax.experiments import tasks
        >>> tasks.takers("length"), tasks.takers("seed")
        (('language', 'translation'), ())
    """
    return tuple(spec.name for spec in SPECS if setting in spec.only)


def main_metrics() -> tuple[str, ...]:
    """The main metric of each task."""
    return tuple(dict.fromkeys(spec.main for spec in SPECS))
