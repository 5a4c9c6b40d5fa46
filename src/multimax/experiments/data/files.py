"""Where data comes from: files, plain or packed, and datasets of the hub."""

import gzip
import importlib
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PACKED = (".gz", ".xz")
VALID = ("valid", "validation", "val", "dev")  # what people call it
VALIDATION = " (validation part)"  # behind the name of data whose test part was not read
HUB = "hub:"


def optional(module: str, remedy: str) -> Any:
    """A module that only some data needs, imported when it does."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"multimax: expected {module} for this data, got {error}; {remedy}") from error


def unpacked(path: Path) -> str:
    """A file's name without .gz or .xz."""
    return path.stem if path.suffix in PACKED else path.name


def find(folder: Path, *names: str) -> Path | None:
    """The first of several names that a folder has as a file; each plain, or else as .gz, or else as .xz."""
    paths = (folder / (name + end) for name in names for end in ("", *PACKED))
    return next((path for path in paths if path.is_file()), None)


def require(folder: Path, *names: str) -> Path:
    """As `find`, for a file that must be there."""
    found = find(folder, *names)
    if found is None:
        looked = ", ".join(name + end for name in names for end in ("", *PACKED))
        raise FileNotFoundError(f"multimax: expected the file {folder / names[0]}, got none; looked for {looked}")
    return found


def place(source: str | Path, expected: str) -> Path:
    """The file or folder that a source names, in full; `expected` says what else it could have been."""
    if not isinstance(source, (str, Path)) or not str(source):
        raise TypeError(f"multimax: expected {expected}, got {source!r}")
    path = Path(source).expanduser()
    if not path.exists():
        raise FileNotFoundError(f"multimax: expected {expected}, got {str(source)!r}, which is not there")
    return path.resolve()  # "." has no name


def folder(source: str | Path, expected: str) -> Path:
    """As `place`, for what must be a folder."""
    path = place(source, expected)
    if not path.is_dir():
        raise NotADirectoryError(f"multimax: expected {expected}, got {path}, a file; unpack it or name its folder")
    return path


def holds(folder: Path) -> str:
    """What a folder holds, for messages: its first few names."""
    names = sorted(path.name + "/" * path.is_dir() for path in folder.iterdir())
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return f"holds {', '.join(names[:8])}{more}" if names else "is empty"


def read_bytes(path: Path) -> bytes:
    """What a file holds, unpacked if its name ends in .gz or .xz; never nothing."""
    data = path.read_bytes()
    # the errors of a damaged file are different from version to version, and none of them names it
    if path.suffix == ".gz":
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error) as error:
            raise _damaged(path, "gzip", error) from error
    elif path.suffix == ".xz":
        lzma = optional("lzma", "this needs a Python that was built with it, or unpack the file")
        try:
            data = lzma.decompress(data)
        except (lzma.LZMAError, EOFError) as error:
            raise _damaged(path, "xz", error) from error
    if not data:
        raise ValueError(f"multimax: expected data in {path}, got an empty file; get it again")
    return data


def _damaged(path: Path, kind: str, error: Exception) -> ValueError:
    return ValueError(f"multimax: expected a whole {kind} file in {path}, got a damaged one ({error}); get it again")


def read_text(path: Path) -> str:
    """A file of UTF-8, unpacked as by `read_bytes`, with ends of lines as on Linux and without a byte order mark."""
    data = read_bytes(path)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"multimax: expected UTF-8 text in {path}, got 0x{data[error.start]:02x} at byte {error.start}, "
            f"in line {line}; convert it, as with iconv -f latin1 -t utf8"
        ) from error
    return text.removeprefix("\ufeff").replace("\r\n", "\n")


def is_hub(source: str | Path) -> bool:
    """Whether a source is the name of a dataset of the hub; a Path never is."""
    return isinstance(source, str) and source.startswith(HUB)


@dataclass(frozen=True)
class Hub:
    """A dataset that the `datasets` library has loaded."""

    source: str  # as it was asked for
    name: str  # as results call it: of a local folder, that of the folder alone
    splits: Mapping[str, Any]

    def split(self, *names: str) -> Any:
        """The first of several names that the dataset has as a split."""
        for name in names:
            if name in self.splits:
                return self.splits[name]
        raise ValueError(
            f"multimax: expected a split {' or '.join(names)} in {self.source}, got {', '.join(self.splits)}"
        )

    def column(self, split: Any, *names: str) -> str:
        """The first of several names that a split has as a column."""
        for name in names:
            if name in split.column_names:
                return name
        raise ValueError(
            f"multimax: expected a column {' or '.join(names)} in {self.source}, got {', '.join(split.column_names)}"
        )


def hub(source: str) -> Hub:
    """Loads a dataset by its name, hub:owner/name or hub:owner/name:configuration, or hub:folder for a local one."""
    name = source.removeprefix(HUB)
    local = bool(name) and Path(name).is_dir()
    path, _, config = (name, "", "") if local else name.partition(":")  # a folder may have a colon in its name
    if not path:
        raise ValueError(f"multimax: expected a name such as hub:owner/name or hub:owner/name:config, got {source!r}")
    datasets = optional("datasets", "pip install datasets")
    if int(datasets.__version__.split(".")[0]) < 4:
        raise ImportError(
            f"multimax: expected datasets 4 or later, got {datasets.__version__}, which may run code that comes with "
            "data; pip install --upgrade datasets"
        )
    try:
        splits = datasets.load_dataset(path, config or None)
    except Exception as error:  # of any kind: from the network, the library or the reader of the format
        raise ValueError(
            f"multimax: expected a dataset that can be loaded as {source!r}, got {type(error).__name__}: {error}"
        ) from error
    return Hub(source, Path(name).resolve().name if local else name, splits)
