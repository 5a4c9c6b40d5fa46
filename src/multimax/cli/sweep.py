"""`multimax sweep`: the methods of a table, with several seeds."""

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from multimax.cli import layout, runs
from multimax.cli.errors import need_packages, refusing
from multimax.experiments import sweep as sweeps
from multimax.experiments.results import SWEEP
from multimax.experiments.settings import preset
from multimax.experiments.speaking import say
from multimax.experiments.tasks.loading import DataCache

TEXT = """\
Runs the methods of a table with several seeds, one run after the other. Give the same command again to continue after
an interruption, or in a second terminal to run two at a time. Then print the table: multimax table FOLDER

examples:
  multimax sweep main --preset cpu-digits --seeds 10 --out runs/digits
  multimax sweep comparison --preset cpu-cifar10 --data FOLDER \\
      --methods softmax "MultiMax both"
  multimax sweep retrofit --preset cpu-digits --epochs 3 \\
      --start "runs/digits/softmax/seed-{seed}/model"
"""


def add(commands: Any) -> None:
    """Adds the subcommand."""
    command = layout.command(commands, "sweep", "run the methods of a table over seeds", TEXT)
    command.add_argument("table", help=f"one of {', '.join(sweeps.table_names())}, or a JSON file")
    command.add_argument("--preset", required=True, help=runs.presets_in_words())
    command.add_argument("--seeds", type=int, help="number of seeds, the table's default unless given")
    command.add_argument("--methods", nargs="+", metavar="LABEL", help="only these methods of the table")
    runs.add_settings(command, left_to_the_table=("seed", "attention", "output"))
    command.set_defaults(function=sweep)


def sweep(options: argparse.Namespace) -> int:
    """All runs that are not finished yet."""
    need_packages()
    with refusing():
        table = sweeps.load_table(options.table)
        base = runs.settings(options, preset(options.preset))
        if options.seed is not None:
            raise ValueError("multimax: expected --seeds, how many, for a sweep, got --seed")
        count = table.seeds if options.seeds is None else options.seeds
        if count < 1:
            raise ValueError(f"multimax: expected at least one seed, got {count}")
        seeds = list(range(count))
        base = replace(base, label="", seed=0)
        folder = options.out or Path("runs") / sweeps.slug(f"{Path(base.preset).stem}-{table.name}")
        planned = sweeps.plan(table, base, seeds, folder, options.methods)
        runs.check_effect(options, [run.settings for run in planned])
        from multimax.experiments import run

        sweeps.content(table, base, seeds, folder)
        for each in planned:  # so that a mistake in the last shows before the first has begun
            run.check(each.settings, each.folder)
        data = DataCache()
        if options.dry_run:
            _say_plan(planned, folder, data)
            return 0
        if not (folder / SWEEP).exists():
            data.task(planned[0].settings)  # so that a mistake in the data shows before anything is written
        if run.is_first():
            sweeps.note(table, base, seeds, folder)
        waiting = sum(not (each.folder / run.RESULT).is_file() for each in planned)
        went: Counter[str] = Counter()
        pace = Pace(waiting)
        for number, done in enumerate(sweeps.sweep(planned, bars=not options.quiet, data=data), start=1):
            went[done.status] += 1
            if run.is_first():
                words = _in_words(done) + pace.left(done)
                say(f"{number} of {len(planned)}: {done.run.label}, seed {done.run.seed}: {words}")
        run.part()
        if went["busy"] and run.is_first():
            busy = f"{went['busy']} runs are still running in other processes"
            say(f"{busy}; give the same command again when they have finished")
    if run.is_first():
        say(f"multimax table {folder}")
    return int(went["damaged"] > 0)


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
    """

    def __init__(self, waiting: int) -> None:
        self.waiting, self.seconds, self.done = waiting, 0.0, 0

    def left(self, done: sweeps.Done) -> str:
        """In words, after a run; nothing where nothing is left, or known."""
        if not done.trained:
            self.waiting -= done.status == "busy"
            return ""
        self.seconds, self.done, self.waiting = self.seconds + done.seconds, self.done + 1, self.waiting - 1
        if self.waiting < 1:
            return ""
        seconds = self.seconds / self.done * self.waiting
        for unit, size in (("hours", 5400), ("minutes", 90)):
            if seconds >= size:
                return f"; about {seconds / (3600 if unit == 'hours' else 60):.0f} {unit} left"
        return f"; about {max(seconds, 1):.0f} seconds left"
