"""Tables and notes in the columns of a terminal."""

import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence

GAP = "  "
FAST = "\N{NO-BREAK SPACE}"  # an arrow stays with its word


def width() -> int | None:
    """Of the terminal that standard output is; None where it is a file or another program."""
    return shutil.get_terminal_size().columns if sys.stdout is not None and sys.stdout.isatty() else None


def _wrapped(cell: str, room: int) -> list[str]:
    return textwrap.wrap(cell, room, break_on_hyphens=False) or [""]


def _block(rows: Sequence[Sequence[str]], rooms: Sequence[int]) -> str:
    """Rows in columns of some widths; the first of them, the head, ends where its line is."""
    lines: list[str] = []
    for number, row in enumerate(rows):
        cells = [_wrapped(cell, room) for cell, room in zip(row, rooms, strict=True)]
        height = max(map(len, cells))
        for cell in cells:
            empty = [""] * (height - len(cell))
            cell[:] = empty + cell if number == 0 else cell + empty
        for line in zip(*cells, strict=True):
            lines.append(GAP.join(text.ljust(room) for text, room in zip(line, rooms, strict=True)).rstrip())
        if number == 0:
            lines.append(GAP.join("-" * room for room in rooms))
    return "\n".join(lines)


def table(rows: Sequence[Sequence[str]], width: int) -> str:
    """Rows of cells in columns, in several blocks if they are too wide; each begins with the first column.

    Args:
        rows: the head first.
        width: of the terminal.

    Example:
        >>> from multimax.experiments.terminal import table
        >>> print(table([["method", "accuracy, %", "loss"], ["softmax", "97.76 ± 0.55", "0.1681"]], 24))
        method   accuracy, %
        -------  ------------
        softmax  97.76 ± 0.55
        <BLANKLINE>
        method   loss
        -------  ------
        softmax  0.1681
    """
    head, *body = rows
    head = [re.sub(r" ([↑↓])", f"{FAST}\\1", title) for title in head]
    rows = [head, *body]
    first = max(len(row[0]) for row in rows)
    most = max(width - first - len(GAP), 8)  # for any other column
    rooms = []
    for place, title in enumerate(head):
        words = max(map(len, title.split(" ")), default=1)  # a title may take several lines
        rooms.append(min(max(words, *(len(row[place]) for row in body), 1), most if place else first))
    blocks: list[list[int]] = []
    used = width
    for place in range(1, len(head)):
        if used + len(GAP) + rooms[place] > width:
            blocks.append([0])
            used = rooms[0]
        blocks[-1].append(place)
        used += len(GAP) + rooms[place]
    text = "\n\n".join(
        _block([[row[place] for place in block] for row in rows], [rooms[place] for place in block])
        for block in blocks or [[0]]
    )
    return text.replace(FAST, " ")


def notes(texts: Iterable[str], width: int) -> str:
    """A list of sentences."""
    return "\n".join(textwrap.fill(text, width, initial_indent="- ", subsequent_indent="  ") for text in texts)
