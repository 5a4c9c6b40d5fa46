"""The configurations of a converted model: which attention runs, and what ``save_pretrained`` writes about it."""

import copy
from collections.abc import Mapping
from typing import Any

from torch import nn

from multimax.convert.outline import Outline, around, within
from multimax.convert.recipe import describe
from multimax.convert.sites import KINDS, Converted, function_of, mark_of
from multimax.convert.transformers.attention import LEFT, NAME, NAME_IN_NUMBERS, NAMES
from multimax.convert.transformers.interface import callers, why_not

BEFORE = "_multimax_attn_before"  # a module's configuration and attention implementation before
VERSION = 1  # of what is written into a configuration
# The attention implementation in the file. No model has one of that name, so plain from_pretrained refuses the file and
# shows these words.
REFUSED = "load with multimax.from_pretrained"
# Models that compute with the mask before attention, and need it in numbers even where they support sdpa.
MASK_IN_NUMBERS = ("beit", "deepseek_v4", "gemma4_audio")


class StillConverted:
    """A forward pre-hook of a converted attention module. ``set_attn_implementation``, and whatever calls it in
    transformers, would bring softmax back.

    Args:
        name: the attention implementation that the module needs.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, module: nn.Module, args: object) -> None:
        """Raises if the module would compute something else."""
        implementation = module.config._attn_implementation  # type: ignore[union-attr]
        if implementation != self.name:
            raise RuntimeError(
                f"multimax: expected the attention implementation {self.name!r} in a converted model, got "
                f"{implementation!r}; set it back with model.set_attn_implementation({self.name!r}), or undo the "
                "conversion with multimax.revert_"
            )


def forget_hooks(outline: Outline) -> None:
    """Removes the hooks, by their type: handles would not survive a deepcopy."""
    for module in outline.modules.values():
        for key, hook in list(module._forward_pre_hooks.items()):
            if isinstance(hook, StillConverted):
                module._forward_pre_hooks.pop(key, None)


def copy_configurations(outline: Outline, models: Mapping[str, Any]) -> None:
    """Gives the model, and each model within it, its own copies of the configurations."""
    outermost: str | None = None  # the model that we are in, on the way through the modules
    inside: dict[int, Any] = {}  # what was copied for it
    outside: dict[int, Any] = {}  # what was copied outside of such models
    for name, module in outline.modules.items():
        if name in models and (outermost is None or not within(name, outermost)):
            outermost, inside = name, {}
        config: Any = module.__dict__.get("config")
        if hasattr(config, "_attn_implementation"):
            module.__dict__[BEFORE] = (config, config._attn_implementation)
            copied = inside if outermost is not None and within(name, outermost) else outside
            module.config = copy.deepcopy(config, copied)


def switch_on(outline: Outline, models: Mapping[str, Any]) -> None:
    """Sets the attention implementation of the modules that call it, and of the models around them."""
    calling = callers(outline)
    outer = around(calling)
    module: Any
    for name, module in outline.modules.items():
        if name not in outer or not hasattr(module.__dict__.get("config"), "_attn_implementation"):
            continue
        config, before = module.__dict__[BEFORE]
        if before in NAMES:  # a configuration of another converted model
            before = "sdpa" if all(model._supports_sdpa for model in models.values()) else "eager"
            module.__dict__[BEFORE] = (config, before)
        numbers = before == "eager" or module.config.model_type in MASK_IN_NUMBERS
        module.config._attn_implementation_internal = NAME_IN_NUMBERS if numbers else NAME
        if mark_of(module) is not None:
            module.register_forward_pre_hook(StillConverted(module.config._attn_implementation))
        elif name in calling:
            if reason := why_not(module):
                raise ValueError(
                    f"multimax: expected to leave {type(module).__name__} with softmax, got one that cannot be "
                    f"combined with converted layers: {reason}"
                )
            module.__dict__[LEFT] = True


def switch_off(outline: Outline) -> None:
    """Restores the previous attention implementation."""
    holders: list[Any] = [module for module in outline.modules.values() if BEFORE in module.__dict__]
    copies: dict[int, tuple[Any, Any]] = {}
    for module in holders:
        config, before = module.__dict__[BEFORE]
        module.config._attn_implementation_internal = before
        forget_settings(module.config)
        copies[id(module.config)] = (module.config, config)
    # the original objects, unless somebody has changed something since
    same = all(copied.to_dict() == config.to_dict() for copied, config in copies.values())
    for module in holders:
        config, before = module.__dict__.pop(BEFORE)
        if same and config._attn_implementation == before:
            module.config = config
    for module in outline.modules.values():
        module.__dict__.pop(LEFT, None)


def write_settings(models: Mapping[str, Any], converted: list[Converted]) -> None:
    """Writes into the configuration of every model in it, outermost first, which layers are converted, and how."""
    outer = around([layer.name for layer in converted])
    written = set()
    for model_name, model in models.items():
        if model_name not in outer or id(model.config) in written:
            continue
        written.add(id(model.config))
        settings: dict[str, Any] = {"version": VERSION} | {kind: {} for kind in KINDS}
        for layer in converted:
            if within(layer.name, model_name):
                name = layer.name[len(model_name) :].removeprefix(".")
                settings[layer.mark.kind][name] = describe(function_of(layer.module))
        model.config.multimax = settings
        model.config.attn_implementation = REFUSED


def forget_settings(config: Any) -> None:
    """Removes from a configuration, and from those in it, what says that a model is converted."""
    config.__dict__.pop("multimax", None)
    if config.__dict__.get("attn_implementation") in (REFUSED, *NAMES):  # names, in files of earlier versions
        del config.attn_implementation
    for name in config.sub_configs:
        if getattr(config, name, None) is not None:
            forget_settings(getattr(config, name))
