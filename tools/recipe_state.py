"""Keeps the finished runs of tools/recipe_runs.sh in docs/results/recipe, and brings them back on another machine.

    python tools/recipe_state.py save OUT            each sweep below OUT as one file of numbers
    python tools/recipe_state.py restore OUT DATA    the folders of these sweeps, whose runs are then not repeated

Give the same OUT each time, relative to where you are: it is part of the settings. Models are not kept: what starts
from one needs its run again. What a search has chosen is written again by its stage, from the numbers.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

from multimax.experiments import results
from multimax.experiments.checkpoints import write_json
from multimax.experiments.sweep import slug

KEPT = Path(__file__).parents[1] / "docs" / "results" / "recipe"
BETWEEN = "."  # the names of a search and its rung


def sweeps_below(out: Path) -> Iterator[Path]:
    """The folders of sweeps and of the rungs of searches."""
    for file in sorted((*out.glob(f"*/{results.SWEEP}"), *out.glob(f"*/rung-*/{results.SWEEP}"))):
        yield file.parent


def save(out: Path, kept: Path) -> int:
    """Writes a file for each sweep; how many runs these hold."""
    kept.mkdir(parents=True, exist_ok=True)
    count = 0
    for folder in sweeps_below(out):
        sweep = results.read(folder)
        if sweep.runs:
            results.save(sweep, kept / f"{BETWEEN.join(folder.relative_to(out).parts)}.json")
            count += len(sweep.runs)
    return count


def place_of(name: str, data: Path) -> str:
    """Where data lies of which the numbers keep the name alone; a name that is no file is data of scikit-learn."""
    found = sorted(path for pattern in (name, f"*/{name}") for path in data.glob(pattern))
    if len(found) > 1:
        raise SystemExit(f"recipe_state: expected one {name} below {data}, got {', '.join(map(str, found))}")
    return str(found[0]) if found else name


def restore(out: Path, data: Path, kept: Path) -> int:
    """Lays out the folders of the sweeps; how many runs were brought back. What is there already stays as it is."""
    count = 0
    for file in sorted(kept.glob("*.json")):
        sweep = results.read(file)
        folder = out.joinpath(*file.stem.split(BETWEEN))
        if (folder / results.SWEEP).exists():
            continue
        settings = sweep.about["settings"]
        place = place_of(results.source(settings["data"]), data)
        for run in sweep.runs:
            at = folder / slug(run.label) / f"seed-{run.seed}"
            at.mkdir(parents=True)
            write_json(at / "config.json", {**run.config, "data": place})
            write_json(at / "environment.json", run.environment)
            write_json(at / "result.json", run.result)
            count += 1
        write_json(folder / results.SWEEP, {**sweep.about, "settings": {**settings, "data": place}})
    return count


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("save", "restore"))
    parser.add_argument("out", type=Path, metavar="OUT", help="folder of tools/recipe_runs.sh")
    parser.add_argument("data", type=Path, nargs="?", metavar="DATA", help="folder with the data, to restore")
    parser.add_argument("--kept", type=Path, default=KEPT, help="folder of the numbers (default: docs/results/recipe)")
    options = parser.parse_args()
    if options.what == "save":
        print(f"{save(options.out, options.kept)} runs kept in {options.kept}")
        return
    if options.data is None:
        parser.error("expected DATA, the folder that tools/recipe_runs.sh is given, to restore")
    print(f"{restore(options.out, options.data, options.kept)} runs restored in {options.out}")


if __name__ == "__main__":
    main()
