"""The linear layer at a model's end: its logits through sigma, or divided by a temperature."""

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from multimax.convert.adapters import is_peft
from multimax.convert.library import HEADS, Converter
from multimax.convert.sites import Converted, Mark, Site, class_name, mark_of, put_function, take_function
from multimax.nn.output import MultiMaxHead
from multimax.reweighting import Softmax
from multimax.reweighting.layer import MultiMax
from multimax.reweighting.registry import in_use


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
        temperature: Tensor | float = in_use(self.reweight).options["temperature"]
        return F.linear(input, self.weight, self.bias) / temperature


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


CALLED = "_multimax_called"  # on a converted output layer inside of something else


class SameHeads:
    """A forward pre-hook of a converted model: resizing a vocabulary, or changing the number of classes, replaces the
    converted output layer with a new one; wrappers may compute logits from its weight alone; and torch's eager
    quantization passes it over.

    Args:
        names: full names of the output layers.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        self.looked_at = 0  # the model, by id: a quantized model is a copy

    def __call__(self, model: nn.Module, args: object) -> None:
        """Raises if one is no longer the converted layer."""
        if self.looked_at != id(model):
            self.looked_at = id(model)
            self._warn_if_quantized(model)
        for name in self.names:
            module = model.get_submodule(name)
            if mark_of(module) is None:
                _check_wrapper(name, module)

    def _warn_if_quantized(self, model: nn.Module) -> None:
        """Says that ``quantize_dynamic``, which takes nn.Linear alone, has left the output layers as they were."""
        if any(type(module).__module__.startswith("torch.ao.nn.quantized") for module in model.modules()):
            warnings.warn(
                f"multimax: expected {', '.join(map(repr, self.names))} to be quantized with the other linear layers, "
                "got floating point: quantize_dynamic takes exactly nn.Linear; torchao's quantize_ takes converted "
                "output layers too",
                stacklevel=2,
            )


def _inside(module: nn.Module) -> list[nn.Module]:
    """The converted layers in what has taken the place of one."""
    return [part for part in module.modules() if mark_of(part) is not None]


def _check_wrapper(name: str, module: nn.Module) -> None:
    """What has taken the place of a converted output layer has to call it."""
    inside = _inside(module)
    if not inside:
        raise RuntimeError(
            f"multimax: expected {name!r} to be converted, got {type(module).__name__} in its place, without its "
            "parameters; change the model first, then convert it"
        )
    if not is_peft(type(module)):
        for part in inside:
            if CALLED not in part.__dict__:
                part.register_forward_hook(_note_call)
            part.__dict__[CALLED] = False
        return
    copies = module._modules.get("modules_to_save")
    if copies is None:
        if hasattr(module, "base_layer"):
            how = "adds to the logits after it; leave this layer out of target_modules, or train it whole, by "
            how += f"modules_to_save=[{name.rpartition('.')[2]!r}]"
        else:
            how = (
                "computes logits from its weight, without sigma; leave this layer and, if their weights are tied, the "
            )
            how += "embeddings out of trainable_token_indices, or convert attention alone"
        raise RuntimeError(f"multimax: expected sigma to come last in {name!r}, got {class_name(module)}, which {how}")
    if any(mark_of(copy) is None for copy in copies.children()):
        raise RuntimeError(
            f"multimax: expected copies of {name!r} with its function in {class_name(module)}, got one without; leave "
            "ensure_weight_tying out of PEFT's configuration"
        )


def _note_call(module: nn.Module, args: object, output: object) -> None:
    module.__dict__[CALLED] = True


class HeadsCalled:
    """A forward hook of a converted model: a wrapper around an output layer, of whatever kind, has called it.

    Args:
        names: full names of the output layers.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names

    def __call__(self, model: nn.Module, args: object, output: object) -> None:
        """Raises if not: then the logits are softmax's."""
        for name in self.names:
            module = model.get_submodule(name)
            if mark_of(module) is not None or is_peft(type(module)) or torch.compiler.is_compiling():
                continue
            if not any(part.__dict__.get(CALLED) for part in _inside(module)):
                raise RuntimeError(
                    f"multimax: expected {class_name(module)} in the place of {name!r} to call the converted layer, "
                    "got logits without it; convert the model after that change, or leave its output layer alone"
                )


def watch_heads(model: nn.Module, converted: list[Converted]) -> None:
    """Makes every forward check that the output layers are still the converted ones."""
    names = tuple(layer.name for layer in converted if layer.mark.kind == "output")
    if names:
        model.register_forward_pre_hook(SameHeads(names))
        model.register_forward_hook(HeadsCalled(names))


def forget_heads(model: nn.Module) -> None:
    """Removes the hooks."""
    for hooks, kind in ((model._forward_pre_hooks, SameHeads), (model._forward_hooks, HeadsCalled)):
        for key, hook in list(hooks.items()):
            if isinstance(hook, kind):
                hooks.pop(key, None)
    for module in model.modules():
        if module.__dict__.pop(CALLED, None) is not None:
            for key, hook in list(module._forward_hooks.items()):
                if hook is _note_call:
                    module._forward_hooks.pop(key, None)
