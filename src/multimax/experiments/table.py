"""The results of a sweep as Markdown, or in the columns of a terminal."""

import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from scipy import stats  # type: ignore[import-untyped]

from multimax.experiments import results, tasks, terminal
from multimax.experiments.results import OF_RESULT, Run, Sweep
from multimax.experiments.tasks import Metric
from multimax.metrics.layer_names import layer_names
from multimax.reweighting.layer import SYMBOLS  # the paper's, which have one value per order

FEW = 5  # seeds, below which an interval comes with a warning
KNOTS = 1  # of the paper's symbols, which come in pairs: slopes and knots
ASKED_FOR = ("entropy",)  # shown only if it is named: its values say little where lengths are equal
ARROWS = {"higher": "↑", "lower": "↓"}


# those of the tasks, and those that all tasks have
METRICS = {name: metric for spec in tasks.SPECS for name, metric in spec.metrics.items()} | {
    "loss": Metric("loss", 1, 4, "lower"),
    "multi_modality": Metric("multi-modality", 1, 4, "higher"),
    "sparsity": Metric("sparsity", 1, 4, "higher"),
    "patch_similarity": Metric("patch similarity", 1, 4, "lower"),
    "entropy": Metric("entropy", 1, 4, "lower"),
    "ms_per_step": Metric("ms per step", 1, 1, "lower"),
}


def _metric(name: str) -> Metric:
    """How a metric is shown; ``perplexity@256`` is perplexity at 256 tokens."""
    base, _, place = name.partition("@")
    metric = METRICS[base]
    return metric._replace(title=f"{metric.title} at {place}") if place else metric


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
    return math.nan if found[name] is None else float(found[name]) * _metric(name).factor


def _cell(runs: Sequence[Run], name: str) -> str:
    """A metric of a method over its finished runs, and how many of them have no number."""
    values = [_value(run, name) for run in runs if run.finished]
    measured = [value for value in values if value is not None]
    if not measured:
        return "-"
    finite = [value for value in measured if math.isfinite(value)]
    text = _spread(finite, _metric(name).digits) if finite else "-"
    lacking = {"not finite": len(measured) - len(finite), "not measured": len(values) - len(measured)}
    notes = [f"{count} of {len(values)} {what}" for what, count in lacking.items() if count]
    return f"{text} ({', '.join(notes)})" if notes else text


class Difference(NamedTuple):
    """The mean difference, the ends of its confidence interval, and how many seeds it is of."""

    mean: float
    low: float
    high: float
    seeds: int


def paired_difference(
    values: Mapping[int, float], baseline: Mapping[int, float], confidence: float = 0.95
) -> Difference | None:
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
    return Difference(mean, mean - half, mean + half, n)


def pooled_deviation(sweep: Sweep, name: str, baseline: str) -> tuple[float, int]:
    """The standard deviation of paired differences to the baseline, pooled over the other methods.

    Args:
        sweep: with at least one method that has two seeds in common with the baseline.
        name: of the metric.
        baseline: its label.

    Returns:
        It, in the unit of the table, and its degrees of freedom.
    """
    against = _by_seed(sweep.of(baseline), name)
    squares, freedom = 0.0, 0
    for label in sweep.labels:
        values = _by_seed(sweep.of(label), name) if label != baseline else {}
        differences = [values[seed] - against[seed] for seed in values if seed in against]
        if len(differences) > 1:
            squares += (len(differences) - 1) * statistics.variance(differences)
            freedom += len(differences) - 1
    if not freedom:
        raise ValueError(f"multimax: expected a method with two seeds or more besides {baseline!r}, got none")
    return math.sqrt(squares / freedom), freedom


def power(seeds: int, effect: float) -> float:
    """How probable it is that the 95% interval of a paired difference leaves zero out.

    Args:
        seeds: how many, at least 2.
        effect: the true difference over the standard deviation of the differences.
    """
    edge, shift = stats.t.ppf(0.975, seeds - 1), abs(effect) * math.sqrt(seeds)
    return float(stats.nct.sf(edge, seeds - 1, shift) + stats.nct.cdf(-edge, seeds - 1, shift))


def seeds_to_see(effect: float, wanted: float = 0.8, most: int = 1000) -> int | None:
    """The smallest number of seeds with which a paired difference is seen with the wanted probability; None if more
    than the most would be needed.

    Example:
        >>> from multimax.experiments.table import seeds_to_see
        >>> seeds_to_see(1.0), seeds_to_see(2.0)
        (10, 5)
    """
    return next((n for n in range(2, most + 1) if power(n, effect) >= wanted), None)


def detection(sweep: Sweep, text: str, metrics: Sequence[str] | None = None, baseline: str | None = None) -> str:
    """How many seeds would show a difference, by the scatter of these runs, in a sentence.

    Args:
        sweep: pilot runs.
        text: the difference in the table's unit, such as "0.4", or in percent of the baseline's mean, such as "1.4%".
        metrics: of which the first counts, as in :func:`markdown`.
        baseline: as there.
    """
    name = _chosen(sweep, metrics)[0]
    baseline = sweep.about["baseline"] if baseline is None else baseline
    try:
        difference = float(text.removesuffix("%"))
    except ValueError:
        raise ValueError(f"multimax: expected a difference such as 0.4 or 1.4%, got {text!r}") from None
    if text.endswith("%"):
        difference *= statistics.fmean(_by_seed(sweep.of(baseline), name).values()) / 100
    deviation, freedom = pooled_deviation(sweep, name, baseline)
    digits = _metric(name).digits + 2
    seeds = seeds_to_see(difference / deviation) if deviation and difference else None
    needed = "more than 1,000 seeds" if seeds is None else f"{seeds} seeds"
    five, ten = (_number(_smallest(n) * deviation, digits) for n in (5, 10))
    return (
        f"{name}: paired differences to {baseline} have a standard deviation of {_number(deviation, digits)} "
        f"({freedom} degrees of freedom); {needed} show a difference of {_number(difference, digits)} with a "
        f"probability of 80%; 5 seeds show {five}, 10 seeds {ten}."
    )


def _smallest(seeds: int) -> float:
    """The effect that so many seeds show with a probability of 80%, by halving."""
    low, high = 0.0, 100.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if power(seeds, middle) >= 0.8 else (middle, high)
    return high


def _by_seed(runs: Sequence[Run], name: str) -> dict[int, float]:
    found = {run.seed: _value(run, name) for run in runs if run.finished}
    return {seed: value for seed, value in found.items() if value is not None and math.isfinite(value)}


def _difference_cell(runs: Sequence[Run], baseline: Sequence[Run], name: str) -> str:
    found = paired_difference(_by_seed(runs, name), _by_seed(baseline, name))
    if found is None:
        return "-"
    mean, low, high = (_number(value, _metric(name).digits, "+") for value in (found.mean, found.low, found.high))
    seeds = f" ({found.seeds} seeds)" if found.seeds != len(runs) else ""
    if found.seeds < FEW:
        seeds = f" (only {found.seeds} seeds)"
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
    return ", ".join(f"{label} seed{'s' * (len(numbers) > 1)} {', '.join(numbers)}" for label, numbers in seeds.items())


def _leaves(value: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, part in sorted(value.items()):  # as in a saved file, so that both give the same text
        if isinstance(part, dict):
            yield from _leaves(part)
        else:
            yield key, part


def _environments(sweep: Sweep) -> list[str]:
    """A line for each hardware and software that the runs had, and one for the commits of the code."""
    commits: dict[str, None] = {}
    found: dict[str, int] = {}
    for run in sweep.runs:
        first = dict(run.environment)
        for environment in (first, *first.pop("resumed_on", [])):  # where a run that was interrupted went on
            leaves = {key: value for key, value in _leaves(results.portable(environment)) if value is not None}
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
        source = results.source(run.config.get("data", ""))
        data[source] = str(results.portable(run.result.get("data", data.get(source, source))))
    names = sorted({name for name in data.values() if name})
    if names:
        parts.append(f"data {', '.join(names)}")
    steps = sorted(set(_of_results([run for run in sweep.runs if run.finished], "steps")))
    if steps:
        ends = dict.fromkeys((steps[0], steps[-1]))  # one, if all runs have the same
        parts.append(f"{' to '.join(f'{count:,.0f}' for count in ends)} steps")
    minutes = _of_results(sweep.runs, "minutes")
    if minutes:
        mean, total = (
            f"{value:.1f}" if value >= 1 else f"{value:.2g}" for value in (statistics.fmean(minutes), sum(minutes))
        )
        parts.append(f"{mean} minutes per run, {total} minutes in all")
    return ", ".join(parts) + "."


def notes(sweep: Sweep, metrics: Sequence[str] | None = None) -> list[str]:
    """What to know of :func:`markdown`'s table."""
    main = _chosen(sweep, metrics)[0]
    legend = "± is the standard deviation over the seeds; ↑ and ↓ say which way is better."
    if len(sweep.labels) > 1:
        metric = _metric(main)
        unit = ", in percentage points" if metric.factor == 100 else ""
        legend += (
            f" The difference is that of {metric.title.removesuffix(', %')}{unit}, over runs with equal seeds, with "
            "its 95% confidence interval by Student's t."
        )
    found = [legend]
    if len(sweep.labels) > 1 and any(1 < len(sweep.of(label)) < FEW for label in sweep.labels):
        found.append(
            f"Fewer than {FEW} seeds: the interval takes for granted that the differences are normal, which so few "
            "cannot show. It is a hint, not a result."
        )
    diverged = [run for run in sweep.runs if not run.finished]
    if diverged:
        texts = (
            f"{run.label} seed {run.seed} ({results.portable(run.result.get('reason') or 'no reason given')})"
            for run in diverged
        )
        found.append(f"Diverged, and in no mean: {', '.join(texts)}.")
    missing = sweep.missing
    if missing:
        count = "1 run is" if len(missing) == 1 else f"{len(missing)} runs are"
        found.append(f"{count} not over: {_listed(missing)}.")
    found += [f"Damaged, and not in the table: {text.removeprefix('multimax: ')}." for text in sweep.damaged.values()]
    found += [_cost(sweep), *_environments(sweep)]
    paper = _paper(sweep, main)
    if paper:
        what = f"{main.replace('_', ' ')} of {paper['setting']}"
        if _of_paper(sweep, paper):
            found.append(f"The column of the paper: {what}, as printed there.")
        else:
            of_paper = paper["values"]
            values = ", ".join(f"{label} {of_paper[label]}" for label in sweep.labels if label in of_paper)
            found.append(f"The paper has another task, to be compared by the direction alone: {what}: {values}.")
    return [" ".join(note.split()) for note in found]


def _paper(sweep: Sweep, main: str) -> dict[str, Any] | None:
    """The paper's figures, if they are of the metric that methods are compared by here."""
    paper: dict[str, Any] | None = sweep.about.get("paper")
    return paper if paper and paper["metric"] == main else None


def _of_paper(sweep: Sweep, paper: Mapping[str, Any]) -> bool:
    """Whether the runs are of the paper's own setting, so that its figures may stand beside them."""
    return bool(sweep.about["preset"] == paper.get("preset"))


def _chosen(sweep: Sweep, metrics: Sequence[str] | None) -> list[str]:
    """The metrics to show, the main one first."""
    finished = [run for run in sweep.runs if run.finished]
    there = {name for run in finished for name in (*run.result.get("metrics", {}), *OF_RESULT)}
    measured = {
        name
        for name in there
        if name.partition("@")[0] in METRICS and any(_value(run, name) is not None for run in finished)
    }
    if metrics is None:
        task = sweep.about["task"]
        if task not in tasks.names():
            known = ", ".join(tasks.names())
            raise ValueError(f"multimax: expected a sweep of one of the tasks {known}, got {task!r}; name the metrics")
        spec = tasks.get(task)
        by = sweep.about.get("by")
        first = [spec.main] if by is None else [by, *(name for name in (spec.main,) if name in measured)]
        return [*first, *(name for name in spec.measures if name in measured and name not in ASKED_FOR)]
    if isinstance(metrics, str) or not metrics:
        raise TypeError(f"multimax: expected metrics to be several names, got {metrics!r}; out of {', '.join(METRICS)}")
    for name in metrics:
        if name.partition("@")[0] not in METRICS:
            raise ValueError(f"multimax: expected metrics out of {', '.join(METRICS)}, got {name!r}")
        if measured and name not in measured:
            known = ", ".join(sorted(measured))
            raise ValueError(f"multimax: expected metrics that the runs have, {known}, got {name!r}")
    return list(dict.fromkeys(metrics))


def markdown(sweep: Sweep, metrics: Sequence[str] | None = None, baseline: str | None = None) -> str:
    """A sweep as a Markdown table, one row per method, and below it what to know of it.

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
        | method   | accuracy, % ↑ | seeds | difference to softmax (95%)         |
        |----------|---------------|-------|-------------------------------------|
        | softmax  | 97.20 ± 0.28  | 2     |                                     |
        | MultiMax | 98.25 ± 0.21  | 2     | +1.05 [+0.41, +1.69] (only 2 seeds) |
    """
    return "\n".join([_table(rows(sweep, metrics, baseline)), "", *(f"- {note}" for note in notes(sweep, metrics))])


def text(
    sweep: Sweep, metrics: Sequence[str] | None = None, baseline: str | None = None, width: int | None = None
) -> str:
    """The same as :func:`markdown`, in the columns of a terminal where one is given.

    Args:
        sweep: what :func:`read` gave.
        metrics: as for :func:`markdown`.
        baseline: likewise.
        width: of the terminal; None for Markdown.
    """
    if width is None:
        return markdown(sweep, metrics, baseline)
    cells, others = rows(sweep, metrics, baseline), len(_chosen(sweep, metrics)) - 1
    # the difference next to its metric, with which it fits into one block
    moved = [[*row[:2], row[3 + others], row[2 + others], *row[2 : 2 + others], *row[4 + others :]] for row in cells]
    return f"{terminal.table(moved, width)}\n\n{terminal.notes(notes(sweep, metrics), width)}"


def rows(sweep: Sweep, metrics: Sequence[str] | None = None, baseline: str | None = None) -> list[list[str]]:
    """The cells of :func:`markdown`'s table, the head first."""
    chosen = _chosen(sweep, metrics)
    baseline = sweep.about["baseline"] if baseline is None else baseline
    if baseline not in sweep.labels:
        known = ", ".join(map(repr, sweep.labels))
        raise ValueError(f"multimax: expected the baseline to be a method of the sweep, {known}, got {baseline!r}")
    paper = _paper(sweep, chosen[0])
    paper = paper if paper and _of_paper(sweep, paper) else None
    head = ["method", *(f"{_metric(name).title} {ARROWS[_metric(name).better]}" for name in chosen), "seeds"]
    found = [[*head, f"difference to {baseline} (95%)", *(["paper"] if paper else [])]]
    searched = "by" in sweep.about
    if searched:
        found[0].append("learned, by layer")
    for label in sweep.labels:
        runs = sweep.of(label)
        diverged = sum(not run.finished for run in runs)
        row = [label, *(_cell(runs, name) for name in chosen)]
        row.append(f"{diverged} of {len(runs)} diverged" if diverged else str(len(runs)))
        row.append("" if label == baseline else _difference_cell(runs, sweep.of(baseline), chosen[0]))
        row += [str(paper["values"].get(label, "-"))] if paper else []
        found.append(row + ([_learned_cell(runs)] if searched else []))
    return found


def _learned_cell(runs: Sequence[Run]) -> str:
    """What a method has learned in short: each slope or temperature by layer, a mean over seeds and heads."""
    layers: dict[str, dict[tuple[int, int, str], list[float]]] = {}
    for run in runs:
        for layer, parameters in (run.result.get("parameters") or {}).items():
            for column, value in _by_column(parameters).items():
                layers.setdefault(layer, {}).setdefault(column, []).append(value)
    columns = sorted({column for found in layers.values() for column in found if column[0] != KNOTS})
    texts = []
    for column in columns:
        values = (layers[layer].get(column) for layer in layer_names(layers))
        texts.append(f"{column[2]} " + " ".join(_number(statistics.fmean(v), 2) for v in values if v))
    return "; ".join(texts)


def _flat(value: Any) -> list[float]:
    if isinstance(value, list | tuple):
        return [number for inner in value for number in _flat(inner)]
    return [math.nan if value is None else float(value)]


def _by_column(parameters: Mapping[str, Any]) -> dict[tuple[int, int, str], float]:
    """One layer's parameters, each a mean over the heads, by the place of its column and its title."""
    found = {}
    for name, value in parameters.items():
        if name not in SYMBOLS:  # a number, or one per head
            found[2, 0, name] = statistics.fmean(_flat(value))
            continue
        heads = value if isinstance(value, list | tuple) and value and isinstance(value[0], list | tuple) else [value]
        for order, per_head in enumerate(zip(*map(_flat, heads), strict=True), start=1):
            # the paper's columns: t_b1, t_d1, t_b2, t_d2, b1, d1, b2, d2
            found[SYMBOLS.index(name) // 2, order, f"{name}{order}"] = statistics.fmean(per_head)
    return found


def parameters_markdown(sweep: Sweep, label: str) -> str:
    """What a method has learned, as a Markdown table: one row per layer, mean over the seeds ± standard deviation.

    MultiMax in the paper's symbols and the order of its tables (t_b1, t_d1, t_b2, ..., b1, d1, ...); parameters of
    heads as their mean over the heads. Runs that diverged are not in it, and are counted below.

    Args:
        sweep: what :func:`read` gave.
        label: the method.

    Returns:
        The text.
    """
    return parameters_text(sweep, label)


def parameters_text(sweep: Sweep, label: str, width: int | None = None) -> str:
    """The same as :func:`parameters_markdown`, in the columns of a terminal where one is given."""
    found, note = parameter_rows(sweep, label)
    if width is None:
        return f"{_table(found)}\n\n- {note}"
    return f"{terminal.table(found, width)}\n\n{terminal.notes([note], width)}"


def parameter_rows(sweep: Sweep, label: str) -> tuple[list[list[str]], str]:
    """The cells of :func:`parameters_markdown`'s table, the head first, and what to know of it."""
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
    found = [["layer", *(title for _, _, title in titles)]]
    for layer, shown in layer_names(layers).items():
        cells = []
        for column in titles:
            values = layers[layer].get(column)
            text = "-" if values is None else _spread(values, 4)
            cells.append(text if values is None or len(values) == len(runs) else f"{text} (n = {len(values)})")
        found.append([shown, *cells])
    diverged = len(sweep.of(label)) - len(runs)
    spread = f"mean ± standard deviation over {len(runs)} seeds" if len(runs) > 1 else "one seed"
    return found, f"{label}: {spread}{f'; {diverged} diverged and not in it' if diverged else ''}."


def learned_layers(sweep: Sweep, label: str) -> dict[str, list[dict[str, list[float]]]]:
    """MultiMax's parameters by layer as it is shown, of each finished run and each head, in the paper's symbols.

    Args:
        sweep: what :func:`multimax.experiments.results.read` gave.
        label: the method.
    """
    found: dict[str, list[dict[str, list[float]]]] = {}
    for run in sweep.of(label):
        for layer, parameters in (run.result.get("parameters") or {}).items():
            if not set(SYMBOLS) <= set(parameters):
                continue
            per_head = isinstance(parameters["t_b"][0], list)
            sets = (
                [parameters]
                if not per_head
                else [{s: parameters[s][h] for s in SYMBOLS} for h in range(len(parameters["t_b"]))]
            )
            found.setdefault(layer, []).extend({s: one[s] for s in SYMBOLS} for one in sets)
    if not found:
        raise ValueError(f"multimax: expected finished runs of MultiMax under the label {label!r}, got none")
    return {shown: found[layer] for layer, shown in layer_names(found).items()}


def line_of(sweep: Sweep, label: str) -> str:
    """What one of several lines of a layer is, where each set of :func:`learned_layers` is a line."""
    runs = [run for run in sweep.of(label) if run.result.get("parameters")]
    layers = [layer for run in runs for layer in run.result["parameters"].values() if set(SYMBOLS) <= set(layer)]
    heads = any(isinstance(layer["t_b"][0], list) for layer in layers)
    return " and ".join(["seed"] * (len(runs) > 1 or not heads) + ["head"] * heads)
