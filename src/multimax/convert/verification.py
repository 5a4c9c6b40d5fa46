"""Whether a forward comes to every converted layer: nothing is left with softmax without a word."""

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from multimax.convert.sites import mark_of, marked, within

# Layers whose forward is their library's: there only the attention function knows that it was called.
TELL_THEMSELVES = ("transformers",)
RAN = "_multimax_ran"


class Reached:
    """A forward hook of a converted layer."""

    def __call__(self, module: nn.Module, args: object, output: object) -> None:
        """Notes it."""
        mark = mark_of(module)
        if mark is not None and not mark.reached:
            mark.reached = True


class Ran:
    """A forward hook of a model within the model, such as the one for images beside the one for text."""

    def __call__(self, module: nn.Module, args: object, output: object) -> None:
        """Notes it."""
        module.__dict__[RAN] = True


class FirstForward:
    """A forward hook of the model: looks once whether all have been reached. Models in it that did not run at all, as
    the one for images in a batch of text, are looked at when they do."""

    def __call__(self, model: nn.Module, args: object, output: object) -> None:
        """Raises if not."""
        if torch.compiler.is_compiling():
            return
        unreached = not_reached(model)
        if not unreached:
            forget(model)
            return
        waiting = [name for name, module in _parts(model) if not module.__dict__.get(RAN)]
        names = [name for name in unreached if not any(within(name, part) for part in waiting)]
        if names and not (model.training and _drops_layers(model)):
            raise _unreached(model, names)


def _unreached(model: nn.Module, names: list[str]) -> RuntimeError:
    return RuntimeError(
        f"multimax: expected the first forward of {type(model).__name__} to come to every converted layer, got none to "
        f"{', '.join(map(repr, names))}; these would be something else than reported. Take the conversion back with "
        "multimax.revert_ and leave them out (layers=, filter_fn=), or begin with an input that needs them"
    )


def _drops_layers(model: nn.Module) -> bool:
    """Whether a forward in training may skip layers at random (LayerDrop)."""
    configs = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
    names = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")
    return any(getattr(config, name, 0) for config in configs.values() for name in names)


def not_reached(model: nn.Module) -> list[str]:
    """Converted layers that no forward has come to."""
    return [name for name, _, mark in marked(model) if not mark.reached]


def _parts(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Models of transformers within the model that have converted layers."""
    parts = [(name, m) for name, m in model.named_modules() if name and hasattr(type(m), "base_model_prefix")]
    return [(name, part) for name, part in parts if next(marked(part), None) is not None]


def expect(model: nn.Module) -> None:
    """Has the first forward look."""
    for _, part in _parts(model):
        part.register_forward_hook(Ran())
    for _, module, mark in marked(model):
        if mark.library not in TELL_THEMSELVES:
            module.register_forward_hook(Reached())
    model.register_forward_hook(FirstForward())  # after the others: the model may be such a layer itself


def forget(model: nn.Module) -> None:
    """Takes the hooks away. By their kind: handles would not survive a deepcopy."""
    for module in model.modules():
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
    """A forward in evaluation that looks at once; training mode and random numbers stay as they are."""
    modes = [(module, module.training) for module in model.modules()]
    devices = {p.device for p in model.parameters() if p.device.type not in ("cpu", "meta")}
    with ExitStack() as generators:
        generators.enter_context(torch.random.fork_rng([]))
        for kind in {device.type for device in devices}:
            same = [device for device in devices if device.type == kind]
            generators.enter_context(torch.random.fork_rng(same, device_type=kind))
        model.eval()
        try:
            if isinstance(inputs, Mapping):
                model(**inputs)
            else:
                model(inputs)
        finally:
            for module, training in modes:
                module.training = training
    if names := not_reached(model):
        raise _unreached(model, names)
