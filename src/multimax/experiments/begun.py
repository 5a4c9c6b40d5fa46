"""What a run began with, and must find again when it goes on: its data, and how many devices share a step."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import TrainingArguments

from multimax.experiments import tasks
from multimax.experiments.data import fingerprint
from multimax.experiments.results import SWEEP
from multimax.experiments.settings import CONFIG, Settings, as_dict, differences, read_json
from multimax.experiments.tasks.task import Task

BEGUN = "begun.json"


def begun_with(task: Task, args: TrainingArguments) -> dict[str, Any]:
    """What a run must find again when it goes on: its data, and how many devices share a step."""
    return {"data": task.fingerprint, "devices": args.world_size * max(args.n_gpu, 1)}


def check(there: Path, now: Mapping[str, Any], remedy: str) -> None:
    """Raises if a run began with other data, or with another number of devices, than there are now.

    Args:
        there: the folder of that run.
        now: what :func:`begun_with` gave.
        remedy: besides going back to what was.
    """
    path = there / BEGUN
    if not path.is_file():
        return
    before = read_json(path)
    if not isinstance(before, Mapping) or not isinstance(before.get("data"), Mapping):
        raise ValueError(f"multimax: expected what the run began with in {str(path)!r}, got {before!r:.60}; {remedy}")
    other = fingerprint.differences(before["data"], now["data"])
    if other:
        raise ValueError(
            f"multimax: expected the data of the run in {str(there)!r}, got other data ({'; '.join(other)}); put it "
            f"back, or {remedy}"
        )
    if before.get("devices") != now["devices"]:
        raise ValueError(
            f"multimax: expected {before.get('devices')} processes or GPUs to share each step, as in the run in "
            f"{str(there)!r}, got {now['devices']}, with which a step would have another number of examples; start as "
            f"many, as with torchrun --nproc-per-node {before.get('devices')}, or {remedy}"
        )


def check_others(settings: Settings, folder: Path, now: Mapping[str, Any]) -> None:
    """Raises if the folder is in a sweep of which other runs began with other data or devices.

    Args:
        settings: of the run.
        folder: of the run.
        now: what :func:`begun_with` gave.
    """
    sweep = folder.parent.parent
    if not (sweep / SWEEP).is_file():
        return
    loaded = tasks.get(settings.task).data
    for other in sorted(sweep.glob("*/seed-*")):
        if other == folder or not (other / BEGUN).is_file() or not (other / CONFIG).is_file():
            continue
        try:
            before = read_json(other / CONFIG)
        except ValueError:  # one run that is damaged keeps no other from going on
            continue
        if not any(name in loaded for name, _, _ in differences(before, as_dict(settings))):
            check(other, now, "choose another folder with --out: runs of one sweep must have these alike")
