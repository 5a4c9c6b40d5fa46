"""`multimax sweep`: the methods of a table, with several seeds."""

import argparse
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from multimax.cli import layout, runs
from multimax.cli.errors import need_packages, refusing
from multimax.experiments import results
from multimax.experiments import search as searches
from multimax.experiments import sweep as sweeps
from multimax.experiments.results import SWEEP
from multimax.experiments.settings import Settings, preset
from multimax.experiments.speaking import say
from multimax.experiments.tasks.loading import DataCache

WAIT = 10.0  # seconds from one look at runs of other processes to the next
TEXT = """\
Runs the methods of a table with several seeds, one run after the other. Give the same command again to continue after
an interruption, or in a second terminal to run two at a time. Then print the table: multimax table FOLDER

examples:
  multimax sweep main --preset cpu-digits --seeds 10 --out runs/digits
  multimax sweep comparison --preset cpu-cifar10 --data FOLDER \\
      --methods softmax "MultiMax both"
  multimax sweep retrofit --preset cpu-digits --epochs 3 \\
      --start "runs/digits/softmax/seed-{seed}/model"
  multimax sweep recipe --preset cpu-text --data FILE    search how to train it
"""


def add(commands: Any) -> None:
    """Adds the subcommand."""
    command = layout.command(commands, "sweep", "run the methods of a table over seeds", TEXT)
    command.add_argument("table", help=f"one of {', '.join(sweeps.table_names())}, or a JSON file")
    command.add_argument("--preset", required=True, help=runs.presets_in_words())
    command.add_argument("--seeds", type=int, help="number of seeds, the table's default unless given")
    command.add_argument(
        "--first-seed", type=int, default=0, metavar="N", help="the first seed, 0 unless given; others follow it"
    )
    command.add_argument("--methods", nargs="+", metavar="LABEL", help="only these methods of the table")
    runs.add_settings(command, left_to_the_table=("seed", "attention", "output"))
    command.set_defaults(function=sweep)


def sweep(options: argparse.Namespace) -> int:
    """All runs that are not finished yet."""
    need_packages()
    from multimax.experiments import run

    with refusing():
        table = sweeps.load_table(options.table)
        base = runs.settings(options, preset(options.preset))
        if options.seed is not None:
            raise ValueError("multimax: expected --seeds, how many, for a sweep, got --seed")
        base = replace(base, label="", seed=0)
        folder = options.out or Path("runs") / sweeps.slug(f"{Path(base.preset).stem}-{table.name}")
        if table.search is not None:
            whole = _search(options, table, base, folder)
        else:
            count = table.seeds if options.seeds is None else options.seeds
            if count < 1:
                raise ValueError(f"multimax: expected at least one seed, got {count}")
            whole = not _run(options, table, base, _seeds(options, count), folder)["damaged"]
        run.part()
    if run.is_first() and not options.dry_run:
        say(f"multimax table {folder}")
    return int(not whole)


def _seeds(options: argparse.Namespace, count: int) -> list[int]:
    return list(range(options.first_seed, options.first_seed + count))


def _run(
    options: argparse.Namespace,
    table: sweeps.Table,
    base: Settings,
    seeds: Sequence[int],
    folder: Path,
    later: float = 0.0,
) -> Counter[str]:
    """The runs of a table.

    Args:
        options: of the command.
        table: with its methods.
        base: settings that all have in common.
        seeds: of each method.
        folder: of the sweep.
        later: what comes after it, as a number of such runs.

    Returns:
        How many went how; empty where nothing was to be done.
    """
    from multimax.experiments import run

    planned = sweeps.plan(table, base, seeds, folder, options.methods)
    runs.check_effect(options, [each.settings for each in planned])
    sweeps.content(table, base, seeds, folder)
    for each in planned:  # so that a mistake in the last shows before the first has begun
        run.check(each.settings, each.folder)
    data = DataCache()
    if options.dry_run:
        _say_plan(planned, folder, data)
        return Counter()
    if not (folder / SWEEP).exists():
        data.task(planned[0].settings)  # so that a mistake in the data shows before anything is written
    if run.is_first():
        sweeps.note(table, base, seeds, folder)
    waiting = sum(not (each.folder / run.RESULT).is_file() for each in planned)
    went: Counter[str] = Counter()
    pace = Pace(waiting, later)
    for number, done in enumerate(sweeps.sweep(planned, bars=not options.quiet, data=data), start=1):
        went[done.status] += 1
        if run.is_first():
            words = _in_words(done) + pace.left(done)
            say(f"{number} of {len(planned)}: {done.run.label}, seed {done.run.seed}: {words}")
    if went["busy"] and run.is_first() and not table.by:  # a search waits for them itself
        busy = f"{went['busy']} runs are still running in other processes"
        say(f"{busy}; give the same command again when they have finished")
    return went


def _search(options: argparse.Namespace, table: sweeps.Table, base: Settings, folder: Path) -> bool:
    """The rungs of a search, and what it has chosen. False if a run is damaged, without which nothing can be chosen."""
    from multimax.experiments import run

    search = table.search
    assert search is not None
    for word in ("seeds", "methods"):
        if getattr(options, word) is not None:
            raise ValueError(f"multimax: expected --{word} to be left to the search in {table.name}, got it")
    found = searches.candidates(search)
    still = {name: list(labels) for name, labels in found.items()}
    works = searches.works(search, len(table.methods))
    for number, rung in enumerate(search.rungs, start=1):
        methods = {**table.methods, **{label: found[name][label] for name in still for label in still[name]}}
        rung_table = replace(table, methods=methods, search=None, by=searches.SCORE)
        place, seeds = searches.rung_folder(folder, number), _seeds(options, rung.seeds)
        settings = searches.settings_of(base, rung)
        if run.is_first():
            text = f"rung {number} of {len(search.rungs)}: {len(methods)} methods, {rung.seeds} seeds"
            say(f"{text}, {rung.share:g} of the steps")
        while _run(options, rung_table, settings, seeds, place, sum(works[number:]) / rung.share)["busy"]:
            if run.is_first():
                say("waiting for runs in other processes")
            time.sleep(WAIT)
        if options.dry_run:
            if number == 1 and run.is_first():
                for later, work in enumerate(works[1:], start=2):
                    say(f"rung {later} of {len(works)}: as much work as {work:g} runs of full length")
                say(f"in all as much work as {sum(works):g} runs of full length")
            return True
        sweep = results.read(place)
        if sweep.missing:
            return False
        best = {name: searches.standings(sweep, labels)[0] for name, labels in still.items()}
        still = searches.going_on(sweep, still, search.keep)
    if run.is_first():
        searches.finish(folder, base, search, best, table.baseline)
        for name, standing in best.items():
            words = f"{standing.difference:+.4f} {searches.SCORE} against {table.baseline}"
            say(f"best of {name}: {standing.label}: {words}")
        for file in (searches.CHOSEN, searches.CONFIRMATION):
            if (folder / file).is_file():
                say(str(folder / file))
    return True


def _in_words(done: sweeps.Done) -> str:
    if done.result is not None:
        return runs.in_words(done.result)
    return "running in another process" if done.status == "busy" else f"damaged: {done.reason}"


def _say_plan(planned: Sequence[sweeps.Planned], folder: Path, data: DataCache) -> None:
    """What would be done, run by run."""
    from multimax.experiments import run

    for number, each in enumerate(planned, start=1):
        words = run.outlook(each.settings, each.folder, data) if number == 1 else run.state_of(each.folder)
        if run.is_first():
            say(f"{number} of {len(planned)}: {each.label}, seed {each.seed}: {words}")
    run.part()
    if run.is_first():
        say(str(folder))


class Pace:
    """How long the rest of a sweep will take, by the time of its runs so far.

    Args:
        waiting: runs that are not over.
        later: what comes after the sweep, as a number of such runs.
    """

    def __init__(self, waiting: int, later: float = 0.0) -> None:
        self.waiting, self.later, self.seconds, self.done = waiting, later, 0.0, 0

    def left(self, done: sweeps.Done) -> str:
        """In words, after a run; nothing where nothing is left, or known."""
        if not done.trained:
            self.waiting -= done.status == "busy"
            return ""
        self.seconds, self.done, self.waiting = self.seconds + done.seconds, self.done + 1, self.waiting - 1
        if self.waiting + self.later <= 0:
            return ""
        seconds = self.seconds / self.done * (self.waiting + self.later)
        for unit, size in (("hours", 5400), ("minutes", 90)):
            if seconds >= size:
                return f"; about {seconds / (3600 if unit == 'hours' else 60):.0f} {unit} left"
        return f"; about {max(seconds, 1):.0f} seconds left"
