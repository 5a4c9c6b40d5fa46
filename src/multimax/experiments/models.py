"""What the tasks' models, which are transformers' own, have in common: how they are configured, and read back."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel


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
    return cls(**options, **from_data)


def trained(task: str, classes: tuple[Any, ...], folder: Path) -> PreTrainedModel:
    """A model with softmax that a run has saved.

    Args:
        task: what it is for, in a word.
        classes: of transformers, that it may be of.
        folder: where it is.
    """
    from transformers import AutoConfig

    if not (folder / "config.json").is_file():
        raise ValueError(f"multimax: expected start to be the folder of a saved model, got {str(folder)!r}")
    config = AutoConfig.from_pretrained(folder)
    if getattr(config, "multimax", None) is not None:
        raise ValueError(f"multimax: expected start to be a model with softmax, got a converted one in {str(folder)!r}")
    for cls in classes:
        if type(config) is cls.config_class:
            model: PreTrainedModel = cls.from_pretrained(folder)
            return model
    raise ValueError(f"multimax: expected start to be a model for {task}, got {type(config).__name__}")
