"""The modules of a model, gathered in one walk."""

from collections.abc import Collection

from torch import nn


class Outline:
    """What a conversion has to know about a model's structure. It is passed on, so the model is walked only once.

    Args:
        model: the model.

    Attributes:
        modules: each module once, by its first full name, in the order of ``named_modules``.
        types: the classes of these modules, with the name of the first module of each.
        packages: the outermost packages of these classes and of their bases.
        repeated: names of modules that are in several places of the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.modules: dict[str, nn.Module] = {}
        self.types: dict[type, str] = {}
        self.repeated: set[str] = set()
        first_names: dict[int, str] = {}
        stack: list[tuple[str, nn.Module]] = [("", model)]
        while stack:
            name, module = stack.pop()
            if id(module) in first_names:
                self.repeated.add(first_names[id(module)])
                continue
            first_names[id(module)] = name
            self.modules[name] = module
            self.types.setdefault(type(module), name)
            prefix = f"{name}." if name else ""
            for child_name, child in reversed(list(module._modules.items())):
                if child is not None:
                    stack.append((prefix + child_name, child))
        self.packages = {base.__module__.partition(".")[0] for cls in self.types for base in cls.__mro__}

    def name_of(self, module: nn.Module) -> str | None:
        """The first full name of a module; None if it is not in the model."""
        return next((name for name, other in self.modules.items() if other is module), None)


def within(name: str, outer: str) -> bool:
    """Whether a module is another one, or inside it, by their full names."""
    return outer in (name, "") or name.startswith(f"{outer}.")


def around(names: Collection[str]) -> set[str]:
    """The full names of these modules, and of all modules around them."""
    found = {""} if names else set()
    for name in names:
        while name and name not in found:
            found.add(name)
            name = name.rpartition(".")[0]
    return found
