"""A histogram of weights that spans many powers of ten, filled batch by batch."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from multimax.ops import checks


class LogHistogram:
    """Counts of weights in bins of equal width on a logarithmic scale.

    Bin i holds the weights w with ``edges[i] <= w < edges[i + 1]``. What fits no bin has separate counters: ``zeros``
    for exact zeros, ``below`` for the rest below the first edge, ``above`` for the last edge and all above it (with
    ``high=1`` these are the weights of 1), and ``nans``, which are not in ``total``. Values are compared in float64,
    which represents every other dtype exactly.

    Args:
        low: the first edge, above 0.
        high: the last edge, above ``low``.
        bins: number of bins. With the default range, 80 are ten per power of ten.

    Example:
        >>> import torch
        >>> from multimax import metrics
        >>> histogram = metrics.LogHistogram(low=1e-4, bins=4)
        >>> histogram.update(torch.tensor([0.0, 3e-6, 0.002, 0.02, 0.5, 0.4, 1.0]))
        >>> histogram.zeros, histogram.below, histogram.counts.tolist(), histogram.above
        (1, 1, [0, 1, 1, 2], 1)
        >>> histogram.cumulative([1e-2, 1.0])  # shares below 0.01 and below 1
        tensor([0.4286, 0.8571], dtype=torch.float64)
    """

    edges: Tensor  # (bins + 1,), float64
    counts: Tensor  # (bins,), int64

    def __init__(self, low: float = 1e-8, high: float = 1.0, bins: int = 80) -> None:
        bins = checks.positive_integer("bins", bins)
        low, high = checks.bin_range(low, high)
        steps = torch.linspace(math.log10(low), math.log10(high), bins + 1, dtype=torch.float64)
        self.edges = 10**steps
        self.edges[0], self.edges[-1] = low, high  # which the powers may miss by rounding
        self.counts = torch.zeros(bins, dtype=torch.int64)
        self.zeros = self.below = self.above = self.nans = 0

    @property
    def total(self) -> int:
        """How many weights were counted, without NaN."""
        return self.zeros + self.below + int(self.counts.sum()) + self.above

    @torch.no_grad()
    def update(self, weights: Tensor, mask: Tensor | None = None) -> None:
        """Counts weights of any shape; with a mask, broadcastable to them, only those where it is True."""
        checks.tensor("weights", weights)
        mask = checks.mask_for(weights, mask)
        values = (weights.reshape(-1) if mask is None else weights[mask]).double()
        nans = values.isnan()
        places = torch.bucketize(values, self.edges.to(values.device), right=True)  # 0 below, bins + 1 from high on
        zeros = values == 0
        # two more places, so that one pass counts all
        bins = len(self.counts)
        places = torch.where(nans, bins + 3, torch.where(zeros, bins + 2, places))
        found = torch.bincount(places, minlength=bins + 4).cpu()
        self.counts += found[1 : bins + 1]
        self.below += int(found[0])
        self.above += int(found[bins + 1])
        self.zeros += int(found[bins + 2])
        self.nans += int(found[bins + 3])

    def merge(self, other: "LogHistogram") -> "LogHistogram":
        """Adds the counts of another histogram with the same edges to this one, and returns it."""
        checks.same_edges(self, other, self.edges, other.edges)
        self.counts += other.counts
        for name in ("zeros", "below", "above", "nans"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        return self

    def cumulative(self, thresholds: Sequence[float] | Tensor | None = None) -> Tensor:
        """The share of weights smaller than each threshold.

        Args:
            thresholds: in the range from the first to the last edge; the edges unless given. At an edge the share is
                exact; between two, it is interpolated on the logarithmic scale.

        Returns:
            (thresholds,) in float64; NaN before the first weight.
        """
        at_edges = torch.cat([torch.zeros(1, dtype=torch.int64), self.counts.cumsum(0)]) + (self.zeros + self.below)
        shares = at_edges.double() / self.total if self.total else torch.full_like(self.edges, torch.nan)
        if thresholds is None:
            return shares
        wanted = torch.as_tensor(thresholds, dtype=torch.float64, device="cpu").reshape(-1)
        low, high = self.edges[0].item(), self.edges[-1].item()
        checks.thresholds(wanted, low, high)
        left = (torch.bucketize(wanted, self.edges, right=True) - 1).clamp(max=len(self.counts) - 1)
        step = (wanted / self.edges[left]).log() / (self.edges[left + 1] / self.edges[left]).log()
        # the last edge is the right end of its bin, where interpolation need not give it to the last digit
        between = torch.where(wanted == high, shares[-1], torch.lerp(shares[left], shares[left + 1], step))
        return torch.where(wanted == self.edges[left], shares[left], between)

    def as_dict(self) -> dict[str, object]:
        """Everything in plain Python numbers."""
        return {
            "edges": self.edges.tolist(),
            "counts": self.counts.tolist(),
            "zeros": self.zeros,
            "below": self.below,
            "above": self.above,
            "nans": self.nans,
            "total": self.total,
        }

    def __repr__(self) -> str:
        """The settings, what was counted, and NaN if there were any."""
        nans = f", nans={self.nans}" if self.nans else ""
        low, high = self.edges[0].item(), self.edges[-1].item()
        return f"LogHistogram(low={low:g}, high={high:g}, bins={len(self.counts)}, total={self.total}{nans})"
