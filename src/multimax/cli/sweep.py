"""`multimax sweep`: the methods of a table, with several seeds."""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from multimax.cli import runs
from multimax.cli.errors import need_packages, refusing
from multimax.experiments import sweep as sweeps
from multimax.experiments.settings import preset
from multimax.experiments.tasks.loading import DataCache

TEXT = """\
Runs the methods of a table with several seeds, one run after the other. Give the same command again to continue after
an interruption, or in a second terminal to run two at a time. Then print the table: multimax table FOLDER

examples:
  multimax sweep main --preset cpu-digits --seeds 10 --out runs/digits
  multimax sweep comparison --preset cpu-cifar10 --data FOLDER --methods softmax "MultiMax both"
  multimax sweep retrofit --preset cpu-digits --start "runs/digits/softmax/seed-{seed}/model" --epochs 3
"""


def add(commands: Any) -> None:
    """Adds the subcommand."""
    command = commands.add_parser(
        "sweep",
        help="run the methods of a table over seeds",
        description=TEXT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("table", help=f"one of {', '.join(sweeps.table_names())}, or a JSON file")
    command.add_argument("--preset", required=True, help=runs.presets_in_words())
    command.add_argument("--seeds", type=int, help="number of seeds, the table's default unless given")
    command.add_argument("--methods", nargs="+", metavar="LABEL", help="only these methods of the table")
    runs.add_settings(command)
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
        folder = options.out or Path("runs") / f"{Path(base.preset).stem}-{table.name}"
        planned = sweeps.plan(table, base, seeds, folder, options.methods)
        from multimax.experiments.run import is_first, part

        data = DataCache()
        if not (folder / sweeps.SWEEP).exists():
            data.task(planned[0].settings)  # so that a mistake in the data shows before anything is written
        if is_first():
            sweeps.note(table, base, seeds, folder)
        busy = 0
        for number, done in enumerate(sweeps.sweep(planned, progress=not options.quiet, data=data), start=1):
            words = "running in another process" if done.result is None else runs.in_words(done.result)
            busy += done.status == "busy"
            if is_first():
                print(f"{number} of {len(planned)}: {done.run.label}, seed {done.run.seed}: {words}", flush=True)
        part()
        if busy and is_first():
            print(
                f"{busy} runs are still running in other processes; give the same command again when they have finished"
            )
    if is_first():
        print(f"multimax table {folder}")
    return 0
