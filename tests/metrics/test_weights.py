import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import multimax
from multimax.metrics import entropy, multi_modality, sparsity, support, top_mass
from multimax.metrics.weights import mean_score

PROPERTY = settings(deadline=None, derandomize=True, max_examples=150)


def tensor(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def close(got: Tensor, expected: object) -> None:
    torch.testing.assert_close(got, torch.as_tensor(expected, dtype=got.dtype), rtol=1e-12, atol=1e-12, equal_nan=True)


def slow_multi_modality(x: list[float], weights: list[float], threshold: float) -> float:
    """Definition 3.2 for one row."""
    if not x:
        return math.nan
    top = max(range(len(x)), key=lambda i: x[i])
    gaps = [weights[top] - weights[i] for i in range(len(x)) if threshold < x[i] < x[top]]
    return 1 - sum(gaps) / len(gaps) if gaps else math.nan


def slow_sparsity(x: list[float], weights: list[float], threshold: float, reference: float | None) -> float:
    """Definition 3.3 for one row."""
    if not x:
        return math.nan
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
@pytest.mark.parametrize("thresholds", ["number", "one per row"])
@pytest.mark.parametrize("reference", ["default", "number", "one per row"])
def test_batches_along_every_dim_against_the_slow_loop(dim: int, thresholds: str, reference: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 4, 5, generator=generator, dtype=torch.float64)
    # weights of no relation to x: the measures must not rely on their order
    weights = torch.softmax(torch.randn(3, 4, 5, generator=generator, dtype=torch.float64), dim)
    rows = x.amin(dim).shape
    epsilon = torch.randn(rows, generator=generator, dtype=torch.float64)
    epsilon = epsilon if thresholds == "one per row" else torch.full_like(epsilon, 0.1)
    scale = 0.1 + torch.rand(rows, generator=generator, dtype=torch.float64)
    scale = scale if reference == "one per row" else torch.full_like(scale, 0.3)

    given_epsilon = epsilon if thresholds == "one per row" else 0.1
    given_scale = {"default": None, "number": 0.3, "one per row": scale}[reference]
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


MASKED = [-math.inf, torch.finfo(torch.float64).min, torch.finfo(torch.float64).min / 2]


@pytest.mark.parametrize("fill", MASKED)
def test_masked_by_value(fill: float) -> None:
    """What is masked counts nowhere: the row is that without it."""
    x, weights = tensor([3.0, 2.0, 1.0, -1.0]), tensor([0.4, 0.3, 0.2, 0.1])
    more, with_zeros = tensor([3.0, fill, 2.0, 1.0, -1.0, fill]), tensor([0.4, 0.0, 0.3, 0.2, 0.1, 0.0])
    # above all thresholds and below; the second would have masked entries among the relevant or irrelevant ones
    for threshold in (0.0, 1.5, -math.inf, math.inf, tensor([1.5])):
        for measure in (multi_modality, sparsity):
            expected = measure(x, weights, threshold=threshold)
            close(measure(more, with_zeros, threshold=threshold), expected)


def test_just_above_half_of_the_lowest_value_is_not_masked() -> None:
    low = torch.nextafter(torch.tensor(torch.finfo(torch.float64).min / 2, dtype=torch.float64), tensor(0.0)).item()
    x, weights = tensor([1.0, low]), tensor([1.0, 0.0])
    assert sparsity(x, weights, threshold=0.0, reference=0.5) == 1
    assert sparsity(tensor([1.0, 2 * low]), weights, threshold=0.0, reference=0.5).isnan()


@pytest.mark.parametrize("reference", [None, 0.1])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_mask_is_as_if_the_entries_were_not_there(reference: float | None, dim: int) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(6, 7, generator=generator, dtype=torch.float64)
    weights = torch.softmax(torch.randn(6, 7, generator=generator, dtype=torch.float64), dim)
    mask = torch.rand(6, 7, generator=generator) < 0.6
    # neither the largest entry nor NaN matters where it is masked
    x, weights = torch.where(mask, x, 100.0), torch.where(mask, weights, torch.nan)
    x[~mask & (torch.rand(6, 7, generator=generator) < 0.3)] = torch.nan
    rows = zip(x.movedim(dim, -1), weights.movedim(dim, -1), mask.movedim(dim, -1), strict=True)
    expected = [
        (
            slow_multi_modality(row[kept].tolist(), its[kept].tolist(), 0.1),
            slow_sparsity(row[kept].tolist(), its[kept].tolist(), 0.1, reference),
        )
        for row, its, kept in rows
    ]
    m = multi_modality(x, weights, threshold=0.1, mask=mask, dim=dim)
    s = sparsity(x, weights, threshold=0.1, reference=reference, mask=mask, dim=dim)
    close(m, [m for m, _ in expected])
    close(s, [s for _, s in expected])
    assert m.isfinite().any()
    assert s.isfinite().any()


def test_mask_broadcasts() -> None:
    x = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    weights = torch.softmax(x, -1)
    causal = torch.ones(4, 5, dtype=torch.bool).tril()
    for measure in (multi_modality, sparsity):
        close(
            measure(x, weights, threshold=0.0, mask=causal),
            measure(x, weights, threshold=0.0, mask=causal.expand(2, 3, 4, 5)),
        )


def test_rows_with_nothing_left() -> None:
    x = tensor([[1.0, 0.0, -1.0], [1.0, 0.0, -1.0]])
    weights = torch.softmax(x, -1)
    mask = torch.tensor([[True, True, True], [False, False, False]])
    empty = torch.empty(2, 0, dtype=torch.float64)
    for measure in (multi_modality, sparsity):
        assert measure(x, weights, threshold=-0.5, mask=mask).isnan().tolist() == [False, True]
        assert measure(torch.full_like(x, -math.inf), weights, threshold=-0.5).isnan().all()
        assert measure(empty, empty, threshold=0.0).isnan().tolist() == [True, True]


def test_a_nan_that_takes_part_shows_though_no_sum_has_it() -> None:
    x, weights = tensor([3.0, 2.0, -1.0]), tensor([0.5, 0.3, 0.2])
    for place in range(3):
        broken = weights.clone()
        broken[place] = math.nan
        assert multi_modality(x, broken, threshold=0.0).isnan()
        assert sparsity(x, broken, threshold=0.0, reference=0.1).isnan()
        broken_x = x.clone()
        broken_x[place] = math.nan
        assert sparsity(broken_x, weights, threshold=0.0, reference=0.1).isnan()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    x = torch.randn(50, 300).to(dtype)
    weights = torch.softmax(x, -1)
    x[:, 7] = torch.finfo(dtype).min  # masked in its own dtype, which float32's lowest value would not show
    for measure in (multi_modality, sparsity):
        got = measure(x, weights, threshold=0.1)
        filled = x.float()
        filled[:, 7] = -torch.inf
        assert got.dtype == torch.float32
        assert torch.equal(got, measure(filled, weights.float(), threshold=torch.tensor(0.1)))
    for got, expected in (
        (entropy(weights), entropy(weights.float())),
        (top_mass(weights, 200), top_mass(weights.float(), 200)),
    ):
        assert got.dtype == torch.float32
        assert torch.equal(got, expected)


def test_the_wider_dtype_of_scores_and_weights() -> None:
    x = torch.randn(4, 9, dtype=torch.float64)
    weights = torch.softmax(x, -1)
    assert multi_modality(x.float(), weights, threshold=0.0).dtype == torch.float64
    assert sparsity(x.bfloat16(), weights.float(), threshold=0.0).dtype == torch.float32


def test_a_number_alone_is_a_row_of_one() -> None:
    one = torch.tensor(1.0)
    assert multi_modality(one, one, threshold=0.0).isnan()
    assert sparsity(one, one, threshold=2.0, reference=1.0).item() == pytest.approx(math.exp(-1))
    assert entropy(one) == 0
    assert support(one) == 1
    assert top_mass(one, 3) == 1


def test_mean_score() -> None:
    x = tensor([[1.0, 2.0, 9.0], [-math.inf, 4.0, 2.0], [-math.inf, -math.inf, -math.inf]])
    mask = torch.tensor([True, True, False])
    close(mean_score(x), [4.0, 3.0, math.nan])
    close(mean_score(x, mask=mask), [1.5, 4.0, math.nan])
    close(mean_score(x.T, mask=mask[:, None], dim=0), [1.5, 4.0, math.nan])


def test_entropy_support_and_top_mass_by_hand() -> None:
    weights = tensor([[0.5, 0.25, 0.25, 0.0], [1.0, 0.0, 0.0, 0.0], [0.25, 0.25, 0.25, 0.25], [0.0, 0.0, 0.0, 0.0]])
    close(entropy(weights), [1.5 * math.log(2), 0.0, math.log(4), 0.0])
    assert support(weights).tolist() == [3, 1, 4, 0]
    assert support(weights, threshold=0.25).tolist() == [1, 1, 0, 0]
    assert support(weights, threshold=-1).tolist() == [4, 4, 4, 4]
    close(top_mass(weights, 1), [0.5, 1.0, 0.25, 0.0])
    close(top_mass(weights, 2), [0.75, 1.0, 0.5, 0.0])
    close(top_mass(weights, 9), [1.0, 1.0, 1.0, 0.0])
    close(top_mass(weights.T, 2, dim=0), [0.75, 1.0, 0.5, 0.0])
    close(entropy(weights.T, dim=0), entropy(weights))
    assert support(weights.T, dim=0).tolist() == [3, 1, 4, 0]
    empty = torch.empty(2, 0)
    assert entropy(empty).tolist() == top_mass(empty, 2).tolist() == [0.0, 0.0]
    assert support(empty).tolist() == [0, 0]


def test_nan_in_weights_alone() -> None:
    weights = tensor([[0.5, math.nan, 0.5], [0.5, 0.2, 0.3]])
    assert entropy(weights).isnan().tolist() == [True, False]
    assert top_mass(weights, 2).isnan().tolist() == [True, False]
    assert support(weights).tolist() == [2, 3]


@PROPERTY
@given(values=st.lists(st.floats(-20, 20), min_size=1, max_size=12), k=st.integers(1, 15))
def test_entropy_support_and_top_mass_against_loops(values: list[float], k: int) -> None:
    weights = torch.softmax(tensor(values), -1)
    values = weights.tolist()
    close(entropy(weights), -sum(value * math.log(value) for value in values if value > 0))
    close(top_mass(weights, k), sum(sorted(values, reverse=True)[:k]))
    assert support(weights, threshold=0.01) == sum(value > 0.01 for value in values)
    assert -1e-12 <= entropy(weights) <= math.log(len(values)) + 1e-12
    assert top_mass(weights, k) >= min(k / len(values), 1) - 1e-12
    assert entropy(weights) >= -math.log(top_mass(weights, 1)) - 1e-12  # no less than the min-entropy


@PROPERTY
@given(
    values=st.lists(st.integers(-48, 48).map(lambda k: k / 16), min_size=2, max_size=9),
    kept=st.integers(0, 2**9 - 1),
    threshold=st.integers(-50, 50).map(lambda k: k / 16),
)
def test_masks_against_loops(values: list[float], kept: int, threshold: float) -> None:
    mask = torch.tensor([bool(kept >> i & 1) for i in range(len(values))])
    x = tensor(values)
    weights = multimax.multimax(x, tensor([[0.0, 0.0]]), tensor([[0.0, 0.0]]), mask=mask)
    rest, its = x[mask].tolist(), weights[mask].tolist()
    m, s = (measure(x, weights, threshold=threshold, mask=mask) for measure in (multi_modality, sparsity))
    close(m, slow_multi_modality(rest, its, threshold))
    close(s, slow_sparsity(rest, its, threshold, None))
    filled = torch.where(mask, x, -torch.inf)
    close(multi_modality(filled, weights, threshold=threshold), m)
    close(sparsity(filled, weights, threshold=threshold), s)


def test_errors() -> None:
    x, weights = torch.randn(2, 3), torch.rand(2, 3)
    with pytest.raises(ValueError, match=r"multimax: expected weights of the shape of x, \(2, 3\), got \(3,\)"):
        multi_modality(x, weights[0], threshold=0.0)
    with pytest.raises(ValueError, match=r"expected one number or one per row, of shape \(2,\), got \(3,\)"):
        sparsity(x, weights, threshold=torch.zeros(3))
    with pytest.raises(TypeError, match="expected mask to be a boolean tensor"):
        sparsity(x, weights, threshold=0.0, mask=torch.ones(2, 3))
    with pytest.raises(ValueError, match="expected a mask that broadcasts"):
        multi_modality(x, weights, threshold=0.0, mask=torch.ones(5, 3, dtype=torch.bool))
    with pytest.raises(TypeError, match="expected x of dtype"):
        multi_modality(x.long(), weights, threshold=0.0)
    with pytest.raises(ValueError, match="multimax: expected k of at least 1, got 0"):
        top_mass(weights, 0)
    with pytest.raises(TypeError, match="multimax: expected k to be an int, got bool"):
        top_mass(weights, True)
    with pytest.raises(ValueError, match=r"expected dim in \[-2, 1\]"):
        entropy(weights, dim=2)
    with pytest.raises(TypeError, match="expected threshold to be a number, got str"):
        support(weights, threshold="0")  # type: ignore[arg-type]
