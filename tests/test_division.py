"""How evenly work divides among threads: what tools/division.cpp prints."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ENOUGH = 1.15
# Where the busiest has more to do: there is too little work for all, or blocks of keys wait for each other.
EXCEPT = {
    "attention backward (1, 1, 16384, 64)": (192,),
    "attention backward (1, 1, 16384, 64), causal": (64, 192),
    "attention backward (1, 8, 4096, 64)": (192,),
    "attention backward (1, 8, 4096, 64), causal": (192,),
    "attention forward (1, 8, 1, 64), 4096 keys": (64, 192),
    "loss (8, 128256)": (192,),
}


@pytest.mark.skipif(shutil.which("g++") is None, reason="no compiler")
def test_work_divides(tmp_path: Path) -> None:
    program = tmp_path / "division"
    command = ["g++", "-std=c++20", "-O1", "-Wno-psabi", "-Icsrc", "tools/division.cpp", "-o", str(program)]
    subprocess.run(command, cwd=ROOT, check=True)
    lines = subprocess.run([program], capture_output=True, text=True, check=True).stdout.splitlines()
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    threads = [int(cell.split()[0]) for cell in head[1:]]
    assert threads == [2, 16, 64, 192]
    assert len(rows) > 10
    for name, *cells in rows:
        for count, cell in zip(threads, cells, strict=True):
            share = float(cell.split()[0])
            assert share >= 1, (name, count)
            assert (share <= ENOUGH) != (count in EXCEPT.get(name, ())), (name, count, cell)
