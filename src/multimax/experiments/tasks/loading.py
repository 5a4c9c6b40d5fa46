"""Tasks with their data, which is loaded once for all runs that read the same."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from multimax.experiments import tasks
from multimax.experiments.settings import Settings

if TYPE_CHECKING:  # which needs transformers
    from multimax.experiments.tasks.task import Task


def check_data(settings: Settings) -> None:
    """Raises if no data is named: none is taken in its place."""
    if not settings.data:
        preset = f" of the preset {settings.preset}" if settings.preset else ""
        raise ValueError(
            f"multimax: expected the data{preset}, got none; name it by --data: {tasks.get(settings.task).needs}"
        )


def check_start(settings: Settings) -> None:
    """Raises if the run cannot start from the model that it names, as far as that shows without data."""
    if settings.start:
        tasks.get(settings.task).kind().check_start(settings)


class DataCache:
    """Data that was loaded, tokenizers and tokens included, for whoever reads the same afterwards."""

    def __init__(self) -> None:
        self.loaded: dict[tuple[object, ...], Any] = {}

    def task(self, settings: Settings) -> "Task":
        """The task of the settings, with its data."""
        spec = tasks.get(settings.task)
        kind = spec.kind()
        check_data(settings)
        kind.check(settings)
        key = spec.data_key(settings)
        if key not in self.loaded:
            self.loaded[key] = kind.load(settings)
        found: Task = kind(settings, self.loaded[key])
        return found

    def keep_for(self, settings: Iterable[Settings]) -> None:
        """Lets go of all data but that of these settings."""
        needed = {tasks.get(each.task).data_key(each) for each in settings}
        self.loaded = {key: data for key, data in self.loaded.items() if key in needed}


def task_of(settings: Settings) -> "Task":
    """The task of the settings, with its data."""
    return DataCache().task(settings)
