"""A place where a model has softmax, and how it is marked once it is converted."""

import re
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import nn

from multimax.convert.outline import Outline
from multimax.reweighting.layer import MultiMax
from multimax.reweighting.registry import Reweighter, inner

KINDS = ("attention", "output")
ROLES = ("encoder", "decoder", "cross")  # of attention, in models with an encoder and a decoder
CROSS = re.compile("encoder_attn|EncDecAttention|cross_?att|multihead_attn", re.IGNORECASE)
MARK = "_multimax_mark"
NAMES = ("multimax", "reweight")  # what the child with the function is called in its layer: MultiMax, or another
LEARNED = ("coefs", "knots", "log_temperature", "shape", "omega")  # what parameters of such children are called


@dataclass(frozen=True)
class Site:
    """A module with softmax in it, or after it.

    Args:
        name: full name in the model.
        module: the module.
        kind: "attention" or "output".
        converter: name of what converts it, see library.py.
        heads: number of attention heads, if known.
        why_not: why it cannot be converted; None if it can.
        only: names of the functions that can be used in it; all, if empty.
    """

    name: str
    module: nn.Module
    kind: str
    converter: str
    heads: int | None = None
    why_not: str | None = None
    only: tuple[str, ...] = ()

    @property
    def role(self) -> str:
        """Of attention in a model with an encoder and a decoder: where it stands, by its name; "" if that tells none.

        Example:
            >>> from torch import nn
            >>> from multimax.convert.sites import Site
            >>> Site("model.decoder.layers.0.encoder_attn", nn.Identity(), "attention", "").role
            'cross'
        """
        if CROSS.search(self.name):
            return "cross"
        return next((role for role in ("decoder", "encoder") if role in self.name), "")


@dataclass
class Mark:
    """What a converted module carries.

    Args:
        converter: name of what converted it, see library.py.
        kind: "attention" or "output".
        was: what it was, in words.
        before: what is needed to restore it.
        reached: whether a forward has reached its reweighting function.
    """

    converter: str
    kind: str
    was: str
    before: dict[str, Any] = field(default_factory=dict)
    reached: bool = False


class Converted(NamedTuple):
    """A converted layer.

    Args:
        name: full name in the model.
        module: the module that is there now.
        mark: what it carries.
    """

    name: str
    module: nn.Module
    mark: Mark


def mark_of(module: nn.Module) -> Mark | None:
    """The module's mark; None if it is not converted."""
    mark: Mark | None = module.__dict__.get(MARK)
    return mark


def set_mark(module: nn.Module, mark: Mark | None) -> None:
    """Marks a module as converted, or removes the mark."""
    if mark is None:
        module.__dict__.pop(MARK, None)
    else:
        module.__dict__[MARK] = mark


def marked_in(outline: Outline) -> list[Converted]:
    """The converted layers of a model."""
    return [Converted(name, m, m.__dict__[MARK]) for name, m in outline.modules.items() if MARK in m.__dict__]


def marked(model: nn.Module) -> list[Converted]:
    """The same, for a model without an outline."""
    return marked_in(Outline(model))


def function_module(module: nn.Module) -> nn.Module:
    """What holds the reweighting function of a converted module: its child, which may have been wrapped since, or the
    module itself, where nn.Softmax was."""
    for name in NAMES:
        child = module._modules.get(name)
        if child is not None:
            return child
    if isinstance(module, Reweighter):
        return module
    raise RuntimeError(
        f"multimax: expected {' or '.join(map(repr, NAMES))} in a converted {class_name(module)}, got none; undo the "
        "conversion with multimax.revert_, and do not remove or rename it"
    )


def function_of(module: nn.Module) -> Reweighter:
    """The same without what wraps it."""
    function = inner(function_module(module))
    assert function is not None
    return function


def has_other_forward(module: nn.Module) -> bool:
    """Whether a forward was put on the object that is not its class's. accelerate leaves the class's own behind when
    its hooks are removed: that one is dropped, since it would stay the same if the class changes."""
    forward = module.__dict__.get("forward")
    if getattr(forward, "__func__", None) is type(module).forward and getattr(forward, "__self__", None) is module:
        del module.__dict__["forward"]
        return False
    return forward is not None


def put_function(module: nn.Module, function: nn.Module) -> None:
    """Gives a layer its function."""
    module.add_module(NAMES[0] if isinstance(function, MultiMax) else NAMES[1], function)


def take_function(module: nn.Module) -> None:
    """Removes it."""
    for name in NAMES:
        module._modules.pop(name, None)


def class_name(module: nn.Module) -> str:
    """The class with the library it is from: ``torch.nn.Linear``, ``transformers.BertSelfAttention``."""
    cls = type(module)
    package = cls.__module__.partition(".")[0]
    return f"torch.nn.{cls.__name__}" if cls.__module__.startswith("torch.nn.") else f"{package}.{cls.__name__}"
