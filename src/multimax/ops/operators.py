"""Operators of torch.library, as all operations define and call them.

An operation's call is a NamedTuple. Its fields are the operator's arguments, in order. The schema follows from it, and
``Call(*args)`` restores the arguments' names wherever torch passes them as a tuple. Schemas and fakes exist only in
Python: an implementation, compiled or not, only registers what it computes.
"""

from collections.abc import Callable, Iterable
from typing import Any, get_type_hints

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensorMode

LIBRARY = torch.library.Library("multimax", "FRAGMENT")
DECOMPOSED: dict[Any, Callable[..., Any]] = {}  # by operator


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


def decompose(name: str, call: type, formula: Callable[..., Any]) -> None:
    """Gives ``multimax::name`` a decomposition to plain PyTorch: for exporters that know no operators but torch's own.

    ``run_decompositions`` of an exported program applies it, with whatever table, and so does ``torch.onnx.export``.
    Compilers keep the kernels. Hence a rule of its own: torch's tables of decompositions are the compilers' too.

    Args:
        name: of the operator.
        call: the NamedTuple that it was defined with.
        formula: the operator's results from a call, and from whatever arguments it has besides; NotImplemented for a
            call that stays as it is.
    """
    operator = getattr(torch.ops.multimax, name).default
    fields = len(get_type_hints(call))

    def decomposition(*args: Any) -> Any:
        return formula(call(*args[:fields]), *args[fields:])

    def rule(mode: FunctionalTensorMode, func: Any, types: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        if _decomposing(mode):
            with mode:
                result = decomposition(*args)
            if result is not NotImplemented:
                return result
        return mode.__torch_dispatch__(func, types, args, kwargs)

    DECOMPOSED[operator] = decomposition
    torch.library.register_torch_dispatch(f"multimax::{name}", FunctionalTensorMode, rule, lib=LIBRARY)


def _decomposing(mode: FunctionalTensorMode) -> bool:
    """Whether run_decompositions is at work, and not torch.export itself, or AOTInductor."""
    exporting = torch.compiler.is_exporting() and not mode.pre_dispatch
    return exporting and torch._guards.CompileContext.try_get() is None


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


def recorded() -> bool:
    """Whether torch.jit.trace is recording."""
    return bool(torch.jit.is_tracing())  # type: ignore[attr-defined]


def distinct(args: Iterable[Any]) -> list[Any]:
    """The arguments, a tensor that comes again as a view of it: the compiler refuses one that comes twice."""
    found: list[Any] = []
    for arg in args:
        again = isinstance(arg, Tensor) and any(arg is other for other in found)
        found.append(arg.view_as(arg) if again else arg)
    return found


def apply_of(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """``function.apply``, without the inspection of signatures that torch.func and the compiler need: 50
    microseconds per call that are saved where neither is active."""
    if torch.compiler.is_compiling():
        return lambda *args: function.apply(*distinct(args))
    if torch._C._are_functorch_transforms_active():
        return function.apply
    plain: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return plain


def front(value: Tensor | None, dim: int | None, size: int) -> Tensor | None:
    """A tensor with vmap's dim in front, added if it has none."""
    if value is None:
        return None
    return value.unsqueeze(0).expand(size, *value.shape) if dim is None else value.movedim(dim, 0)
