"""Builds the kernels with a self-test in C++, without torch, and runs it: any compiler, any machine.

    python tools/selftest.py    # g++, and all instruction sets of this kind of machine
    python tools/selftest.py --compiler clang++
    python tools/selftest.py --compiler aarch64-linux-gnu-g++ --machine aarch64 --run "qemu-aarch64 -L FOLDER"

The kernels and flags are those of setup.py.
"""

import argparse
import os
import platform
import runpy
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = {
    "g++": "g++",
    "clang++": "clang",
    "aarch64-linux-gnu-g++": "g++-aarch64-linux-gnu",
    "qemu-aarch64": "qemu-user",
}


def need(program: str) -> None:
    """Ends with a hint if a program is missing."""
    if shutil.which(program) is None:
        package = PACKAGES.get(program)
        sys.exit(f"{program} is missing" + (f"; on Debian: apt-get install {package}" if package else ""))


def build(compiler: str, folder: Path, sets: tuple[str, ...] = (), flags: tuple[str, ...] = ()) -> Path:
    """Compiles everything into a folder and returns the program. sets: instruction sets, else all."""
    setup = runpy.run_path(str(ROOT / "setup.py"))
    jobs = [
        (source, name, more)
        for source, name, more in setup["kernel_jobs"]()
        if not sets or name.partition("/")[0] in sets
    ]
    here = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tools" / "selftest").glob("*.cpp"))
    jobs += [(source, "selftest", ["-O1", "-Itools/selftest"]) for source in here]

    def compile_one(job: tuple[str, str, list[str]]) -> str:
        source, name, more = job
        target = folder / name / Path(source).with_suffix(".o").name
        target.parent.mkdir(parents=True, exist_ok=True)
        command = [*compiler.split(), *setup["FLAGS"], *more, *flags, "-c", source, "-o", str(target)]
        subprocess.run(command, cwd=ROOT, check=True)
        return str(target)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_one, jobs))
    program = folder / "selftest.out"
    subprocess.run([*compiler.split(), *flags, *objects, "-o", str(program)], cwd=ROOT, check=True)
    return program


def main() -> int:
    """Builds and runs; what the self-test returns."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--compiler", default="g++", help="with flags of its own, if it needs any")
    parser.add_argument("--machine", default=platform.machine(), help="what the compiler compiles for")
    parser.add_argument("--run", default="", help="what runs the program, such as an emulator")
    options = parser.parse_args()
    runner = options.run.split()
    for program in [options.compiler.split()[0], *runner[:1]]:
        need(program)
    folder = ROOT / "build" / "selftest" / options.compiler.replace(" ", "")
    # the sets that setup.py knows are those of the machine that runs it
    sets = () if options.machine == platform.machine() else ("baseline",)
    program = build(options.compiler, folder, sets)
    return subprocess.run([*runner, str(program)], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
