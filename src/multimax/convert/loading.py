"""A checkpoint of the model as it was before, loaded into the converted one."""

from typing import Any

import torch
from torch import Tensor, nn


def softmax_if_missing(module: nn.Module, state_dict: dict[str, Tensor], prefix: str, *args: Any) -> None:
    """Lets a reweighting module take a state_dict that knows its layer, but not the module: MultiMax becomes softmax,
    and another function stays as it is.

    A hook for ``register_load_state_dict_pre_hook``.
    """
    own = module.state_dict()
    layer = prefix.rstrip(".").rpartition(".")[0]
    layer = f"{layer}." if layer else ""
    known = any(key.startswith(layer) and not key.startswith(prefix) for key in state_dict)
    if known and not any(prefix + name in state_dict for name in own):
        for name, value in own.items():
            state_dict[prefix + name] = torch.zeros_like(value) if name == "coefs" else value.detach().clone()
