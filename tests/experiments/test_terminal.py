"""Tables in the columns of a terminal."""

import io
import re

import pytest

from multimax import cli
from multimax.experiments import terminal
from results_tables import FOLDER

ROWS = [["method", "accuracy, % ↑", "a long title of many words", "loss ↓"], ["softmax", "97.76 ± 0.55", "1", "0.1"]]


def cells(text: str) -> list[list[str]]:
    return [re.split(r" {2,}", line.strip()) for line in text.splitlines() if line and set(line) != {"-", " "}]


def test_all_columns_where_there_is_room() -> None:
    text = terminal.table(ROWS, 200)
    assert cells(text)[-1] == ["softmax", "97.76 ± 0.55", "1", "0.1"]
    assert "\n\n" not in text


@pytest.mark.parametrize("width", range(24, 60, 5))
def test_blocks_where_there_is_none(width: int) -> None:
    text = terminal.table(ROWS, width)
    assert max(map(len, text.splitlines())) <= width
    for block in text.split("\n\n"):
        assert block.splitlines()[-1].startswith("softmax ")
    shown = [cell for block in text.split("\n\n") for cell in cells(block)[-1][1:]]
    assert shown == ROWS[1][1:]
    assert "accuracy, %\n" not in text  # the arrow stays with its word
    for word in ("a", "long", "title", "many", "words"):
        assert word in text


def test_a_cell_wider_than_the_terminal_takes_several_lines() -> None:
    text = terminal.table([["method", "note"], ["softmax", "one two three four five"]], 20)
    assert max(map(len, text.splitlines())) <= 20
    assert " ".join(line[9:] for line in text.splitlines()[2:]) == "one two three four five"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("name", ["digits", "multi30k", "wikitext2-output"])
def test_table_is_compact_on_a_terminal_and_markdown_elsewhere(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["table", str(FOLDER / "results" / f"{name}.json"), "--parameters", "MultiMax output"]
    assert cli.main(words) == 0
    markdown = capsys.readouterr().out
    assert markdown.startswith("| method ")
    monkeypatch.setenv("COLUMNS", "80")
    stream = Terminal()
    monkeypatch.setattr("sys.stdout", stream)
    assert cli.main(words) == 0
    text = stream.getvalue()
    assert "|" not in text
    assert max(map(len, text.splitlines())) <= 80
    # the same cells, and the difference beside its metric
    of_markdown = {cell.strip() for line in markdown.splitlines() if line[0:1] == "|" for cell in line.split("|")}
    of_text = {cell for row in cells(text) for cell in row}
    assert {cell for cell in of_markdown if "±" in cell or "[" in cell} <= of_text
    if name == "digits":  # where there is room for both
        assert "difference" in text.partition("\n\n")[0]
    notes = [line[2:] for line in markdown.splitlines() if line.startswith("- ")]
    joined = " ".join(text.split())
    assert all(note in joined for note in notes)
