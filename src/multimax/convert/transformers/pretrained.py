"""Converted models of transformers from what ``save_pretrained`` wrote."""

import copy
import os
from collections.abc import Mapping
from typing import Any

from torch import nn

from multimax.convert.conversion import convert_as_described
from multimax.convert.outline import Outline
from multimax.convert.sites import KINDS, NAMES
from multimax.training.groups import reweighting_parameters

OF_THE_MODEL = ("dtype", "torch_dtype", "quantization_config")  # what a configuration would take too
HUB = (
    "cache_dir",
    "force_download",
    "local_files_only",
    "proxies",
    "revision",
    "subfolder",
    "token",
    "trust_remote_code",
)


def from_pretrained(cls: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
    """Loads a converted model of transformers: ``cls.from_pretrained`` with the conversion done again.

    ``model.save_pretrained(path)`` of a converted model writes which layers were converted, and how, into the
    configuration, and the parameters with the weights. Plain ``cls.from_pretrained(path)`` raises on such a folder:
    its configuration asks for the attention implementation "multimax", which transformers does not have.

    Args:
        cls: a class of transformers, such as ``AutoModelForCausalLM`` or ``BertModel``.
        path: the folder, or a name on the hub.
        args: passed on.
        kwargs: passed on, such as ``dtype`` or ``device_map``. ``attn_implementation`` is what layers without MultiMax
            get back when the model is reverted.

    Returns:
        The model, in evaluation mode; with ``output_loading_info=True`` also transformers' loading info.

    Example:
        >>> import tempfile, multimax
        >>> from transformers import AutoModel, BertConfig, BertModel
        >>> model = BertModel(BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=99))
        >>> report = multimax.convert_(model)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     model.save_pretrained(folder)
        ...     again = multimax.from_pretrained(AutoModel, folder)
        >>> again.encoder.layer[0].attention.self.multimax
        MultiMax(order=2, t_b=[1, 1], t_d=[1, 1], b=[-0.5, -1], d=[0.5, 1])
    """
    from transformers import AutoConfig

    from multimax.convert.transformers.configuration import VERSION, forget_settings

    if not isinstance(cls, type) or not hasattr(cls, "from_pretrained"):
        raise TypeError(f"multimax: expected cls to be a model class of transformers, got {cls!r}")
    hub: dict[str, Any] = {name: kwargs.pop(name) for name in HUB if name in kwargs}
    kept: dict[str, Any] = {name: kwargs.pop(name) for name in OF_THE_MODEL if name in kwargs}
    wants_info = kwargs.pop("output_loading_info", False)
    implementation = kwargs.pop("attn_implementation", None)
    config = kwargs.pop("config", None)
    if config is None or isinstance(config, str | os.PathLike):
        config, kwargs = AutoConfig.from_pretrained(config or path, return_unused_kwargs=True, **hub, **kwargs)
    else:
        config = copy.deepcopy(config)
    kwargs |= {**hub, **kept}
    config_class = getattr(cls, "config_class", None)
    if config_class is not None and not isinstance(config, config_class):  # a part of the model that was saved
        parts = [getattr(config, name, None) for name in config.sub_configs]
        found = [part for part in parts if isinstance(part, config_class)]
        named = cls.__name__ in (config.architectures or ())  # then this is what was saved, whatever the class
        if len(found) != 1 and not named:
            raise ValueError(
                f"multimax: expected a {config_class.__name__} for {cls.__name__} in {str(path)!r}, got "
                f"{type(config).__name__}"
            )
        config = config if named else found[0]
    described = getattr(config, "multimax", None)
    if described is None:
        raise ValueError(
            f"multimax: expected {str(path)!r} to hold a converted model, got a configuration without 'multimax'; load "
            f"it with {cls.__name__}.from_pretrained and convert it with multimax.convert_"
        )
    _check(described, VERSION)
    concrete = _concrete(cls, config)
    forget_settings(config)
    config._attn_implementation = implementation

    def init(self: nn.Module, config: Any, *args: Any, **kwargs: Any) -> None:
        concrete.__init__(self, config, *args, **kwargs)
        outline = Outline(self)
        convert_as_described(outline, _for(outline, described))

    # The layers have to be there before the weights are loaded, since transformers uses other names in files.
    # To anyone who inspects it, this is the class itself.
    keep = set(getattr(concrete, "_keep_in_fp32_modules_strict", None) or ()) | set(NAMES)
    body = {"__init__": init, "__module__": concrete.__module__, "__qualname__": concrete.__qualname__}
    loading: Any = type(concrete.__name__, (concrete,), {**body, "_keep_in_fp32_modules_strict": keep})
    model, info = loading.from_pretrained(path, *args, config=config, output_loading_info=True, **kwargs)
    model.__class__ = concrete
    missing = sorted({name for name, _ in reweighting_parameters(model)} & set(info["missing_keys"]))
    if missing:
        raise ValueError(f"multimax: expected {', '.join(missing)} in the weights of {str(path)!r}, got none")
    return (model, info) if wants_info else model


def _check(described: object, version: int) -> None:
    """Checks the description: a file may say anything."""
    if not isinstance(described, Mapping) or described.get("version") != version:
        got = described.get("version") if isinstance(described, Mapping) else described
        raise ValueError(f"multimax: expected 'multimax' of version {version} in the configuration, got {got!r}")
    for kind in KINDS:
        layers = described.get(kind)
        if not isinstance(layers, Mapping) or not all(isinstance(layer, Mapping) for layer in layers.values()):
            raise ValueError(
                f"multimax: expected 'multimax' in the configuration to name {kind} layers, got {layers!r}"
            )


def _concrete(cls: Any, config: Any) -> Any:
    """The class that an Auto class stands for."""
    mapping = getattr(cls, "_model_mapping", None)
    if mapping is None:
        return cls
    if type(config) not in mapping:
        raise ValueError(f"multimax: expected an Auto class that knows {type(config).__name__}, got {cls.__name__}")
    found = mapping[type(config)]
    if not isinstance(found, (list, tuple)):
        return found
    named = [candidate for candidate in found if candidate.__name__ in (config.architectures or ())]
    return (named or list(found))[0]


def _for(outline: Outline, described: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The description with the layers' names in this model: they differ between a model with a head and one without. A
    head that is not there has no softmax."""
    prefix = f"{outline.model.base_model_prefix}."

    def renamed(name: str) -> str:
        for candidate in (name, name.removeprefix(prefix), prefix + name):
            if candidate in outline.modules:
                return candidate
        return name

    result = {kind: {renamed(name): layer for name, layer in described[kind].items()} for kind in KINDS}
    result["output"] = {name: layer for name, layer in result["output"].items() if name in outline.modules}
    return result
