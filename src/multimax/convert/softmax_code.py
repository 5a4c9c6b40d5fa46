"""Whether a class computes softmax in its own code, where it cannot be replaced from outside."""

import inspect
from collections.abc import Iterator
from types import CodeType, FunctionType
from weakref import WeakKeyDictionary

TELLING = {"softmax", "log_softmax", "scaled_dot_product_attention"}  # names in code that computes attention
_known: WeakKeyDictionary[type, bool] = WeakKeyDictionary()


def package(cls: type) -> str:
    """The outermost package of a class."""
    return cls.__module__.partition(".")[0]


def computes_softmax(cls: type) -> bool:
    """Whether the code of a class, or functions of its package that it calls, has softmax or attention in it."""
    if cls not in _known:
        _known[cls] = any(
            TELLING & set(_names(function, package(base), set()))
            for base in cls.__mro__
            if package(base) != "torch"
            for function in map(_function, vars(base).values())
            if function is not None
        )
    return _known[cls]


def _function(member: object) -> FunctionType | None:
    """The function behind a method, a static method or a decorated one."""
    member = getattr(member, "__func__", member)
    member = inspect.unwrap(member) if callable(member) else member
    return member if isinstance(member, FunctionType) else None


def _names(function: FunctionType, within: str, seen: set[FunctionType]) -> Iterator[str]:
    """All names in a function's code, and in the code of functions of its package that it calls by name."""
    seen.add(function)
    codes = [function.__code__]
    for code in codes:
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        for name in code.co_names:
            yield name
            called = function.__globals__.get(name)
            if isinstance(called, FunctionType) and called not in seen and called.__module__.startswith(f"{within}."):
                yield from _names(called, within, seen)
