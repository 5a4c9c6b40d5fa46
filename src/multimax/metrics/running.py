"""Which modules of a model are running: tracked by hooks, also where one raises."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import nn


@dataclass
class Frame:
    """A module that is running, under the name it was given."""

    name: str
    module: nn.Module


FrameT = TypeVar("FrameT", bound=Frame)
Left = Callable[[FrameT, tuple[Any, ...], Mapping[str, Any], object], None]


def in_backward() -> bool:
    """Whether a backward is running: a forward in it comes from a checkpoint that computes its part a second time."""
    return torch._C._current_graph_task_id() != -1


class RunningModules(Generic[FrameT]):
    """The modules that are running within :meth:`watch`, outermost first.

    What a checkpoint computes again in the backward does not count as running.

    Args:
        names: the modules to follow, each with the name its frame gets.
        frame: makes a module's frame: :class:`Frame` or a subclass.
        left: called as ``left(frame, args, kwargs, output)`` after a module's forward, while its frame is still the
            innermost; not where the forward raised or returned None.

    Example:
        >>> import torch
        >>> from multimax.metrics.running import Frame, RunningModules
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
        >>> names = {module: name or "(model)" for name, module in model.named_modules()}
        >>> def left(frame, args, kwargs, output):
        ...     print([running.name for running in modules.frames])
        >>> modules = RunningModules(names, Frame, left)
        >>> with modules.watch():
        ...     out = model(torch.ones(1, 2))
        ['(model)', '0']
        ['(model)', '1']
        ['(model)']
    """

    def __init__(
        self,
        names: Mapping[nn.Module, str],
        frame: Callable[[str, nn.Module], FrameT],
        left: "Left[FrameT] | None" = None,
    ) -> None:
        self.names, self.frame, self.left = names, frame, left
        self.frames: list[FrameT] = []

    @property
    def innermost(self) -> FrameT | None:
        """The frame of the module that was called last and has not returned."""
        return self.frames[-1] if self.frames and not in_backward() else None

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Follows the modules within the context."""
        with ExitStack() as hooks:
            for module in self.names:
                before = module.register_forward_pre_hook(self._enter, prepend=True, with_kwargs=True)
                after = module.register_forward_hook(self._leave, with_kwargs=True, always_call=True)
                hooks.callback(before.remove)
                hooks.callback(after.remove)
            yield

    def _enter(self, module: nn.Module, args: object, kwargs: object) -> None:
        if not in_backward():
            self.frames.append(self.frame(self.names[module], module))

    def _leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: object) -> None:
        places = [place for place, frame in enumerate(self.frames) if frame.module is module]
        if not places or in_backward():
            return
        *_, last = places
        # frames beyond it belong to modules that a foreign hook interrupted before ours could see it
        del self.frames[last + 1 :]
        try:
            if self.left is not None and output is not None:
                self.left(self.frames[last], args, kwargs, output)
        finally:
            del self.frames[last:]
