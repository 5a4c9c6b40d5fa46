"""`multimax demo`: softmax and MultiMax, trained on digits and compared."""

import argparse
import importlib.util
from pathlib import Path
from typing import Any

from multimax.cli import layout
from multimax.cli.errors import need_packages, refusing
from multimax.experiments.speaking import say

TEXT = "Trains a small vision transformer on digits, with softmax and with MultiMax, and compares them."


def add(commands: Any) -> None:
    """Adds the subcommand."""
    command = layout.command(commands, "demo", "train softmax and MultiMax on digits, in a minute or two", TEXT)
    command.add_argument("--seeds", type=int, default=3, help="runs of each method, 3 unless given")
    command.add_argument(
        "--out", type=Path, default=Path("runs/demo"), help="folder for the runs, runs/demo unless given"
    )
    command.set_defaults(function=demo)


def demo(options: argparse.Namespace) -> None:
    """Both methods, a table, and a page with the figures."""
    need_packages()
    from multimax.experiments import demo as experiment
    from multimax.experiments import terminal

    with refusing():
        if options.seeds < 1:
            raise ValueError(f"multimax: expected at least one seed, got {options.seeds}")
        found = experiment.demo(options.out, options.seeds, width=terminal.width())
        say(found.text)
        page = options.out / "report.html"
        if importlib.util.find_spec("matplotlib") is None:
            say(f'\nFor a page with all figures: pip install "multimax[plots]"\nmultimax report {options.out}')
        else:
            from multimax.experiments.report import report

            say(f"\nA page with all figures, for the browser: {report([options.out], page)}")
        if found.warning:
            say(found.warning)
        say(f"The runs are in {options.out}; delete it to train again.\nThe weights themselves: multimax weights")
