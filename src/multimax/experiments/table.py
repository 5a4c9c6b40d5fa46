"""Tables from runs: reads a sweep's folder, keeps its numbers in one small file, and prints them as Markdown."""

import json
import math
import os
import re
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal, NamedTuple

from scipy import stats  # type: ignore[import-untyped]

FORMAT = "multimax sweep 1"  # marks a file of `save`
FILES = ("config", "environment", "result")  # of a run, each .json
WORDS = ("nan", "inf", "-inf")  # stand for such numbers, which JSON has not
STATUSES = ("finished", "diverged")
SYMBOLS = ("t_b", "t_d", "b", "d")  # the paper's, which have a value an order
ARROWS = {"higher": "↑", "lower": "↓"}


class Metric(NamedTuple):
    """How a metric is shown: its title, what it is multiplied with, digits after the point, which way is better."""

    title: str
    factor: float
    digits: int
    better: Literal["higher", "lower"]


METRICS = {
    "accuracy": Metric("accuracy, %", 100, 2, "higher"),
    "perplexity": Metric("perplexity", 1, 2, "lower"),
    "token_perplexity": Metric("perplexity a token", 1, 2, "lower"),
    "bleu": Metric("BLEU", 1, 2, "higher"),
    "chrf": Metric("chrF", 1, 2, "higher"),
    "loss": Metric("loss", 1, 4, "lower"),
    "multi_modality": Metric("multi-modality", 1, 4, "higher"),
    "sparsity": Metric("sparsity", 1, 4, "higher"),
    "patch_similarity": Metric("patch similarity", 1, 4, "lower"),
    "ms_per_step": Metric("ms a step", 1, 1, "lower"),
}
OF_RESULT = ("ms_per_step",)  # stand in the result itself, not among its metrics
TASKS = {  # the main metric, and those that are shown where they were measured
    "vision": ("accuracy", "multi_modality", "sparsity", "patch_similarity"),
    "language": ("perplexity", "multi_modality", "sparsity"),
    "translation": ("bleu", "multi_modality", "sparsity"),
}


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
    """The runs of a sweep that are over, by method and seed in the order of ``about``, which is its sweep.json."""

    about: dict[str, Any]
    runs: list[Run]

    @property
    def labels(self) -> list[str]:
        """The methods, in their order."""
        return list(self.about["methods"])

    @property
    def missing(self) -> list[tuple[str, int]]:
        """Label and seed of the runs that are not over, or not begun."""
        over = {(run.label, run.seed) for run in self.runs}
        wanted = [(label, seed) for label in self.labels for seed in self.about["seeds"]]
        return [own for own in wanted if own not in over]

    def of(self, label: str) -> list[Run]:
        """The runs of one method."""
        return [run for run in self.runs if run.label == label]


def _load(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(
            f"multimax: expected a file {file}, got none; run this part of the sweep again"
        ) from None
    except (ValueError, RecursionError) as error:  # of JSON or UTF-8
        raise ValueError(f"multimax: expected JSON in {file}, got a damaged file: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"multimax: expected a JSON object in {file}, got {type(found).__name__}")
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
    if paper is not None:
        texts = isinstance(paper, dict) and all(isinstance(paper.get(key), str) for key in ("metric", "setting"))
        if not texts or not isinstance(paper.get("values"), dict):
            raise ValueError(
                f"multimax: expected 'paper' in {where} to have a metric, a setting and values by label, got {paper!r}"
            )


def _check_result(result: dict[str, Any], where: str) -> None:
    """The content of result.json."""
    if result.get("status") not in STATUSES:
        allowed = ", ".join(map(repr, STATUSES))
        raise ValueError(f"multimax: expected 'status' in {where} to be one of {allowed}, got {result.get('status')!r}")
    metrics = result.get("metrics", {} if result["status"] == "diverged" else None)
    if not isinstance(metrics, dict):
        raise ValueError(f"multimax: expected 'metrics' in {where} to be numbers by name, got {metrics!r}")
    numbers = {**metrics, **{key: result[key] for key in ("steps", "minutes", *OF_RESULT) if key in result}}
    for name, value in numbers.items():
        if value is not None and not _is_number(value):
            raise ValueError(f"multimax: expected {name!r} in {where} to be a number, got {value!r}")
    parameters = result.get("parameters") or {}
    if not isinstance(parameters, dict) or not all(isinstance(own, dict) for own in parameters.values()):
        raise ValueError(f"multimax: expected 'parameters' in {where} to be values by layer and name")


class _Gathered:
    """Runs on their way into a sweep: each must belong to it, and be there once."""

    def __init__(self, about: dict[str, Any]) -> None:
        self.about = about
        self.runs: dict[tuple[str, int], Run] = {}
        self.places: dict[tuple[str, int], str] = {}

    def add(self, label: object, seed: object, files: Sequence[dict[str, Any]], where: str) -> None:
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
        self.runs[label, seed], self.places[label, seed] = Run(label, seed, *files), where

    def sweep(self) -> Sweep:
        wanted = [(label, seed) for label in self.about["methods"] for seed in self.about["seeds"]]
        return Sweep(self.about, [self.runs[own] for own in wanted if own in self.runs])


def _read_folder(folder: Path) -> Sweep:
    if not (folder / "sweep.json").is_file():
        raise FileNotFoundError(
            f"multimax: expected a sweep's folder with a file sweep.json, got {folder} without one; "
            "give the folder that the sweep wrote to"
        )
    about = _load(folder / "sweep.json")
    _check_about(about, str(folder / "sweep.json"))
    gathered = _Gathered(about)
    label_of: dict[Path, Any] = {}
    folder_of: dict[Any, Path] = {}
    for place in sorted(folder.glob("*/seed-*")):
        match = re.fullmatch(r"seed-(-?\d+)", place.name)
        if match is None or not (place / "result.json").exists():  # the result is written when the run is over
            continue
        files = [_load(place / f"{name}.json") for name in FILES]
        config, _, result = files
        _check_result(result, str(place / "result.json"))
        where, label, seed = str(place / "config.json"), config.get("label"), config.get("seed")
        if seed != int(match[1]):
            raise ValueError(f"multimax: expected seed {int(match[1])} in {where}, got {seed!r}")
        gathered.add(label, seed, files, where)
        # how a label becomes a folder's name is the sweep's affair; here one folder has one label, and the reverse
        method = place.parent
        if label_of.setdefault(method, label) != label:
            raise ValueError(
                f"multimax: expected label {label_of[method]!r} in {where}, as in its neighbours, got {label!r}"
            )
        if folder_of.setdefault(label, method) != method:
            raise ValueError(f"multimax: expected all runs of {label!r} in {folder_of[label]}, got one in {method}")
    return gathered.sweep()


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
    _check_about(about, str(file))
    assert isinstance(about, dict)  # just checked
    if not isinstance(order, list) or sorted(order, key=str) != sorted(about["methods"]):
        raise ValueError(f"multimax: expected 'order' in {file} to list the methods, got {order!r}")
    if not isinstance(runs, list):
        raise ValueError(f"multimax: expected 'runs' in {file} to be a list, got {type(runs).__name__}")
    about["methods"] = {label: about["methods"][label] for label in order}  # the file's keys are sorted
    gathered = _Gathered(about)
    for number, own in enumerate(runs):
        where = f"{file}, runs[{number}]"
        parts: list[Any] = [own.get(name) for name in FILES] if isinstance(own, dict) else [None]
        if not all(isinstance(part, dict) for part in parts):
            raise ValueError(f"multimax: expected config, environment and result in {where}, got {own!r:.80}")
        _check_result(own["result"], where)
        gathered.add(own.get("label"), own.get("seed"), parts, where)
    return gathered.sweep()


def read(path: str | Path) -> Sweep:
    """Reads a sweep from the folder that it wrote to, or from a file of :func:`save`.

    A run counts as over once its result.json is there. Nothing but JSON is read.

    Args:
        path: the folder, or the file.

    Returns:
        The runs that are over; ``missing`` says which are not.
    """
    path = Path(path)
    if path.is_dir():
        return _read_folder(path)
    if not path.exists():
        raise FileNotFoundError(f"multimax: expected a sweep's folder or a file that was saved from one, got no {path}")
    return _read_file(path)


# a path in the midst of a text; "https://" has none, nor has "and/or"
_PATH = re.compile(r"(?<![^\s'\"=(\[,:])(?:~|\.\.)?/(?!/)[^\s'\",)\]]+")


def _last_part(path: str) -> str:
    return PurePosixPath(path).name or path


def _is_path(text: str) -> bool:
    return text.startswith(("/", "~/")) or ".." in PurePosixPath(text).parts


def _portable(value: Any, labels: Collection[str] = ()) -> Any:
    """The same in strict JSON, and without what tells of the machine: paths, of which the last part stays.

    Names of the hub are no paths, nor are labels.
    """
    if isinstance(value, dict):
        return {key: _portable(own, labels) for key, own in value.items()}
    if isinstance(value, list | tuple):
        return [_portable(own, labels) for own in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if not isinstance(value, str) or value in labels:
        return value
    prefix = "hub:" if value.startswith("hub:") else ""
    path = value.removeprefix("hub:")
    if _is_path(path):
        return prefix + _last_part(path)
    return _PATH.sub(lambda match: _last_part(match[0]), value)


def _source(data: object) -> str:
    """The name of what a run was told to read: of a relative path, too, the last part."""
    name = str(_portable(data))
    return name if name.startswith("hub:") else _last_part(name)


def _as_text(value: Any, indent: str = "") -> str:
    """JSON with sorted keys; a line each for what objects and lists of objects hold, other lists in one line."""
    inner = indent + " "
    if isinstance(value, dict) and value:
        rows = [f"{inner}{json.dumps(key)}: {_as_text(value[key], inner)}" for key in sorted(value)]
        return "{\n" + ",\n".join(rows) + f"\n{indent}}}"
    if isinstance(value, list) and any(isinstance(own, dict) for own in value):
        return "[\n" + ",\n".join(inner + _as_text(own, inner) for own in value) + f"\n{indent}]"
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


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
        own = {name: _portable(getattr(run, name), labels) for name in FILES}
        if "data" in own["config"]:
            own["config"]["data"] = _source(run.config["data"])
        runs.append({"label": run.label, "seed": run.seed, **own})
    content = {
        "format": FORMAT,
        "order": labels,
        "sweep": _portable(sweep.about, labels),
        "runs": runs,
    }
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(_as_text(content) + "\n", encoding="utf-8")
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)


def _number(value: float, digits: int, sign: str = "") -> str:
    """A number of so many digits; no minus before zero, and large ones (a perplexity that exploded) in short."""
    if math.isfinite(value) and abs(value) < 1e6:
        return f"{round(value, digits) + 0.0:{sign}.{digits}f}"
    return f"{value:{sign}.3g}"


def _spread(values: Sequence[float], digits: int) -> str:
    """Mean ± standard deviation of a sample; the mean alone of one value; nan if one is."""
    finite = all(map(math.isfinite, values))
    text = _number(statistics.fmean(values) if finite else math.nan, digits)
    return f"{text} ± {_number(statistics.stdev(values), digits)}" if finite and len(values) > 1 else text


def _value(run: Run, name: str) -> float | None:
    """A metric in the unit of the table; None if the run has not measured it."""
    found = run.result if name in OF_RESULT else run.result.get("metrics", {})
    if name not in found:
        return None
    return math.nan if found[name] is None else float(found[name]) * METRICS[name].factor


def _cell(runs: Sequence[Run], name: str) -> str:
    """A metric of a method over its finished runs, and how many of them have no number."""
    values = [_value(run, name) for run in runs if run.finished]
    measured = [value for value in values if value is not None]
    if not measured:
        return "-"
    finite = [value for value in measured if math.isfinite(value)]
    text = _spread(finite, METRICS[name].digits) if finite else "-"
    lacking = {"not finite": len(measured) - len(finite), "not measured": len(values) - len(measured)}
    notes = [f"{count} of {len(values)} {what}" for what, count in lacking.items() if count]
    return f"{text} ({', '.join(notes)})" if notes else text


def paired_difference(
    values: Mapping[int, float], baseline: Mapping[int, float], confidence: float = 0.95
) -> tuple[float, float, float, int] | None:
    """Mean difference of runs with equal seeds, with its confidence interval by Student's t.

    Args:
        values: a number by seed.
        baseline: the numbers to compare with, by seed.
        confidence: that of the interval.

    Returns:
        Mean of value - baseline, the interval's ends, and how many seeds both have; None for fewer than two.

    Example:
        >>> from multimax.experiments.table import paired_difference
        >>> mean, low, high, seeds = paired_difference({0: 3.0, 1: 5.0, 2: 7.0}, {0: 1.0, 1: 4.0, 2: 4.0, 3: 4.0})
        >>> print(f"{mean:.2f} [{low:.2f}, {high:.2f}] of {seeds}")
        2.00 [-0.48, 4.48] of 3
    """
    differences = [values[seed] - baseline[seed] for seed in values if seed in baseline]
    n = len(differences)
    if n < 2:
        return None
    mean = statistics.fmean(differences)
    half = float(stats.t.ppf((1 + confidence) / 2, n - 1)) * statistics.stdev(differences) / math.sqrt(n)
    return mean, mean - half, mean + half, n


def _by_seed(runs: Sequence[Run], name: str) -> dict[int, float]:
    found = {run.seed: _value(run, name) for run in runs if run.finished}
    return {seed: value for seed, value in found.items() if value is not None and math.isfinite(value)}


def _difference_cell(runs: Sequence[Run], baseline: Sequence[Run], name: str) -> str:
    found = paired_difference(_by_seed(runs, name), _by_seed(baseline, name))
    if found is None:
        return "-"
    mean, low, high = (_number(value, METRICS[name].digits, "+") for value in found[:3])
    seeds = f" ({found[3]} seeds)" if found[3] != len(runs) else ""
    return f"{mean} [{low}, {high}]{seeds}"


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells, the first of which is the head, as Markdown that also reads well as it is."""
    safe = [[" ".join(cell.split()).replace("\\", "\\\\").replace("|", "\\|") for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in safe) for i in range(len(safe[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in safe
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def _listed(runs: Sequence[tuple[str, int]]) -> str:
    """Runs by label, as a sentence has them."""
    seeds: dict[str, list[str]] = {}
    for label, seed in runs:
        seeds.setdefault(label, []).append(str(seed))
    return ", ".join(f"{label} seed{'s' * (len(own) > 1)} {', '.join(own)}" for label, own in seeds.items())


def _leaves(value: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, own in sorted(value.items()):  # as in a saved file, so that both give the same text
        if isinstance(own, dict):
            yield from _leaves(own)
        else:
            yield key, own


def _environments(sweep: Sweep) -> list[str]:
    """A line for each hardware and software that the runs had, and one for the commits of the code."""
    commits: dict[str, None] = {}
    found: dict[str, int] = {}
    for run in sweep.runs:
        first = dict(run.environment)
        for environment in (first, *first.pop("resumed_on", [])):  # where a run that was interrupted went on
            leaves = {key: value for key, value in _leaves(_portable(environment)) if value is not None}
            if "commit" in environment:
                commit = str(leaves.pop("commit", "unknown"))
                commits[re.sub(r"\b([0-9a-f]{10})[0-9a-f]{30}\b", r"\1", commit)] = None
            line = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in leaves.items())
            found[line] = found.get(line, 0) + 1
    several = len(found) > 1
    lines = [
        (f"{count} runs with {line}." if count > 1 else f"1 run with {line}.") if several else f"Run with {line}."
        for line, count in found.items()
        if line
    ]
    return lines + ([f"Commit{'s' * (len(commits) > 1)} {', '.join(commits)}."] if commits else [])


def _of_results(runs: Sequence[Run], key: str) -> list[float]:
    found = [run.result.get(key) for run in runs]
    return [float(value) for value in found if value is not None]


def _cost(sweep: Sweep) -> str:
    """Preset, data, steps and time."""
    parts = [f"Preset {sweep.about['preset']}"]
    data: dict[str, str] = {}  # what the runs were told to read, and its name if one of them got so far
    for run in sweep.runs:
        source = _source(run.config.get("data", ""))
        data[source] = str(_portable(run.result.get("data", data.get(source, source))))
    names = sorted({name for name in data.values() if name})
    if names:
        parts.append(f"data {', '.join(names)}")
    steps = sorted(set(_of_results([run for run in sweep.runs if run.finished], "steps")))
    if steps:
        ends = dict.fromkeys((steps[0], steps[-1]))  # one, if all runs have the same
        parts.append(f"{' to '.join(f'{own:,.0f}' for own in ends)} steps")
    minutes = _of_results(sweep.runs, "minutes")
    if minutes:
        mean, total = (f"{own:.1f}" if own >= 1 else f"{own:.2g}" for own in (statistics.fmean(minutes), sum(minutes)))
        parts.append(f"{mean} minutes a run, {total} minutes in all")
    return ", ".join(parts) + "."


def _notes(sweep: Sweep, main: str) -> list[str]:
    """What to know of the table."""
    legend = "± is the standard deviation over the seeds; ↑ and ↓ say which way is better."
    if len(sweep.labels) > 1:
        unit = ", in percentage points" if METRICS[main].factor == 100 else ""
        legend += (
            f" The difference is that of {main.replace('_', ' ')}{unit}, over runs with equal seeds, with its 95% "
            "confidence interval by Student's t."
        )
    notes = [legend]
    diverged = [run for run in sweep.runs if not run.finished]
    if diverged:
        texts = (
            f"{run.label} seed {run.seed} ({_portable(run.result.get('reason') or 'no reason given')})"
            for run in diverged
        )
        notes.append(f"Diverged, and in no mean: {', '.join(texts)}.")
    missing = sweep.missing
    if missing:
        count = "1 run is" if len(missing) == 1 else f"{len(missing)} runs are"
        notes.append(f"{count} not over: {_listed(missing)}.")
    notes += [_cost(sweep), *_environments(sweep)]
    paper = sweep.about.get("paper")
    if paper:
        notes.append(
            f"The column of the paper: {paper['metric'].replace('_', ' ')} of {paper['setting']}, as printed there. "
            "These small runs cannot be compared with it but for the direction."
        )
    return [" ".join(note.split()) for note in notes]


def _chosen(sweep: Sweep, metrics: Sequence[str] | None) -> list[str]:
    """The metrics to show, the main one first."""
    measured = {name for name in METRICS if any(_value(run, name) is not None for run in sweep.runs if run.finished)}
    if metrics is None:
        task = sweep.about["task"]
        if task not in TASKS:
            raise ValueError(
                f"multimax: expected a sweep of one of the tasks {', '.join(TASKS)}, got {task!r}; name the metrics"
            )
        main, *others = TASKS[task]
        return [main, *(name for name in others if name in measured)]
    if isinstance(metrics, str) or not metrics:
        raise TypeError(f"multimax: expected metrics to be several names, got {metrics!r}; out of {', '.join(METRICS)}")
    for name in metrics:
        if name not in METRICS:
            raise ValueError(f"multimax: expected metrics out of {', '.join(METRICS)}, got {name!r}")
        if measured and name not in measured:
            own = ", ".join(sorted(measured))
            raise ValueError(f"multimax: expected metrics that the runs have, {own}, got {name!r}")
    return list(dict.fromkeys(metrics))


def markdown(sweep: Sweep, metrics: Sequence[str] | None = None, baseline: str | None = None) -> str:
    """A sweep as a Markdown table, a row a method, and below it what to know of it.

    Each metric is given as its mean over the seeds ± standard deviation (n - 1), the first also as the difference to
    the baseline with its 95% confidence interval (:func:`paired_difference`). Runs that diverged are counted in their
    row, and so are metrics that are no number; neither is in a mean.

    Args:
        sweep: what :func:`read` gave.
        metrics: names out of ``METRICS``; unless given, those of the task.
        baseline: the label of the method to compare with; unless given, the sweep's own.

    Returns:
        The text.

    Example:
        >>> from multimax.experiments.table import Run, Sweep, markdown
        >>> about = {"preset": "tiny", "task": "vision", "baseline": "softmax", "seeds": [0, 1]}
        >>> about["methods"] = {"softmax": {}, "MultiMax": {}}
        >>> found = {"softmax": (0.970, 0.974), "MultiMax": (0.981, 0.984)}
        >>> runs = [
        ...     Run(label, seed, {"data": "digits"}, {}, {"status": "finished", "metrics": {"accuracy": value}})
        ...     for label, values in found.items()
        ...     for seed, value in enumerate(values)
        ... ]
        >>> print(markdown(Sweep(about, runs)).split("\\n\\n")[0])
        | method   | accuracy, % ↑ | seeds | difference to softmax (95%) |
        |----------|---------------|-------|-----------------------------|
        | softmax  | 97.20 ± 0.28  | 2     |                             |
        | MultiMax | 98.25 ± 0.21  | 2     | +1.05 [+0.41, +1.69]        |
    """
    chosen = _chosen(sweep, metrics)
    baseline = sweep.about["baseline"] if baseline is None else baseline
    if baseline not in sweep.labels:
        known = ", ".join(map(repr, sweep.labels))
        raise ValueError(f"multimax: expected the baseline to be a method of the sweep, {known}, got {baseline!r}")
    paper = sweep.about.get("paper")
    head = ["method", *(f"{METRICS[name].title} {ARROWS[METRICS[name].better]}" for name in chosen), "seeds"]
    rows = [[*head, f"difference to {baseline} (95%)", *(["paper"] if paper else [])]]
    for label in sweep.labels:
        runs = sweep.of(label)
        diverged = sum(not run.finished for run in runs)
        row = [label, *(_cell(runs, name) for name in chosen)]
        row.append(f"{diverged} of {len(runs)} diverged" if diverged else str(len(runs)))
        row.append("" if label == baseline else _difference_cell(runs, sweep.of(baseline), chosen[0]))
        rows.append(row + ([str(paper["values"].get(label, "-"))] if paper else []))
    return "\n".join([_table(rows), "", *(f"- {note}" for note in _notes(sweep, chosen[0]))])


def _natural(name: str) -> list[tuple[int, str]]:
    """A key that sorts layers.10 behind layers.9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _flat(value: Any) -> list[float]:
    if isinstance(value, list | tuple):
        return [own for inner in value for own in _flat(inner)]
    return [math.nan if value is None else float(value)]


def _by_column(parameters: Mapping[str, Any]) -> dict[tuple[int, int, str], float]:
    """One layer's parameters, each a mean over the heads, by the place of its column and its title."""
    found = {}
    for name, value in parameters.items():
        if name not in SYMBOLS:  # a number, or one a head
            found[2, 0, name] = statistics.fmean(_flat(value))
            continue
        heads = value if isinstance(value, list | tuple) and value and isinstance(value[0], list | tuple) else [value]
        for order, own in enumerate(zip(*map(_flat, heads), strict=True), start=1):
            # the paper's columns: t_b1, t_d1, t_b2, t_d2, b1, d1, b2, d2
            found[SYMBOLS.index(name) // 2, order, f"{name}{order}"] = statistics.fmean(own)
    return found


def parameters_markdown(sweep: Sweep, label: str) -> str:
    """What a method has learned, as a Markdown table: a row a layer, mean over the seeds ± standard deviation.

    MultiMax in the paper's symbols and the order of its tables (t_b1, t_d1, t_b2, ..., b1, d1, ...); parameters of
    heads as their mean over the heads. Runs that diverged are not in it, and are counted below.

    Args:
        sweep: what :func:`read` gave.
        label: the method.

    Returns:
        The text.
    """
    if label not in sweep.labels:
        known = ", ".join(map(repr, sweep.labels))
        raise ValueError(f"multimax: expected label to be a method of the sweep, {known}, got {label!r}")
    runs = [run for run in sweep.of(label) if run.finished]
    layers: dict[str, dict[tuple[int, int, str], list[float]]] = {}
    for run in runs:
        for layer, parameters in (run.result.get("parameters") or {}).items():
            try:
                columns = _by_column(parameters)
            except (TypeError, ValueError) as error:
                raise ValueError(
                    f"multimax: expected numbers, an order or a head each, as parameters of {layer!r} in the run of "
                    f"{label!r} with seed {run.seed}, got {parameters!r:.200}"
                ) from error
            for column, value in columns.items():
                layers.setdefault(layer, {}).setdefault(column, []).append(value)
    if not layers:
        what = "no run that is finished" if not runs else "a method that has learned none"
        raise ValueError(f"multimax: expected learned parameters of {label!r}, got {what}")
    titles = sorted({column for columns in layers.values() for column in columns})
    rows = [["layer", *(title for _, _, title in titles)]]
    for layer in sorted(layers, key=_natural):
        cells = []
        for column in titles:
            values = layers[layer].get(column)
            text = "-" if values is None else _spread(values, 4)
            cells.append(text if values is None or len(values) == len(runs) else f"{text} (n = {len(values)})")
        rows.append([layer or "(model)", *cells])
    diverged = len(sweep.of(label)) - len(runs)
    note = f"- {label}: mean ± standard deviation over {len(runs)} seed{'s' * (len(runs) > 1)}"
    return f"{_table(rows)}\n\n{note}{f'; {diverged} diverged and not in it' if diverged else ''}."
