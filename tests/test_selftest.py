"""The kernels without torch, in C++: tools/selftest."""

import shutil
import subprocess
from pathlib import Path

import pytest

import selftest


@pytest.mark.skipif(shutil.which("g++") is None, reason="no compiler")
def test_selftest(tmp_path: Path) -> None:
    # the portable kernels, which machines with more are never tested with otherwise, and quickly compiled
    program = selftest.build("g++", tmp_path, ("baseline",), ("-O1", "-Wno-psabi"))
    result = subprocess.run([program], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout
    assert result.stdout.splitlines()[-1].endswith("numbers compared, 0 wrong")
    for room in ("rows", "loss", "entmax", "attention"):
        assert f"baseline {room} f32 " in result.stdout
