"""What the tasks' models, which are transformers' own, have in common: how they are configured, and read back."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from multimax.experiments.settings import CONFIG, Settings

HEADS = ("num_attention_heads", "encoder_attention_heads", "decoder_attention_heads")


def configured(cls: Any, options: Mapping[str, Any], from_data: Mapping[str, Any]) -> Any:
    """A configuration of transformers.

    Args:
        cls: its class.
        options: what the user gave.
        from_data: what the task decides.
    """
    known = set(cls().to_dict()) | set(cls.attribute_map)
    unknown = sorted(set(options) - known)
    if unknown:
        raise ValueError(f"multimax: expected options of {cls.__name__} as model, got {', '.join(unknown)}")
    taken = sorted(set(options) & set(from_data))
    if taken:
        raise ValueError(
            f"multimax: expected {', '.join(taken)} to come from the data, got it as an option of the model"
        )
    made = cls(**options, **from_data)
    _check_sizes(made)
    return made


def _check_sizes(config: Any) -> None:
    """Heads must divide the width, and patches the image: transformers would leave the rest out without a word."""
    ways = (("hidden_size", HEADS), ("image_size", ("patch_size",)))
    for whole, parts in ways:
        size = getattr(config, whole, None)
        for part in parts:
            value = getattr(config, part, None)
            if not isinstance(size, int) or not isinstance(value, int):
                continue
            if size < 1 or value < 1 or size % value:
                names = (config.attribute_map.get(name, name) for name in (whole, part))
                raise ValueError(f"multimax: expected {' to be a multiple of '.join(names)}, got {size} and {value}")


def start_config(settings: Settings, classes: tuple[Any, ...]) -> Any:
    """The configuration of the model to start from, which must be one with softmax, of the task, and as described.

    Args:
        settings: of the run.
        classes: of transformers, that it may be of.
    """
    from transformers import AutoConfig

    folder = Path(settings.start).expanduser()
    if not (folder / CONFIG).is_file() or (folder / "model" / CONFIG).is_file():
        inside = f"; name {str(folder / 'model')!r}" if (folder / "model" / CONFIG).is_file() else ""
        raise ValueError(f"multimax: expected start to be the folder of a saved model, got {str(folder)!r}{inside}")
    try:
        config = AutoConfig.from_pretrained(folder)
    except (ValueError, OSError, KeyError) as error:
        text = " ".join(str(error).split())
        raise ValueError(
            f"multimax: expected start to be the folder of a saved model, got {str(folder)!r}: {text:.200}"
        ) from None
    if getattr(config, "multimax", None) is not None:
        raise ValueError(f"multimax: expected start to be a model with softmax, got a converted one in {str(folder)!r}")
    kinds = [cls for cls in classes if type(config) is cls.config_class]
    if not kinds:
        raise ValueError(f"multimax: expected start to be a model for {settings.task}, got {type(config).__name__}")
    described = configured(kinds[0].config_class, settings.model, {})
    check_same(
        settings, {f"model.{name}": (getattr(config, name), getattr(described, name)) for name in settings.model}
    )
    return config


def check_same(settings: Settings, values: Mapping[str, tuple[Any, Any]]) -> None:
    """Raises if the model to start from differs from what is asked for.

    Args:
        settings: of the run.
        values: by name, what the model has and what it should have.
    """
    other = [f"{name}: {there!r} there, {here!r} here" for name, (there, here) in values.items() if there != here]
    if other:
        raise ValueError(
            f"multimax: expected settings and data that fit the model in {settings.start!r}, got others "
            f"({'; '.join(other)}); take those of its run, as with --preset {Path(settings.start).parent / CONFIG}"
        )


def trained(settings: Settings, classes: tuple[Any, ...], values: Mapping[str, Any]) -> PreTrainedModel:
    """The model to start from.

    Args:
        settings: of the run.
        classes: of transformers, that it may be of.
        values: by name, options of its configuration that the data decides.
    """
    config = start_config(settings, classes)
    check_same(settings, {name: (getattr(config, name), value) for name, value in values.items()})
    cls = next(cls for cls in classes if type(config) is cls.config_class)
    model, info = cls.from_pretrained(Path(settings.start).expanduser(), output_loading_info=True)
    if info["missing_keys"]:  # transformers would draw them at random
        missing = ", ".join(sorted(info["missing_keys"]))
        raise ValueError(f"multimax: expected all weights in {settings.start!r}, got none of {missing:.200}")
    found: PreTrainedModel = model
    return found
