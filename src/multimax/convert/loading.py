"""A checkpoint of the model as it was before, loaded into the converted one."""

from typing import Any

import torch
from torch import Tensor, nn

from multimax.modules import MultiMax
from multimax.reweighting.modules import Reweighter


def _softmax_if_missing(module: nn.Module, state_dict: dict[str, Tensor], prefix: str, *args: Any) -> None:
    """Lets a layer take a state_dict that knows the layer, but not its reweighting function: MultiMax becomes softmax,
    and another function stays as it is."""
    for name, child in module.named_children():
        own = child.state_dict(prefix=f"{prefix}{name}.") if isinstance(child, MultiMax | Reweighter) else {}
        known = any(key.startswith(prefix) and key not in own for key in state_dict)
        if known and not any(key in state_dict for key in own):
            for key, value in own.items():
                state_dict[key] = torch.zeros_like(value) if key.endswith("coefs") else value.detach().clone()


def allow_softmax(layer: nn.Module) -> None:
    """Has the layer take such a state_dict."""
    forbid_softmax(layer)
    layer.register_load_state_dict_pre_hook(_softmax_if_missing)


def forbid_softmax(layer: nn.Module) -> None:
    """Has it raise again if keys are missing. The hook is found by its function: a handle would not survive a copy."""
    for key, hook in list(layer._load_state_dict_pre_hooks.items()):
        if getattr(hook, "hook", None) is _softmax_if_missing:
            del layer._load_state_dict_pre_hooks[key]
