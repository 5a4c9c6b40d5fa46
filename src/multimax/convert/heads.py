"""The linear layer at a model's end: its logits through sigma, or divided by a temperature."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from multimax.convert.library import HEADS, Converter
from multimax.convert.sites import Converted, Mark, Site, mark_of, put_function, take_function
from multimax.nn.output import MultiMaxHead
from multimax.reweighting import Softmax
from multimax.reweighting.layer import MultiMax


class TemperatureHead(nn.Linear):
    r"""A linear layer whose logits are divided by a temperature.

    .. math:: \operatorname{head}(h) = (h W^\top + \beta) / T

    The state_dict has the keys of ``nn.Linear``, and ``reweight.log_temperature`` if the temperature is trained.

    Args:
        in_features: entries of a hidden state.
        out_features: classes.
        bias: whether the layer has one.
        reweight: the softmax with its temperature.
        options: device and dtype.

    Shape:
        input (..., in_features), output (..., out_features).

    Example:
        >>> import torch
        >>> from multimax import reweighting
        >>> from multimax.convert.heads import TemperatureHead
        >>> TemperatureHead(16, 10, reweight=reweighting.Softmax(2.0, learn=True))(torch.randn(4, 16)).shape
        torch.Size([4, 10])
    """

    reweight: Softmax

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, *, reweight: Softmax, **options: Any
    ) -> None:
        super().__init__(in_features, out_features, bias, **options)
        self.reweight = reweight

    def forward(self, input: Tensor) -> Tensor:
        """Logits divided by the temperature."""
        return F.linear(input, self.weight, self.bias) / self.reweight.temperature


def why_not(module: nn.Module) -> str | None:
    """Why a layer cannot be a converted head; None if it can."""
    if type(module) is not nn.Linear:
        return f"the output layer has to be exactly nn.Linear, but is {type(module).__name__}"
    return None


class HeadConverter(Converter):
    """Turns a linear layer into a head with a function, in place: the same object, weight and bias."""

    name = HEADS

    def attach(self, model: nn.Module, site: Site, function: nn.Module, mark: Mark) -> nn.Module:
        """Gives it the function and the class that uses it."""
        site.module.__class__ = MultiMaxHead if isinstance(function, MultiMax) else TemperatureHead
        put_function(site.module, function)
        return site.module

    def detach(self, model: nn.Module, name: str, module: nn.Module) -> None:
        """Makes it a linear layer again."""
        take_function(module)
        module.__class__ = nn.Linear


CONVERTER = HeadConverter()


class SameHeads:
    """A forward pre-hook of a converted model: resizing a vocabulary, or changing the number of classes, replaces the
    converted output layer with a new one.

    Args:
        names: full names of the output layers.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names

    def __call__(self, model: nn.Module, args: object) -> None:
        """Raises if one is no longer the converted layer."""
        for name in self.names:
            module = model.get_submodule(name)
            if mark_of(module) is None:
                raise RuntimeError(
                    f"multimax: expected {name!r} to be converted, got {type(module).__name__} in its place, without "
                    "its parameters; change the model first, then convert it"
                )


def watch_heads(model: nn.Module, converted: list[Converted]) -> None:
    """Makes every forward check that the output layers are still the converted ones."""
    names = tuple(layer.name for layer in converted if layer.mark.kind == "output")
    if names:
        model.register_forward_pre_hook(SameHeads(names))


def forget_heads(model: nn.Module) -> None:
    """Removes the hook."""
    for key, hook in list(model._forward_pre_hooks.items()):
        if isinstance(hook, SameHeads):
            model._forward_pre_hooks.pop(key, None)
