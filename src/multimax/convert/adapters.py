"""Converted models with PEFT's adapters: the reweighting functions are saved and loaded with them."""

import re
import warnings
from typing import Any

import torch
from torch import nn

from multimax.convert.outline import Outline, within
from multimax.convert.sites import LEARNED, NAMES, marked
from multimax.ops import checks
from multimax.training.groups import reweighting_parameters

HUB = ("cache_dir", "revision", "subfolder", "token")
# PEFT keeps the module that it trains and saves beside the original, and calls one of the two.
BESIDE = re.compile(r"\.(original_module|modules_to_save\.[^.]+)(?=\.|$)")


def place(name: str) -> str:
    """The full name of a module, or of what PEFT has put in its place."""
    return BESIDE.sub("", name)


def adapter_in(outline: Outline) -> str | None:
    """The first module of PEFT's in a model, in words; None if there is none."""
    found = next(((cls, name) for cls, name in outline.types.items() if is_peft(cls)), None)
    if found is None:
        return None
    cls, name = found
    return f"{name!r} in PEFT's {cls.__name__}" if name else f"PEFT's {cls.__name__}"


def is_peft(cls: type) -> bool:
    """Whether a class is from PEFT."""
    return cls.__module__.partition(".")[0] == "peft"


def _check_saved_once(model: nn.Module) -> None:
    """PEFT must not save a function apart from a layer that it saves whole. It would put a copy of the function beside
    the layer's, or one wrapper into another, and train or save one that the forward does not use."""
    for name, module in model.named_modules():
        if "modules_to_save" not in module._modules:
            continue
        for child in NAMES:
            beside = child in module._modules
            nested = name.endswith(f".{child}") and ".modules_to_save." in name
            if beside or nested:
                whole = name if beside else name.partition(".modules_to_save.")[0]
                raise RuntimeError(
                    f"multimax: expected the adapter to save {whole!r} with its function, got the function apart from "
                    "it too, in a copy that is not used or not loaded; name functions of other layers alone: "
                    f"modules_to_save={_names_without(model, whole, child)}"
                )


def _names_without(model: nn.Module, whole: str, child: str) -> list[str]:
    """Endings of names that fit the functions of all layers but those in one that is saved whole, and its own."""
    layers = {place(layer.name) for layer in marked(model)}
    others = {name for name in layers if not within(name, whole)}
    return [*sorted({f"{name.rpartition('.')[2]}.{child}" for name in others}), whole.rpartition(".")[2]]


class InAdapter:
    """A forward pre-hook of a converted model with adapters of PEFT: raises, or says in training, if functions would be
    lost, since only the adapter is saved."""

    def __init__(self) -> None:
        self.seen: tuple[int, ...] = ()  # the model, by id, and its adapters
        self.outside: list[tuple[str, nn.Parameter]] = []  # parameters of functions that no adapter holds
        self.warned = False

    def __call__(self, model: nn.Module, args: object) -> None:
        """Looks at every new adapter once."""
        if "peft_config" not in model.__dict__:
            return
        if torch.compiler.is_compiling():
            _check_saved_once(model)
            return
        now = (id(model), *map(id, model.__dict__["peft_config"].values()))
        if self.seen != now:
            _check_saved_once(model)
            self.seen = now
            self.outside = [(name, p) for name, p in reweighting_parameters(model) if place(name) == name]
        lost = [name for name, p in self.outside if p.requires_grad] if model.training and not self.warned else []
        if lost:
            self.warned = True
            children = sorted({name.split(".")[-2] for name in lost})
            warnings.warn(
                f"multimax: expected trained parameters of reweighting functions in the adapter, got {', '.join(lost)} "
                f"outside of it: they are not saved with it; give PEFT's configuration modules_to_save={children}",
                stacklevel=2,
            )


def watch_adapters(model: nn.Module) -> None:
    """Makes forwards check."""
    model.register_forward_pre_hook(InAdapter())


def forget_adapters(model: nn.Module) -> None:
    """Removes the hook."""
    for key, hook in list(model._forward_pre_hooks.items()):
        if isinstance(hook, InAdapter):
            model._forward_pre_hooks.pop(key, None)


def load_adapter(model: nn.Module, path: Any, **options: Any) -> Any:
    """Loads an adapter of PEFT that was trained with a converted model: ``PeftModel.from_pretrained`` with a check.

    An adapter holds the reweighting functions' parameters if they were trained with it (``modules_to_save``), but not
    the conversion. PEFT itself would drop them without a word where the model is not converted.

    Args:
        model: converted as it was in training; with adapters or without.
        path: the adapter's folder, or its name on the hub.
        options: passed on to ``PeftModel.from_pretrained``, such as ``is_trainable``; for a ``PeftModel`` to its
            ``load_adapter``, with at least ``adapter_name``.

    Returns:
        The ``PeftModel``.

    Example:
        >>> import tempfile, multimax
        >>> from peft import LoraConfig, get_peft_model
        >>> from transformers import BertConfig, BertModel
        >>> def converted():
        ...     model = BertModel(BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=99))
        ...     report = multimax.convert_(model)
        ...     return model
        >>> lora = LoraConfig(target_modules=["query", "value"], modules_to_save=["multimax"])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     get_peft_model(converted(), lora).save_pretrained(folder)
        ...     model = multimax.load_adapter(converted(), folder, is_trainable=True)
        >>> sum(parameter.requires_grad for _, parameter in multimax.reweighting_parameters(model))
        4
    """
    from peft import PeftConfig, PeftModel
    from peft.utils import load_peft_weights

    checks.module(model)
    name_of_model = type(model).__name__
    here = {_in_base(name): tuple(parameter.shape) for name, parameter in reweighting_parameters(model)}
    hub = {name: options[name] for name in HUB if name in options}
    saved = {_in_base(key): value for key, value in load_peft_weights(str(path), device="cpu", **hub).items()}
    for name, value in saved.items():
        if name.rpartition(".")[2] in LEARNED and here.get(name) != tuple(value.shape):
            got = f"{here[name]}" if name in here else "none"
            raise ValueError(
                f"multimax: expected {name!r} of {tuple(value.shape)} in {name_of_model}, as the adapter in "
                f"{str(path)!r} has it, got {got}; convert the model as it was in training, with multimax.convert_"
            )
    config = PeftConfig.from_pretrained(str(path), **hub)
    endings = tuple(getattr(config, "modules_to_save", None) or ())
    for name in here:
        if name.rpartition(".")[0].endswith(endings) and name not in saved:
            raise ValueError(
                f"multimax: expected {name!r} of {name_of_model} in the adapter in {str(path)!r}, which holds "
                f"modules_to_save={list(endings)}, got none; convert the model as it was in training"
            )
    if isinstance(model, PeftModel):
        model.load_adapter(path, **options)
        return model
    return PeftModel.from_pretrained(model, path, **options)


def _in_base(name: str) -> str:
    """The name of a parameter, or of what an adapter's file has for it, in the model without adapters."""
    return place(name).removeprefix("base_model.model.")
