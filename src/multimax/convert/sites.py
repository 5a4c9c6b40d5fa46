"""A place where a model has softmax, and what is said of it once it is converted."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from multimax.reweighting.layer import MultiMax
from multimax.reweighting.registry import Reweighter

KINDS = ("attention", "output")
MARK = "_multimax_mark"
NAMES = ("multimax", "reweight")  # what the child with the function is called in its layer: MultiMax, or another


@dataclass(frozen=True)
class Site:
    """A module with softmax in it, or after it.

    Args:
        name: full name in the model.
        module: the module.
        kind: "attention" or "output".
        library: the file of this package that converts it.
        heads: number of attention heads, if known.
        why_not: why it cannot be converted; None if it can.
        only: names of the functions that can stand in it; all, if empty.
    """

    name: str
    module: nn.Module
    kind: str
    library: str
    heads: int | None = None
    why_not: str | None = None
    only: tuple[str, ...] = ()


@dataclass
class Mark:
    """What a converted module carries.

    Args:
        library: the file of this package that converted it.
        kind: "attention" or "output".
        was: what it was, in words.
        before: what its library needs to bring it back.
        reached: whether a forward has come to its reweighting function.
    """

    library: str
    kind: str
    was: str
    before: dict[str, Any] = field(default_factory=dict)
    reached: bool = False


def mark_of(module: nn.Module) -> Mark | None:
    """The module's mark; None if it is not converted."""
    mark: Mark | None = module.__dict__.get(MARK)
    return mark


def set_mark(module: nn.Module, mark: Mark | None) -> None:
    """Marks a module as converted, or takes the mark away."""
    if mark is None:
        module.__dict__.pop(MARK, None)
    else:
        module.__dict__[MARK] = mark


def marked(model: nn.Module) -> Iterator[tuple[str, nn.Module, Mark]]:
    """The converted modules of a model, with full names."""
    for name, module in model.named_modules():
        mark = mark_of(module)
        if mark is not None:
            yield name, module, mark


def function_module(module: nn.Module) -> MultiMax | Reweighter | None:
    """The child with the reweighting function and its parameters."""
    for name in NAMES:
        child = module._modules.get(name)
        if isinstance(child, MultiMax | Reweighter):
            return child
    return None


def function_of(module: nn.Module) -> MultiMax | Reweighter:
    """The function of a converted module: its child, or the module itself, where nn.Softmax was."""
    found = function_module(module) or module
    assert isinstance(found, MultiMax | Reweighter)
    return found


def put_function(module: nn.Module, function: nn.Module) -> None:
    """Gives a layer its function."""
    module.add_module(NAMES[0] if isinstance(function, MultiMax) else NAMES[1], function)


def take_function(module: nn.Module) -> None:
    """Takes it away."""
    for name in NAMES:
        module._modules.pop(name, None)


def within(name: str, outer: str) -> bool:
    """Whether a module is another one, or inside it, by their full names."""
    return outer in (name, "") or name.startswith(f"{outer}.")


def class_name(module: nn.Module) -> str:
    """The class with the library it is from: ``torch.nn.Linear``, ``transformers.BertSelfAttention``."""
    own = type(module)
    library = own.__module__.split(".")[0]
    return f"torch.nn.{own.__name__}" if own.__module__.startswith("torch.nn.") else f"{library}.{own.__name__}"
