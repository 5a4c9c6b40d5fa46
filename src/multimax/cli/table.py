"""`multimax table`: the results of sweeps as Markdown."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from multimax.cli.errors import need_packages, refusing

if TYPE_CHECKING:
    from multimax.experiments.results import Sweep

TEXT = """\
Prints the results of sweeps as Markdown: mean, standard deviation, seeds, and the paired difference to softmax with its
95% confidence interval.

examples:
  multimax table runs/digits
  multimax table runs/digits --save docs/results/digits.json      all numbers in one small file, which can be read back
  multimax table docs/results/digits.json --parameters "MultiMax both"
"""


def add(commands: Any) -> None:
    """Adds the subcommand."""
    command = commands.add_parser(
        "table",
        help="print the results of sweeps",
        description=TEXT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
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
    from multimax.experiments import results
    from multimax.experiments import table as tables
    from multimax.experiments.search import rungs_in

    with refusing():
        sweeps = [results.read(path) for given in options.paths for path in rungs_in(given) or [given]]
        if options.save is not None:
            if len(sweeps) != 1:
                raise ValueError(f"multimax: expected one sweep to save, got {len(sweeps)}")
            results.save(sweeps[0], options.save)
        for number, sweep in enumerate(sweeps):
            print("\n" * bool(number) + tables.markdown(sweep, options.metrics, options.baseline))
            if options.detect is not None:
                print("\n" + tables.detection(sweep, options.detect, options.metrics, options.baseline))
            for label in options.parameters or ():
                print("\n" + tables.parameters_markdown(sweep, label))
        if options.curves is not None:
            _draw_curves(sweeps, options.parameters or (), options.curves)


def _draw_curves(sweeps: "Sequence[Sweep]", labels: Sequence[str], file: Path) -> None:
    """The sigma that a method of a sweep has learned, one line per seed."""
    from multimax import plots
    from multimax.experiments.table import learned_layers

    if len(sweeps) != 1 or len(labels) != 1:
        raise ValueError("multimax: expected one sweep, and one method by --parameters, for --curves")
    plots.save(plots.learned_sigma(learned_layers(sweeps[0], labels[0])), file)
