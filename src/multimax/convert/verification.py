"""Whether a forward reaches every converted layer: no layer silently keeps softmax."""

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from multimax.convert.adapters import place
from multimax.convert.library import Library, converter, in_use
from multimax.convert.outline import Outline, around, within
from multimax.convert.sites import Converted, mark_of, marked_in
from multimax.metrics.evaluation import evaluating

RAN = "_multimax_ran"


class Reached:
    """A forward hook of a converted layer."""

    def __call__(self, module: nn.Module, args: object, output: object) -> None:
        """Notes it."""
        mark = mark_of(module)
        if mark is not None and not mark.reached:
            mark.reached = True


class Ran:
    """A forward hook of a model within the model, such as the one for images next to the one for text."""

    def __call__(self, module: nn.Module, args: object, output: object) -> None:
        """Notes it."""
        module.__dict__[RAN] = True


class FirstForward:
    """A forward hook of the model: checks once that all layers have been reached. Models in it that did not run at all,
    such as the one for images in a batch of text, are checked when they do."""

    def __call__(self, model: nn.Module, args: object, output: object) -> None:
        """Raises if not."""
        if torch.compiler.is_compiling():
            return
        outline = Outline(model)
        converted = marked_in(outline)
        unreached = _not_reached(converted)
        if not unreached:
            forget(outline)
            return
        parts = _parts(outline, in_use(outline), converted)
        waiting = [name for name in parts if not outline.modules[name].__dict__.get(RAN)]
        names = [name for name in unreached if not any(within(name, part) for part in waiting)]
        if names and not (model.training and _drops_layers(outline)):
            raise _unreached(model, names)


def _unreached(model: nn.Module, names: list[str]) -> RuntimeError:
    return RuntimeError(
        f"multimax: expected the first forward of {type(model).__name__} to reach every converted layer, got none to "
        f"{', '.join(map(repr, names))}; these are not what the report says. Undo the conversion with "
        "multimax.revert_ and leave them out (layers=, filter_fn=), or start with an input that needs them"
    )


def _drops_layers(outline: Outline) -> bool:
    """Whether a forward in training may skip layers at random (LayerDrop)."""
    configs = {id(c): c for m in outline.modules.values() if (c := getattr(m, "config", None)) is not None}
    names = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")
    return any(getattr(config, name, 0) for config in configs.values() for name in names)


def _not_reached(converted: list[Converted]) -> list[str]:
    """Converted layers that no forward has reached, nor what PEFT trains in their place."""
    reached = {place(layer.name) for layer in converted if layer.mark.reached}
    return [layer.name for layer in converted if place(layer.name) not in reached]


def _parts(outline: Outline, libraries: list[Library], converted: list[Converted]) -> list[str]:
    """Models within the model that have converted layers."""
    outer = around([layer.name for layer in converted]) - {""}
    return [name for library in libraries for name in library.models(outline) if name in outer]


def expect(outline: Outline, libraries: list[Library], converted: list[Converted]) -> None:
    """Makes the first forward check."""
    for name in _parts(outline, libraries, converted):
        outline.modules[name].register_forward_hook(Ran())
    for layer in converted:
        if not converter(layer.mark.converter).notes_reached:
            layer.module.register_forward_hook(Reached())
    outline.model.register_forward_hook(FirstForward())  # after the others: the model may be such a layer itself


def forget(outline: Outline) -> None:
    """Removes the hooks, by their type: handles would not survive a deepcopy."""
    for module in outline.modules.values():
        module.__dict__.pop(RAN, None)
        for key, hook in list(module._forward_hooks.items()):
            if isinstance(hook, (FirstForward, Ran, Reached)):
                module._forward_hooks.pop(key, None)


def check_probe(inputs: object) -> None:
    """What :func:`probe` takes."""
    if not isinstance(inputs, Mapping | Tensor):
        raise TypeError(
            f"multimax: expected probe to be a tensor or a mapping of keyword arguments, got {type(inputs).__name__}"
        )


@torch.no_grad()
def probe(model: nn.Module, inputs: Mapping[str, Any] | Tensor) -> None:
    """A forward in evaluation that checks right away; training mode and random numbers do not change."""
    devices = {p.device for p in model.parameters() if p.device.type not in ("cpu", "meta")}
    with ExitStack() as context:
        context.enter_context(torch.random.fork_rng([]))
        for kind in {device.type for device in devices}:
            same = [device for device in devices if device.type == kind]
            context.enter_context(torch.random.fork_rng(same, device_type=kind))
        context.enter_context(evaluating(model))
        if isinstance(inputs, Mapping):
            model(**inputs)
        else:
            model(inputs)
    if names := _not_reached(marked_in(Outline(model))):
        raise _unreached(model, names)
