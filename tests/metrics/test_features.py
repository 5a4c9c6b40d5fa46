import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from multimax.metrics import mean_average_distance, patch_similarity

PROPERTY = settings(deadline=None, derandomize=True, max_examples=100)


def tensor(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def close(got: Tensor, expected: object) -> None:
    torch.testing.assert_close(got, torch.as_tensor(expected, dtype=got.dtype), rtol=1e-12, atol=1e-12, equal_nan=True)


def cosine(a: list[float], b: list[float]) -> float:
    lengths = math.hypot(*a) * math.hypot(*b)
    return sum(x * y for x, y in zip(a, b, strict=True)) / lengths if lengths else 0.0


def slow_similarity(features: list[list[float]]) -> float:
    n = len(features)
    pairs = [abs(cosine(features[i], features[j])) for i in range(n) for j in range(n) if i != j]
    return sum(pairs) / len(pairs) if pairs else math.nan


def slow_distance(features: list[list[float]], targets: list[list[bool]]) -> float:
    n = len(features)
    rows = [
        [1 - cosine(features[i], features[j]) for j in range(n) if i != j and targets[i][j]]
        for i in range(n)
        if any(targets[i][j] for j in range(n) if j != i)
    ]
    return sum(sum(row) / len(row) for row in rows) / len(rows) if rows else math.nan


def published_distance(features: Tensor, mask: Tensor) -> Tensor:
    """Equations 1 to 4 of Chen et al. to the letter: averages over the entries that are not zero."""
    d = (1 - torch.nn.functional.cosine_similarity(features[:, None], features[None], -1)) * mask
    d = d * (1 - torch.eye(len(d), dtype=d.dtype))
    rows = d.sum(1) / (d > 0).sum(1).clamp(min=1)
    return rows.sum() / (rows > 0).sum()


RIGHT_LEFT_UP = [[1.0, 0.0], [-2.0, 0.0], [0.0, 3.0]]


def test_by_hand() -> None:
    close(patch_similarity(tensor(RIGHT_LEFT_UP)), 1 / 3)
    close(mean_average_distance(tensor(RIGHT_LEFT_UP)), 4 / 3)
    same = tensor([[1.0, 2.0], [2.0, 4.0], [0.5, 1.0]])
    close(patch_similarity(same), 1.0)
    close(mean_average_distance(same), 0.0)
    close(patch_similarity(torch.eye(4, dtype=torch.float64)), 0.0)
    close(mean_average_distance(torch.eye(4, dtype=torch.float64)), 1.0)
    # of the rows that have targets, each counts the same, however many targets it has
    targets = torch.tensor([[True, True, True], [True, False, False], [False, False, False]])
    close(mean_average_distance(tensor(RIGHT_LEFT_UP), targets), ((2 + 1) / 2 + 2) / 2)


def test_one_patch_and_zeros() -> None:
    for measure in (patch_similarity, mean_average_distance):
        assert measure(torch.randn(1, 8)).isnan()
        assert measure(torch.randn(2, 0, 8)).isnan().tolist() == [True, True]
    features = tensor([[1.0, 0.0], [0.0, 0.0], [2.0, 0.0]])
    close(patch_similarity(features), 1 / 3)  # one pair out of three, both ways
    close(mean_average_distance(features), (0.5 + 1 + 0.5) / 3)
    close(patch_similarity(torch.zeros(3, 0, dtype=torch.float64)), 0.0)


@pytest.mark.parametrize("shape", [(5, 3), (2, 5, 3), (2, 3, 4, 6)])
def test_against_loops(shape: tuple[int, ...]) -> None:
    features = torch.randn(shape, dtype=torch.float64)
    mask = torch.rand(shape[:-1]) < 0.7
    targets = torch.rand(*shape[:-1], shape[-2]) < 0.5
    hidden = torch.where(mask[..., None], features, torch.nan)  # padding may hold anything
    flat, kept, wanted = (
        features.reshape(-1, *shape[-2:]),
        mask.reshape(-1, shape[-2]),
        targets.reshape(-1, *targets.shape[-2:]),
    )
    everything = [[True] * shape[-2]] * shape[-2]
    close(patch_similarity(features).reshape(-1), [slow_similarity(patches.tolist()) for patches in flat])
    close(
        patch_similarity(hidden, mask).reshape(-1),
        [slow_similarity(patches[its].tolist()) for patches, its in zip(flat, kept, strict=True)],
    )
    close(
        mean_average_distance(features).reshape(-1), [slow_distance(patches.tolist(), everything) for patches in flat]
    )
    close(
        mean_average_distance(features, targets).reshape(-1),
        [slow_distance(patches.tolist(), its.tolist()) for patches, its in zip(flat, wanted, strict=True)],
    )
    pairs = mask[..., :, None] & mask[..., None, :]
    close(
        mean_average_distance(hidden, pairs).reshape(-1),
        [
            slow_distance(patches.tolist(), its.tolist())
            for patches, its in zip(flat, pairs.reshape(wanted.shape), strict=True)
        ],
    )


def test_as_published_where_no_two_patches_are_parallel() -> None:
    features, mask = torch.randn(9, 4, dtype=torch.float64), torch.rand(9, 9) < 0.5
    close(mean_average_distance(features), published_distance(features, torch.ones(9, 9)))
    close(mean_average_distance(features, mask), published_distance(features, mask))


def test_masks_broadcast() -> None:
    features, mask = torch.randn(3, 5, 4), torch.tensor([True, True, False, True, True])
    assert torch.equal(patch_similarity(features, mask), patch_similarity(features, mask.expand(3, 5)))
    targets = torch.rand(5, 5) < 0.5
    assert torch.equal(
        mean_average_distance(features, targets), mean_average_distance(features, targets.expand(3, 5, 5))
    )


@PROPERTY
@given(
    values=st.lists(st.lists(st.integers(-9, 9), min_size=3, max_size=3), min_size=2, max_size=6),
    scale=st.sampled_from([1.0, -2.5, 1e-200, 1e200]),
)
def test_properties(values: list[list[int]], scale: float) -> None:
    features = tensor(values)
    similarity, distance = patch_similarity(features), mean_average_distance(features)
    close(similarity, slow_similarity(values))
    assert 0 <= similarity <= 1
    assert -1e-12 <= distance <= 2
    # lengths do not matter, nor does the order
    close(patch_similarity(scale * features), similarity)
    close(mean_average_distance(scale * features), distance)
    close(patch_similarity(features.flip(0)), similarity)
    close(mean_average_distance(features.flip(0)), distance)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    features = (300 * torch.randn(2, 40, 16)).to(dtype)  # whose squares are beyond float16
    for measure in (patch_similarity, mean_average_distance):
        assert measure(features).dtype == torch.float32
        assert torch.equal(measure(features), measure(features.float()))


def test_large_and_small_float32() -> None:
    for scale in (1e30, 1e-30):
        close(patch_similarity(scale * torch.tensor(RIGHT_LEFT_UP)).double(), torch.tensor(1 / 3).double())


def test_a_nan_shows() -> None:
    features = torch.randn(2, 4, 3)
    features[1, 2, 0] = math.nan
    for measure in (patch_similarity, mean_average_distance):
        assert measure(features).isnan().tolist() == [False, True]


def test_errors() -> None:
    with pytest.raises(
        ValueError, match=r"multimax: expected features of shape \(..., patches, features\), got \(3,\)"
    ):
        patch_similarity(torch.randn(3))
    with pytest.raises(ValueError, match=r"a mask that broadcasts to \(2, 3\), the patches of features .* got \(2,\)"):
        patch_similarity(torch.randn(2, 3, 4), torch.ones(2, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"a mask that broadcasts to \(2, 3, 3\), the pairs of patches"):
        mean_average_distance(torch.randn(2, 3, 4), torch.ones(2, 3, dtype=torch.bool))
    with pytest.raises(TypeError, match=r"expected mask to be a boolean tensor, True for patches that take part, got"):
        patch_similarity(torch.randn(2, 3, 4), torch.ones(2, 3))
    with pytest.raises(TypeError, match="expected features of dtype"):
        mean_average_distance(torch.ones(3, 4, dtype=torch.int64))
