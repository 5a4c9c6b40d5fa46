"""How help is laid out: in the width of the terminal, with examples on lines of their own."""

import argparse
import textwrap
from typing import Any


class Help(argparse.HelpFormatter):
    """Fills paragraphs, leaves indented lines as they are, and never breaks a name at its hyphens."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines: list[str] = []
        paragraph: list[str] = []
        for line in [*text.strip("\n").split("\n"), ""]:
            if line and not line.startswith(" "):
                paragraph.append(line)
                continue
            lines += textwrap.wrap(" ".join(paragraph), width, break_on_hyphens=False)
            paragraph = []
            lines.append(line)
        return "\n".join(indent + line for line in lines[:-1])

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


def command(commands: Any, name: str, help: str, description: str = "") -> argparse.ArgumentParser:
    """A subcommand.

    Args:
        commands: to add it to.
        name: as it is called.
        help: in the list of commands.
        description: above its options; the help as a sentence unless given. Lines that are indented stay as they are.
    """
    description = description or f"{help[0].upper()}{help[1:]}."
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=help, description=description, formatter_class=Help
    )
    return parser
