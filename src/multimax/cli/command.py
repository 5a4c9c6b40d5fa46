"""The command line, put together from its subcommands."""

import argparse
import codecs
import io
import os
import sys
from collections.abc import Sequence

from multimax import __version__
from multimax.cli import check, demo, env, explore, figures, layout, presets, report, sweep, table, train, weights
from multimax.cli.errors import Refused

PLAIN = {"↑": "(higher)", "↓": "(lower)", "±": "+-"}
EXAMPLES = """\
examples:
  multimax weights 2.4 2.0 0.3 -1   weights of these scores, by every function
  multimax demo                     softmax and MultiMax trained on digits
  multimax train vision             one run
  multimax COMMAND --help           what a command takes, with examples
"""
COMMANDS = (weights, env, check, figures, demo, train, sweep, presets, table, report, explore)  # in the order of --help


def _plain(error: UnicodeError) -> tuple[str, int]:
    """What stands for a sign that a terminal does not have."""
    assert isinstance(error, UnicodeEncodeError)
    return "".join(PLAIN.get(sign, "?") for sign in error.object[error.start : error.end]), error.end


codecs.register_error("multimax.plain", _plain)


def speak_plainly() -> None:
    """Lets a terminal that has not all signs, as one of Latin-1, show others in their place."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="multimax.plain")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="multimax",
        description="MultiMax: softmax over a learned, piece-wise modulated input, sparse and multi-modal at once.",
        epilog=EXAMPLES,
        formatter_class=layout.Help,
    )
    parser.add_argument("--version", action="version", version=f"multimax {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add(subparsers)
    speak_plainly()
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
