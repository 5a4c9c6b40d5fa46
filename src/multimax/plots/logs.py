"""What training has logged: lines of metrics.jsonl, or the ``log_history`` of transformers' Trainer."""

import json
from collections.abc import Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

METRICS = "metrics.jsonl"  # in the folder of a run
KINDS = ("multimax", "measures")
WORDS = ("nan", "inf", "-inf")  # stand for numbers that JSON does not have
Entries = Sequence[Mapping[str, Any]]


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Everything that a run has logged, in order.

    Args:
        path: the folder of a run, or its metrics.jsonl.

    A last line that has no end, as a run leaves that is killed while it writes, is left out.

    Returns:
        One entry per line: "step", "epoch", and numbers by name, a layer's as "multimax/LAYER/PARAMETER" and
        "measures/LAYER/MEASURE".

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from multimax import plots
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     size = (Path(folder) / "metrics.jsonl").write_text('{"loss": 2.5, "step": 50}\\n')
        ...     plots.read_metrics(folder)
        [{'loss': 2.5, 'step': 50}]
    """
    path = Path(path)
    file = path / METRICS if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(
            f"multimax: expected the folder of a run, with {METRICS} in it, got {str(path)!r}; `multimax train` and "
            "`multimax sweep` make such folders"
        )
    entries = []
    lines = file.read_bytes().splitlines(keepends=True)
    for number, line in enumerate(lines, start=1):
        try:
            entry = json.loads(line)
        except ValueError as error:  # not JSON, or not text
            if number == len(lines) and line.startswith(b"{") and not line.endswith(b"\n"):
                break  # a run is writing it, or was killed while it did
            raise ValueError(
                f"multimax: expected a line of JSON in {file}, got line {number}: {error}; remove the line"
            ) from None
        if not isinstance(entry, dict):
            raise ValueError(
                f"multimax: expected names with numbers in {file}, got line {number}: {line.decode()[:60]}"
            )
        entries.append({name: float(value) if value in WORDS else value for name, value in entry.items()})
    return entries


def split(name: str) -> tuple[str, str] | None:
    """Layer and value of a name such as "measures/layers.0.attention/entropy"; None for other names."""
    kind, _, rest = name.partition("/")
    layer, _, value = rest.partition("/")
    return (layer, value) if kind in KINDS and layer and value else None


def checked(entries: object, label: str) -> Entries:
    """A list of entries, not a path or a single entry."""
    several = entries if isinstance(entries, Sequence) and not isinstance(entries, str) else [None]
    if all(isinstance(entry, Mapping) for entry in several):
        return several  # type: ignore[return-value]
    raise TypeError(
        f"multimax: expected the entries of a log for {label!r}, a mapping each, got {type(entries).__name__}; "
        "plots.read_metrics(FOLDER) reads a run's entries"
    )


def by_epoch(entries: Entries, measure: str = "patch_similarity") -> dict[float, dict[str, float]]:
    """A measure of every layer, at each epoch at which it was logged.

    Args:
        entries: what :func:`read_metrics` gave.
        measure: such as patch_similarity, multi_modality, sparsity or entropy.

    Returns:
        By epoch, the values by layer.

    Example:
        >>> from multimax import plots
        >>> plots.by_epoch([{"epoch": 5.0, "measures/layers.0.attention/entropy": 2.1}, {"loss": 1.0}], "entropy")
        {5.0: {'layers.0.attention': 2.1}}
    """
    found: dict[float, dict[str, float]] = {}
    there: dict[str, None] = {}
    for entry in checked(entries, measure):
        for name, value in entry.items():
            layer, which = split(name) or ("", "")
            if not layer or "epoch" not in entry:
                continue
            if which == measure:
                for what, number in ((name, value), ("epoch", entry["epoch"])):
                    if not isinstance(number, Real):
                        raise ValueError(f"multimax: expected {what} to be a number, got {number!r}")
                found.setdefault(float(entry["epoch"]), {})[layer] = float(value)
            elif name.startswith("measures/"):
                there[which] = None
    if not found:
        got = f"only {', '.join(there)}" if there else "no measures at all"
        raise ValueError(f"multimax: expected {measure} of layers among the entries, got {got}")
    return found
