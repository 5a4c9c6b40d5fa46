"""Many runs: the methods of a table, with several seeds each, one after the other."""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from multimax.experiments.checkpoints import is_empty, write_json
from multimax.experiments.settings import METHOD, Settings, as_dict, named_file, override, preset_names, read_json
from multimax.experiments.tasks.loading import DataCache

TABLES = Path(__file__).parent / "tables"
SWEEP = "sweep.json"


@dataclass(frozen=True)
class Table:
    """Which methods to compare: a plain JSON file."""

    name: str
    about: str
    methods: Mapping[str, Mapping[str, Any]]  # by label, the settings that differ
    baseline: str
    seeds: int
    paper: Mapping[str, Any] | None = None


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
    if not isinstance(values["methods"], Mapping):
        raise ValueError(f"multimax: expected methods by label in {str(path)!r}, got {values['methods']!r}")
    if values["baseline"] not in values["methods"]:
        raise ValueError(
            f"multimax: expected baseline to be one of the methods in {str(path)!r}, got {values['baseline']!r}"
        )
    return Table(path.stem, paper=values.get("paper"), **{key: values[key] for key in wanted})


def slug(label: str) -> str:
    """A label as the name of a folder."""
    return re.sub(r"[^a-z0-9.]+", "-", label.lower()).strip("-")


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
    runs = []
    for seed in seeds:
        for label in labels:
            settings = override(base, {**table.methods[label], "label": label, "seed": seed})
            settings = replace(settings, start=settings.start.replace("{seed}", str(seed)))
            runs.append(Planned(label, seed, settings, folder / slug(label) / f"seed-{seed}"))
    return runs


def note(table: Table, base: Settings, seeds: Sequence[int], folder: Path) -> None:
    """Writes what the sweep is, or adds seeds to one that is there."""
    path = folder / SWEEP
    common = {key: value for key, value in as_dict(base).items() if key not in ("seed", "label")}
    content: dict[str, Any] = {
        "table": table.name,
        "about": table.about,
        "preset": base.preset,
        "task": base.task,
        "baseline": table.baseline,
        "methods": {label: dict(changes) for label, changes in table.methods.items()},
        "seeds": sorted(seeds),
        "settings": common,
    }
    if table.paper is not None:
        content["paper"] = dict(table.paper)
    if path.is_file():
        before = read_json(path)
        other = [key for key in ("table", "methods", "settings") if before.get(key) != content[key]]
        if other:
            raise ValueError(
                f"multimax: expected the sweep that is in {str(folder)!r}, got another ({', '.join(other)} differ); "
                "choose another folder with --out"
            )
        content["seeds"] = sorted({*before["seeds"], *seeds})
    elif not is_empty(folder):
        raise ValueError(f"multimax: expected a new folder, an empty one, or that of a sweep, got {str(folder)!r}")
    folder.mkdir(parents=True, exist_ok=True)
    write_json(path, content)


@dataclass(frozen=True)
class Done:
    """How a run of a sweep went."""

    run: Planned
    status: str  # finished, diverged, or busy: at work in another process
    result: Mapping[str, Any] | None


def sweep(
    runs: Sequence[Planned],
    *,
    progress: bool = True,
    callbacks: Callable[[Planned], Sequence[Any]] | None = None,
    data: DataCache | None = None,
) -> Iterator[Done]:
    """Does the runs that are not over yet, one after the other. The same sweep may be at work in several processes.

    Data is loaded once for all runs that read the same, and kept as long as there are such.

    Args:
        runs: from :func:`plan`.
        progress: whether each shows a bar.
        callbacks: of the Trainer, for each run.
        data: that was loaded already.
    """
    from multimax.experiments.run import Busy, result_of, train
    from multimax.experiments.trainer import Diverged

    data = DataCache() if data is None else data
    for number, run in enumerate(runs):
        data.keep_for(later.settings for later in runs[number:])
        trained_with = () if callbacks is None else callbacks(run)
        try:
            result = train(run.settings, run.folder, progress=progress, callbacks=trained_with, data=data)
            yield Done(run, result["status"], result)
        except Diverged:
            yield Done(run, "diverged", result_of(run.folder))
        except Busy:
            yield Done(run, "busy", None)
