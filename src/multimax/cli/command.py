"""The command line, put together from its subcommands."""

import argparse
import os
import sys
from collections.abc import Sequence

from multimax import __version__
from multimax.cli import check, demo, env, explore, figures, report, sweep, table, train, weights
from multimax.cli.errors import Refused

COMMANDS = (weights, env, check, figures, demo, train, sweep, table, report, explore)  # in the order of --help


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="multimax",
        description="MultiMax: softmax over a learned, piece-wise modulated input, sparse and multi-modal at once.",
        epilog="examples:  multimax demo    multimax train vision    multimax COMMAND --help",
    )
    parser.add_argument("--version", action="version", version=f"multimax {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add(subparsers)
    options = parser.parse_args(arguments)
    try:
        code: int | None = options.function(options)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, `head` say, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except KeyboardInterrupt:
        print(
            "\nmultimax: interrupted; the same command continues from the last checkpoint, if there is one",
            file=sys.stderr,
        )
        return 130
    except Refused as error:
        print(error, file=sys.stderr)
        return 1
    return code or 0
