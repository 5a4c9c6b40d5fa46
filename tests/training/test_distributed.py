"""Training over two processes, started as users start it; what is compared is in distributed_training.py."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor

from distributed_training import joint, seeded
from places import ROOT

SCRIPT = ROOT / "tests" / "support" / "distributed_training.py"
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")
# --multi_gpu is what starts processes: without it, and with --cpu, accelerate leaves that to mpirun. The script itself
# asks for the CPU.
ACCELERATE = ("accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1")
ACCELERATE += ("--main_process_port", "0", "--mixed_precision", "no", "--dynamo_backend", "no")

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="torch without gloo")


def launch(launcher: tuple[str, ...], folder: Path, *parts: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *launcher, str(SCRIPT), str(folder), *parts],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "HF_HOME": str(folder / "none"),
            "PYTHONFAULTHANDLER": "1",  # where a process was that dies by a signal
        },
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """Where torchrun's processes left what they trained, and what they said: one start for all parts, in this order."""
    folder = tmp_path_factory.mktemp("trained")
    return folder, launch(TORCHRUN, folder, "ddp", "fsdp", "fsdp_dtypes", "fsdp_first")


def agreed(trained: tuple[Path, subprocess.CompletedProcess[str]], part: str) -> Path:
    folder, result = trained
    assert f"{part} agrees" in result.stdout, result.stdout + result.stderr
    return folder / part


def same_logits(state: dict[str, Tensor], folder: Path) -> None:
    """A plain model, in a process of its own, gives what the many gave."""
    model = seeded()
    before = model(joint(0)[0])
    model.load_state_dict(state)
    with torch.no_grad():
        logits = model(joint(0)[0])
    torch.testing.assert_close(logits, torch.load(folder / "logits.pt"), rtol=1e-5, atol=1e-6)
    assert not torch.allclose(logits, before, atol=1e-2)


def test_distributed_data_parallel(trained: tuple[Path, Any]) -> None:
    folder = agreed(trained, "ddp")
    same_logits(torch.load(folder / "state.pt"), folder)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")  # which is the point
def test_fully_shard(trained: tuple[Path, Any]) -> None:
    folder = agreed(trained, "fsdp")
    same_logits(torch.load(folder / "state.pt"), folder)
    # and from the sharded checkpoint
    state = {"model": {name: torch.zeros_like(value) for name, value in seeded().state_dict().items()}}
    dcp.load(state, checkpoint_id=folder / "checkpoint", no_dist=True)
    same_logits(state["model"], folder)


def test_fully_shard_with_several_dtypes(trained: tuple[Path, Any]) -> None:
    agreed(trained, "fsdp_dtypes")


def test_fsdp_wraps_every_multimax(trained: tuple[Path, Any]) -> None:
    agreed(trained, "fsdp_first")


def test_processes_end_well(trained: tuple[Path, Any]) -> None:
    result = trained[1]
    assert result.returncode == 0, result.stdout + result.stderr


def test_accelerate(tmp_path: Path) -> None:
    result = launch(ACCELERATE, tmp_path, "accelerate")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "accelerate agrees" in result.stdout
    same_logits(load_file(tmp_path / "accelerate" / "model.safetensors"), tmp_path / "accelerate")
