"""Whether a forward comes to every converted layer: nothing is left with softmax without a word."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from multimax.convert.sites import mark_of, marked

# Layers whose forward is their library's: there only the attention function knows that it was called.
TELL_THEMSELVES = ("transformers",)


class Reached:
    """A forward hook of a converted layer."""

    def __call__(self, module: nn.Module, args: object, output: object) -> None:
        """Notes it."""
        mark = mark_of(module)
        if mark is not None and not torch.compiler.is_compiling():
            mark.reached = True


class FirstForward:
    """A forward hook of the model: looks once whether all have been reached."""

    def __call__(self, model: nn.Module, args: object, output: object) -> None:
        """Raises if not."""
        if torch.compiler.is_compiling() or (model.training and _drops_layers(model)):
            return
        names = not_reached(model)
        forget(model)
        if names:
            raise RuntimeError(
                f"multimax: expected the first forward of {type(model).__name__} to come to every converted layer, got "
                f"none to {', '.join(map(repr, names))}; these would be something else than reported. Leave them out "
                "(layers=, filter_fn=), or give an input that needs them (probe=)"
            )


def _drops_layers(model: nn.Module) -> bool:
    """Whether a forward in training may skip layers at random (LayerDrop)."""
    configs = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
    names = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")
    return any(getattr(config, name, 0) for config in configs.values() for name in names)


def not_reached(model: nn.Module) -> list[str]:
    """Converted layers that no forward has come to."""
    return [name for name, _, mark in marked(model) if not mark.reached]


def expect(model: nn.Module) -> None:
    """Has the first forward look."""
    for _, module, mark in marked(model):
        if mark.library not in TELL_THEMSELVES:
            module.register_forward_hook(Reached())
    model.register_forward_hook(FirstForward())  # after the others: the model may be such a layer itself


def forget(model: nn.Module) -> None:
    """Takes the hooks away. By their kind: handles would not survive a deepcopy."""
    for module in model.modules():
        for key, hook in list(module._forward_hooks.items()):
            if isinstance(hook, (FirstForward, Reached)):
                del module._forward_hooks[key]


@torch.no_grad()
def probe(model: nn.Module, inputs: Mapping[str, Any] | Tensor) -> None:
    """A forward in evaluation that looks at once; training mode and random numbers stay as they are."""
    modes = [(module, module.training) for module in model.modules()]
    devices = {p.device for p in model.parameters() if p.device.type != "cpu"}
    with torch.random.fork_rng(list(devices)):
        model.eval()
        try:
            if isinstance(inputs, Mapping):
                model(**inputs)
            else:
                model(inputs)
        finally:
            for module, training in modes:
                module.training = training
