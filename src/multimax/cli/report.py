"""`multimax report`: one HTML page about runs or models."""

import argparse
from pathlib import Path
from typing import Any

from multimax.cli import layout, runs
from multimax.cli.errors import need_packages, refusing

TEXT = """\
Writes one self-contained HTML page about trained runs or saved models: results, all figures that apply, the learned
parameters in the paper's symbols, and the settings. It works offline, and can be printed.

examples:
  multimax report runs/digits                     a sweep, all its methods
  multimax report runs/a/seed-0 runs/b/seed-0     runs side by side
  multimax report MODEL --preset cpu-fashion --data FOLDER --out model.html
                                                  a saved model, on data
"""


def add(commands: Any) -> None:
    """Adds the subcommand."""
    command = layout.command(commands, "report", "write one HTML page about runs or models", TEXT)
    command.add_argument(
        "paths",
        nargs="+",
        type=Path,
        metavar="RUN",
        help="folder of a run, a sweep or a saved transformers model, or a file written by multimax table --save",
    )
    command.add_argument("--out", type=Path, default=Path("report.html"), help="report.html unless given")
    command.add_argument("--data", help="the data to run the models on, the runs' data unless given")
    command.add_argument("--preset", help=f"how the data of saved models is read, {runs.presets_in_words()}")
    command.add_argument(
        "--seed", type=int, help="which runs of a sweep to show models of, the first seed unless given"
    )
    command.add_argument(
        "--examples",
        type=int,
        default=100,
        help="test examples for the models, 100 unless given; 0 runs none, and is quick",
    )
    command.add_argument("--quiet", action="store_true", help="no progress bar")
    command.set_defaults(function=report)


def report(options: argparse.Namespace) -> None:
    """Writes it, and says where."""
    need_packages()
    from multimax.experiments import report as reports

    with refusing():
        file = reports.report(
            options.paths,
            options.out,
            preset=options.preset,
            data=options.data,
            seed=options.seed,
            examples=options.examples,
            progress=not options.quiet,
        )
        print(file)
