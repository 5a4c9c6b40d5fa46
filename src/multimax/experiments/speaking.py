"""What commands say while they work: results on standard output, all else on standard error."""

import os
import sys
from typing import Any


def say(text: str) -> None:
    """A line on standard output."""
    _write(sys.stdout, text)


def note(text: str) -> None:
    """A line on standard error."""
    _write(sys.stderr, text)


def _write(stream: Any, text: str) -> None:
    """Writes a line. Where nobody reads any more, as behind `| head`, the work goes on, and the words are lost."""
    try:
        print(text, file=stream, flush=True)
    except BrokenPipeError:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), stream.fileno())


def on_terminal() -> bool:
    """Whether standard error is a terminal, on which a bar can be drawn."""
    return sys.stderr is not None and sys.stderr.isatty()
