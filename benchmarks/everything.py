"""Runs all benchmarks, then makes the README's table, docs/speed.md and its picture: what `make bench` does.

    python benchmarks/everything.py            about 25 minutes on two cores
    python benchmarks/everything.py --quick    torch's functions and ours only, printed and not saved

After an interruption the same command goes on where it stopped. --seconds and --threads are handed on.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

import measuring
import page
import processors

BENCHMARKS = ("rows", "attention", "loss", "reweighting", "models", "threads")
FOLDER = Path(__file__).parent


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="without the rivals; nothing is saved")
    parser.add_argument("--seconds", help="time for each case (default: each benchmark's own)")
    parser.add_argument("--threads", help="torch threads (default: torch's choice)")
    options = parser.parse_args()
    handed = ["--quick"] if options.quick else []
    for name in ("seconds", "threads"):
        if getattr(options, name):
            handed += [f"--{name}", getattr(options, name)]
    done = Done(FOLDER / "results" / processors.here().slug / "done.part", " ".join([measuring.code(), *handed]))
    start = time.perf_counter()
    for number, name in enumerate(BENCHMARKS, 1):
        if not options.quick and name in done.names():
            print(f"{number}/{len(BENCHMARKS)} {name}: measured before the interruption", flush=True)
            continue
        print(f"{number}/{len(BENCHMARKS)} {name}", flush=True)
        code = subprocess.run([sys.executable, str(FOLDER / f"{name}.py"), *handed]).returncode
        if code:
            raise SystemExit(code)
        if not options.quick:
            done.add(name)
    print(f"{(time.perf_counter() - start) / 60:.0f} minutes")
    if not options.quick:
        page.main()
        done.path.unlink()


class Done:
    """Which benchmarks this run has finished, in a file: it is there only while a run is unfinished."""

    def __init__(self, path: Path, run: str) -> None:
        self.path, self.run = path, run

    def names(self) -> list[str]:
        """None if the file is of another run."""
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        return lines[1:] if lines[:1] == [self.run] else []

    def add(self, name: str) -> None:
        """Notes one more."""
        lines = [self.run, *self.names(), name]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
