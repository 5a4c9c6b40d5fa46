"""`multimax presets`: what `train` and `sweep` can be given by name."""

import argparse
import shutil
import textwrap
from typing import Any

from multimax.cli import layout
from multimax.cli.errors import refusing
from multimax.experiments import sweep as sweeps
from multimax.experiments import tasks
from multimax.experiments.settings import preset, preset_names


def add(commands: Any) -> None:
    """Adds the subcommand."""
    text = "list the presets of train and sweep, and the tables of sweep, with what they are"
    command = layout.command(commands, "presets", text)
    command.set_defaults(function=presets)


def _entry(name: str, text: str) -> str:
    width = min(shutil.get_terminal_size().columns, 100)
    return textwrap.fill(
        text, width, initial_indent=f"  {name:<18} ", subsequent_indent=" " * 21, break_on_hyphens=False
    )


def presets(_: argparse.Namespace) -> None:
    """Prints them, the presets by task."""
    with refusing():
        known = {name: preset(name) for name in preset_names()}
        for spec in tasks.SPECS:
            print(f"presets for multimax train {spec.name}, and for multimax sweep:")
            for name, settings in known.items():
                if settings.task == spec.name:
                    usual = f" Taken unless --preset is given: multimax train {spec.name}." * (name == spec.preset)
                    needs = "" if settings.data else " Needs --data."
                    print(_entry(name, f"{settings.about}.{needs}{usual}"))
            print()
        print("tables for multimax sweep TABLE --preset PRESET:")
        for name in sweeps.table_names():
            table = sweeps.load_table(name)
            size = f"{len(table.methods)} methods, {table.seeds} seeds unless given"
            if table.search is not None:
                size = f"a search in {len(table.search.rungs)} rungs"
            print(_entry(name, f"{table.about}. {size[0].upper()}{size[1:]}."))
