"""Operators of torch.library, as all operations define and call them.

An operation's call is a NamedTuple. Its fields are the operator's arguments, in order. The schema follows from it, and
``Call(*args)`` restores the arguments' names wherever torch passes them as a tuple. Schemas and fakes exist only in
Python: an implementation, compiled or not, only registers what it computes.
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
    """Defines ``multimax::name``, which takes the fields of a call and returns that many tensors.

    Args:
        name: of the operator.
        call: a NamedTuple with fields of the types above.
        returns: how many tensors.
        fake: computes results without values from the same arguments, for the compiler.
        more: further arguments after the fields of the call, with their types.
    """
    arguments = ", ".join(f"{TYPES[hint]} {field}" for field, hint in (get_type_hints(call) | more).items())
    LIBRARY.define(f"{name}({arguments}) -> ({', '.join(['Tensor'] * returns)})")
    torch.library.register_fake(f"multimax::{name}", fake, lib=LIBRARY)


def one_device(*tensors: Tensor | None) -> None:
    """All tensors on one device: the dispatcher ensures it for the real operator, but the fake has to check."""
    devices = {tensor.device for tensor in tensors if tensor is not None}
    if len(devices) > 1:
        raise RuntimeError(f"multimax: expected all tensors on one device, got {sorted(map(str, devices))}")


def traced(*tensors: Tensor | None) -> bool:
    """Whether a call has to go through autograd. The bare operator is faster, but supports neither gradients
    nor torch.func's transforms."""
    if torch._C._are_functorch_transforms_active():
        return True
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return False


def apply_of(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """``function.apply``, without the inspection of signatures that torch.func and the compiler need: 50
    microseconds per call that are saved where neither is active."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return function.apply
    plain: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return plain


def front(value: Tensor | None, dim: int | None, size: int) -> Tensor | None:
    """A tensor with vmap's dim in front, added if it has none."""
    if value is None:
        return None
    return value.unsqueeze(0).expand(size, *value.shape) if dim is None else value.movedim(dim, 0)
