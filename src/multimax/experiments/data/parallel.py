"""Pairs of sentences to train translation on."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from multimax.experiments.data import files

Pairs = list[tuple[str, str]]


@dataclass(frozen=True)
class ParallelData:
    """Sentences with their translations.

    Attributes:
        train: pairs (sentence, its translation) to train on.
        valid: those to choose by.
        test: those that the results are of.
        languages: from which to which.
        name: what the data is called, with the test set if that has a name of its own.
    """

    train: Pairs
    valid: Pairs
    test: Pairs
    languages: tuple[str, str]
    name: str


def _filled(pairs: Pairs, where: str, *, training: bool) -> Pairs:
    """The pairs without those that lack a sentence; to validate and test, none may."""
    filled = [pair for pair in pairs if all(pair)]
    if not filled:
        raise ValueError(f"multimax: expected pairs of sentences in {where}, got none")
    if not training and len(filled) < len(pairs):
        line = next(i for i, pair in enumerate(pairs, 1) if not all(pair))
        raise ValueError(
            f"multimax: expected a sentence in every line of {where}, got an empty one in line {line}; "
            "remove the line on both sides"
        )
    return filled


def _lines(path: Path) -> list[str]:
    # not splitlines, which also ends lines at signs that stand inside of sentences, and the sides would shift
    lines = files.read_text(path).split("\n")
    return [line.strip() for line in (lines if lines[-1] else lines[:-1])]


def _pairs(source: Path, target: Path, *, training: bool = False) -> Pairs:
    sides = _lines(source), _lines(target)
    if len(sides[0]) != len(sides[1]):
        raise ValueError(
            f"multimax: expected as many lines on both sides, got {len(sides[0])} in {source} and "
            f"{len(sides[1])} in {target}"
        )
    return _filled(list(zip(*sides, strict=True)), f"{source} and {target}", training=training)


def _choose(names: Sequence[str], test: str | None, where: str) -> str:
    """The test set that is asked for, or the one called test, or the only one."""
    usual = [name for name in names if name.startswith("test")]
    if test is not None:
        if test not in names:
            raise ValueError(f"multimax: expected test to be one of {', '.join(usual)} of {where}, got {test!r}")
        return test
    if len(usual) > 1 and "test" not in usual:
        raise ValueError(f"multimax: expected test to be one of {', '.join(usual)} of {where}, got None; choose one")
    return usual[0] if len(usual) == 1 else "test"  # if there is none, the reader says so


def _named(name: str, test: str) -> str:
    return name if test == "test" else f"{name} ({test})"


def _folder(folder: Path, languages: tuple[str, str], test: str | None, with_test: bool) -> ParallelData:
    end, other = f".{languages[0]}", f".{languages[1]}"

    def sides(*names: str) -> tuple[Path, Path]:
        first = files.require(folder, *(name + end for name in names))
        return first, files.require(folder, files.unpacked(first).removesuffix(end) + other)

    found = sorted({files.unpacked(path) for path in folder.iterdir() if path.is_file()})
    train = sides("train")  # before the choice: a folder of something else has no test sets to choose from
    if not with_test:
        valid = _pairs(*sides(*files.VALID))
        return ParallelData(_pairs(*train, training=True), valid, valid, languages, f"{folder.name}{files.VALIDATION}")
    chosen = _choose([name.removesuffix(end) for name in found if name.endswith(end)], test, str(folder))
    validated, tested = sides(*files.VALID), sides(chosen)
    return ParallelData(
        _pairs(*train, training=True), _pairs(*validated), _pairs(*tested), languages, _named(folder.name, chosen)
    )


def _hub_rows(split: Any, languages: tuple[str, str], where: str) -> list[Any]:
    """The two sides of each row: of a column translation, or of two columns called as the languages."""
    if "translation" in split.column_names:
        rows = split["translation"][:]
        return [tuple(row.get(language) if isinstance(row, dict) else row for language in languages) for row in rows]
    if set(languages) <= set(split.column_names):
        return list(zip(*(split[language][:] for language in languages), strict=True))
    raise ValueError(
        f"multimax: expected a column translation, or columns {' and '.join(languages)}, in {where}, "
        f"got {', '.join(split.column_names)}"
    )


def _hub_pairs(split: Any, languages: tuple[str, str], where: str, *, training: bool = False) -> Pairs:
    pairs: Pairs = []
    for i, row in enumerate(_hub_rows(split, languages, where), 1):
        for language, side in zip(languages, row, strict=True):
            if not isinstance(side, str):
                raise ValueError(
                    f"multimax: expected text of the language {language!r} in row {i} of {where}, "
                    f"got {type(side).__name__}; the columns are {split.features}"
                )
        pairs.append((row[0].strip(), row[1].strip()))
    return _filled(pairs, where, training=training)


def _hub(source: str, languages: tuple[str, str], test: str | None, with_test: bool) -> ParallelData:
    found = files.hub(source)
    train = _hub_pairs(found.split("train"), languages, f"the split train of {source}", training=True)
    valid = _hub_pairs(found.split(*files.VALID), languages, f"the validation split of {source}")
    if not with_test:
        return ParallelData(train, valid, valid, languages, f"{found.name}{files.VALIDATION}")
    chosen = _choose(sorted(found.splits), test, source)
    tested = _hub_pairs(found.split(chosen), languages, f"the split {chosen} of {source}")
    return ParallelData(train, valid, tested, languages, _named(found.name, chosen))


def load_parallel(
    source: str | Path, languages: tuple[str, str], *, test: str | None = None, with_test: bool = True
) -> ParallelData:
    """Loads sentences with their translations.

    A line, or a row, is a sentence; spaces around it are removed. Pairs that lack a sentence on either side are left
    out of training. To validate and to test they are an error, since scores would not be comparable without them.

    Args:
        source: one of

            - a folder with train.de, valid.de (or validation, val, dev), test.de, and the same with .en, for the
              languages ("de", "en"), in UTF-8, each also .gz or .xz;
            - ``"hub:owner/name"`` or ``"hub:owner/name:configuration"``: what ``datasets.load_dataset`` loads, with a
              column translation that holds both languages, or with columns called as the languages.
        languages: from which to which, as the files or columns call them.
        test: the test set where there are several, such as ``"test_2016_flickr"`` for test_2016_flickr.de. Needed only
            if none of them is called test.
        with_test: whether to read the test set. If not, the pairs to validate on stand in its place.

    Returns:
        The pairs.

    Raises:
        FileNotFoundError: a file or folder is missing, and the message names it.
        ValueError: a file is damaged, or its lines are not as many as those of the other side; the message names it.

    Example:
        >>> from multimax.experiments.data import load_parallel
        >>> data = load_parallel("multi30k", ("de", "en"), test="test_2016_flickr")  # doctest: +SKIP
        >>> data.train[0]  # doctest: +SKIP
        ('Zwei junge weiße Männer sind im Freien in der Nähe vieler Büsche.', 'Two young, White males are outside ...')
    """
    pair = tuple(languages) if isinstance(languages, (tuple, list)) else ()
    if len(pair) != 2 or not all(isinstance(language, str) and language for language in pair) or pair[0] == pair[1]:
        raise ValueError(f"multimax: expected languages to be two names such as ('de', 'en'), got {languages!r}")
    if files.is_hub(source):
        return _hub(str(source), (pair[0], pair[1]), test, with_test)
    folder = files.folder(source, "hub:owner/name or a folder of parallel text")
    return _folder(folder, (pair[0], pair[1]), test, with_test)
