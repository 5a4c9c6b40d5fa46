"""The commands for runs, `train`, `sweep`, `table`, `report` and `demo`: from words to settings.

What they do is imported when it runs.
"""

import argparse
import importlib.util
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_type_hints

from multimax.experiments import settings as own
from multimax.experiments import sweep as sweeps
from multimax.experiments.settings import Settings, override, preset

NEEDED = ("transformers", "accelerate", "safetensors", "tokenizers", "sacrebleu", "sklearn", "scipy", "PIL", "tqdm")
DEFAULTS = {"vision": "cpu-digits", "language": "cpu-text", "translation": "cpu-multi30k"}
# Words for the most usual of transformers' TrainingArguments.
SHORT: dict[str, tuple[str, Callable[[str], Any], str]] = {
    "steps": ("max_steps", int, "steps of training"),
    "epochs": ("num_train_epochs", float, "epochs of training"),
    "batch-size": ("per_device_train_batch_size", int, "examples a step and process"),
    "learning-rate": ("learning_rate", float, "the largest learning rate"),
}
NOT_OPTIONS = ("task", "preset", "label", "about")
DEMO_TEXT = "Trains a small vision transformer on digits, with softmax and with MultiMax, and compares them."
TRAIN_TEXT = """\
Trains a model of transformers with any reweighting function in attention and output, on real data, from a preset.
Give the same command again to go on after an interruption.

examples:
  multimax train vision                                                   softmax on digits, nothing to download
  multimax train vision --attention multimax --output multimax            MultiMax in both
  multimax train vision --preset cpu-fashion --data FOLDER                IDX files as they are
  multimax train language --preset cpu-wikitext2 --data FOLDER            train.txt, valid.txt, test.txt
  multimax train translation --preset cpu-multi30k --data FOLDER          train.de, train.en, ...
  torchrun --nproc-per-node 8 -m multimax train vision --preset paper-deit-small --data IMAGENET
"""
SWEEP_TEXT = """\
Runs the methods of a table with several seeds, one run after the other. Give the same command again to go on after an
interruption, or in a second terminal to have two at work. Then print it: multimax table FOLDER

examples:
  multimax sweep main --preset cpu-digits --seeds 10 --out runs/digits
  multimax sweep comparison --preset cpu-cifar10 --data FOLDER --methods softmax "MultiMax both"
  multimax sweep retrofit --preset cpu-digits --start "runs/digits/softmax/seed-{seed}/model" --epochs 3
"""
TABLE_TEXT = """\
Prints the results of sweeps as Markdown: mean, standard deviation, seeds, and the paired difference to softmax with its
95% confidence interval.

examples:
  multimax table runs/digits
  multimax table runs/digits --save docs/results/digits.json      all numbers in one small file, which is read as well
  multimax table docs/results/digits.json --parameters "MultiMax both"
"""
REPORT_TEXT = """\
Writes one self-contained page of HTML about trained runs or saved models: results, all figures that apply, the learned
parameters in the paper's symbols, and the settings. It works offline, and prints.

examples:
  multimax report runs/digits                                                   a sweep, all its methods
  multimax report runs/digits/softmax/seed-0 runs/digits/multimax-both/seed-0   runs side by side
  multimax report MODEL --preset cpu-fashion --data FOLDER --out model.html     a saved model, on data
"""


class Refused(Exception):
    """An error that is the user's to mend: shown without a traceback."""


@contextmanager
def _words() -> Iterator[None]:
    """Errors with words for the user, as they are."""
    try:
        yield
    except BrokenPipeError:  # of the one who reads what is printed
        raise
    except (ValueError, TypeError, OSError, RuntimeError, ImportError) as error:
        if str(error).startswith("multimax:"):
            raise Refused(str(error)) from error
        if isinstance(error, OSError):
            raise Refused(f"multimax: expected files that can be read and written, got: {error}") from error
        raise


def _needs() -> None:
    missing = []
    for name in NEEDED:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            missing.append(name)
    if missing:
        raise Refused(
            f"multimax: expected the packages of the experiments, got no {', '.join(missing)}; "
            'pip install "multimax[experiments]"'
        )


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


def _add_settings(parser: argparse.ArgumentParser) -> None:
    """An option for each setting that is one word or number."""
    hints = get_type_hints(Settings)
    group = parser.add_argument_group("settings", "in the place of the preset's")
    for setting in fields(Settings):
        kind, text = hints[setting.name], str(setting.metadata["help"]).replace("%", "%%")
        if setting.name in NOT_OPTIONS or kind == dict[str, Any]:
            continue
        word = "--" + setting.name.replace("_", "-")
        if kind is bool:
            group.add_argument(word, action=argparse.BooleanOptionalAction, default=None, help=text)
            continue
        parse = kind if kind in (int, float, str) else _number_or_word
        group.add_argument(word, type=parse, default=None, metavar=setting.name.upper(), help=text)
    for word, (_, parse, text) in SHORT.items():
        group.add_argument(f"--{word}", type=parse, default=None, metavar="N", help=text)
    group.add_argument("--bf16", action="store_true", default=None, help="compute in bfloat16")
    group.add_argument("--size", help="of the model: a name in experiments/models.py, such as mini or deit-small")
    group.add_argument(
        "--set",
        nargs="+",
        action="extend",
        default=[],
        type=_assignment,
        metavar="NAME=VALUE",
        help="any other, such as trainer.weight_decay=0.1 (transformers' TrainingArguments), "
        "model.num_hidden_layers=2 (its configuration), augmentation.flip=true, attention_options.k=8",
    )
    parser.add_argument("--out", type=Path, help="folder for the results, in runs/ unless given")
    parser.add_argument("--quiet", action="store_true", help="no bars")


def _settings(options: argparse.Namespace, base: Settings) -> Settings:
    """The preset with the options in their places."""
    values: dict[str, Any] = {}
    for setting in fields(Settings):
        value = getattr(options, setting.name, None)
        if setting.name not in NOT_OPTIONS and value is not None:
            values[setting.name] = value
    trainer = {name: getattr(options, word.replace("-", "_")) for word, (name, *_) in SHORT.items()}
    trainer = {name: value for name, value in trainer.items() if value is not None}
    if options.bf16:
        trainer["bf16"] = True
    if "num_train_epochs" in trainer and "max_steps" not in trainer:
        trainer["max_steps"] = -1  # which would else come before the epochs
    result = override(base, {**values, **({"trainer": trainer} if trainer else {})})
    if options.size:
        from multimax.experiments.models import size

        result = override(result, {"model": size(result.task, options.size)})
    for path, value in options.set:
        nested: Any = value
        for part in reversed(path[1:]):
            nested = {part: nested}
        if len(path) > 1 and not isinstance(getattr(result, path[0], None), Mapping):
            raise ValueError(f"multimax: expected a setting with parts, such as trainer, got {path[0]!r}")
        result = override(result, {path[0]: nested})
    return result


def method(settings: Settings) -> str:
    """A method in words, for a run that is not of a table."""
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
    parts += ["per head"] * settings.per_head + ["class token"] * (settings.pooling == "class")
    parts += ["Patch Diversification"] * bool(settings.patch_diversification)
    return ", ".join(parts)


def _said(result: Mapping[str, Any]) -> str:
    if result["status"] != "finished":
        return str(result["status"])
    shown = ("accuracy", "perplexity", "bleu", "loss")
    values = [f"{name} {result['metrics'][name]:.4f}" for name in shown if name in result["metrics"]]
    return f"{', '.join(values)}, {result['minutes']:.1f} minutes"


def train(options: argparse.Namespace) -> int:
    """One run."""
    _needs()
    with _words():
        base = preset(options.preset or DEFAULTS[options.task])
        if base.task != options.task:
            raise ValueError(f"multimax: expected a preset for {options.task}, got {options.preset!r}, for {base.task}")
        settings = _settings(options, base)
        settings = replace(settings, label=method(settings))
        folder = (
            options.out
            or Path("runs") / Path(settings.preset).stem / sweeps.slug(settings.label) / f"seed-{settings.seed}"
        )
        from multimax.experiments.run import is_first, part
        from multimax.experiments.run import train as run

        result = run(settings, folder, progress=not options.quiet)
        part()
        if is_first():
            print(f"{settings.label}, seed {settings.seed}: {_said(result)}\n{folder}")
    return 0 if result["status"] == "finished" else 1


def sweep(options: argparse.Namespace) -> int:
    """The runs of a table."""
    _needs()
    with _words():
        table = sweeps.load_table(options.table)
        base = _settings(options, preset(options.preset))
        if options.seed is not None:
            raise ValueError("multimax: expected --seeds, how many, for a sweep, got --seed")
        count = table.seeds if options.seeds is None else options.seeds
        if count < 1:
            raise ValueError(f"multimax: expected at least one seed, got {count}")
        seeds = list(range(count))
        folder = options.out or Path("runs") / f"{Path(base.preset).stem}-{table.name}"
        runs = sweeps.plan(table, replace(base, label="", seed=0), seeds, folder, options.methods)
        from multimax.experiments.run import is_first, part, task_of

        if not (folder / sweeps.SWEEP).exists():
            task_of(runs[0].settings)  # a mistake in the data shows before anything is written
        if is_first():
            sweeps.note(table, replace(base, label="", seed=0), seeds, folder)
        busy = 0
        for number, done in enumerate(sweeps.sweep(runs, progress=not options.quiet), start=1):
            said = "at work in another process" if done.result is None else _said(done.result)
            busy += done.status == "busy"
            if is_first():
                print(f"{number} of {len(runs)}: {done.run.label}, seed {done.run.seed}: {said}", flush=True)
        part()
        if busy and is_first():
            print(f"{busy} runs are at work in other processes; give the same command again when they are over")
    if is_first():
        print(f"multimax table {folder}")
    return 0


def table(options: argparse.Namespace) -> None:
    """Results as Markdown."""
    _needs()
    from multimax.experiments import results
    from multimax.experiments import table as tables

    with _words():
        found = [results.read(path) for path in options.paths]
        if options.save is not None:
            if len(found) != 1:
                raise ValueError(f"multimax: expected one sweep to save, got {len(found)}")
            results.save(found[0], options.save)
        for number, one in enumerate(found):
            print("\n" * bool(number) + tables.markdown(one, options.metrics, options.baseline))
            for label in options.parameters or ():
                print("\n" + tables.parameters_markdown(one, label))
        if options.curves is not None:
            _draw_curves(found, options.parameters or (), options.curves)


def _draw_curves(found: Any, labels: Any, file: Path) -> None:
    """The learned sigma of a method of a sweep, a line a seed."""
    from multimax import plots
    from multimax.experiments.table import learned_layers

    if len(found) != 1 or len(labels) != 1:
        raise ValueError("multimax: expected one sweep, and one method by --parameters, for --curves")
    plots.save(plots.learned_sigma(learned_layers(found[0], labels[0])), file)


def demo(options: argparse.Namespace) -> None:
    """Both methods, trained on digits."""
    _needs()
    from multimax.experiments.demo import demo as run

    with _words():
        if options.seeds < 1:
            raise ValueError(f"multimax: expected at least one seed, got {options.seeds}")
        print(run(options.out, options.seeds))
        page = options.out / "report.html"
        if importlib.util.find_spec("matplotlib") is None:
            print(f'\nFor a page with all figures: pip install "multimax[plots]", multimax report {options.out}')
        else:
            from multimax.experiments.report import report as write

            print(f"\nA page with all figures, for the browser: {write([options.out], page)}")
        print(f"The runs are in {options.out}; delete it to train again. The weights themselves: multimax weights")


def report(options: argparse.Namespace) -> None:
    """A page about runs or models."""
    _needs()
    from multimax.experiments.report import report as write

    with _words():
        print(
            write(
                options.paths,
                options.out,
                preset=options.preset,
                data=options.data,
                seed=options.seed,
                examples=options.examples,
                progress=not options.quiet,
            )
        )


def add_commands(commands: Any) -> None:
    """Adds them to the command line's parser."""
    raw = argparse.RawDescriptionHelpFormatter
    presets = f"out of {', '.join(own.preset_names())}, or a file of JSON"
    command = commands.add_parser(
        "demo", help="train softmax and MultiMax on digits, in a minute or two", description=DEMO_TEXT
    )
    command.add_argument("--seeds", type=int, default=3, help="runs of each, 3 unless given")
    command.add_argument(
        "--out", type=Path, default=Path("runs/demo"), help="folder for the runs, runs/demo unless given"
    )
    command.set_defaults(function=demo)
    command = commands.add_parser(
        "train", help="train a model with any reweighting function", description=TRAIN_TEXT, formatter_class=raw
    )
    tasks = command.add_subparsers(dest="task", metavar="vision|language|translation", required=True)
    for task, text in (
        ("vision", "classify images"),
        ("language", "model language"),
        ("translation", "translate sentences"),
    ):
        one = tasks.add_parser(task, help=text, description=TRAIN_TEXT, formatter_class=raw)
        one.add_argument(
            "--preset", help=f"{DEFAULTS[task]} unless given; out of {', '.join(own.preset_names())}, or a file"
        )
        _add_settings(one)
        one.set_defaults(function=train)
    command = commands.add_parser(
        "sweep", help="run the methods of a table over seeds", description=SWEEP_TEXT, formatter_class=raw
    )
    command.add_argument("table", help=f"out of {', '.join(sweeps.table_names())}, or a file of JSON")
    command.add_argument("--preset", required=True, help=presets)
    command.add_argument("--seeds", type=int, help="how many; the table's own number unless given")
    command.add_argument("--methods", nargs="+", metavar="LABEL", help="only these of the table")
    _add_settings(command)
    command.set_defaults(function=sweep)
    command = commands.add_parser(
        "table", help="print the results of sweeps", description=TABLE_TEXT, formatter_class=raw
    )
    command.add_argument(
        "paths", nargs="+", type=Path, metavar="PATH", help="folder of a sweep, or a file made by --save"
    )
    command.add_argument("--metrics", nargs="+", help="which to show, the first with its difference to the baseline")
    command.add_argument("--baseline", help="the method to compare with, the table's own unless given")
    command.add_argument(
        "--parameters", nargs="+", metavar="LABEL", help="also what these methods have learned, by layer"
    )
    command.add_argument(
        "--curves", type=Path, metavar="FILE", help="draw the sigma that this method has learned (needs matplotlib)"
    )
    command.add_argument("--save", type=Path, metavar="FILE", help="write all numbers into one file of JSON")
    command.set_defaults(function=table)
    command = commands.add_parser(
        "report", help="write one page of HTML about runs or models", description=REPORT_TEXT, formatter_class=raw
    )
    command.add_argument(
        "paths",
        nargs="+",
        type=Path,
        metavar="RUN",
        help="folder of a run, of a sweep, or of a saved model of transformers, or a file of multimax table --save",
    )
    command.add_argument("--out", type=Path, default=Path("report.html"), help="report.html unless given")
    command.add_argument("--data", help="the data to run models on, in the place of the runs' own")
    command.add_argument("--preset", help=f"how the data of saved models is read, {presets}")
    command.add_argument("--seed", type=int, help="of a sweep's runs that models are shown of, the first unless given")
    command.add_argument(
        "--examples", type=int, default=100, help="of the test set, 100 unless given; 0 runs no model, and is quick"
    )
    command.add_argument("--quiet", action="store_true", help="no bar")
    command.set_defaults(function=report)
