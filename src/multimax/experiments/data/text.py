"""Plain text to train a language model on."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from multimax.experiments.data import files

SHORTEST = 4000  # characters of a text that is cut into parts: of fewer, the small parts would say nothing
SHARES = (0.9, 0.95)  # where it is cut
# a folder's files: to train, to validate, to test
LAYOUTS = (
    (("train.txt",), tuple(f"{name}.txt" for name in files.VALID), ("test.txt",)),
    (("wiki.train.tokens",), ("wiki.valid.tokens",), ("wiki.test.tokens",)),
)


@dataclass(frozen=True)
class TextData:
    """Text in three parts.

    Attributes:
        train: to train on.
        valid: to choose by.
        test: what the results are of.
        name: what the data is called.
    """

    train: str
    valid: str
    test: str
    name: str


def _checked(data: TextData, where: str) -> TextData:
    """The text, every part of which must have words."""
    for part, text in (("training", data.train), ("validation", data.valid), ("test", data.test)):
        if not text.strip():
            raise ValueError(f"multimax: expected words in the {part} part of {where}, got only spaces and line ends")
    return data


def _cut(text: str, where: str, name: str) -> TextData:
    """Cuts a text in three, at ends of lines."""
    if len(text) < SHORTEST:
        raise ValueError(f"multimax: expected at least {SHORTEST} characters in {where}, got {len(text)}")
    first, second = (text.find("\n", int(share * len(text))) + 1 for share in SHARES)
    if not 0 < first < second < len(text):
        raise ValueError(
            f"multimax: expected ends of lines at which to cut {where} near {SHARES[0]:.0%} and {SHARES[1]:.0%} of it, "
            "got lines that are too long; give three files, train.txt, valid.txt and test.txt, in a folder"
        )
    return _checked(TextData(text[:first], text[first:second], text[second:], name), where)


def _python() -> TextData:
    topics = files.optional("pydoc_data.topics", "this Python comes without its help; name a file instead").topics
    text = "\n".join(topics[name] for name in sorted(topics))
    # the text is another one in every version
    return _cut(text, "Python's own help", f"python-{'.'.join(map(str, sys.version_info[:3]))}")


def _parted(name: str, train: str, valid: str, test: str | None = None) -> TextData:
    """The parts; that to validate on stands in for a test part which is not to be read."""
    if test is None:
        return TextData(train, valid, valid, f"{name}{files.VALIDATION}")
    return TextData(train, valid, test, name)


def _chosen(data: TextData, with_test: bool) -> TextData:
    return data if with_test else _parted(data.name, data.train, data.valid)


def _hub_text(source: str, with_test: bool) -> TextData:
    found = files.hub(source)

    def joined(split: Any) -> str:
        column = found.column(split, "text", "sentence")
        rows = split[column][:]
        for i, row in enumerate(rows):
            if not isinstance(row, str):
                raise ValueError(
                    f"multimax: expected text in row {i} of the column {column} of {source}, got {type(row).__name__}"
                )
        # some datasets keep the ends of lines, as WikiText does
        text = "".join(row.removesuffix("\n") + "\n" for row in rows)
        if not text.strip():
            raise ValueError(f"multimax: expected text in the column {column} of every split of {source}, got none")
        return text

    splits = [found.split("train"), found.split(*files.VALID), *([found.split("test")] if with_test else [])]
    return _parted(found.name, *map(joined, splits))


def load_text(source: str | Path, *, with_test: bool = True) -> TextData:
    """Loads plain text of UTF-8.

    Args:
        source: one of

            - ``"python"``: the help on Python's language that every Python carries. It is a little different in every
              version, so that the name tells the version;
            - a file: the first nine tenths are to train on, then a twentieth each to validate and to test, cut at ends
              of lines;
            - a folder with train.txt, valid.txt (or validation.txt, val.txt, dev.txt) and test.txt, or with
              wiki.train.tokens, wiki.valid.tokens and wiki.test.tokens as WikiText has them;
            - ``"hub:owner/name"`` or ``"hub:owner/name:configuration"``: what ``datasets.load_dataset`` loads, with a
              column text or sentence, one row per line.

            Files may be packed, as .gz or .xz. A ``Path`` is always a file or folder, also when named python.
        with_test: whether to read the test part. If not, the validation part stands in its place, and a file test.txt
            is not opened.

    Returns:
        The text. Ends of lines are as on Linux; nothing else is changed.

    Raises:
        FileNotFoundError: a file or folder is missing, and the message names it.
        ValueError: a file is damaged, not of UTF-8 or too short, and the message names it.

    Example:
        >>> from multimax.experiments.data import load_text
        >>> data = load_text("python")
        >>> len(data.train) > 10 * len(data.test) > 0
        True
    """
    if source == "python":
        return _chosen(_python(), with_test)
    if files.is_hub(source):
        return _hub_text(str(source), with_test)
    path = files.place(source, "'python', hub:owner/name, a file or a folder of text")
    if path.is_file():
        return _chosen(_cut(files.read_text(path), str(path), Path(files.unpacked(path)).stem), with_test)
    for layout in LAYOUTS:
        if any(files.find(path, *names) for names in layout):
            train, valid, *test = (files.require(path, *names) for names in (layout if with_test else layout[:2]))
            return _checked(_parted(path.name, *map(files.read_text, (train, valid, *test))), str(path))
    raise FileNotFoundError(
        "multimax: expected train.txt, valid.txt and test.txt, or wiki.train.tokens, wiki.valid.tokens and "
        f"wiki.test.tokens, each also .gz or .xz, in {path}, which {files.holds(path)}; a single file is named itself"
    )
