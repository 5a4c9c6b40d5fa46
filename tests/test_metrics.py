import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import multimax
from multimax.metrics import multi_modality, sparsity

PROPERTY = settings(deadline=None, derandomize=True, max_examples=150)


def tensor(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def close(got: Tensor, expected: object) -> None:
    torch.testing.assert_close(got, torch.as_tensor(expected, dtype=got.dtype), rtol=1e-12, atol=1e-12, equal_nan=True)


def slow_multi_modality(x: list[float], weights: list[float], threshold: float) -> float:
    """Definition 3.2 for one row."""
    top = max(range(len(x)), key=lambda i: x[i])
    gaps = [weights[top] - weights[i] for i in range(len(x)) if threshold < x[i] < x[top]]
    return 1 - sum(gaps) / len(gaps) if gaps else math.nan


def slow_sparsity(x: list[float], weights: list[float], threshold: float, reference: float | None) -> float:
    """Definition 3.3 for one row."""
    if reference is None:
        reference = math.exp(min(x)) / sum(math.exp(value) for value in x)
    scores = [
        math.exp((reference - weight) / reference - 1)
        for value, weight in zip(x, weights, strict=True)
        if value < threshold
    ]
    return sum(scores) / len(scores) if scores else math.nan


X = [3.0, 2.0, -1.0]
WEIGHTS = [0.5, 0.3, 0.2]


@pytest.mark.parametrize(("threshold", "expected"), [(0.0, 1 - 0.2), (-2.0, 1 - (0.2 + 0.3) / 2), (-1.0, 1 - 0.2)])
def test_multi_modality_by_hand(threshold: float, expected: float) -> None:
    close(multi_modality(tensor(X), tensor(WEIGHTS), threshold=threshold), expected)


@pytest.mark.parametrize(
    ("threshold", "reference", "expected"),
    [
        (0.0, 0.2, math.exp(-1)),
        (0.0, 0.1, math.exp(-2)),
        (2.5, 0.2, (math.exp(-1) + math.exp(-1.5)) / 2),
        (2.0, 0.2, math.exp(-1)),
        (9.0, 1.0, (math.exp(-0.5) + math.exp(-0.3) + math.exp(-0.2)) / 3),
    ],
)
def test_sparsity_by_hand(threshold: float, reference: float, expected: float) -> None:
    close(sparsity(tensor(X), tensor(WEIGHTS), threshold=threshold, reference=reference), expected)


def test_softmax_example_of_the_docstrings() -> None:
    x = torch.tensor(X)
    weights = torch.softmax(x, -1)
    assert f"{multi_modality(x, weights, threshold=0.0):.4f}" == "0.5440"
    assert f"{sparsity(x, weights, threshold=0.0):.4f}" == "0.3679"


def test_extremes() -> None:
    x = tensor([2.0, 1.0, -1.0, -2.0])
    assert multi_modality(x, tensor([0.5, 0.5, 0.0, 0.0]), threshold=0.0) == 1  # the two modes are equal
    assert multi_modality(x, tensor([1.0, 0.0, 0.0, 0.0]), threshold=0.0) == 0  # there is but one mode
    assert sparsity(x, tensor([0.5, 0.5, 0.0, 0.0]), threshold=0.0, reference=0.01) == 1  # exact zeros
    assert sparsity(x, tensor([0.0, 0.0, 0.5, 0.5]), threshold=0.0, reference=0.01) < 1e-20


def test_default_reference_is_the_smallest_softmax_weight_of_each_row() -> None:
    x = tensor([[3.0, 2.0, -1.0], [0.5, 0.0, -0.5]])
    weights = tensor([[0.6, 0.3, 0.1], [0.6, 0.3, 0.1]])
    smallest = torch.softmax(x, -1).amin(-1)
    close(sparsity(x, weights, threshold=0.25), sparsity(x, weights, threshold=0.25, reference=smallest))
    # softmax itself: exp(-1) for the smallest entry, and for another by how much larger its weight is
    close(sparsity(x, torch.softmax(x, -1), threshold=-0.25), [math.exp(-1), math.exp(-1)])
    expected = (math.exp(-math.e) + math.exp(-math.exp(4.0))) / 3 + math.exp(-1) / 3
    x = tensor([4.0, 1.0, 0.0])
    close(sparsity(x, torch.softmax(x, -1), threshold=9.0), expected)


@pytest.mark.parametrize("value", [0.25, torch.tensor(0.25), torch.tensor([0.25]), torch.tensor([[0.25]])])
def test_threshold_and_reference_as_a_number_in_any_form(value: float | Tensor) -> None:
    x = tensor([[1.0, 0.5, -1.0], [2.0, 1.0, 0.0]])
    weights = torch.softmax(x, -1)
    for row in range(2):
        one, its = x[row].tolist(), weights[row].tolist()
        close(multi_modality(x, weights, threshold=value)[row], slow_multi_modality(one, its, 0.25))
        close(sparsity(x, weights, threshold=value, reference=value)[row], slow_sparsity(one, its, 0.25, 0.25))


def test_one_threshold_and_reference_a_row() -> None:
    x = tensor([[3.0, 2.0, 1.0, 0.0]]).expand(4, 4)
    weights = tensor([[0.4, 0.3, 0.2, 0.1]]).expand(4, 4)
    thresholds = tensor([-1.0, 0.5, 1.5, 2.5])
    close(multi_modality(x, weights, threshold=thresholds), [1 - 0.2, 1 - 0.15, 1 - 0.1, math.nan])
    references = tensor([1.0, 0.1, 0.2, 0.3])
    expected = [
        math.nan,
        math.exp(-1),
        (math.exp(-0.5) + math.exp(-1)) / 2,
        (math.exp(-1 / 3) + math.exp(-2 / 3) + math.exp(-1)) / 3,
    ]
    close(sparsity(x, weights, threshold=thresholds, reference=references), expected)
    # the matrix is square: thresholds along the wrong dim would go unnoticed but for these values
    close(multi_modality(x.T, weights.T, threshold=thresholds, dim=0), [1 - 0.2, 1 - 0.15, 1 - 0.1, math.nan])
    close(sparsity(x.T, weights.T, threshold=thresholds, reference=references, dim=0), expected)


def test_nan_where_nothing_is_relevant_or_irrelevant() -> None:
    x = tensor([[1.0, 0.0, -1.0], [1.0, 1.0, 1.0], [1.0, 0.5, 0.5]])
    weights = torch.softmax(x, -1)
    # relevant beside the largest: 0.0; nothing, as equals of the largest are not counted; the two 0.5
    assert multi_modality(x, weights, threshold=-0.5).isnan().tolist() == [False, True, False]
    # the entry at the threshold is not above it
    assert multi_modality(x, weights, threshold=0.5).isnan().all()
    assert sparsity(x, weights, threshold=0.5).isnan().tolist() == [False, True, True]
    assert sparsity(x, weights, threshold=-1.0).isnan().all()
    assert multi_modality(tensor([1.0]), tensor([1.0]), threshold=0.0).isnan()


def test_a_nan_input_shows() -> None:
    x = tensor([[1.0, math.nan, -1.0], [1.0, 0.0, -1.0]])
    weights = torch.softmax(x, -1)
    assert multi_modality(x, weights, threshold=-0.5).isnan().tolist() == [True, False]
    assert sparsity(x, weights, threshold=-0.5).isnan().tolist() == [True, False]


def test_ties_of_the_largest_entry_share_its_weight() -> None:
    x = tensor([2.0, 2.0, 1.0])
    close(multi_modality(x, tensor([0.4, 0.4, 0.2]), threshold=0.0), 1 - 0.2)


@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2, -3])
@pytest.mark.parametrize("thresholds", ["number", "one a row"])
@pytest.mark.parametrize("reference", ["default", "number", "one a row"])
def test_batches_along_every_dim_against_the_slow_loop(dim: int, thresholds: str, reference: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 4, 5, generator=generator, dtype=torch.float64)
    # weights of no relation to x: the measures must not rely on their order
    weights = torch.softmax(torch.randn(3, 4, 5, generator=generator, dtype=torch.float64), dim)
    rows = x.amin(dim).shape
    epsilon = torch.randn(rows, generator=generator, dtype=torch.float64)
    epsilon = epsilon if thresholds == "one a row" else torch.full_like(epsilon, 0.1)
    scale = 0.1 + torch.rand(rows, generator=generator, dtype=torch.float64)
    scale = scale if reference == "one a row" else torch.full_like(scale, 0.3)

    given_epsilon = epsilon if thresholds == "one a row" else 0.1
    given_scale = {"default": None, "number": 0.3, "one a row": scale}[reference]
    got_m = multi_modality(x, weights, threshold=given_epsilon, dim=dim)
    got_s = sparsity(x, weights, threshold=given_epsilon, reference=given_scale, dim=dim)
    assert got_m.shape == got_s.shape == rows

    one_row = zip(
        x.movedim(dim, -1).flatten(0, -2).tolist(),
        weights.movedim(dim, -1).flatten(0, -2).tolist(),
        epsilon.flatten().tolist(),
        scale.flatten().tolist(),
        strict=True,
    )
    expected = [
        (slow_multi_modality(values, its, e), slow_sparsity(values, its, e, None if given_scale is None else s))
        for values, its, e, s in one_row
    ]
    close(got_m.flatten(), [m for m, _ in expected])
    close(got_s.flatten(), [s for _, s in expected])


@PROPERTY
@given(
    values=st.lists(st.integers(-48, 48).map(lambda k: k / 16), min_size=1, max_size=9),
    threshold=st.integers(-50, 50).map(lambda k: k / 16),
    t_b=st.integers(0, 64).map(lambda k: k / 16),
    t_d=st.integers(0, 32).map(lambda k: k / 16),
)
def test_range_for_a_non_decreasing_function(values: list[float], threshold: float, t_b: float, t_d: float) -> None:
    x = tensor(values)
    coefs, knots = multimax.from_paper(*(tensor([value]) for value in (t_b, t_d, -0.5, 0.5)))
    for weights in (torch.softmax(x, -1), multimax.multimax(x, coefs, knots)):
        m = multi_modality(x, weights, threshold=threshold)
        s = sparsity(x, weights, threshold=threshold)
        close(m, slow_multi_modality(values, weights.tolist(), threshold))
        close(s, slow_sparsity(values, weights.tolist(), threshold, None))
        top = max(values)
        assert m.isnan() if not any(threshold < value < top for value in values) else 0 <= m <= 1 + 1e-12
        assert s.isnan() if not any(value < threshold for value in values) else 0 <= s <= 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dtype_is_kept(dtype: torch.dtype) -> None:
    x = torch.tensor([X, X], dtype=dtype)
    weights = torch.softmax(x, -1)
    # a threshold of another dtype does not widen the result
    for threshold in (0.0, torch.zeros(2, dtype=torch.float64)):
        assert multi_modality(x, weights, threshold=threshold).dtype == dtype
        assert sparsity(x, weights, threshold=threshold).dtype == dtype
