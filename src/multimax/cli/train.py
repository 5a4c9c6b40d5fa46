"""`multimax train`: one run."""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from multimax.cli import layout, runs
from multimax.cli.errors import need_packages, refusing
from multimax.experiments import sweep as sweeps
from multimax.experiments import tasks
from multimax.experiments.settings import method, preset, preset_names
from multimax.experiments.speaking import note, say

TEXT = """\
Trains a transformers model with any reweighting function in attention and output, on real data, from a preset.
Give the same command again to continue after an interruption.

examples:
"""
EXAMPLES = {
    "vision": """\
  multimax train vision           softmax on digits, nothing to download
  multimax train vision --attention multimax --output multimax
                                  MultiMax in both
  multimax train vision --preset cpu-fashion --data FOLDER
                                  IDX files as they are
  torchrun --nproc-per-node 8 -m multimax train vision \\
      --preset paper-deit-small --data IMAGENET
""",
    "language": """\
  multimax train language         softmax on the help that Python brings
  multimax train language --preset cpu-wikitext2 --data FOLDER
                                  train.txt, valid.txt, test.txt
""",
    "translation": """\
  multimax train translation --preset cpu-multi30k --data FOLDER
                                  train.de, train.en, ...
""",
}


def add(commands: Any) -> None:
    """Adds the subcommand, which has one subcommand per task."""
    every = TEXT + "".join(EXAMPLES.values())
    command = layout.command(commands, "train", "train a model with any reweighting function", every)
    subcommands = command.add_subparsers(dest="task", metavar="|".join(tasks.names()), required=True)
    for spec in tasks.SPECS:
        subcommand = layout.command(subcommands, spec.name, spec.about, TEXT + EXAMPLES.get(spec.name, ""))
        known = ", ".join(name for name in preset_names() if preset(name).task == spec.name)
        subcommand.add_argument("--preset", help=f"{spec.preset} unless given; one of {known}, or a JSON file")
        runs.add_settings(subcommand, spec)
        subcommand.set_defaults(function=train)


def train(options: argparse.Namespace) -> int:
    """One run, from the beginning or from where it was interrupted."""
    need_packages()
    with refusing():
        base = preset(options.preset or tasks.get(options.task).preset)
        if base.task != options.task:
            raise ValueError(f"multimax: expected a preset for {options.task}, got {options.preset!r}, for {base.task}")
        settings = runs.settings(options, base)
        runs.check_effect(options, [settings])
        settings = replace(settings, label=method(settings))
        folder = (
            options.out
            or Path("runs")
            / sweeps.slug(Path(settings.preset).stem)
            / sweeps.slug(settings.label)
            / f"seed-{settings.seed}"
        )
        from multimax.experiments import run

        if options.dry_run:
            words = run.outlook(settings, folder)
            run.part()
            if run.is_first():
                say(f"{settings.label}, seed {settings.seed}: {words}\n{folder}")
            return 0
        result = run.train(settings, folder, bars=not options.quiet)
        run.part()
        if run.is_first():
            say(f"{settings.label}, seed {settings.seed}: {runs.in_words(result)}\n{folder}")
            if result["status"] != run.FINISHED:
                note(f"multimax: delete the folder {folder} to train it again")
    return 0 if result["status"] == "finished" else 1
