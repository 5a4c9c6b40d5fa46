import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from multimax.metrics import LogHistogram

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def by_numpy(histogram: LogHistogram, values: np.ndarray) -> list[int]:
    """Counts of the bins; numpy's last bin is closed, ours is not."""
    edges = histogram.edges.numpy()
    return np.histogram(values[values < edges[-1]], edges)[0].tolist()


def test_edges() -> None:
    histogram = LogHistogram()
    assert len(histogram.edges) == 81
    assert histogram.edges[0] == 1e-8
    assert histogram.edges[-1] == 1.0
    np.testing.assert_allclose(histogram.edges.numpy(), np.geomspace(1e-8, 1, 81), rtol=1e-14)
    assert histogram.counts.dtype == torch.int64


@pytest.mark.parametrize("dtype", DTYPES)
def test_against_numpy(dtype: torch.dtype) -> None:
    weights = torch.cat([torch.softmax(3 * torch.randn(40, 500), -1).flatten(), torch.zeros(7), torch.ones(5)]).to(
        dtype
    )
    histogram = LogHistogram(low=1e-5, bins=23)
    histogram.update(weights.reshape(4, -1))
    values = weights.double().numpy()
    assert histogram.counts.tolist() == by_numpy(histogram, values)
    assert histogram.zeros == (values == 0).sum() >= 7
    assert histogram.below == ((values > 0) & (values < 1e-5)).sum()
    assert histogram.above == (values >= 1).sum() == 5
    assert histogram.total == values.size
    assert histogram.nans == 0
    shares = [(values < edge).mean() for edge in histogram.edges.tolist()]
    np.testing.assert_allclose(histogram.cumulative().numpy(), shares, rtol=1e-15)


def test_values_at_the_edges() -> None:
    histogram = LogHistogram(low=1e-3, high=1.0, bins=7)
    histogram.update(histogram.edges)
    assert histogram.counts.tolist() == [1] * 7
    assert histogram.above == 1
    just_below = torch.nextafter(histogram.edges, torch.zeros(1, dtype=torch.float64))
    histogram = LogHistogram(low=1e-3, high=1.0, bins=7)
    histogram.update(just_below)
    assert histogram.below == 1
    assert histogram.counts.tolist() == [1] * 7
    assert histogram.above == 0


def test_everything_outside_is_counted_once() -> None:
    histogram = LogHistogram(low=1e-2, high=0.5, bins=3)
    values = [0.0, -0.0, 1e-3, 5e-324, -1.0, 0.5, 0.7, float("inf"), float("nan"), 0.1]
    histogram.update(torch.tensor(values, dtype=torch.float64))
    assert (histogram.zeros, histogram.below, histogram.above, histogram.nans) == (2, 3, 3, 1)
    assert histogram.counts.sum() == 1
    assert histogram.total == len(values) - 1
    assert "nans=1" in repr(histogram)


def test_mask_and_batches() -> None:
    weights, mask = torch.rand(3, 2, 50) ** 9, torch.rand(3, 1, 50) < 0.5
    whole, parts = LogHistogram(), LogHistogram()
    whole.update(weights, mask)
    for part, its in zip(weights, mask, strict=True):
        parts.update(part, its)
    assert whole.as_dict() == parts.as_dict()
    kept = LogHistogram()
    kept.update(weights[mask.expand_as(weights)])
    assert whole.as_dict() == kept.as_dict()
    assert whole.total == 2 * int(mask.sum())
    whole.update(torch.empty(0))
    assert whole.as_dict() == kept.as_dict()


def test_merge() -> None:
    one, two, both = LogHistogram(bins=5), LogHistogram(bins=5), LogHistogram(bins=5)
    first = torch.tensor([0.0, 1e-9, 0.3, 1.0, float("nan")])
    second = torch.rand(100)
    one.update(first)
    two.update(second)
    both.update(torch.cat([first, second]))
    before = two.as_dict()
    assert one.merge(two) is one
    assert one.as_dict() == both.as_dict()
    assert two.as_dict() == before
    with pytest.raises(ValueError, match="multimax: expected a histogram of the same edges, got LogHistogram"):
        one.merge(LogHistogram(bins=6))


def test_many_more_than_float32_can_count() -> None:
    histogram = LogHistogram(bins=1)
    histogram.counts += 2**40
    histogram.update(torch.tensor([0.5]))
    assert histogram.counts.item() == histogram.total == 2**40 + 1


def test_cumulative_between_the_edges() -> None:
    histogram = LogHistogram(low=1e-2, high=1.0, bins=2)
    histogram.update(torch.tensor([0.0, 0.05, 0.05, 0.5], dtype=torch.float64))
    got = histogram.cumulative([1e-2, 10**-1.5, 0.1, 10**-0.75, 1.0])
    # half way through a bin on the logarithmic scale, half of it
    np.testing.assert_allclose(got.numpy(), [0.25, 0.5, 0.75, 0.75 + 0.25 / 4, 1.0], rtol=1e-12)
    at_edges = histogram.cumulative(histogram.edges)
    assert torch.equal(at_edges, histogram.cumulative())
    assert LogHistogram().cumulative([0.5]).isnan().all()
    with pytest.raises(ValueError, match=r"expected thresholds in \[0.01, 1\], the range of the bins, got \[0.001\]"):
        histogram.cumulative([1e-3])


@settings(deadline=None, derandomize=True, max_examples=100)
@given(
    values=st.lists(st.floats(0, 1, width=32), max_size=40),
    bins=st.integers(1, 12),
    low=st.sampled_from([1e-12, 1e-8, 1e-3, 0.3]),
)
def test_properties(values: list[float], bins: int, low: float) -> None:
    weights = torch.tensor(values, dtype=torch.float64)
    histogram = LogHistogram(low=low, bins=bins)
    histogram.update(weights.float())
    assert histogram.counts.tolist() == by_numpy(histogram, weights.numpy())
    assert histogram.total == len(values)
    shares: Tensor = histogram.cumulative()
    if values:
        assert shares.tolist() == [sum(value < edge for value in values) / len(values) for edge in histogram.edges]
        between = histogram.cumulative(torch.linspace(low, 1, 50, dtype=torch.float64))
        assert (between.diff() >= -1e-15).all()


def test_json_and_errors() -> None:
    histogram = LogHistogram(bins=3)
    histogram.update(torch.rand(9))
    assert json.loads(json.dumps(histogram.as_dict())) == histogram.as_dict()
    for low, high in ((0.0, 1.0), (1.0, 1.0), (1e-8, float("inf"))):
        with pytest.raises(ValueError, match="multimax: expected 0 < low < high, both finite"):
            LogHistogram(low, high)
    with pytest.raises(ValueError, match="expected bins of at least 1, got 0"):
        LogHistogram(bins=0)
    with pytest.raises(TypeError, match="expected weights of dtype"):
        histogram.update(torch.ones(3, dtype=torch.int64))
