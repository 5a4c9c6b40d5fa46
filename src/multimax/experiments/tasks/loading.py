"""Tasks with their data, which is loaded once for all runs that read the same."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from multimax.experiments import tasks
from multimax.experiments.settings import Settings

if TYPE_CHECKING:  # which needs transformers
    from multimax.experiments.tasks.task import Task


class DataCache:
    """Data that was loaded, tokenizers and tokens included, for whoever reads the same afterwards."""

    def __init__(self) -> None:
        self.loaded: dict[tuple[object, ...], Any] = {}

    def task(self, settings: Settings) -> "Task":
        """The task of the settings, with its data."""
        spec = tasks.get(settings.task)
        kind = spec.kind()
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
