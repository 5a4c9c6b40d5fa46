"""Many runs: the methods of a table, with several seeds each, one after the other."""

import hashlib
import re
import time
import unicodedata
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from multimax.experiments import search as searches
from multimax.experiments.checkpoints import is_empty, locked, remove_partial, write_json
from multimax.experiments.results import SWEEP, Damaged, check_paper
from multimax.experiments.settings import (
    METHOD,
    Settings,
    as_dict,
    differences,
    idle,
    named_file,
    override,
    preset_names,
    read_json,
)
from multimax.experiments.tasks.loading import DataCache

TABLES = Path(__file__).parent / "tables"
LONGEST = 100  # bytes of a folder's name


@dataclass(frozen=True)
class Table:
    """Which methods to compare: a plain JSON file."""

    name: str
    about: str
    methods: Mapping[str, Mapping[str, Any]]  # by label, the settings that differ
    baseline: str
    seeds: int
    paper: Mapping[str, Any] | None = None
    search: searches.Search | None = None  # among methods that are not written down one by one
    by: str = ""  # the metric to compare by, where it is not the task's


def table_names() -> tuple[str, ...]:
    """The tables that come with the package."""
    return preset_names(TABLES)


def load_table(name: str) -> Table:
    """A table by name, or from a file of JSON."""
    path = named_file(name, TABLES, "table")
    values = read_json(path)
    wanted = ("about", "methods", "baseline", "seeds")
    missing = [key for key in wanted if not isinstance(values, Mapping) or key not in values]
    if missing:
        raise ValueError(f"multimax: expected {', '.join(wanted)} in {str(path)!r}, got no {', '.join(missing)}")
    methods, seeds = values["methods"], values["seeds"]
    if not isinstance(methods, Mapping) or not methods:
        raise ValueError(f"multimax: expected methods by label in {str(path)!r}, got {methods!r}")
    for label, changes in methods.items():
        if not isinstance(changes, Mapping):
            raise ValueError(
                f"multimax: expected the settings that {label!r} changes in {str(path)!r}, such as "
                f'{{"attention": "multimax"}}, got {changes!r}'
            )
    if type(seeds) is not int or seeds < 1:
        raise ValueError(f"multimax: expected seeds to be a number of at least 1 in {str(path)!r}, got {seeds!r}")
    if not isinstance(values["about"], str):
        raise ValueError(f"multimax: expected about to be a sentence in {str(path)!r}, got {values['about']!r}")
    check_paper(values.get("paper"), str(path))
    if not isinstance(values["baseline"], str) or values["baseline"] not in methods:
        raise ValueError(
            f"multimax: expected baseline to be one of the methods in {str(path)!r}, got {values['baseline']!r}"
        )
    search = searches.read(values["search"], repr(str(path))) if "search" in values else None
    return Table(path.stem, paper=values.get("paper"), search=search, **{key: values[key] for key in wanted})


def slug(label: str) -> str:
    """A label as the name of a folder: letters and digits of any script, and points between them.

    Example:
        >>> from multimax.experiments.sweep import slug
        >>> slug("MultiMax, order 1"), slug("../entmax-1.5"), slug("注意")
        ('multimax-order-1', 'entmax-1.5', '注意')
    """
    name = re.sub(r"[^\w.]+|_+", "-", unicodedata.normalize("NFC", label).lower()).strip("-.")
    if name and len(name.encode()) <= LONGEST and name != SWEEP:
        return name
    # nothing is left of it, or too much: a checksum tells it from others
    start = name.encode()[: LONGEST - 9].decode(errors="ignore").rstrip("-.") or "method"
    return f"{start}-{hashlib.sha256(label.encode()).hexdigest()[:8]}"


@dataclass(frozen=True)
class Planned:
    """A run to do."""

    label: str
    seed: int
    settings: Settings
    folder: Path


def plan(
    table: Table, base: Settings, seeds: Sequence[int], folder: Path, methods: Collection[str] | None = None
) -> list[Planned]:
    """All runs of a sweep, seed by seed, so that one that is not over still has pairs to compare.

    Args:
        table: with its methods.
        base: settings that all have in common. ``{seed}`` in its start stands for the seed.
        seeds: of each method.
        folder: of the sweep.
        methods: labels of those to run; all unless given.
    """
    unknown = [label for label in methods or () if label not in table.methods]
    if unknown:
        raise ValueError(
            f"multimax: expected methods of the table {table.name} out of {', '.join(map(repr, table.methods))}, got "
            f"{', '.join(map(repr, unknown))}"
        )
    plain, named = as_dict(Settings()), {key for changes in table.methods.values() for key in changes}
    for label, changes in table.methods.items():
        other = [key for key in METHOD if key in named - set(changes) and as_dict(base)[key] != plain[key]]
        if other:
            raise ValueError(
                f"multimax: expected {', '.join(sorted(other))} to be left to the table {table.name}, whose methods "
                f"differ by it, got another for {label!r}"
            )
    labels = [label for label in table.methods if methods is None or label in methods]
    if len({slug(label) for label in table.methods}) < len(table.methods):
        raise ValueError(
            f"multimax: expected labels with folders of their own in {table.name}, got {', '.join(labels)}"
        )
    _check_effect(table, base, labels)
    runs = []
    for seed in seeds:
        for label in labels:
            settings = override(base, {**table.methods[label], "label": label, "seed": seed})
            settings = replace(settings, start=settings.start.replace("{seed}", str(seed)))
            runs.append(Planned(label, seed, settings, folder / slug(label) / f"seed-{seed}"))
    return runs


def _check_effect(table: Table, base: Settings, labels: Sequence[str]) -> None:
    """Raises if a method of the table changes what has no effect on it."""
    for label in labels:
        without = idle(override(base, {**table.methods[label], "label": label}))
        for key in table.methods[label]:
            if key in without:
                raise ValueError(
                    f"multimax: expected {key} with {without[key]}, got it without in {label!r} of the table "
                    f"{table.name}; leave it out"
                )


def note(table: Table, base: Settings, seeds: Sequence[int], folder: Path) -> None:
    """Writes what the sweep is, or adds seeds to one that is there. Several processes may do so at once."""
    content(table, base, seeds, folder)  # so that what is no sweep stays as it is
    with locked(folder):
        remove_partial(folder)
        write_json(folder / SWEEP, content(table, base, seeds, folder))


def content(table: Table, base: Settings, seeds: Sequence[int], folder: Path) -> dict[str, Any]:
    """What sweep.json is to say, with the seeds that it has already; raises if the folder holds anything else."""
    path = folder / SWEEP
    common = {key: value for key, value in as_dict(base).items() if key not in ("seed", "label")}
    found: dict[str, Any] = {
        "table": table.name,
        "about": table.about,
        "preset": base.preset,
        "task": base.task,
        "baseline": table.baseline,
        "methods": {label: dict(changes) for label, changes in table.methods.items()},
        "seeds": sorted(seeds),
        "settings": common,
    }
    if table.by:
        found["by"] = table.by
    if table.paper is not None:
        found["paper"] = dict(table.paper)
    if path.is_file():
        before = read_json(path)
        if not isinstance(before, Mapping) or not isinstance(before.get("settings"), Mapping):
            raise ValueError(
                f"multimax: expected a sweep in {str(path)!r}, got other content; choose another folder with --out"
            )
        other = [key for key in ("table", "methods") if before.get(key) != found[key]]
        other += [
            f"{name}: {there!r} there, {here!r} now"
            for name, there, here in differences(before["settings"], found["settings"])
        ]
        if other:
            raise ValueError(
                f"multimax: expected the sweep that is in {str(folder)!r}, got another ({'; '.join(other)}); choose "
                "another folder with --out"
            )
        return {**before, "seeds": sorted({*before["seeds"], *seeds})}
    if not is_empty(folder):
        raise ValueError(f"multimax: expected a new folder, an empty one, or that of a sweep, got {str(folder)!r}")
    return found


@dataclass(frozen=True)
class Done:
    """How a run of a sweep went."""

    run: Planned
    status: str  # finished, diverged, busy: at work in another process, or damaged: its result cannot be read
    result: Mapping[str, Any] | None
    trained: bool = False  # now, and not found as it is
    seconds: float = 0.0  # that it took
    reason: str = ""  # why it is damaged


def sweep(
    runs: Sequence[Planned],
    *,
    progress: bool = True,
    bars: bool = True,
    callbacks: Callable[[Planned], Sequence[Any]] | None = None,
    data: DataCache | None = None,
) -> Iterator[Done]:
    """Does the runs that are not over yet, one after the other. The same sweep may be at work in several processes.

    Data is loaded once for all runs that read the same, and kept as long as there are such.

    Args:
        runs: from :func:`plan`.
        progress: whether each says on standard error what happens.
        bars: whether each draws a bar, too, where that is a terminal.
        callbacks: of the Trainer, for each run.
        data: that was loaded already.
    """
    from multimax.experiments.run import Busy, result_of, train
    from multimax.experiments.trainer import Diverged

    data = DataCache() if data is None else data
    for number, run in enumerate(runs):
        data.keep_for(later.settings for later in runs[number:])
        trained_with = () if callbacks is None else callbacks(run)
        began, over = time.monotonic(), (run.folder / "result.json").is_file()
        try:
            result = train(run.settings, run.folder, progress=progress, bars=bars, callbacks=trained_with, data=data)
            yield Done(run, result["status"], result, not over, time.monotonic() - began)
        except Diverged:
            yield Done(run, "diverged", result_of(run.folder), True, time.monotonic() - began)
        except Busy:
            yield Done(run, "busy", None)
        except Damaged as error:
            yield Done(run, "damaged", None, reason=str(error))
