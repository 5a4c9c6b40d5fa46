"""What ``convert_`` asks of a library of models, and the list of the libraries it knows.

To add a library: a file with a subclass of :class:`Library`, an instance of it as ``CONVERTER``, and a line in
``LIBRARIES``.
"""

import importlib
from abc import abstractmethod
from typing import ClassVar, Protocol

from torch import nn

from multimax.convert.outline import Outline
from multimax.convert.sites import Converted, Mark, Site

# The package that classes in a model are from, and the file that converts them, which is imported only for such models.
# In this order: the next leaves alone what one has found. nn.Module itself is from torch.
LIBRARIES = {
    "transformers": "multimax.convert.transformers.library",
    "timm": "multimax.convert.timm",
    "torch": "multimax.convert.torch_nn",
}
KNOWN = "nn.MultiheadAttention, nn.Softmax, and the attention modules of transformers and timm"  # in words
HEADS = "heads"  # the converter of output layers, in models of any library


class Converter(Protocol):
    """What gives a layer its reweighting function, and takes it away again.

    Attributes:
        name: the key in ``LIBRARIES``, which a layer's mark carries.
        notes_reached: whether it sets ``mark.reached`` itself when a forward reaches a layer's function. Otherwise a
            hook on the layer does so, which would not notice a forward that does not call the function.
        keeps_class: whether its layers stay of the class they were.
    """

    name: ClassVar[str]
    notes_reached: ClassVar[bool] = False
    keeps_class: ClassVar[bool] = False

    @abstractmethod
    def attach(self, model: nn.Module, site: Site, function: nn.Module, mark: Mark) -> nn.Module:
        """Gives a layer its function.

        Args:
            model: the model that is converted.
            site: the layer.
            function: the reweighting module, on the right device.
            mark: its ``before`` takes what :meth:`detach` will need.

        Returns:
            The module that is now in that place, usually the same one.
        """

    @abstractmethod
    def detach(self, model: nn.Module, name: str, module: nn.Module) -> None:
        """Restores a converted layer. It may have been attached only halfway."""


class Library(Converter, Protocol):
    """A library of models."""

    @abstractmethod
    def sites(self, outline: Outline) -> list[Site]:
        """The modules of a model with softmax attention, including those that cannot be converted, with the reason."""

    def why_not_in_code(self, cls: type) -> str | None:
        """Why a class that computes softmax in its own code, and is not one of the sites, cannot be converted, if
        the library can say more than that it has softmax in its code."""
        return None

    def output_names(self, outline: Outline) -> list[str]:
        """The full names of the layers that give the logits; none if they cannot be found."""
        return []

    def why_not_output(self, model: nn.Module, name: str) -> str | None:
        """Why the logits of a model, or of one inside it, cannot be modulated in the layer of this name in it."""
        return None

    def models(self, outline: Outline) -> dict[str, nn.Module]:
        """The modules that are models themselves, by full name: a forward of a model around them may leave them out."""
        return {}

    def finish(self, outline: Outline, converted: list[Converted]) -> None:
        """What remains to be done, beyond the layers, after a conversion and after it has been undone.

        Args:
            outline: of the model.
            converted: the layers that are converted now; none after it has been undone.
        """
        return None


def converter(name: str) -> Converter:
    """The converter of this name: a library, or the converter of output layers."""
    file = "multimax.convert.heads" if name == HEADS else LIBRARIES[name]
    found: Converter = importlib.import_module(file).CONVERTER
    return found


def in_use(outline: Outline) -> list[Library]:
    """The libraries that classes in the model are from."""
    found: list[Library] = []
    for package, file in LIBRARIES.items():
        if package in outline.packages:
            found.append(importlib.import_module(file).CONVERTER)
    return found
