"""All settings of a training run, and the presets: plain JSON files with some of them."""

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from torch import Tensor

from multimax import reweighting
from multimax.convert.sites import ROLES
from multimax.experiments import tasks
from multimax.ops import checks
from multimax.reweighting.layer import INITS

TRAINED = "trained"
PLACES = ("preset", "data", "start")  # settings that may be paths
CONFIG = "config.json"  # of a run: its settings
PRESETS = Path(__file__).parent / "presets"
# What a method is.
METHOD = (
    "attention",
    "output",
    "order",
    "terms",
    "temperature",
    "output_temperature",
    "per_head",
    "init",
    "monotone",
    "attention_in",
    "multimax_lr_factor",
    "attention_options",
    "patch_diversification",
    "pooling",
)
LEAST = {"order": 1, "length": 2, "vocabulary": 1, "image_size": 1, "beams": 1, "stride": 0, "watch": 0, "measured": 0}
LEAST |= {"seed": 0, "patience": 0, "longer": 0, "multimax_lr_factor": 0, "patch_diversification": 0}
# TrainingArguments that transformers does not check; max_steps of -1 means epochs
POSITIVE = (
    "max_steps",
    "num_train_epochs",
    "per_device_train_batch_size",
    "per_device_eval_batch_size",
    "learning_rate",
)
# Functions whose weights are not a softmax of other logits are trained with their own losses.
# Entmax at any alpha is not among them: what it learns would belong to the loss.
LOSSES: dict[str, Callable[..., Tensor]] = {
    spec.name: spec.loss for spec in reweighting.SPECS if spec.loss is not None and not spec.learns
}
LEARNING = tuple(spec.name for spec in reweighting.SPECS if spec.learns and spec.name != "softmax")
OUTPUTS = ("softmax", "multimax", *LOSSES)  # that an output layer can be trained with


def _setting(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class Settings:
    """What a run does. Two runs with the same settings on the same machine give the same numbers."""

    task: str = _setting(tasks.names()[0], " or ".join(tasks.names()))
    preset: str = _setting("", "the preset that the other settings started from")
    label: str = _setting("", "the name of the method in a table")
    about: str = _setting("", "what this is, in a sentence")
    seed: int = _setting(0, "of the initial weights, the order of the data, dropout and augmentation")

    # the reweighting functions
    attention: str = _setting("softmax", "function in the attention layers")
    output: str = _setting("softmax", "function in the output layer")
    order: int = _setting(2, "order of MultiMax")
    terms: str = _setting("both", "terms of MultiMax: both, lower or upper")
    temperature: float | str = _setting(1.0, "of softmax in the attention layers, or 'trained'")
    output_temperature: float | str = _setting(1.0, "of softmax in the output layer, or 'trained'")
    per_head: bool = _setting(False, "parameters for each head of attention")
    init: str = _setting(
        "paper",
        "MultiMax's initial parameters: paper (as in the published code), identity (softmax), or what the layers of "
        "the paper's models have learned: deit_small, wikitext103_lm",
    )
    monotone: bool = _setting(False, "MultiMax whose sigma never falls")
    attention_in: str = _setting(
        "all", "which attention has the function: all, encoder, decoder or cross (translation)"
    )
    attention_options: dict[str, Any] = field(
        default_factory=dict, metadata={"help": "further options of the function in attention, such as k of topk"}
    )
    patch_diversification: float = _setting(0.0, "weight of the three losses of Patch Diversification (vision)")
    multimax_lr_factor: float = _setting(
        1.0, "learning rate of the functions' parameters, as a multiple of the others'"
    )
    only_reweighting: bool = _setting(False, "train only the parameters of the functions")
    start: str = _setting("", "folder of a trained model with softmax to start from")

    # data
    data: str = _setting("", "folder, file, or hub:owner/name of the data")
    test: bool = _setting(
        True,
        "evaluate on the test part at the end; if not, that part is never read, and the last evaluation is on the "
        "validation part (of images, a tenth of the training set)",
    )
    test_set: str = _setting("", "name of the test set, where a folder has several (translation)")
    languages: str = _setting("de-en", "from which language into which (translation)")
    tokenizer: str = _setting("bpe", "bpe, word or character: trained on the data, and saved with the run")
    vocabulary: int = _setting(8192, "the largest number of tokens")
    length: int = _setting(256, "tokens per sequence; in translation, at most so many")
    stride: int = _setting(0, "tokens from one window of evaluation to the next; 0 for windows side by side (language)")
    longer: int = _setting(
        0, "evaluate at the end at doubled lengths, too, up to this one; needs rotary positions (language)"
    )
    beams: int = _setting(5, "beams of the search (translation)")
    image_size: int = _setting(224, "height and width that the model gets (vision)")
    augmentation: dict[str, Any] = field(
        default_factory=dict, metadata={"help": "of the training images, see experiments/augmentation.py"}
    )

    # model and training
    positions: str = _setting("learned", "learned (GPT-2) or rotary (GPT-NeoX), which longer texts can have (language)")
    pooling: str = _setting("average", "average, or class for a class token (vision)")
    stochastic_depth: float = _setting(0.0, "rate with which the last layer is left out; less before it (vision)")
    model: dict[str, Any] = field(
        default_factory=dict, metadata={"help": "options of transformers' configuration of the model"}
    )
    trainer: dict[str, Any] = field(
        default_factory=dict, metadata={"help": "options of transformers' TrainingArguments"}
    )
    patience: int = _setting(
        0,
        "stop when so many evaluations have brought no better validation loss, and take the best; 0 for never",
    )
    watch: int = _setting(100, "steps from one log of the functions' parameters to the next; 0 for none")
    measured: int = _setting(256, "how many test examples the measures of attention are taken from; 0 for none")
    tensorboard: bool = _setting(True, "write event files for TensorBoard")

    def __post_init__(self) -> None:
        """Raises where a setting cannot be right."""
        for name, kind in get_type_hints(type(self)).items():
            _check_type(name, getattr(self, name), kind)
        checks.choice("task", self.task, tasks.names())
        checks.choice("attention", self.attention, reweighting.names())
        checks.choice("output", self.output, OUTPUTS)
        checks.choice("terms", self.terms, ("both", "lower", "upper"))
        checks.choice("init", self.init, INITS)
        checks.choice("attention_in", self.attention_in, ("all", *ROLES))
        checks.choice("positions", self.positions, ("learned", "rotary"))
        checks.choice("pooling", self.pooling, ("average", "class"))
        checks.choice("tokenizer", self.tokenizer, ("bpe", "word", "character"))
        for name, function in (("temperature", self.attention), ("output_temperature", self.output)):
            value = getattr(self, name)
            if isinstance(value, str) and value != TRAINED:
                raise ValueError(f"multimax: expected {name} to be a number or 'trained', got {value!r}")
            if not isinstance(value, str):
                checks.number_above(name, value, 0)
            if value != 1 and function != "softmax":
                raise ValueError(f"multimax: expected {name} with softmax, got it with {function}")
        if self.attention == "softmax" and self.attention_options:
            raise ValueError(f"multimax: expected attention_options of another function, got {self.attention_options}")
        for name, least in LEAST.items():
            if not least <= getattr(self, name) < math.inf:
                raise ValueError(f"multimax: expected {name} of at least {least}, got {getattr(self, name)}")
        if self.seed >= 2**32:
            raise ValueError(f"multimax: expected a seed below 2**32, got {self.seed}")
        for setting in fields(self):
            takers = tasks.takers(setting.name)
            if takers and self.task not in takers and getattr(self, setting.name) != default(setting.name):
                raise ValueError(f"multimax: expected {setting.name} for {' or '.join(takers)}, got it for {self.task}")
        for name in POSITIVE:
            value = self.trainer.get(name, 1)
            good = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
            if not good and not (name == "max_steps" and value == -1):
                raise ValueError(f"multimax: expected {name} above 0, got {value!r}")
        if self.only_reweighting and not self.start:
            raise ValueError("multimax: expected start, a trained model, with only_reweighting, got none")
        parts = self.languages.split("-")
        if len(parts) != 2 or not all(parts):
            raise ValueError(f"multimax: expected languages such as 'de-en', got {self.languages!r}")


def default(name: str) -> Any:
    """What a setting is unless told."""
    setting: Any = Settings.__dataclass_fields__[name]
    return setting.default_factory() if setting.default is MISSING else setting.default


def idle(settings: Settings) -> dict[str, str]:
    """Settings of functions that have no effect on this run, each with what it would need.

    Example:
        >>> from multimax.experiments.settings import Settings, idle
        >>> idle(Settings())["order"]
        'multimax in attention or output'
        >>> idle(Settings(output="multimax"))
        {'attention_in': 'a function in attention', 'per_head': 'multimax, or a trained temperature, in attention'}
    """
    functions = (settings.attention, settings.output)
    trained = TRAINED in (settings.temperature, settings.output_temperature)
    learns = trained or any(name in LEARNING for name in functions)
    per_head = settings.attention == "multimax" or settings.temperature == TRAINED
    needs = dict.fromkeys(("order", "terms", "init", "monotone"), "multimax in attention or output")
    found = {} if "multimax" in functions else needs
    if settings.attention == "softmax" and settings.temperature == 1:
        found["attention_in"] = "a function in attention"
    if not per_head:
        found["per_head"] = "multimax, or a trained temperature, in attention"
    if not learns:
        found["multimax_lr_factor"] = "a function that learns"
    return found


def _check_type(name: str, value: object, kind: Any) -> None:
    kinds = get_args(kind) if get_origin(kind) not in (None, dict) else (get_origin(kind) or kind,)
    if bool not in kinds and isinstance(value, bool):
        good = False
    else:
        good = isinstance(value, kinds) or (float in kinds and isinstance(value, int))
    if not good:
        wanted = " or ".join(each.__name__ for each in kinds)
        raise TypeError(f"multimax: expected the setting {name} to be of type {wanted}, got {value!r}")


def from_dict(values: Mapping[str, Any], where: str) -> Settings:
    """Settings from plain data.

    Args:
        values: by name.
        where: the values come from, for the error.
    """
    known = [setting.name for setting in fields(Settings)]
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise ValueError(f"multimax: expected settings out of {', '.join(known)} in {where}, got {', '.join(unknown)}")
    return Settings(**values)


def as_dict(settings: Settings) -> dict[str, Any]:
    """Settings as plain data."""
    return asdict(settings)


def override(settings: Settings, values: Mapping[str, Any]) -> Settings:
    """Settings with some of them changed. A dict changes the entries that it names, and leaves the others.

    Example:
        >>> from multimax.experiments.settings import Settings, override
        >>> override(Settings(trainer={"max_steps": 10}), {"trainer": {"seed": 1}, "order": 1}).trainer
        {'max_steps': 10, 'seed': 1}
    """
    before = as_dict(settings)
    merged = {
        name: {**before[name], **value} if isinstance(value, Mapping) and isinstance(before.get(name), dict) else value
        for name, value in values.items()
    }
    return from_dict({**before, **merged}, "the settings")


def _same_place(task: str, one: object, other: object) -> bool:
    """Whether two words name one file or folder, such as ./d.txt and d.txt. Names of the hub, and of data that comes
    with a package, are no files."""
    words = (one, other)
    if not all(isinstance(word, str) and word and not word.startswith("hub:") for word in words):
        return False
    if task in tasks.names() and tasks.get(task).included in words:
        return False
    first, second = (os.path.abspath(os.path.expanduser(str(word))) for word in words)
    return first == second


def differences(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Names and values of what differs between settings as plain data, in their parts too."""
    for name in [*now, *(name for name in before if name not in now)]:
        there, here = before.get(name), now.get(name)
        if isinstance(there, Mapping) and isinstance(here, Mapping):
            yield from differences(there, here, f"{prefix}{name}.")
        elif there != here and not (name in PLACES and _same_place(str(now.get("task")), there, here)):
            yield f"{prefix}{name}", there, here


def read_json(path: Path) -> Any:
    """What a JSON file holds."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"multimax: expected {str(path)!r} to be a file of JSON, got: {error}") from None


def preset_names(folder: Path = PRESETS) -> tuple[str, ...]:
    """The presets that come with the package."""
    return tuple(sorted(path.stem for path in folder.glob("*.json")))


def named_file(name: str, folder: Path, kind: str) -> Path:
    """A file that comes with the package, by name, or one of the user's.

    Args:
        name: of a file in the folder, without its ending, or a path that ends with .json.
        folder: of the package, that holds them.
        kind: what the files hold, for the error.
    """
    path = Path(name) if name.endswith(".json") else folder / f"{name}.json"
    if not path.is_file():
        known = ", ".join(preset_names(folder))
        raise ValueError(f"multimax: expected a {kind} out of {known}, or a file of JSON, got {name!r}")
    return path


def preset(name: str) -> Settings:
    """The settings of a preset by name, or of a file of JSON, such as another run's config.json."""
    path = named_file(name, PRESETS, "preset")
    values = read_json(path)
    if not isinstance(values, Mapping):
        raise ValueError(f"multimax: expected {str(path)!r} to hold settings by name, got {type(values).__name__}")
    return from_dict({**values, "preset": values.get("preset") or name}, str(path))


def method(settings: Settings) -> str:
    """A method in words, for a run that is not of a table.

    Example:
        >>> from multimax.experiments.settings import Settings, method
        >>> method(Settings(attention="multimax", order=1))
        'MultiMax attention, order 1'
    """
    names = {"softmax": "softmax", "multimax": "MultiMax"}
    attention, output = (names.get(name, name) for name in (settings.attention, settings.output))
    if settings.attention == settings.output:
        parts = ["softmax" if attention == "softmax" else f"{attention} both"]
    else:
        parts = [f"{attention} attention"] * (settings.attention != "softmax")
        parts += [f"{output} output"] * (settings.output != "softmax")
    for name in ("temperature", "output_temperature", "order", "terms"):
        if getattr(settings, name) != getattr(Settings, name):
            parts.append(f"{name.replace('_', ' ')} {getattr(settings, name)}")
    parts += [f"{key} {value}" for key, value in settings.attention_options.items()]
    parts += ["per head"] * settings.per_head + ["monotone"] * settings.monotone
    parts += [f"in {settings.attention_in}"] * (settings.attention_in != "all") + ["class token"] * (
        settings.pooling == "class"
    )
    parts += ["Patch Diversification"] * bool(settings.patch_diversification)
    return ", ".join(parts)
