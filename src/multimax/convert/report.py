"""What a conversion did."""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Layer:
    """One layer of a report.

    Args:
        name: full name in the model.
        kind: "attention" or "output".
        was: what it was before.
        now: what it is now, in the words of its module.
        parameters: how many trainable numbers it has gained.
        why_left: why it was not converted; empty for a converted layer.
    """

    name: str
    kind: str
    was: str
    now: str = ""
    parameters: int = 0
    why_left: str = ""


@dataclass(frozen=True)
class Report:
    """What :func:`multimax.convert_` changed, and what it left.

    Iterating and ``len`` go over the converted layers; printing gives a table.

    Args:
        layers: those that were converted.
        left: those with softmax that were not.
        done: what was done.
    """

    layers: tuple[Layer, ...]
    left: tuple[Layer, ...] = ()
    done: str = "converted"

    def __len__(self) -> int:
        """How many were converted."""
        return len(self.layers)

    def __iter__(self) -> Iterator[Layer]:
        """Those that were converted."""
        return iter(self.layers)

    @property
    def parameters(self) -> int:
        """How many trainable numbers the model has gained."""
        return sum(layer.parameters for layer in self.layers)

    def __str__(self) -> str:
        """A table."""
        lines = [f"{_layers(self.layers)} {self.done}"]
        if self.done == "converted":
            lines[0] += f", {self.parameters} parameters gained"
        width = max((len(layer.name) for layer in (*self.layers, *self.left)), default=0)
        lines += [f"  {layer.name:{width}}  {layer.was} -> {layer.now}" for layer in self.layers]
        if self.left:
            lines.append(f"{_layers(self.left)} left with softmax")
            lines += [f"  {layer.name:{width}}  {layer.was}: {layer.why_left}" for layer in self.left]
        return "\n".join(lines)


def _layers(layers: tuple[Layer, ...]) -> str:
    return f"{len(layers)} layer{'' if len(layers) == 1 else 's'}"
