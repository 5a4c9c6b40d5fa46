"""What a report is about: from folders and files to runs and models, in groups that can be compared."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from multimax.experiments import results, tasks
from multimax.experiments import sweep as sweeps
from multimax.experiments.results import Run, Sweep
from multimax.experiments.run import METRICS, MODEL, RESULT
from multimax.experiments.settings import CONFIG, Settings, from_dict, preset, read_json
from multimax.plots import read_metrics


@dataclass
class Source:
    """A run, or a saved model.

    Attributes:
        label: the method, or the folder's name.
        settings: of the run, or those that say what data a saved model gets; None for a model alone.
        data: that the model is run on.
        log: what the run has logged.
        model: the folder of its model, None if there is none.
        note: what is to be known of it.
    """

    label: str
    settings: Settings | None
    data: str = ""
    log: list[dict[str, Any]] = field(default_factory=list)
    model: Path | None = None
    note: str = ""


@dataclass
class Group:
    """Runs of one task, preset and data, which can be compared; or saved models of one kind of data.

    Attributes:
        title: in words.
        sweep: all runs that are over, for the tables; None if there are none.
        sources: one for each method, for the figures.
        notes: what is to be known.
    """

    title: str
    sweep: Sweep | None
    sources: list[Source]
    notes: list[str] = field(default_factory=list)


@dataclass
class _Found:
    """A run's folder, or a model's, which has no seed."""

    path: Path
    source: Source
    seed: int | None = None
    run: Run | None = None

    @property
    def key(self) -> tuple[str, ...]:
        """Of the group that it belongs to."""
        settings = self.source.settings
        if settings is None:
            return ("model",)
        # a saved model of text brings its tokenizer, so that its data is no other's
        alone = self.seed is None and "start" in tasks.get(settings.task).data
        return settings.task, settings.preset, settings.data, str(self.path) if alone else ""


def _name(path: Path) -> str:
    return path.resolve().name or str(path)


def _run_folder(path: Path, data: str | None) -> _Found:
    settings = from_dict(read_json(path / CONFIG), str(path / CONFIG))
    label = settings.label or _name(path)
    source = Source(label, settings, settings.data if data is None else data)
    notes = []
    if not (path / METRICS).is_file():
        notes.append(f"{label}: nothing logged yet.")
    else:
        try:
            source.log = read_metrics(path)
        except ValueError as error:  # the numbers and the model are still good
            notes.append(
                f"{label}, seed {settings.seed}: its log is not shown: {str(error).removeprefix('multimax: ')}."
            )
    if (path / MODEL).is_dir():
        source.model = path / MODEL
    if not (path / RESULT).is_file():
        notes = [f"{label}, seed {settings.seed}: not over, so only what it has logged is shown.", *notes]
        source.note = " ".join(notes)
        return _Found(path, source, settings.seed)
    run = results.read_run(path)
    if not run.finished:
        notes = [f"{label}, seed {settings.seed}: diverged, so only what it has logged is shown.", *notes]
    elif source.model is None:
        notes = [
            f"{label}, seed {settings.seed}: no folder {MODEL} is left, so there are no figures of its model.",
            *notes,
        ]
    source.note = " ".join(notes)
    return _Found(path, source, settings.seed, replace(run, label=label))


def _model_folder(path: Path, preset_name: str | None, data: str | None) -> _Found:
    settings = None
    if preset_name is not None:
        settings = replace(preset(preset_name), label=_name(path))
        settings = settings if data is None else replace(settings, data=data)
    elif data is not None:
        raise ValueError(
            f"multimax: expected --preset beside --data for the saved model {str(path)!r}, got none; it says how the "
            "data is read, such as cpu-fashion or paper-deit-small"
        )
    return _Found(path, Source(_name(path), settings, "" if settings is None else settings.data, model=path))


def _sweep_group(path: Path, seed: int | None, data: str | None) -> Group:
    """All its runs in the table, those of one seed in the figures."""
    found = results.read(path)
    name = path.stem if path.is_file() else _name(path)
    group = Group(f"{name}: {found.about.get('about', 'a sweep')}", found, [])
    if path.is_file():
        group.notes.append("Read from a file that holds numbers alone: figures that need models or logs are not here.")
        return group
    for label in found.labels:
        over = found.of(label)
        chosen = [run for run in over if seed is None or run.seed == seed]
        if not chosen:
            what = "that is over" if seed is None else f"with seed {seed} that is over"
            group.notes.append(f"{label}: no run {what}, so there are no figures of it.")
            continue
        first = next((run for run in chosen if run.finished), chosen[0])  # one that diverged has no model
        group.sources.append(_run_folder(path / sweeps.slug(label) / f"seed-{first.seed}", data).source)
    if len(found.about["seeds"]) > 1 and group.sources:
        seeds = sorted({source.settings.seed for source in group.sources if source.settings is not None})
        shown = ", ".join(map(str, seeds))
        group.notes.append(f"Tables are of all seeds. Figures of models are of seed {shown}, which was not chosen.")
    return group


def _distinct(found: Sequence[_Found]) -> None:
    """Labels that differ where folders do: runs of one method have one label if they differ by their seeds alone."""
    by_label: dict[str, list[_Found]] = {}
    for member in found:
        by_label.setdefault(member.source.label, []).append(member)
    for members in by_label.values():
        others = [member.source.settings and replace(member.source.settings, seed=0) for member in members]
        if len({member.seed for member in members}) == len(members) and others.count(others[0]) == len(others):
            continue
        above = os.path.commonpath([member.path.resolve() for member in members])
        for member in members:
            member.source.label += f" ({member.path.resolve().relative_to(above)})"
            if member.run is not None:
                member.run = replace(member.run, label=member.source.label)


def _of_runs(found: Iterable[_Found]) -> list[Group]:
    groups: dict[tuple[str, ...], list[_Found]] = {}
    for member in found:
        groups.setdefault(member.key, []).append(member)
    result = []
    for members in groups.values():
        _distinct(members)
        first: dict[str, Source] = {}
        for member in members:
            first.setdefault(member.source.label, member.source)
        runs = [member.run for member in members if member.run is not None]
        group = Group(_title(members[0].source), _unplanned(runs), list(first.values()))
        if len(first) < len(members):
            group.notes.append("Tables are of all runs. Figures of models are of the first run of each method.")
        result.append(group)
    return result


def _title(source: Source) -> str:
    if source.settings is None:
        return "saved models"
    return f"{Path(source.settings.preset).stem}: {source.settings.about or source.settings.task}"


def _unplanned(runs: Sequence[Run]) -> Sweep | None:
    """Single runs as a sweep, compared with softmax if it is among them."""
    if not runs:
        return None
    labels = list(dict.fromkeys(run.label for run in runs))
    about = {
        "preset": runs[0].config["preset"],
        "task": runs[0].config["task"],
        "baseline": "softmax" if "softmax" in labels else labels[0],
        "methods": {label: {} for label in labels},
        "seeds": sorted({run.seed for run in runs}),
    }
    return Sweep(about, list(runs), planned=False)


def read(paths: Sequence[Path], *, seed: int | None, preset_name: str | None, data: str | None) -> list[Group]:
    """Groups of what the paths hold.

    Args:
        paths: folders of runs, of sweeps or of saved models, or files of ``multimax table --save``.
        seed: of the runs of a sweep that figures are drawn of; the first unless given.
        preset_name: how data for saved models is read.
        data: instead of the runs' own, and for saved models.
    """
    groups: list[Group] = []
    single: list[_Found] = []
    for path in {path.resolve(): path for path in paths}.values():  # once, even if it is given twice
        if path.is_file() or (path / results.SWEEP).is_file():
            groups.append(_sweep_group(path, seed, data))
            continue
        config = read_json(path / CONFIG) if (path / CONFIG).is_file() else None
        if isinstance(config, dict) and "task" in config and "trainer" in config:
            single.append(_run_folder(path, data))
        elif isinstance(config, dict) and "model_type" in config:
            single.append(_model_folder(path, preset_name, data))
        else:
            of_neither = "one whose config.json is neither a run's nor a model's"
            got = of_neither if config is not None else "one without config.json" if path.is_dir() else "none"
            raise ValueError(
                f"multimax: expected the folder of a run, of a sweep or of a saved model, or a file of `multimax table "
                f"--save`, got {got} at {str(path)!r}; `multimax train` and `multimax sweep` make such folders"
            )
    if seed is not None and not groups:
        raise ValueError(f"multimax: expected a sweep beside --seed, got none to choose seed {seed} of; leave it out")
    if preset_name is not None and all(member.seed is not None for member in single):
        raise ValueError(
            f"multimax: expected a saved model beside --preset, got none for {preset_name!r}; runs have their own"
        )
    return groups + _of_runs(single)
