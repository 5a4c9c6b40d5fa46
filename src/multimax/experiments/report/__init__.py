"""One page of HTML about trained runs or saved models: tables, all figures that apply, parameters and settings.

Needs the extras ``experiments`` and ``plots``.
"""

import os
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm  # type: ignore[import-untyped]
from transformers.utils import logging as quiet

from multimax import __version__
from multimax.experiments import table as tables
from multimax.experiments.report import models, page
from multimax.experiments.report.drawing import Drawing, Drawings, NotHere
from multimax.experiments.report.sources import Group, read
from multimax.experiments.settings import as_dict

__all__ = ["report"]

EXAMPLES = 100  # that models are run on


def report(
    paths: Sequence[str | Path],
    out: str | Path = "report.html",
    *,
    preset: str | None = None,
    data: str | None = None,
    seed: int | None = None,
    examples: int = EXAMPLES,
    progress: bool = True,
) -> Path:
    """Writes one self-contained page of HTML: it works offline, and prints.

    For each group of runs that can be compared: the table of results, all figures that apply, what has been learned in
    the paper's symbols, and the settings. What does not apply is named with the reason.

    Args:
        paths: folders of runs, of sweeps or of saved models of transformers, or files of ``multimax table --save``.
        out: the file; one that is there must be a report, or it is left as it is.
        preset: how the data of saved models is read, such as "cpu-fashion".
        data: the data to run models on, instead of the runs' own.
        seed: the runs of a sweep that figures of models are drawn of, the first unless given.
        examples: how many of the test set models are run on; 0 leaves the figures out that need it.
        progress: whether to show a bar.

    Returns:
        The file.
    """
    out = Path(out)
    if isinstance(paths, str | Path):
        raise TypeError(f"multimax: expected a list of paths, got {str(paths)!r}; put it into one")
    if not paths:
        raise ValueError("multimax: expected at least one run, sweep or saved model, got none")
    if not isinstance(examples, int) or isinstance(examples, bool) or examples < 0:
        raise ValueError(f"multimax: expected examples of at least 0, got {examples!r}")
    _check(out)
    groups = read([Path(path) for path in paths], seed=seed, preset_name=preset, data=data)
    text = _text(groups, examples, progress)
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, out)
    finally:
        temporary.unlink(missing_ok=True)
    return out


def _check(out: Path) -> None:
    """Raises if a report cannot be written there, before anything is done."""
    if not out.parent.is_dir():
        raise FileNotFoundError(f"multimax: expected a folder {out.parent} to write {out.name} to, got none; make it")
    if out.is_dir():
        raise IsADirectoryError(f"multimax: expected a file to write the report to, got the folder {out}")
    if out.exists():
        with out.open("rb") as file:
            if page.MARK.encode() not in file.read(200):
                raise FileExistsError(
                    f"multimax: expected {out} to be new or a report, got another file, which stays as it is; choose "
                    "another name with --out"
                )


def _text(groups: Sequence[Group], examples: int, progress: bool) -> str:
    quiet.disable_progress_bar()  # of every model that is loaded
    with tqdm(unit="part", disable=None if progress else True) as bar:
        bar.total = sum(len(group.sources) for group in groups)
        sections = [_section(group, f"part-{number}", examples, bar) for number, group in enumerate(groups, start=1)]
    return page.page("MultiMax report", sections, f"Made by multimax {__version__}.")


def _models(group: Group, examples: int, bar: Any) -> tuple[dict[str, models.Measured], str]:
    """Models by label, run on data, and why they were not, if they were not."""
    without = "" if examples else "models were not run on data"
    found: dict[str, models.Measured] = {}
    tasks = models.Tasks()
    for source in group.sources:
        bar.set_description(f"runs {source.label}"[:40])
        if source.model is not None:
            task = None
            if source.settings is None:
                without = without or "there is no data for saved models; give --preset and --data"
            elif examples:
                task = tasks.of(source)
            found[source.label] = models.measured(source, task, examples)
        bar.update()
    return found, without


def _section(group: Group, name: str, examples: int, bar: Any) -> page.Section:
    """What the page says of a group."""
    found, without = _models(group, examples, bar)
    parameters = models.parameters_of(group, found)
    html: list[str] = []
    parts: list[page.Part] = []
    notes = [*group.notes, *(source.note for source in group.sources if source.note)]

    def part(title: str, *content: str) -> None:
        anchor = f"{name}-{len(parts) + 1}"
        parts.append(page.Part(anchor, title))
        html.append(f'<h3 id="{anchor}">{escape(title)}</h3>\n' + "\n".join(content))

    if group.sweep is not None:
        part("Results", page.table(tables.rows(group.sweep)), page.listed([*tables.notes(group.sweep), *notes]))
    elif notes:
        part("To be known", page.listed(notes))
    measured = models.measures_of(found.items())
    if len(measured) > 1:
        data = ", ".join(dict.fromkeys(model.data for model in found.values() if model.data))
        words = f"Of the attention, on at most {examples} examples of the test set of {data}, means over the layers."
        part("Measured for this report", page.table(measured), page.listed([words]))
    lacking = []
    for drawing in _with_bar(list(Drawings(group, found, parameters, without)), bar):
        try:
            svg, words = drawing.drawn()
        except NotHere as error:
            lacking.append(f"{drawing.title}: {error}.")
            continue
        anchor = f"{name}-{len(parts) + 1}"
        parts.append(page.Part(anchor, drawing.title))
        html.append(page.figure(anchor, drawing.title, drawing.caption, words, svg))
    for label in parameters.labels:
        if any(run.result.get("parameters") for run in parameters.of(label)):
            rows, note = tables.parameter_rows(parameters, label)
            part(f"Learned parameters: {label}", page.table(rows), page.listed([note]))
    settings = {source.label: as_dict(source.settings) for source in group.sources if source.settings is not None}
    if not settings and group.sweep is not None:  # a file of numbers, which has them as well
        settings = {label: group.sweep.of(label)[0].config for label in group.sweep.labels if group.sweep.of(label)}
    if settings:
        part("Settings", page.settings_tables(settings))
    if lacking:
        part("Figures that do not apply", page.listed(lacking))
    return page.Section(name, group.title, "\n".join(html), parts)


def _with_bar(drawings: Sequence[Drawing], bar: Any) -> Any:
    bar.total += len(drawings)
    for drawing in drawings:
        bar.set_description(f"draws {drawing.title}"[:40])
        yield drawing
        bar.update()
