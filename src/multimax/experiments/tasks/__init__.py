"""The tasks: one list of them, and one file for each.

To add a task, write its file beside the others, with a subclass of :class:`multimax.experiments.tasks.task.Task`, and
its :class:`TaskSpec` into the list in specs.py.
"""

from multimax.experiments.tasks.specs import SPECS, Metric, TaskSpec, get, main_metrics, names, takers

__all__ = ["SPECS", "Metric", "TaskSpec", "get", "main_metrics", "names", "takers"]
