"""Which modules of a model get their attention function from transformers' interface, and what is known about them."""

import inspect
from functools import cache
from types import CodeType

from torch import nn

from multimax.convert.outline import Outline

HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head")


def callers(outline: Outline) -> dict[str, nn.Module]:
    """The attention modules that use the interface, by full name."""
    others = [cls for cls in outline.types if not cls.__module__.startswith("torch.")]  # it knows nothing of it
    types = {cls for cls in others if _mentions(cls, "ALL_ATTENTION_FUNCTIONS")}
    return {name: module for name, module in outline.modules.items() if type(module) in types}


def _mentions(cls: type, words: str) -> bool:
    """Whether words occur in the source of a class's forward."""
    code = getattr(inspect.unwrap(cls.forward), "__code__", None)  # type: ignore[attr-defined]
    return code is not None and words in _source(code)


@cache
def _source(code: CodeType) -> str:
    try:
        return inspect.getsource(code)
    except (OSError, TypeError):
        return ""


def number_of_heads(module: nn.Module) -> int | None:
    """How many query heads an attention module has, if it says so."""
    for holder in (module, getattr(module, "config", None)):
        for name in HEADS:
            value = getattr(holder, name, None)
            if isinstance(value, int):
                return value
    return None


def why_not(module: nn.Module) -> str | None:
    """Why an attention module cannot be converted; None if it can."""
    if _mentions(type(module), "block_indices=") and getattr(module, "indexer", None) is not None:
        return f"{type(module).__name__} chooses blocks of keys outside its mask"
    return None


def only(module: nn.Module) -> tuple[str, ...]:
    """The functions that an attention module can have; all, if empty. Sinks take part in a softmax's sum."""
    return ("multimax",) if _mentions(type(module), "s_aux=") else ()
