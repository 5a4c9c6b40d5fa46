"""The command `multimax`."""

from multimax.cli.command import main

__all__ = ["main"]
