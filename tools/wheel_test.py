"""The wheels in dist/ with many versions of Python and torch: `python tools/wheel_test.py`, or `make wheel-test`.

    python tools/wheel_test.py --python 3.12 --torch 2.13 2.14    # some of them
    python tools/wheel_test.py --page                             # puts the table into docs/install.md

Each combination is installed by pip into a folder of its own, `tools/wheel_smoke.py` runs there, and the folder is
removed: a build of torch takes gigabytes. What passed, or cannot be had, is kept in build/wheel-test/results.json and
not tried again for wheels of the same contents. Interpreters are looked for on the PATH, and with pyenv and uv.

torch's builds for CUDA load CUDA's libraries when they are imported, GPU or not. Those that they name as needed are
installed along; others of their requirements (Triton among them) are left out.
"""

import argparse
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from email.parser import BytesParser
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
DIST = ROOT / "dist"
WORK = ROOT / "build" / "wheel-test"
RESULTS = WORK / "results.json"
PAGE = ROOT / "docs" / "install.md"
SMOKE = ROOT / "tools" / "wheel_smoke.py"
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
TORCHES = ("2.10", "2.11", "2.12", "2.13", "2.14", "2.15")
# of what torch's builds for CUDA require, what importing them does not load
NOT_LOADED = ("triton", "cuda-bindings", "cusolver", "nvtx")
# results that trying again would not change
FINAL = ("passed", "no such build")


class Failed(Exception):
    """What went wrong, for the table; the log has the rest."""


def interpreter(python: str) -> Path | None:
    """A CPython of that version."""
    home = Path.home()
    found = shutil.which(f"python{python}")
    places = [Path(found)] if found else []
    places += sorted(home.glob(f".pyenv/versions/{python}.*/bin/python{python}"))
    places += sorted(home.glob(f".local/share/uv/python/cpython-{python}.*/bin/python{python}"))
    code = "import sys; print('%s-%d.%d %s' % (sys.implementation.name, *sys.version_info[:2], sys.executable))"
    for place in places:
        said = subprocess.run([place, "-c", code], capture_output=True, text=True, check=False).stdout.strip()
        if said.startswith(f"cpython-{python} "):
            return Path(said.partition(" ")[2])  # where it really is: what was found may be a script that looks for it
    return None


def pip(log: Path, command: str, python: str, *arguments: str) -> None:
    """This interpreter's pip, on behalf of another."""
    machine = platform.machine()
    newest = int(platform.libc_ver()[1].split(".")[1])
    platforms = ["manylinux1", "manylinux2010", "manylinux2014", *(f"manylinux_2_{n}" for n in range(5, newest + 1))]
    tags = [f"--platform={name}_{machine}" for name in platforms]
    tags += [f"--abi={abi}" for abi in (f"cp{python.replace('.', '')}", "abi3", "none")]
    tags += [f"--python-version={python}", "--implementation=cp", "--only-binary=:all:"]
    quiet = ["--disable-pip-version-check", "--no-cache-dir", "--progress-bar=off"]
    if command == "install":
        quiet.append("--no-compile")
    run(log, [sys.executable, "-m", "pip", command, *quiet, *tags, *arguments], {})


def run(log: Path, command: list[str], variables: dict[str, str]) -> str:
    """Its output, which the log gets too."""
    result = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=WORK, env={**os.environ, **variables}
    )
    with log.open("a") as file:
        file.write(f"$ {' '.join(command)}\n{result.stdout}{result.stderr}\n")
    if "No matching distribution found" in result.stderr:
        raise Failed("no such build")
    if result.returncode:
        raise Failed(f"failed, see {log.relative_to(ROOT)}")
    return result.stdout


def requirements(wheel: Path, python: str) -> Iterator[Requirement]:
    """Of torch, without extras."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = BytesParser().parsebytes(archive.read(name))
    for text in metadata.get_all("Requires-Dist", []):
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"python_version": python, "extra": ""}):
            requirement.marker = None
            yield requirement


def loaded(requirement: Requirement) -> bool:
    """Whether importing torch loads it. Takes what is not loaded out of its extras."""
    requirement.extras = {extra for extra in requirement.extras if extra not in NOT_LOADED}
    return not any(name in requirement.name for name in NOT_LOADED)


def install_torch(log: Path, python: str, torch: str, site: Path, cuda: Path) -> None:
    """torch and what it needs to be imported; CUDA's libraries are shared by all interpreters of a version."""
    wheels = WORK / "torch"
    shutil.rmtree(wheels, ignore_errors=True)
    pip(log, "download", python, "--no-deps", f"--dest={wheels}", f"torch=={torch}.*")
    (wheel,) = wheels.iterdir()
    needed = [requirement for requirement in requirements(wheel, python) if loaded(requirement)]
    of_cuda = [str(r) for r in needed if r.name.startswith(("nvidia", "cuda"))]
    pip(log, "install", python, "--no-deps", f"--target={site}", str(wheel))
    wheel.unlink()
    pip(log, "install", python, f"--target={site}", *(str(r) for r in needed if str(r) not in of_cuda))
    if of_cuda:
        mark = cuda / "requirements"
        if not mark.exists() or mark.read_text() != "\n".join(of_cuda):
            shutil.rmtree(cuda, ignore_errors=True)
            pip(log, "install", python, f"--target={cuda}", *of_cuda)
            mark.write_text("\n".join(of_cuda))
        (site / "nvidia").symlink_to(cuda / "nvidia")


def smoke(log: Path, python: str, site: Path, wheel: Path, what: str, path: str) -> dict[str, str]:
    """One run of the smoke test, with the wheel installed beside torch, and what it has seen."""
    folder = WORK / f"site-{what}"
    shutil.rmtree(folder, ignore_errors=True)
    pip(log, "install", python, "--no-deps", "--no-index", f"--target={folder}", str(wheel))
    variables = {"PYTHONPATH": f"{folder}{os.pathsep}{site}", "PATH": path, "PYTHONNOUSERSITE": "1"}
    seen = json.loads(run(log, [str(interpreter(python)), str(SMOKE), what], variables).splitlines()[-1])
    if not seen["file"].startswith(str(folder)):
        raise Failed(f"another multimax was imported: {seen['file']}")
    return seen


def combination(wheels: dict[str, Path], python: str, torch: str) -> dict[str, str]:
    """Installs and runs one of them."""
    if interpreter(python) is None:
        return {"result": "no interpreter"}
    site, log = WORK / "site", WORK / f"torch-{torch}-python-{python}.log"
    shutil.rmtree(site, ignore_errors=True)
    log.unlink(missing_ok=True)
    try:
        install_torch(log, python, torch, site, WORK / f"cuda-{torch}")
        nowhere = str(WORK / "nowhere")  # a PATH without a compiler
        seen = smoke(log, python, site, wheels["kernels"], "kernels", nowhere)
        smoke(log, python, site, wheels["pure"], "pure", nowhere)
        seen["compile"] = "no compiler"
        if shutil.which("g++"):
            smoke(log, python, site, wheels["kernels"], "compile", os.environ["PATH"])
            seen["compile"] = "passed"
        return {"result": "passed", **seen}
    except Failed as failure:
        return {"result": str(failure)}
    finally:
        shutil.rmtree(site, ignore_errors=True)


def find_wheels() -> dict[str, Path]:
    """The two in dist/."""
    pure, native = list(DIST.glob("*-none-any.whl")), list(DIST.glob("*-abi3-manylinux*.whl"))
    if len(pure) != 1 or len(native) != 1:
        sys.exit("expected one wheel with kernels and one without in dist/; make them with `make wheel`")
    return {"kernels": native[0], "pure": pure[0]}


def digest_of(wheels: dict[str, Path]) -> str:
    """Of what the wheels install, whatever they say about it."""
    digest = hashlib.sha256()
    for wheel in wheels.values():
        with zipfile.ZipFile(wheel) as archive:
            for name in sorted(name for name in archive.namelist() if name.startswith("multimax/")):
                digest.update(name.encode() + archive.read(name))
    return digest.hexdigest()


def load(wheels: dict[str, Path]) -> dict[str, dict[str, str]]:
    """What is known of these wheels."""
    digest = digest_of(wheels)
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    return known if known.get("wheels") == {"sha256": digest} else {"wheels": {"sha256": digest}}


def key(torch: str, python: str) -> str:
    """Of a result."""
    return f"torch {torch}, Python {python}"


def table(results: dict[str, dict[str, str]], torches: list[str], pythons: list[str]) -> str:
    """As Markdown."""
    lines = ["| torch | " + " | ".join(f"Python {python}" for python in pythons) + " |"]
    lines.append("|---" * (len(pythons) + 1) + "|")
    for torch in torches:
        cells = []
        for python in pythons:
            found = results.get(key(torch, python), {"result": "not tried"})
            note = "" if found.get("compile", "passed") == "passed" else f", {found['compile']}"
            cells.append(
                f"{found['torch']}: passed{note}" if "torch" in found else found["result"].partition(", see")[0]
            )
        lines.append(f"| {torch} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> int:
    """Everything that is not known yet; then the table. 0 unless something failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--python", nargs="+", default=list(PYTHONS), help="versions, such as 3.12")
    parser.add_argument("--torch", nargs="+", default=list(TORCHES), help="versions, such as 2.13")
    parser.add_argument("--page", action="store_true", help="put the table into docs/install.md, and try nothing")
    options = parser.parse_args()
    wheels = find_wheels()
    WORK.mkdir(parents=True, exist_ok=True)
    results = load(wheels)
    for torch in [] if options.page else options.torch:
        for python in options.python:
            name = key(torch, python)
            if results.get(name, {}).get("result") not in FINAL:
                results[name] = combination(wheels, python, torch)
                RESULTS.write_text(json.dumps(results, indent=1))
            print(f"{name}: {results[name]['result']}", flush=True)
        shutil.rmtree(WORK / f"cuda-{torch}", ignore_errors=True)
    text = table(results, options.torch, options.python)
    print(f"\n{text}")
    if options.page:
        before, rest = PAGE.read_text().split("<!-- table -->\n")
        after = rest.split("<!-- /table -->")[1]
        PAGE.write_text(f"{before}<!-- table -->\n{text}\n<!-- /table -->{after}")
    tried = [results.get(key(torch, python), {}).get("result") for torch in options.torch for python in options.python]
    return 0 if "passed" in tried and all(result in (*FINAL, "no interpreter") for result in tried) else 1


if __name__ == "__main__":
    sys.exit(main())
