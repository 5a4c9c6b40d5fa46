"""The command `multimax`: one file for each subcommand."""

from multimax.cli.command import main

__all__ = ["main"]
