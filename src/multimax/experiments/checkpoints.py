"""Checkpoints that are whole: a file lists what belongs to each, and is written last."""

import json
import os
import re
import shutil
import zlib
from pathlib import Path

SEAL = "complete.json"
LOCK = ".lock"
FOLDER = re.compile(r"checkpoint-(\d+)")


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
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    with partial.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=indent, allow_nan=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def is_empty(folder: Path) -> bool:
    """Whether a folder is not there, or holds nothing but what a killed process may have left."""
    return not folder.exists() or (
        folder.is_dir() and all(entry.name == LOCK or entry.name.endswith(".partial") for entry in folder.iterdir())
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
