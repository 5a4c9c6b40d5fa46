"""The reweighting functions of a run: from settings to a converted model."""

from typing import Any

from torch import nn

from multimax import reweighting
from multimax.convert import convert_
from multimax.experiments.settings import TRAINED, Settings
from multimax.reweighting.layer import MultiMax
from multimax.training.groups import reweighting_modules

TOP = 0.5  # the share of the keys that top-k keeps unless told


def attention_function(settings: Settings, heads: int) -> nn.Module:
    """The module for the attention layers.

    Args:
        settings: of the run.
        heads: of an attention layer.
    """
    per_head = heads if settings.per_head else None
    options = dict(settings.attention_options)
    if settings.attention == "multimax":
        return _multimax(settings, heads=per_head, **options)
    if settings.attention == "softmax":
        return _softmax(settings.temperature, per_head)
    if settings.attention == "topk":
        options.setdefault("k", TOP)
    if settings.attention == "attnscale":
        options.setdefault("heads", heads)  # one per head, as published
    return reweighting.module(settings.attention, **options)


def _multimax(settings: Settings, **options: Any) -> MultiMax:
    return MultiMax(
        settings.order, terms=settings.terms, init=settings.init, **{"monotone": settings.monotone, **options}
    )


def _softmax(temperature: float | str, heads: int | None = None) -> nn.Module:
    if temperature == TRAINED:
        return reweighting.Softmax(learn=True, heads=heads)
    return reweighting.Softmax(float(temperature))


def output_function(settings: Settings) -> nn.Module | None:
    """The module for the output layer; None where it stays as it is, and a loss does the rest."""
    if settings.output == "multimax":
        return _multimax(settings)
    if settings.output == "softmax" and settings.output_temperature != 1:
        return _softmax(settings.output_temperature)
    return None


def convert(model: nn.Module, settings: Settings) -> None:
    """Puts the functions of the settings into a model with softmax, in place. Plain softmax leaves it as it is."""
    output = output_function(settings)
    plain = settings.attention == "softmax" and settings.temperature == 1
    if plain and output is None:
        return
    heads: int = model.config.num_attention_heads  # type: ignore[union-attr, assignment]
    part = "attention" if settings.attention_in == "all" else settings.attention_in
    functions: dict[str, Any] = {part: attention_function(settings, heads)}
    if output is not None:
        functions["output"] = output
    convert_(model, where=tuple(functions), reweight=functions)
    for _, module in reweighting_modules(model):
        if isinstance(module, MultiMax):  # initial values differ from layer to layer, as if it had been built so
            module.reset_parameters()
