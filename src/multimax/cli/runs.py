"""What `train` and `sweep` share: options into settings, results into words."""

import argparse
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

from multimax.experiments import tasks
from multimax.experiments.settings import Settings, idle, override, preset_names

FROM_START = ("tokenizer", "vocabulary")  # comes with a model to start from
NOT_OPTIONS = ("task", "preset", "label", "about")


class Short(NamedTuple):
    """A short option for one of transformers' TrainingArguments."""

    argument: str
    parse: Callable[[str], Any]
    help: str


SHORT = {
    "steps": Short("max_steps", int, "steps of training"),
    "epochs": Short("num_train_epochs", float, "epochs of training"),
    "batch-size": Short("per_device_train_batch_size", int, "examples per step and process"),
    "learning-rate": Short("learning_rate", float, "the largest learning rate"),
}


# of the options in the configuration of each task's model
OF_MODEL = {
    "vision": "augmentation.flip=true, model.num_hidden_layers=2",
    "language": "model.n_layer=2",
    "translation": "model.encoder_layers=2",
}


def presets_in_words() -> str:
    """What --preset takes."""
    return f"one of {', '.join(preset_names())}, or a JSON file"


def _number_or_word(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _assignment(text: str) -> tuple[list[str], Any]:
    """``a.b=value``, the value in JSON, or a word."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, got {text!r}")
    try:
        return name.split("."), json.loads(value)
    except json.JSONDecodeError:
        return name.split("."), value


def add_settings(
    parser: argparse.ArgumentParser, task: tasks.TaskSpec | None = None, left_to_the_table: Collection[str] = ()
) -> None:
    """One option per setting that is a single word or number, and the options that both commands share.

    Args:
        parser: of the command.
        task: whose options to add; those of all tasks unless given.
        left_to_the_table: settings that are not offered; those who give them all the same are told why not.
    """
    hints = get_type_hints(Settings)
    group = parser.add_argument_group("settings", "override the preset's")
    for setting in fields(Settings):
        kind, text = hints[setting.name], str(setting.metadata["help"]).replace("%", "%%")
        if setting.name in NOT_OPTIONS or kind == dict[str, Any]:
            continue
        takers = tasks.takers(setting.name)
        if takers and task is not None and task.name not in takers:
            continue
        text = text if task is None else text.removesuffix(f" ({task.name})")
        text = argparse.SUPPRESS if setting.name in left_to_the_table else text
        word = "--" + setting.name.replace("_", "-")
        if kind is bool:
            group.add_argument(word, action=argparse.BooleanOptionalAction, default=None, help=text)
            continue
        parse = kind if kind in (int, float, str) else _number_or_word
        group.add_argument(word, type=parse, default=None, metavar=setting.name.upper(), help=text)
    for word, short in SHORT.items():
        group.add_argument(f"--{word}", type=short.parse, default=None, metavar="N", help=short.help)
    group.add_argument("--bf16", action="store_true", default=None, help="compute in bfloat16")
    sizes = {spec.name: ", ".join(spec.sizes) for spec in tasks.SPECS if task in (None, spec)}
    known = "; ".join(f"{name}: {of_task}" for name, of_task in sizes.items()) if task is None else sizes[task.name]
    group.add_argument("--size", help=f"of the model, one of {known}")
    of_model = OF_MODEL.get(task.name if task else "vision", "model.hidden_size=64")
    group.add_argument(
        "--set",
        nargs="+",
        action="extend",
        default=[],
        type=_assignment,
        metavar="NAME=VALUE",
        help="any other setting, such as trainer.weight_decay=0.1 (transformers' TrainingArguments), "
        f"{of_model} (its configuration), attention_options.k=8",
    )
    parser.add_argument("--out", type=Path, help="folder for the results, in runs/ unless given")
    parser.add_argument("--quiet", action="store_true", help="no progress bars, only lines")
    parser.add_argument("--dry-run", action="store_true", help="check everything, say what would be done, and stop")


def settings(options: argparse.Namespace, base: Settings) -> Settings:
    """The preset's settings, changed by the options."""
    values: dict[str, Any] = {}
    for setting in fields(Settings):
        value = getattr(options, setting.name, None)
        if setting.name not in NOT_OPTIONS and value is not None:
            values[setting.name] = value
    trainer = {short.argument: getattr(options, word.replace("-", "_")) for word, short in SHORT.items()}
    trainer = {name: value for name, value in trainer.items() if value is not None}
    if options.bf16:
        trainer["bf16"] = True
    if "num_train_epochs" in trainer and "max_steps" not in trainer:
        trainer["max_steps"] = -1  # or else it would take precedence over the epochs
    result = override(base, {**values, **({"trainer": trainer} if trainer else {})})
    if options.size:
        result = override(result, {"model": tasks.get(result.task).size(options.size)})
    for path, value in options.set:
        name, *parts = path
        for part in reversed(parts):
            value = {part: value}
        if parts and not isinstance(getattr(result, name, None), Mapping):
            raise ValueError(f"multimax: expected a setting with parts, such as trainer, got {name!r}")
        result = override(result, {name: value})
    return result


def check_effect(options: argparse.Namespace, runs: Sequence[Settings]) -> None:
    """Raises if an option was given that has no effect on any of the runs.

    Args:
        options: as given.
        runs: their settings.
    """
    given = {setting.name for setting in fields(Settings) if getattr(options, setting.name, None) is not None}
    given |= {path[0] for path, _ in options.set}
    first = runs[0]
    for name in sorted(given):
        takers, word = tasks.takers(name), "--" + name.replace("_", "-")
        if takers and first.task not in takers:
            raise ValueError(f"multimax: expected {word} for {' or '.join(takers)}, got it for {first.task}")
        if all(name in idle(settings) for settings in runs):
            raise ValueError(f"multimax: expected {word} with {idle(first)[name]}, got it without; leave it out")
        if name in FROM_START and all(settings.start for settings in runs):
            raise ValueError(
                f"multimax: expected {word} without --start, whose model brings its tokenizer, got both; leave it out"
            )


def in_words(result: Mapping[str, Any]) -> str:
    """How a run went."""
    if result["status"] != "finished":
        reason = str(result.get("reason", "")).removeprefix("multimax: ")
        return f"{result['status']}{f': {reason}' if reason else ''}"
    shown = (*tasks.main_metrics(), "loss")
    values = [f"{name} {result['metrics'][name]:.4f}" for name in shown if name in result["metrics"]]
    return f"{', '.join(values)}, {result['minutes']:.1f} minutes"
