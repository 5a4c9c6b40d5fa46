"""The results of a sweep: read from its folder, and kept in one small file."""

import json
import math
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

SWEEP = "sweep.json"  # in the folder of a sweep
FORMAT = "multimax sweep 1"  # marks a file of `save`
FILES = ("config", "environment", "result")  # of a run, each .json
SHARED = ("config", "environment")  # of which runs have much in common
WORDS = ("nan", "inf", "-inf")  # stand for such numbers, which JSON has not
STATUSES = ("finished", "diverged")
OF_RESULT = ("ms_per_step",)  # stand in the result itself, not among its metrics


class Damaged(ValueError):
    """A file of a run cannot be read, or holds something else."""


@dataclass(frozen=True)
class Run:
    """A run that is over: its method's label, its seed, and what its three files say."""

    label: str
    seed: int
    config: dict[str, Any]
    environment: dict[str, Any]
    result: dict[str, Any]

    @property
    def finished(self) -> bool:
        """Whether it came to its end, and did not diverge."""
        return bool(self.result["status"] == "finished")


@dataclass(frozen=True)
class Sweep:
    """The runs of a sweep that are over, by method and seed in the order of ``about``, which is its sweep.json.

    Without a plan it holds just any runs, of which none is missing. What is wrong with the files of a run that is not
    among them stands under its folder in ``damaged``.
    """

    about: dict[str, Any]
    runs: list[Run]
    planned: bool = True
    damaged: Mapping[str, str] = field(default_factory=dict)

    @property
    def labels(self) -> list[str]:
        """The methods, in their order."""
        return list(self.about["methods"])

    @property
    def missing(self) -> list[tuple[str, int]]:
        """Label and seed of the runs that are not over, or not begun."""
        if not self.planned:
            return []
        over = {(run.label, run.seed) for run in self.runs}
        wanted = [(label, seed) for label in self.labels for seed in self.about["seeds"]]
        return [run for run in wanted if run not in over]

    def of(self, label: str) -> list[Run]:
        """The runs of one method."""
        return [run for run in self.runs if run.label == label]


def _load(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise Damaged(f"multimax: expected a file {file}, got none") from None
    except (ValueError, RecursionError) as error:  # of JSON or UTF-8
        raise Damaged(f"multimax: expected JSON in {file}, got a damaged file: {error}") from None
    if not isinstance(found, dict):
        raise Damaged(f"multimax: expected a JSON object in {file}, got {type(found).__name__}")
    return found


def _is_number(value: object) -> bool:
    return value in WORDS if isinstance(value, str) else isinstance(value, int | float) and not isinstance(value, bool)


def _check_about(about: object, where: str) -> None:
    """The content of sweep.json."""
    if not isinstance(about, dict):
        raise ValueError(f"multimax: expected a JSON object in {where}, got {type(about).__name__}")
    for key in ("preset", "task", "baseline"):
        if not isinstance(about.get(key), str):
            raise ValueError(f"multimax: expected {key!r} in {where} to be a text, got {about.get(key)!r}")
    methods, seeds, paper = about.get("methods"), about.get("seeds"), about.get("paper")
    if not isinstance(methods, dict) or not methods:
        raise ValueError(f"multimax: expected 'methods' in {where} to be settings by label, got {methods!r}")
    if (
        not isinstance(seeds, list)
        or not all(type(seed) is int for seed in seeds)
        or not 0 < len(seeds) == len(set(seeds))
    ):
        raise ValueError(f"multimax: expected 'seeds' in {where} to be different whole numbers, got {seeds!r}")
    check_paper(paper, where)


def check_paper(paper: object, where: str) -> None:
    """Raises if the figures of the paper, where there are such, are not what a table shows."""
    if paper is None:
        return
    texts = isinstance(paper, dict) and all(isinstance(paper.get(key), str) for key in ("metric", "setting"))
    texts = texts and isinstance(paper.get("preset", ""), str)  # type: ignore[attr-defined]
    if not texts or not isinstance(paper.get("values"), dict):  # type: ignore[attr-defined]
        raise ValueError(
            f"multimax: expected 'paper' in {where} to have a metric, a setting and values by label, got {paper!r}"
        )


def _check_result(result: dict[str, Any], where: str) -> None:
    """The content of result.json."""
    if result.get("status") not in STATUSES:
        allowed = ", ".join(map(repr, STATUSES))
        raise Damaged(f"multimax: expected 'status' in {where} to be one of {allowed}, got {result.get('status')!r}")
    metrics = result.get("metrics", {} if result["status"] == "diverged" else None)
    if not isinstance(metrics, dict):
        raise Damaged(f"multimax: expected 'metrics' in {where} to be numbers by name, got {metrics!r}")
    numbers = {**metrics, **{key: result[key] for key in ("steps", "minutes", *OF_RESULT) if key in result}}
    for name, value in numbers.items():
        if value is not None and not _is_number(value):
            raise Damaged(f"multimax: expected {name!r} in {where} to be a number, got {value!r}")
    parameters = result.get("parameters") or {}
    if not isinstance(parameters, dict) or not all(isinstance(values, dict) for values in parameters.values()):
        raise Damaged(f"multimax: expected 'parameters' in {where} to be values by layer and name")


def read_result(folder: Path) -> dict[str, Any]:
    """How a run that is over went."""
    file = folder / "result.json"
    try:
        result = _load(file)
        _check_result(result, str(file))
    except Damaged as error:
        raise Damaged(
            f"{error}; delete the file, and give the run's command again: it goes on from its last checkpoint, if one "
            "is left"
        ) from None
    return result


def read_run(folder: Path) -> Run:
    """A run that is over, from its folder."""
    result = read_result(folder)
    try:
        config, environment = (_load(folder / f"{name}.json") for name in SHARED)
    except Damaged as error:
        raise Damaged(f"{error}; delete the folder {folder}, and give the run's command again") from None
    return Run(config.get("label"), config.get("seed"), config, environment, result)  # type: ignore[arg-type]


class _Gathered:
    """Runs on their way into a sweep: each must belong to it, and be there once."""

    def __init__(self, about: dict[str, Any]) -> None:
        self.about = about
        self.runs: dict[tuple[str, int], Run] = {}
        self.places: dict[tuple[str, int], str] = {}

    def add(self, run: Run, where: str) -> None:
        label: object = run.label
        seed: object = run.seed
        if not isinstance(label, str) or label not in self.about["methods"]:
            known = ", ".join(map(repr, self.about["methods"]))
            raise ValueError(
                f"multimax: expected the label in {where} to be a method of the sweep, {known}, got {label!r}"
            )
        if not isinstance(seed, int) or isinstance(seed, bool) or seed not in self.about["seeds"]:
            known = ", ".join(map(str, self.about["seeds"]))
            raise ValueError(f"multimax: expected the seed in {where} to be one of the sweep, {known}, got {seed!r}")
        if (label, seed) in self.runs:
            other = self.places[label, seed]
            raise ValueError(
                f"multimax: expected one run of {label!r} with seed {seed}, got two, {other} and {where}; "
                "move one of them away"
            )
        self.runs[label, seed], self.places[label, seed] = run, where

    def sweep(self, damaged: Mapping[str, str]) -> Sweep:
        wanted = [(label, seed) for label in self.about["methods"] for seed in self.about["seeds"]]
        return Sweep(self.about, [self.runs[key] for key in wanted if key in self.runs], damaged=damaged)


def _read_folder(folder: Path) -> Sweep:
    if not (folder / SWEEP).is_file():
        raise FileNotFoundError(
            f"multimax: expected a sweep's folder with a file sweep.json, got {folder} without one; "
            "give the folder that the sweep wrote to"
        )
    about = _load(folder / SWEEP)
    _check_about(about, str(folder / SWEEP))
    gathered = _Gathered(about)
    label_of: dict[Path, Any] = {}
    folder_of: dict[Any, Path] = {}
    damaged: dict[str, str] = {}
    for place in sorted(folder.glob("*/seed-*")):
        match = re.fullmatch(r"seed-(-?\d+)", place.name)
        if match is None or not (place / "result.json").exists():  # the result is written when the run is over
            continue
        try:
            run = read_run(place)
        except Damaged as error:  # one run is no reason to show nothing of the others
            damaged[place.relative_to(folder).as_posix()] = str(error)
            continue
        where, label, seed = str(place / "config.json"), run.label, run.seed
        if seed != int(match[1]):
            raise ValueError(f"multimax: expected seed {int(match[1])} in {where}, got {seed!r}")
        gathered.add(run, where)
        # how a label becomes a folder's name is the sweep's affair; here one folder has one label, and the reverse
        method = place.parent
        if label_of.setdefault(method, label) != label:
            raise ValueError(
                f"multimax: expected label {label_of[method]!r} in {where}, as in its neighbours, got {label!r}"
            )
        if folder_of.setdefault(label, method) != method:
            raise ValueError(f"multimax: expected all runs of {label!r} in {folder_of[label]}, got one in {method}")
    return gathered.sweep(damaged)


def _is_saved(content: dict[str, Any]) -> bool:
    return content.get("format") == FORMAT


def _read_file(file: Path) -> Sweep:
    content = _load(file)
    if not _is_saved(content):
        raise ValueError(
            f"multimax: expected a sweep's folder or a file that was saved from one, got {file}, which has no "
            f"'format': {FORMAT!r}"
        )
    about, order, runs = content.get("sweep"), content.get("order"), content.get("runs")
    common = content.get("common", {})
    if not isinstance(common, dict) or not all(isinstance(values, dict) for values in common.values()):
        raise ValueError(f"multimax: expected 'common' in {file} to be what all runs have alike, got {common!r:.80}")
    _check_about(about, str(file))
    assert isinstance(about, dict)  # just checked
    if not isinstance(order, list) or sorted(order, key=str) != sorted(about["methods"]):
        raise ValueError(f"multimax: expected 'order' in {file} to list the methods, got {order!r}")
    if not isinstance(runs, list):
        raise ValueError(f"multimax: expected 'runs' in {file} to be a list, got {type(runs).__name__}")
    about["methods"] = {label: about["methods"][label] for label in order}  # the file's keys are sorted
    gathered = _Gathered(about)
    for number, saved in enumerate(runs):
        where = f"{file}, runs[{number}]"
        parts: list[Any] = [saved.get(name) for name in FILES] if isinstance(saved, dict) else [None]
        if not all(isinstance(part, dict) for part in parts):
            raise ValueError(f"multimax: expected config, environment and result in {where}, got {saved!r:.80}")
        parts = [{**common.get(name, {}), **part} for name, part in zip(FILES, parts, strict=True)]
        _check_result(saved["result"], where)
        gathered.add(Run(saved.get("label"), saved.get("seed"), *parts), where)
    return gathered.sweep({})


def read(path: str | Path) -> Sweep:
    """Reads a sweep from the folder that it wrote to, or from a file of :func:`save`.

    A run counts as over once its result.json is there. Nothing but JSON is read.

    Args:
        path: the folder, or the file.

    Returns:
        The runs that are over; ``missing`` says which are not, ``damaged`` which of those have files that cannot be
        read, and what to do.
    """
    path = Path(path)
    if path.is_dir():
        return _read_folder(path)
    if not path.exists():
        raise FileNotFoundError(f"multimax: expected a sweep's folder or a file that was saved from one, got no {path}")
    return _read_file(path)


# a path within a text; "https://" has none, nor has "and/or"
_PATH = re.compile(r"(?<![^\s'\"=(\[,:])(?:~|\.\.)?/(?!/)[^\s'\",)\]]+")


def _last_part(path: str) -> str:
    return PurePosixPath(path).name or path


def _is_path(text: str) -> bool:
    return text.startswith(("/", "~/")) or ".." in PurePosixPath(text).parts


def portable(value: Any, labels: Collection[str] = ()) -> Any:
    """The same in strict JSON, and without what tells of the machine: paths, of which the last part stays.

    Names of the hub are no paths, nor are labels.
    """
    if isinstance(value, dict):
        return {key: portable(part, labels) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [portable(part, labels) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if not isinstance(value, str) or value in labels:
        return value
    prefix = "hub:" if value.startswith("hub:") else ""
    path = value.removeprefix("hub:")
    if _is_path(path):
        return prefix + _last_part(path)
    return _PATH.sub(lambda match: _last_part(match[0]), value)


def source(data: object) -> str:
    """The name of what a run was told to read: of a relative path, too, the last part."""
    name = str(portable(data))
    return name if name.startswith("hub:") else _last_part(name)


def _as_text(value: Any, indent: str = "") -> str:
    """JSON with sorted keys; a line each for what holds objects or lists, all else in one line."""
    inner = indent + " "
    if isinstance(value, dict) and any(isinstance(part, dict | list) for part in value.values()):
        rows = [f"{inner}{json.dumps(key)}: {_as_text(value[key], inner)}" for key in sorted(value)]
        return "{\n" + ",\n".join(rows) + f"\n{indent}}}"
    if isinstance(value, list) and any(isinstance(part, dict) for part in value):
        return "[\n" + ",\n".join(inner + _as_text(part, inner) for part in value) + f"\n{indent}]"
    return json.dumps(value, ensure_ascii=False, allow_nan=False, sort_keys=True)


def _common(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """What all have alike, which is most of their settings."""
    first = parts[0] if parts else {}
    return {key: value for key, value in first.items() if all(key in part and part[key] == value for part in parts)}


def save(sweep: Sweep, file: str | Path) -> None:
    """Writes all runs of a sweep into one JSON file, for :func:`read`, in an order that keeps diffs small.

    Paths are not in it, since they tell of the machine and of nothing else: the last part of each stays. The file is
    there as a whole or not at all.

    Args:
        sweep: what :func:`read` gave.
        file: where to; one that is there already must have been written by this function.
    """
    file = Path(file)
    if not file.parent.is_dir():
        raise FileNotFoundError(f"multimax: expected a folder {file.parent} to write {file.name} to, got none; make it")
    if file.exists():
        try:
            ours = _is_saved(_load(file))
        except (ValueError, OSError):
            ours = False
        if not ours:
            raise FileExistsError(
                f"multimax: expected {file} to be new or a saved sweep, got another file, which stays as it is; "
                "choose another name"
            )
    labels = sweep.labels
    runs = []
    for run in sweep.runs:
        saved = {name: portable(getattr(run, name), labels) for name in FILES}
        if "data" in saved["config"]:
            saved["config"]["data"] = source(run.config["data"])
        runs.append({"label": run.label, "seed": run.seed, **saved})
    common = {name: _common([saved[name] for saved in runs]) for name in SHARED}
    for saved in runs:
        for name in SHARED:
            saved[name] = {key: value for key, value in saved[name].items() if key not in common[name]}
    content = {
        "format": FORMAT,
        "common": common,
        "order": labels,
        "sweep": portable(sweep.about, labels),
        "runs": runs,
    }
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(_as_text(content) + "\n", encoding="utf-8")
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)
