"""Which settings to choose, by successive halving on validation data: all candidates in short runs with few seeds, the
best of them in longer ones with more.

Each rung is a sweep of its own, in the folder rung-1, rung-2 and so on: it can be interrupted, continued, shared among
processes and shown like any other. No run reads the test part of its data.
"""

import itertools
import math
import random
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from multimax.experiments.checkpoints import write_json
from multimax.experiments.results import Run, Sweep
from multimax.experiments.settings import Settings, as_dict, default, override

SCORE = "loss"  # of validation, the lower the better: far more precise than accuracy or BLEU
DRAW_SEED = 0
CHOSEN, CONFIRMATION = "chosen.json", "confirm.json"  # what a search writes at its end


class Rung(NamedTuple):
    """How long the runs of a rung are, as a share of the preset's steps, and how many seeds they have."""

    share: float
    seeds: int


@dataclass(frozen=True)
class Group:
    """Candidates that compete with each other.

    Attributes:
        settings: that all have in common.
        axes: the values of each setting that differs, by its name, in which a point leads to a part.
        without: combinations that cannot be.
        draw: how many of all combinations to try; all, if 0.
    """

    settings: Mapping[str, Any]
    axes: Mapping[str, Sequence[Any]]
    without: Sequence[Mapping[str, Any]] = ()
    draw: int = 0


@dataclass(frozen=True)
class Search:
    """What to choose from, and how.

    Attributes:
        rungs: from the first and shortest to the last.
        keep: of how many candidates of a group one goes on to the next rung.
        groups: by name.
        confirm: further methods to compare with when the best are confirmed, by label.
    """

    rungs: Sequence[Rung]
    keep: float
    groups: Mapping[str, Group]
    confirm: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def read(values: object, where: str) -> Search:
    """A search from plain data.

    Args:
        values: what the file of a table has under "search".
        where: the values come from, for the error.
    """
    try:
        content = dict(values)  # type: ignore[call-overload]
        content["rungs"] = [Rung(float(rung["share"]), int(rung["seeds"])) for rung in content["rungs"]]
        content["groups"] = {name: Group(**group) for name, group in content["groups"].items()}
        found = Search(**content)
        rungs_good = all(0 < rung.share <= 1 and rung.seeds >= 1 for rung in found.rungs) and found.keep > 1
        groups_good = all(all(group.axes.values()) for group in found.groups.values())
        good = bool(found.rungs and found.groups) and rungs_good and groups_good
    except (KeyError, TypeError, ValueError, AttributeError):
        good = False
    if not good:
        raise ValueError(
            f"multimax: expected the search in {where} to have rungs (each a share of the steps above 0 and at most 1, "
            "and a number of seeds), keep above 1, and groups with settings and axes, as in experiments/tables/"
            f"recipe.json, got {values!r:.200}"
        )
    return found


def combinations(group: Group) -> list[dict[str, Any]]:
    """The combinations of a group to try: all, or as many as are to be drawn, always the same ones, such that every
    value occurs about as often as the others of its axis."""
    found = [dict(zip(group.axes, values, strict=True)) for values in itertools.product(*group.axes.values())]
    found = [each for each in found if not any(without.items() <= each.items() for without in group.without)]
    if not 0 < group.draw < len(found):
        return found
    random.Random(DRAW_SEED).shuffle(found)
    used: Counter[tuple[str, Any]] = Counter()
    drawn = []
    for _ in range(group.draw):
        rarest = min(found, key=lambda each: sum(used[item] * len(group.axes[item[0]]) for item in each.items()))
        found.remove(rarest)
        used.update(rarest.items())
        drawn.append(rarest)
    return drawn


def _changes(group: Group, values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a candidate; what is as it always is need not be said."""
    changes = dict(group.settings)
    for name, value in values.items():
        outer, _, inner = name.partition(".")
        if inner:
            changes[outer] = {**changes.get(outer, {}), inner: value}
        elif value != default(name):
            changes[name] = value
    return changes


def _words(name: str, value: Any) -> str:
    words = name.rpartition(".")[2].replace("_", " ").replace("multimax lr factor", "rate x")
    return words if value is True else f"{words}{value}" if words.endswith(" x") else f"{words} {value}"


def candidates(search: Search) -> dict[str, dict[str, dict[str, Any]]]:
    """The settings of each candidate, by group and by its label, which says what it is.

    Example:
        >>> from multimax.experiments.search import Group, Rung, Search, candidates
        >>> group = Group({"attention": "multimax"}, {"multimax_lr_factor": [1, 10], "per_head": [False, True]})
        >>> list(candidates(Search([Rung(1, 1)], 2, {"MultiMax": group}))["MultiMax"])[1:3]
        ['MultiMax, rate x1, per head', 'MultiMax, rate x10']
    """
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for name, group in search.groups.items():
        found[name] = {
            ", ".join([name, *(_words(*item) for item in values.items() if item[1] is not False)]): _changes(
                group, values
            )
            for values in combinations(group)
        }
    return found


def shortened(base: Settings, share: float) -> Settings:
    """The settings of a rung's runs: a share of the steps, and no look at the test part."""
    trainer = base.trainer
    if trainer.get("max_steps", -1) > 0:
        length: dict[str, Any] = {"max_steps": max(1, round(share * trainer["max_steps"]))}
    else:
        length = {"num_train_epochs": share * trainer.get("num_train_epochs", 3)}
    # what reads the test part alone has nothing to do
    return override(base, {"trainer": length, "test": False, "longer": 0})


def works(search: Search, others: int) -> list[float]:
    """The work of each rung, as a number of runs of full length.

    Args:
        search: with its rungs.
        others: methods that are in every rung, the baseline among them.
    """
    sizes, found = [len(labels) for labels in candidates(search).values()], []
    for rung in search.rungs:
        found.append(rung.share * rung.seeds * (others + sum(sizes)))
        sizes = [math.ceil(size / search.keep) for size in sizes]
    return found


class Standing(NamedTuple):
    """A candidate with the mean of its paired differences to the baseline; infinite if a run has diverged."""

    difference: float
    label: str


def _score(run: Run) -> float:
    value = float(run.result["metrics"].get(SCORE, math.inf)) if run.finished else math.inf
    return value if math.isfinite(value) else math.inf


def standings(sweep: Sweep, labels: Sequence[str]) -> list[Standing]:
    """Candidates from the best to the worst, by the validation loss against that of the baseline with the same seed."""
    against = {run.seed: _score(run) for run in sweep.of(sweep.about["baseline"])}
    found = []
    for label in labels:
        runs = sweep.of(label)
        differences = [_score(run) - against[run.seed] for run in runs if math.isfinite(against[run.seed])]
        found.append(Standing(statistics.fmean(differences) if differences else math.inf, label))
    return sorted(found, key=lambda each: each.difference)  # which keeps the order of equals


def going_on(sweep: Sweep, groups: Mapping[str, Sequence[str]], keep: float) -> dict[str, list[str]]:
    """The labels of each group that go on to the next rung, best first.

    Args:
        sweep: the rung, with all its runs.
        groups: labels by group, that are still in the search.
        keep: of how many one goes on.
    """
    return {
        name: [each.label for each in standings(sweep, labels)[: math.ceil(len(labels) / keep)]]
        for name, labels in groups.items()
    }


def finish(folder: Path, base: Settings, search: Search, best: Mapping[str, Standing], baseline: str) -> None:
    """Writes what was chosen: settings for `--preset`, those of the best of all if it is better than the baseline; and
    a table to confirm the best of each group by, with new seeds and on test data.

    Args:
        folder: of the search.
        base: settings that all runs had in common.
        search: with its groups.
        best: of each group.
        baseline: the label of what all were compared with, which is the settings in common themselves.
    """
    found = {name: labels[best[name].label] for name, labels in candidates(search).items()}
    first = min(best, key=lambda name: best[name].difference)
    chosen = found[first] if best[first].difference < 0 else {}
    write_json(folder / CHOSEN, as_dict(override(base, {**chosen, "label": "", "seed": 0})))
    if search.confirm:
        recipes = {f"{name}, recipe": values for name, values in found.items()}
        methods = {baseline: {}, **search.confirm, **recipes}
        about = f"whether what was chosen ({'; '.join(best[name].label for name in found)}) holds with new seeds"
        table = {"about": f"{about} on test data", "baseline": baseline, "seeds": 5, "methods": methods}
        write_json(folder / CONFIRMATION, table)


def rung_folder(folder: Path, number: int) -> Path:
    """Of a rung, counted from 1."""
    return folder / f"rung-{number}"


def rungs_in(folder: Path) -> list[Path]:
    """The folders of a search's rungs that have begun; none, if it is not a search."""
    found = (path for path in folder.glob("rung-*") if (path / "sweep.json").is_file())
    return sorted(found, key=lambda path: int(path.name.rpartition("-")[2]))


def settings_of(base: Settings, rung: Rung) -> Settings:
    """Of a rung's runs."""
    return replace(shortened(base, rung.share), label="", seed=0)
