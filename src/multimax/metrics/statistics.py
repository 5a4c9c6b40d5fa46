"""What the collector has gathered: running means and deviations of each layer, and how they are shown."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from multimax.metrics.histogram import LogHistogram


def _plain(value: float) -> float | None:
    """A number for JSON, which has no NaN."""
    return value if math.isfinite(value) else None


class Moments:
    """Number, mean and standard deviation of values that come in batches, for each head and for all, in float64.

    The standard deviation describes the values seen (divided by their number); it is not an estimate for others.

    Example:
        >>> import torch
        >>> from multimax.metrics import Moments
        >>> moments = Moments()
        >>> moments.update(torch.tensor([[[1.0, 3.0], [5.0, 5.0]]]))  # two heads, two values each
        >>> moments.update(torch.tensor([[[5.0], [float("nan")]]]))  # NaN does not count
        >>> moments.mean, moments.count, moments.head_means, moments.head_counts
        (3.8, 5, [3.0, 5.0], [3, 2])
    """

    def __init__(self) -> None:
        self._count = torch.zeros(0, dtype=torch.float64)  # (H,)
        self._mean = torch.zeros(0, dtype=torch.float64)
        self._squares = torch.zeros(0, dtype=torch.float64)  # sum of squared deviations from the mean

    @torch.no_grad()
    def update(self, values: Tensor) -> None:
        """Adds values, (batch, heads, any number); NaN stands for none."""
        values = values.detach().to("cpu", torch.float64).transpose(0, 1).flatten(1)  # (H, values)
        missing = len(values) - len(self._count)
        if missing > 0:
            self._count, self._mean, self._squares = (
                torch.nn.functional.pad(t, (0, missing)) for t in (self._count, self._mean, self._squares)
            )
        some = ~values.isnan()
        count = some.sum(1).double()
        mean = torch.where(some, values, 0).sum(1) / count.clamp(min=1)
        squares = torch.where(some, values - mean[:, None], 0).square().sum(1)
        # the parallel form of Welford's method: sums of squares alone would cancel
        heads = slice(len(values))
        both = self._count[heads] + count
        gap = mean - self._mean[heads]
        share = count / both.clamp(min=1)
        self._squares[heads] += squares + gap.square() * self._count[heads] * share
        self._mean[heads] += gap * share
        self._count[heads] = both

    @property
    def count(self) -> int:
        """How many values there were."""
        return int(self._count.sum())

    @property
    def mean(self) -> float:
        """Their mean, NaN if there were none."""
        total = self._count.sum()
        return float((self._count * self._mean).sum() / total)

    @property
    def variance(self) -> float:
        """The mean of their squared deviations from the mean."""
        around = self._squares + self._count * (self._mean - self.mean).square()
        return float(around.sum() / self._count.sum())

    @property
    def std(self) -> float:
        """The root of the variance."""
        return math.sqrt(self.variance)

    @property
    def head_counts(self) -> list[int]:
        """How many values each head had."""
        counts: list[int] = self._count.long().tolist()
        return counts

    @property
    def head_means(self) -> list[float]:
        """The mean of each head, NaN where it had no values."""
        means: list[float] = torch.where(self._count > 0, self._mean, torch.nan).tolist()
        return means

    @property
    def head_stds(self) -> list[float]:
        """The standard deviation of each head, NaN where it had no values."""
        stds: list[float] = (self._squares / self._count).sqrt().tolist()
        return stds

    def as_dict(self) -> dict[str, object]:
        """Plain Python numbers; None for what is missing. Heads only if there are several."""
        found: dict[str, object] = {"mean": _plain(self.mean), "std": _plain(self.std), "count": self.count}
        if len(self._count) > 1:
            found["heads"] = {
                "mean": [_plain(value) for value in self.head_means],
                "std": [_plain(value) for value in self.head_stds],
                "count": self.head_counts,
            }
        return found


@dataclass
class LayerStatistics:
    """The measures of one attention layer."""

    name: str  # the full name of the module; "" for the model itself
    rows: int = 0  # queries of all heads and batches that have keys, with or without NaN
    nan_rows: int = 0  # those with a NaN among their scores or weights, which are in no mean
    measures: dict[str, Moments] = field(default_factory=dict)
    histogram: LogHistogram | None = None
    left_out: dict[str, str] = field(default_factory=dict)  # measures that were never, or not always, taken, and why

    def __getitem__(self, measure: str) -> Moments:
        """The numbers of one measure."""
        return self.measures[measure]

    def add(self, measure: str, values: Tensor) -> None:
        """Adds values of a measure, (batch, heads, any number), or (batch,) where heads share them; NaN for none."""
        values = values[:, None, None] if values.ndim == 1 else values
        self.measures.setdefault(measure, Moments()).update(values)

    def as_dict(self) -> dict[str, object]:
        """Plain Python numbers."""
        found: dict[str, object] = {"rows": self.rows, "nan_rows": self.nan_rows}
        found.update({name: moments.as_dict() for name, moments in self.measures.items()})
        if self.histogram is not None:
            found["histogram"] = self.histogram.as_dict()
        if self.left_out:
            found["left_out"] = dict(self.left_out)
        return found


SMALL = 1e-3  # the share of weights below it stands for the histogram in the table


class AttentionStatistics:
    """The measures of every attention layer that has run, by the full names of the modules, in order of execution."""

    def __init__(self, measures: tuple[str, ...]) -> None:
        self.measures = measures
        self.layers: dict[str, LayerStatistics] = {}

    def __getitem__(self, layer: str) -> LayerStatistics:
        """One layer's measures."""
        return self.layers[layer]

    def __iter__(self) -> Iterator[str]:
        """The layers' names."""
        return iter(self.layers)

    def __len__(self) -> int:
        """How many layers have run."""
        return len(self.layers)

    def _cell(self, layer: LayerStatistics, measure: str) -> str:
        if measure == "histogram":
            histogram = layer.histogram
            if histogram is None or not histogram.edges[0] <= SMALL <= histogram.edges[-1] or not histogram.total:
                return "-"
            return f"{histogram.cumulative([SMALL]).item():.4f}"
        moments = layer.measures.get(measure)
        return f"{moments.mean:.4f} ± {moments.std:.4f}" if moments is not None and moments.count else "-"

    def table(self) -> str:
        """A Markdown table: mean ± standard deviation of every measure, and below it remarks on what was left out."""
        heads = [f"weights < {SMALL:g}" if name == "histogram" else name for name in self.measures]
        lines = [["layer", "rows", *heads]]
        for name, layer in self.layers.items():
            cells = [self._cell(layer, measure) for measure in self.measures]
            lines.append([name or "(model)", str(layer.rows), *cells])
        widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
        text = [
            "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |"
            for line in lines
        ]
        text.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
        notes = []
        for name, layer in self.layers.items():
            if layer.nan_rows:
                notes.append(f"{name or '(model)'}: {layer.nan_rows} of {layer.rows} rows hold NaN and are in no mean.")
            notes += [f"{name or '(model)'}: {measure} left out: {why}." for measure, why in layer.left_out.items()]
        return "\n".join(text + [""] * bool(notes) + notes)

    def as_dict(self) -> dict[str, dict[str, object]]:
        """Layers by name, each with its measures in plain Python numbers, ready for ``json.dump``."""
        return {name: layer.as_dict() for name, layer in self.layers.items()}

    def __repr__(self) -> str:
        """The number of layers, and the measures."""
        return f"AttentionStatistics({len(self)} layers, {', '.join(self.measures)})"
