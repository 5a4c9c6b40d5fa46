"""Operators of torch.library, as all rooms define and call them.

A room's call is a NamedTuple. Its fields are the operator's arguments, in order, so that the schema follows from it and
``Call(*args)`` gives the arguments their names back wherever torch hands them over as a tuple. Schemas and fakes exist
in Python alone: an implementation, compiled or not, only registers what it computes.
"""

from collections.abc import Callable
from typing import Any, get_type_hints

import torch
from torch import Tensor

LIBRARY = torch.library.Library("multimax", "FRAGMENT")


class Mutable:
    """The type of an argument that an operator writes to."""


TYPES: dict[Any, str] = {
    Mutable: "Tensor(a!)",
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    bool: "bool",
    float: "float",
    int: "int",
    list[bool]: "bool[]",
    str: "str",
    torch.dtype: "ScalarType",
}


def define(name: str, call: type, returns: int, fake: Callable[..., Any], **more: type) -> None:
    """Defines ``multimax::name``, which takes the fields of a call and returns so many tensors.

    Args:
        name: of the operator.
        call: a NamedTuple with fields of the types above.
        returns: how many tensors.
        fake: computes results without values from the same arguments, for the compiler.
        more: arguments after those of the call, with their types.
    """
    arguments = ", ".join(f"{TYPES[hint]} {field}" for field, hint in (get_type_hints(call) | more).items())
    LIBRARY.define(f"{name}({arguments}) -> ({', '.join(['Tensor'] * returns)})")
    torch.library.register_fake(f"multimax::{name}", fake, lib=LIBRARY)


def one_device(*tensors: Tensor | None) -> None:
    """What the dispatcher ensures for the real operator, the fake has to check for itself."""
    devices = {tensor.device for tensor in tensors if tensor is not None}
    if len(devices) > 1:
        raise RuntimeError(f"multimax: expected all tensors on one device, got {sorted(map(str, devices))}")


def traced(*tensors: Tensor | None) -> bool:
    """Whether a call has to go through autograd. The bare operator is quicker, but knows nothing of gradients and of
    torch.func's transforms."""
    if torch._C._are_functorch_transforms_active():
        return True
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return False


def apply_of(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """``function.apply``, which inspects signatures at every call for the sake of torch.func and the compiler: 50
    microseconds that are saved where neither is at work."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return function.apply
    plain: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return plain


def front(value: Tensor | None, dim: int | None, size: int) -> Tensor | None:
    """A tensor with vmap's dim in front, added if it has none."""
    if value is None:
        return None
    return value.unsqueeze(0).expand(size, *value.shape) if dim is None else value.movedim(dim, 0)
