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
FAKES: dict[str, Callable[..., Any]] = {}  # by name
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
    FAKES[name] = fake


def decompose(name: str, call: type, formula: Callable[..., Any]) -> None:
    """Gives ``multimax::name`` a decomposition to plain PyTorch: for exporters that know no operators but torch's own.

    ``torch.onnx.export`` finds it here; for ``run_decompositions`` users ask for the table, see `decompositions`.
    Compilers do not look here, and keep the kernels.

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

    DECOMPOSED[operator] = decomposition
    torch._decomp.register_decomposition([operator])(decomposition)
    # without this a decomposition comes before the fake where sizes are symbols
    torch._decomp.register_decomposition([operator], type="meta")(FAKES[name])


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Decompositions of this library's operators to torch's own, added to torch's default ones.

    An exported program has operators of this library, such as ``multimax::attention_forward``, and runs where
    ``multimax`` is installed. This table removes them: the program then runs anywhere, slower, and holds attention
    scores as matrices. ``torch.onnx.export`` does so by itself. To export plain PyTorch in the first place, see
    :func:`multimax.implementation`.

    Returns:
        A table for ``run_decompositions``.

    Example:
        >>> import torch, multimax
        >>> layer = multimax.MultiheadAttention(8, 2, batch_first=True).eval()
        >>> program = torch.export.export(layer, (torch.randn(1, 5, 8),) * 3, {"need_weights": False})
        >>> plain = program.run_decompositions(multimax.decompositions())
        >>> any("multimax." in str(node.target) for node in plain.graph.nodes)
        False
    """
    table: dict[Any, Callable[..., Any]] = torch.export.default_decompositions()
    table.update(DECOMPOSED)
    return table


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
