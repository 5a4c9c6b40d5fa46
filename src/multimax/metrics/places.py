"""Where a layer is in a model: its block, and the stack of such blocks."""

from collections.abc import Iterator
from typing import NamedTuple

from torch import nn


class _Element(NamedTuple):
    """An element of a list of modules, on the way from a module up."""

    container: str  # the list
    name: str
    path: str  # from the element down to the module


class Place(NamedTuple):
    """The block that a layer is in, and the stack of such blocks, None if there is none."""

    block: str
    stack: str | None


class Places:
    """The places of a model's layers, each found once."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = dict(model.named_modules())
        self._found: dict[str, Place] = {}

    def _elements(self, name: str) -> Iterator[_Element]:
        parts = name.split(".") if name else []
        for i in range(len(parts), 0, -1):
            container = ".".join(parts[: i - 1])
            # a module with two names is listed under the first alone, and then its parent may be missing here
            if isinstance(self.modules.get(container), nn.ModuleList | nn.Sequential | nn.ModuleDict):
                yield _Element(container, ".".join(parts[:i]), ".".join(parts[i:]))

    def of(self, name: str) -> Place:
        """Block and stack of a layer.

        The stack is the closest list that has the same kind of layer at the same place in another element, unlike
        the list of a block's parts. In a model of one layer it is the closest list above the layer, if any.
        """
        if name not in self._found:
            self._found[name] = self._search(name)
        return self._found[name]

    def _search(self, name: str) -> Place:
        above = list(self._elements(name))
        # a list of the layers themselves comes last, since its elements may also run in parallel, as heads do
        for element in sorted(above, key=lambda element: not element.path):
            for index in self.modules[element.container]._modules:
                other = ".".join(part for part in (element.container, index, element.path) if part)
                if other != name and type(self.modules.get(other)) is type(self.modules[name]):
                    return Place(element.name, element.container)
        return next((Place(element.name, element.container) for element in above if element.path), Place(name, None))
