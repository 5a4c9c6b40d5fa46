"""Checkpoints that are whole: a file lists what belongs to each, and is written last."""

import fcntl
import json
import os
import re
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SEAL = "complete.json"
LOCK = ".lock"
PARTIAL = ".partial"
FOLDER = re.compile(r"checkpoint-(\d+)")
_held: set[Any] = set()  # locks of this process
os.register_at_fork(after_in_child=lambda: [lock.close() for lock in _held])  # workers outlive a process that is killed


class DamagedCheckpoint(RuntimeError):
    """A checkpoint that was complete is not any more."""


def checksum(path: Path) -> int:
    """CRC-32 of a file."""
    value = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            value = zlib.crc32(block, value)
    return value


def write_json(path: Path, value: object, indent: int | None = 2) -> None:
    """Writes a file of JSON, all of it or nothing."""
    partial = path.with_name(f"{path.name}.{os.getpid()}{PARTIAL}")
    try:
        with partial.open("w", encoding="utf-8") as file:
            json.dump(value, file, indent=indent, allow_nan=False)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def remove_partial(folder: Path) -> None:
    """Removes what processes were writing when they were killed. Nobody else may be at work in the folder."""
    for entry in folder.glob(f"*{PARTIAL}"):
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink()


@contextmanager
def locked(folder: Path, *, wait: bool = True) -> Iterator[Any]:
    """Keeps other processes out of a folder; the lock goes with the process, however it ends.

    Args:
        folder: made if it is not there.
        wait: for another process that has it; else BlockingIOError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        _held.add(file)
        try:
            yield
        finally:
            _held.discard(file)


def is_empty(folder: Path) -> bool:
    """Whether a folder is not there, or holds nothing but what a killed process may have left."""
    return not folder.exists() or (
        folder.is_dir() and all(entry.name == LOCK or entry.name.endswith(PARTIAL) for entry in folder.iterdir())
    )


def seal(checkpoint: Path) -> None:
    """Says that a checkpoint is complete, with sizes and checksums of its files."""
    files = sorted(file for file in checkpoint.rglob("*") if file.is_file() and file.name != SEAL)
    content = {
        file.relative_to(checkpoint).as_posix(): {"bytes": file.stat().st_size, "crc32": checksum(file)}
        for file in files
    }
    write_json(checkpoint / SEAL, content)


def verify(checkpoint: Path) -> None:
    """Raises if a file of a sealed checkpoint is missing or changed."""
    remedy = f"delete the folder {str(checkpoint)!r} to go on from the checkpoint before it, or from the beginning"
    try:
        content = json.loads((checkpoint / SEAL).read_text(encoding="utf-8"))
        expected = {name: (entry["bytes"], entry["crc32"]) for name, entry in content.items()}
    except (ValueError, TypeError, KeyError, AttributeError):
        raise DamagedCheckpoint(
            f"multimax: expected {str(checkpoint / SEAL)!r} to list files, got other content; {remedy}"
        ) from None
    for name, (size, crc) in expected.items():
        path = checkpoint / name
        if not path.is_file():
            raise DamagedCheckpoint(f"multimax: expected the file {str(path)!r}, got none; {remedy}")
        if path.stat().st_size != size or checksum(path) != crc:
            raise DamagedCheckpoint(
                f"multimax: expected {str(path)!r} as it was written, {size} bytes, got {path.stat().st_size} bytes or "
                f"other content; {remedy}"
            )


def _all(folder: Path) -> list[Path]:
    """Newest first."""
    found = [
        (int(match[1]), checkpoint)
        for checkpoint in folder.glob("checkpoint-*")
        if (match := FOLDER.fullmatch(checkpoint.name))
    ]
    return [checkpoint for _, checkpoint in sorted(found, reverse=True)]


def step_of(checkpoint: Path) -> int:
    """The step after which it was written."""
    return int(checkpoint.name.rpartition("-")[2])


def last(folder: Path) -> Path | None:
    """The newest complete checkpoint in a folder, verified; None if there is none."""
    for checkpoint in _all(folder):
        if (checkpoint / SEAL).is_file():
            verify(checkpoint)
            return checkpoint
    return None


def remove_unsealed(folder: Path) -> None:
    """Removes what was being written when a run was killed: it would count as a checkpoint."""
    for checkpoint in _all(folder):
        if not (checkpoint / SEAL).is_file():
            shutil.rmtree(checkpoint)


def rotate(folder: Path, limit: int | None, best: str | None) -> None:
    """Removes all but the newest checkpoints, and the best: each loses its seal first, so that none is half there."""
    if not limit or limit < 1:
        return
    kept = [checkpoint for checkpoint in _all(folder) if best is None or checkpoint.name != Path(best).name]
    for checkpoint in kept[max(limit - (best is not None), 1) :]:
        (checkpoint / SEAL).unlink(missing_ok=True)
        shutil.rmtree(checkpoint)
