"""A checkpoint of the model as it was before, loaded into the converted one."""

from typing import Any

from torch import Tensor, nn

from multimax.convert.recipe import describe, from_description
from multimax.convert.sites import LEARNED, NAMES
from multimax.reweighting.layer import MultiMax, state_as_softmax
from multimax.reweighting.registry import Reweighter


def _of_function(key: str) -> bool:
    """Whether a key in a file is of a reweighting function, which something may have wrapped."""
    *layers, name = key.split(".")
    return name in LEARNED and not set(NAMES).isdisjoint(layers)


def _softmax_if_missing(model: nn.Module, state_dict: dict[str, Tensor], prefix: str, *args: Any) -> None:
    """Lets a model load a state_dict that lacks only its reweighting functions: MultiMax becomes softmax, and other
    functions stay as they are. A part of a checkpoint, such as one of several files, says nothing about the rest."""
    functions = {
        n: m for n, m in model.named_modules(prefix=prefix.rstrip(".")) if isinstance(m, MultiMax | Reweighter)
    }
    new_keys = {key for name, m in functions.items() for key in m.state_dict(prefix=f"{name}.")}
    if not new_keys or any(key in new_keys or _of_function(key) for key in state_dict):
        return
    there: dict[int | str, bool] = {}  # tied weights count as one: files may hold only one of them
    for key, value in model.state_dict(prefix=prefix, keep_vars=True).items():
        if key not in new_keys:
            same = id(value) if isinstance(value, Tensor) else key
            there[same] = there.get(same, False) or key in state_dict
    if not there or not all(there.values()):
        return
    for name, module in functions.items():
        meta = any(parameter.is_meta for parameter in module.parameters())  # there are no values yet
        values = state_as_softmax(from_description(describe(module)) if meta else module)
        state_dict.update({f"{name}.{key}": value for key, value in values.items()})


def allow_softmax(model: nn.Module) -> None:
    """Lets the model load such a state_dict."""
    model.register_load_state_dict_pre_hook(_softmax_if_missing)


def forbid_softmax(model: nn.Module) -> None:
    """Lets it raise again if keys are missing. The hook is found by its function: a handle would not survive a copy."""
    for key, hook in list(model._load_state_dict_pre_hooks.items()):
        if getattr(hook, "hook", None) is _softmax_if_missing:
            model._load_state_dict_pre_hooks.pop(key, None)
