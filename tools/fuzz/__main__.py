"""Gives the package random hard inputs and compares every result and gradient with an oracle written apart from it.

    python tools/fuzz --out build/fuzz                  # 100,000 cases; again to go on where it was interrupted
    python tools/fuzz --cases 500 --only attention      # a short look at one operation
    python tools/fuzz --seed 1234                       # one case again, with what differed

A case is a seed: it decides operation, dtype, shapes, strides, masks, parameters, instruction set, number of threads,
implementation, and values, most of them hard: next to the dtype's limits, infinite, NaN, subnormal, constant, with
coefficients of 1e30 and orders up to 4. Cases run in child processes, some hundred each: one that crashes is recorded
with its seed, and the run goes on behind it. --out has state.json, with how far the run is and every seed that failed:
an interrupted run (Ctrl-C) goes on there at the same command.

Exits with 1 if a case failed.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

CHUNK = 250


def arguments() -> argparse.Namespace:
    """Of the command line."""
    words = __doc__ or ""
    parser = argparse.ArgumentParser(
        prog="python tools/fuzz", description=words, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=100_000, help="how many (default: 100,000)")
    parser.add_argument(
        "--first", type=int, default=0, help="seed of the first case; the others follow it (default: 0)"
    )
    parser.add_argument("--only", choices=("rows", "attention", "losses", "linear", "entmax"), help="one operation")
    parser.add_argument("--seed", type=int, help="run the case of this seed alone, here, and print what differed")
    parser.add_argument("--out", type=Path, help="folder for the state, to go on after an interruption")
    parser.add_argument("--child", type=int, nargs=2, metavar=("FIRST", "END"), help=argparse.SUPPRESS)
    return parser.parse_args()


def child(first: int, end: int, only: str | None) -> None:
    """Runs cases; a line for each that begins and for each that failed."""
    import cases  # torch takes seconds to load: not for --help

    for seed in range(first, end):
        print(f"begin {seed}", flush=True)
        try:
            label, differences = cases.run(seed, only)
        except Exception as error:
            label, differences = "", [f"{type(error).__name__}: {error}"]
        if differences:
            print("failed " + json.dumps({"seed": seed, "case": label, "differences": differences}), flush=True)
    print(f"end {end}", flush=True)


class State:
    """How far a run is, and what failed; in a file, if there is a folder for it."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.file = None if given.out is None else given.out / "state.json"
        self.run = {"first": given.first, "only": given.only}
        self.next, self.failed = given.first, []
        if self.file is not None and self.file.exists():
            stored = json.loads(self.file.read_text())
            if stored["run"] != self.run:
                sys.exit(f"fuzz: {self.file} is of another run, {stored['run']}; give another --out")
            self.next, self.failed = stored["next"], stored["failed"]

    def save(self) -> None:
        """Writes the file, whole or not at all."""
        if self.file is None:
            return
        self.file.parent.mkdir(parents=True, exist_ok=True)
        partial = self.file.with_suffix(".partial")
        partial.write_text(json.dumps({"run": self.run, "next": self.next, "failed": self.failed}, indent=1))
        partial.replace(self.file)


class Bar:
    """Progress on a terminal; else a line now and then."""

    def __init__(self, first: int, done: int, end: int) -> None:
        self.first, self.begun, self.end = first, done, end
        self.start = self.said = time.monotonic()
        self.terminal = sys.stderr.isatty()

    def show(self, at: int, failed: int, last: bool = False) -> None:
        """How far it is, if that was not said just now."""
        now = time.monotonic()
        if not last and now - self.said < (0.2 if self.terminal else 30):
            return
        self.said = now
        done, total = at - self.first, self.end - self.first
        rate = (at - self.begun) / max(now - self.start, 1e-9)
        left = f"{(self.end - at) / rate / 60:.0f} min left" if rate else ""
        filled = 30 * done // max(total, 1)
        line = f"[{'#' * filled}{'.' * (30 - filled)}] {done:,} of {total:,}, {failed} failed, {rate:.0f}/s, {left}"
        print(("\r" if self.terminal else "") + line, end="" if self.terminal and not last else "\n", file=sys.stderr)


def chunk(state: State, end: int, only: str | None, bar: Bar) -> None:
    """Cases up to `end` in one child; a crash moves the state behind the case that crashed."""
    command = [sys.executable, __file__, "--child", str(state.next), str(end)]
    command += [] if only is None else ["--only", only]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    current = state.next - 1
    try:
        for line in process.stdout:
            word, _, rest = line.partition(" ")
            if word == "begin":
                current = int(rest)
                state.next = current
            elif word == "failed":
                report(state, json.loads(rest))
            elif word == "end":
                state.next = end
            bar.show(state.next, len(state.failed))
        errors = process.communicate()[1]
    except BaseException:
        process.kill()
        process.wait()
        raise
    if state.next < end:
        if current < state.next:
            sys.exit(f"fuzz: the cases could not be begun\n{errors}")
        why = f"the process ended with {process.returncode}: {errors.strip()[-500:]}"
        report(state, {"seed": current, "case": "", "differences": [why]})
        state.next = current + 1


def report(state: State, failure: dict[str, object]) -> None:
    """Keeps a failure, and prints it."""
    state.failed.append(failure)
    print(f"\nseed {failure['seed']}: {failure['case']}", *failure["differences"], sep="\n    ")  # type: ignore[misc]


def main() -> int:
    """Runs the cases; the exit code."""
    given = arguments()
    if given.child is not None:
        child(*given.child, given.only)
        return 0
    if given.seed is not None:
        import cases

        label, differences = cases.run(given.seed, given.only)
        print(f"seed {given.seed}: {label}", *(differences or ["nothing differed"]), sep="\n    ")
        return int(bool(differences))
    state, end = State(given), given.first + given.cases
    if state.next > given.first:
        print(f"going on at seed {state.next}", file=sys.stderr)
    bar = Bar(given.first, state.next, end)
    try:
        while state.next < end:
            chunk(state, min(state.next + CHUNK, end), given.only, bar)
            state.save()
    except KeyboardInterrupt:
        state.save()
        again = "" if given.out is None else "; the same command goes on"
        print(f"\ninterrupted at seed {state.next}{again}", file=sys.stderr)
        return 130
    bar.show(end, len(state.failed), last=True)
    print(f"{given.cases:,} cases from seed {given.first} on: {len(state.failed)} failed")
    return int(bool(state.failed))


if __name__ == "__main__":
    sys.exit(main())
