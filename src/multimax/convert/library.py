"""What ``convert_`` asks of a library of models, and the list of the libraries it knows.

To add a library: a file with a class made from :class:`Library`, an instance of it as ``CONVERTER``, and a line in
``LIBRARIES``.
"""

import importlib
from abc import abstractmethod
from typing import ClassVar, Protocol

from torch import nn

from multimax.convert.outline import Outline
from multimax.convert.sites import Converted, Mark, Site

# The package that classes in a model are from, and the file that converts them: it is imported for such models only.
# In this order: what one has found, the next leaves alone. nn.Module itself is from torch.
LIBRARIES = {
    "transformers": "multimax.convert.transformers.library",
    "timm": "multimax.convert.timm",
    "torch": "multimax.convert.torch_nn",
}
KNOWN = "nn.MultiheadAttention, nn.Softmax, and the attention modules of transformers and timm"  # for people
HEADS = "heads"  # the converter of output layers, in models of any library


class Converter(Protocol):
    """What gives a layer its reweighting function, and takes it away again.

    Attributes:
        name: the key in ``LIBRARIES``, which a layer's mark carries.
        notes_reached: whether it sets ``mark.reached`` itself when a forward comes to a layer's function. Else a hook
            on the layer does so, which would not notice a forward that does not call the function.
    """

    name: ClassVar[str]
    notes_reached: ClassVar[bool] = False

    @abstractmethod
    def attach(self, model: nn.Module, site: Site, function: nn.Module, mark: Mark) -> nn.Module:
        """Gives a layer its function.

        Args:
            model: the model that is converted.
            site: the layer.
            function: the reweighting module, on the right device.
            mark: its ``before`` takes what :meth:`detach` will need.

        Returns:
            The module that now stands there, as a rule the same.
        """

    @abstractmethod
    def detach(self, model: nn.Module, name: str, module: nn.Module) -> None:
        """Brings a converted layer back to what it was. It may have been attached halfway."""


class Library(Converter, Protocol):
    """A library of models."""

    @abstractmethod
    def sites(self, outline: Outline) -> list[Site]:
        """The modules of a model with softmax attention, those that cannot be converted too, with the reason."""

    def why_not_in_code(self, cls: type) -> str | None:
        """Why a class that computes softmax in its own code, and is none of the sites, cannot be converted, if the
        library knows better than that it has softmax in its code."""
        return None

    def output_names(self, outline: Outline) -> list[str]:
        """The full names of the layers that give the logits; none if they cannot be found."""
        return []

    def why_not_output(self, model: nn.Module, name: str) -> str | None:
        """Why the logits of a model, or of one inside it, cannot be modulated in the layer of this name in it."""
        return None

    def models(self, outline: Outline) -> dict[str, nn.Module]:
        """The modules that are models in themselves, by full name: a forward of one around them may leave them out."""
        return {}

    def finish(self, outline: Outline, converted: list[Converted]) -> None:
        """What remains to be done, beyond the layers, after a conversion, and after it has been taken back.

        Args:
            outline: of the model.
            converted: the layers that are converted now; none after it has been taken back.
        """
        return None


def converter(name: str) -> Converter:
    """The converter of this name: a library, or that of output layers."""
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
