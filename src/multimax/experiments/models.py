"""The models: transformers' own, sized as the paper's."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    IJepaConfig,
    IJepaForImageClassification,
    MarianConfig,
    MarianMTModel,
    PreTrainedModel,
    ViTConfig,
    ViTForImageClassification,
)

from multimax.experiments.settings import Settings


def _gpt(width: int, layers: int, heads: int) -> dict[str, Any]:
    return {"n_embd": width, "n_layer": layers, "n_head": heads, "n_inner": 4 * width}


def _vit(width: int, layers: int, heads: int) -> dict[str, Any]:
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    return {**sizes, "intermediate_size": 4 * width}


def _marian(width: int, layers: int, heads: int, inner: int) -> dict[str, Any]:
    both = {"layers": layers, "attention_heads": heads, "ffn_dim": inner}
    return {"d_model": width} | {f"{side}_{key}": v for side in ("encoder", "decoder") for key, v in both.items()}


# What --size means: options of the configuration, as those of --preset are.
SIZES: dict[str, dict[str, dict[str, Any]]] = {
    "vision": {
        "digits": _vit(64, 4, 4),
        "mini": _vit(96, 6, 3),
        "deit-tiny": _vit(192, 12, 3),
        "deit-small": _vit(384, 12, 6),
        "deit-base": _vit(768, 12, 12),
    },
    "language": {"mini": _gpt(128, 4, 4), "small": _gpt(256, 6, 8), "paper": _gpt(512, 6, 8)},
    "translation": {
        "mini": _marian(128, 3, 4, 256),
        "small": _marian(256, 4, 4, 512),
        "paper": _marian(512, 6, 4, 1024),
    },
}


def size(task: str, name: str) -> dict[str, Any]:
    """The options of a size by name."""
    if name not in SIZES[task]:
        raise ValueError(f"multimax: expected a size of {task} out of {', '.join(SIZES[task])}, got {name!r}")
    return SIZES[task][name]


def _configured(cls: Any, options: Mapping[str, Any], own: Mapping[str, Any]) -> Any:
    """A configuration; what the task decides comes after what the user gave."""
    known = set(cls().to_dict()) | set(cls.attribute_map)
    unknown = sorted(set(options) - known)
    if unknown:
        raise ValueError(f"multimax: expected options of {cls.__name__} as model, got {', '.join(unknown)}")
    taken = sorted(set(options) & set(own))
    if taken:
        raise ValueError(
            f"multimax: expected {', '.join(taken)} to come from the data, got it as an option of the model"
        )
    return cls(**options, **own)


def image_classifier(settings: Settings, channels: int, classes: tuple[str, ...]) -> PreTrainedModel:
    """A vision transformer sized as DeiT: with a class token, or with the average of the patches and no class token."""
    own = {
        "image_size": settings.image_size,
        "num_channels": channels,
        "id2label": dict(enumerate(classes)),
        "label2id": {name: number for number, name in enumerate(classes)},
    }
    if settings.pooling == "class":
        return ViTForImageClassification(_configured(ViTConfig, settings.model, own))
    return IJepaForImageClassification(_configured(IJepaConfig, settings.model, own))


def language_model(settings: Settings, vocabulary: int) -> PreTrainedModel:
    """A GPT-style decoder."""
    ends = {"bos_token_id": None, "eos_token_id": None}
    own = {"vocab_size": vocabulary, "n_positions": settings.length, "loss_type": "ForCausalLM", **ends}
    return GPT2LMHeadModel(_configured(GPT2Config, settings.model, own))


def translator(settings: Settings, vocabulary: int, pad: int, end: int) -> PreTrainedModel:
    """An encoder and decoder as in the first Transformer: sinusoidal positions, layer norms after the sums."""
    own = {
        "vocab_size": vocabulary,
        "pad_token_id": pad,
        "eos_token_id": end,
        "decoder_start_token_id": pad,
        "forced_eos_token_id": None,
        "max_position_embeddings": settings.length + 1,
    }
    model = MarianMTModel(_configured(MarianConfig, settings.model, own))
    assert model.generation_config is not None
    model.generation_config.max_length = settings.length
    model.generation_config.num_beams = settings.beams
    model.generation_config.bad_words_ids = [[pad]]
    return model


CLASSES: dict[str, tuple[Any, ...]] = {
    "vision": (ViTForImageClassification, IJepaForImageClassification),
    "language": (GPT2LMHeadModel,),
    "translation": (MarianMTModel,),
}


def trained(task: str, folder: Path) -> PreTrainedModel:
    """A model with softmax that a run has saved."""
    from transformers import AutoConfig

    if not (folder / "config.json").is_file():
        raise ValueError(f"multimax: expected start to be the folder of a saved model, got {str(folder)!r}")
    config = AutoConfig.from_pretrained(folder)
    if getattr(config, "multimax", None) is not None:
        raise ValueError(f"multimax: expected start to be a model with softmax, got a converted one in {str(folder)!r}")
    for cls in CLASSES[task]:
        if isinstance(config, cls.config_class) and type(config) is cls.config_class:
            model: PreTrainedModel = cls.from_pretrained(folder)
            return model
    raise ValueError(f"multimax: expected start to be a model for {task}, got {type(config).__name__}")


class StochasticDepth:
    """A forward hook of a branch of a residual block: in training it leaves the branch out for some examples.

    Args:
        rate: the probability.
    """

    def __init__(self, rate: float) -> None:
        self.rate = rate

    def __call__(self, module: nn.Module, args: object, output: Any) -> Any:
        """The output, zero for some examples and larger for the others."""
        if not module.training or not self.rate:
            return output
        first: Tensor = output[0] if isinstance(output, tuple) else output
        keep = torch.rand(first.shape[0], *[1] * (first.ndim - 1), device=first.device) >= self.rate
        first = first * keep / (1 - self.rate)
        return (first, *output[1:]) if isinstance(output, tuple) else first


def add_stochastic_depth(model: PreTrainedModel, rate: float) -> None:
    """Stochastic depth in every layer of a vision transformer, from 0 in the first to the rate in the last."""
    if not 0 <= rate < 1:
        raise ValueError(f"multimax: expected stochastic_depth in [0, 1), got {rate}")
    if not rate:
        return
    layers: Any = model.base_model.layers
    for number, layer in enumerate(layers):
        hook = StochasticDepth(rate * number / max(len(layers) - 1, 1))
        layer.attention.register_forward_hook(hook)
        layer.mlp.register_forward_hook(hook)
