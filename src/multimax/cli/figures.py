"""`multimax figures`: the paper's figures that need only its printed parameters."""

import argparse
from pathlib import Path
from typing import Any

from multimax.cli import layout
from multimax.cli.errors import Refused


def add(commands: Any) -> None:
    """Adds the subcommand."""
    text = "draw the paper's figures that need only its parameters: simplex, trade-off, two entries, sigma by layer"
    command = layout.command(commands, "figures", text)
    command.add_argument(
        "--out", type=Path, default=Path("figures"), help="folder for the figures, figures/ unless given"
    )
    command.add_argument("--format", choices=("png", "svg", "pdf"), default="png", help="png unless given")
    command.add_argument(
        "--dark", action="store_true", help="on a dark background; an svg is by itself where the reader's system is"
    )
    command.set_defaults(function=figures)


def figures(options: argparse.Namespace) -> None:
    """Draws them into files."""
    from multimax import plots

    try:
        options.out.mkdir(parents=True, exist_ok=True)
        for name, figure in plots.paper_figures():
            file = options.out / f"{name}.{options.format}"
            plots.save(figure, file, dark=options.dark)
            print(file)
    except ImportError as error:
        raise Refused(str(error)) from error
    except OSError as error:
        raise Refused(f"multimax: expected a folder to write figures to, got {str(options.out)!r}: {error}") from error
