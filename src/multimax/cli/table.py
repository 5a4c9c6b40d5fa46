"""`multimax table`: the results of sweeps, in columns or as Markdown."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from multimax.cli import layout
from multimax.cli.errors import need_packages, refusing

if TYPE_CHECKING:
    from multimax.experiments.results import Sweep

TEXT = """\
Prints the results of sweeps: mean, standard deviation, seeds, and the paired difference to softmax with its 95%
confidence interval. On a terminal in its columns; into a file or another program as Markdown.

examples:
  multimax table runs/digits
  multimax table runs/digits > digits.md
  multimax table runs/digits --save digits.json
                          all numbers in one small file, which can be read back
  multimax table digits.json --parameters "MultiMax both"
"""


def add(commands: Any) -> None:
    """Adds the subcommand."""
    command = layout.command(commands, "table", "print the results of sweeps", TEXT)
    command.add_argument(
        "paths", nargs="+", type=Path, metavar="PATH", help="folder of a sweep or search, or a file made by --save"
    )
    command.add_argument(
        "--metrics", nargs="+", help="which metrics to show, the first with its difference to the baseline"
    )
    command.add_argument("--baseline", help="the method to compare with, the table's default unless given")
    command.add_argument(
        "--parameters", nargs="+", metavar="LABEL", help="also show what these methods have learned, by layer"
    )
    command.add_argument(
        "--curves", type=Path, metavar="FILE", help="draw the sigma that this method has learned (needs matplotlib)"
    )
    command.add_argument(
        "--detect",
        metavar="D",
        help="also say how many seeds would show a difference of D, such as 0.4, or 1.4%% of the baseline",
    )
    command.add_argument("--save", type=Path, metavar="FILE", help="write all numbers into one JSON file")
    command.set_defaults(function=table)


def table(options: argparse.Namespace) -> None:
    """Prints, saves and draws what was asked for."""
    need_packages()
    from multimax.experiments import results, terminal
    from multimax.experiments import table as tables
    from multimax.experiments.search import rungs_in

    width = terminal.width()
    with refusing():
        sweeps = [results.read(path) for given in options.paths for path in rungs_in(given) or [given]]
        if options.save is not None:
            if len(sweeps) != 1:
                raise ValueError(f"multimax: expected one sweep to save, got {len(sweeps)}")
            results.save(sweeps[0], options.save)
        for number, sweep in enumerate(sweeps):
            print("\n" * bool(number) + tables.text(sweep, options.metrics, options.baseline, width))
            if options.detect is not None:
                print("\n" + tables.detection(sweep, options.detect, options.metrics, options.baseline))
            for label in options.parameters or ():
                print("\n" + tables.parameters_text(sweep, label, width))
        if options.curves is not None:
            _draw_curves(sweeps, options.parameters or (), options.curves)


def _draw_curves(sweeps: "Sequence[Sweep]", labels: Sequence[str], file: Path) -> None:
    """The sigma that a method of a sweep has learned, one line per seed."""
    from multimax import plots
    from multimax.experiments.table import learned_layers, line_of

    if len(sweeps) != 1 or len(labels) != 1:
        raise ValueError("multimax: expected one sweep, and one method by --parameters, for --curves")
    layers, line = learned_layers(sweeps[0], labels[0]), line_of(sweeps[0], labels[0])
    plots.save(plots.learned_sigma(layers, line=line), file)
