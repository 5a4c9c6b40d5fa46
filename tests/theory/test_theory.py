"""The paper's Lemmas and Propositions on its two measures, M and S. The proofs are in docs/theory.md.

Inputs lie on a grid of sixteenths in a small range: what is claimed to differ then differs by far more than rounding.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from torch import Tensor

import multimax
from multimax.metrics import multi_modality, sparsity

PROPERTY = settings(deadline=None, derandomize=True, max_examples=120)
ROUNDING = 1e-12
STEP = 1 / 16


def row(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def grid(low: float, high: float) -> SearchStrategy[float]:
    return st.integers(round(low / STEP), round(high / STEP)).map(lambda k: k * STEP)


def paper(t_b: list[float], t_d: list[float], b: list[float], d: list[float]) -> tuple[Tensor, Tensor]:
    return multimax.from_paper(row(t_b), row(t_d), row(b), row(d))


def lower_only(t_b: list[float], b: list[float]) -> tuple[Tensor, Tensor]:
    """MultiMax-l."""
    return paper(t_b, [1.0] * len(b), b, [0.0] * len(b))


def softmax(x: Tensor, temperature: float = 1.0) -> Tensor:
    return torch.softmax(x / temperature, -1)


def m(x: Tensor, weights: Tensor, threshold: float) -> float:
    return multi_modality(x, weights, threshold=threshold).item()


def s(x: Tensor, weights: Tensor, threshold: float, reference: float | None = None) -> float:
    return sparsity(x, weights, threshold=threshold, reference=reference).item()


def second_largest(x: Tensor) -> float:
    return x[x < x.max()].max().item()


def temperature_of_mass(x: Tensor, entries: Tensor, mass: float, low: float, high: float) -> float:
    """The temperature at which softmax gives the lowest entries that mass; it rises with temperature."""
    for _ in range(60):
        middle = (low + high) / 2
        if softmax(x, middle)[entries].sum().item() < mass:
            low = middle
        else:
            high = middle
    return (low + high) / 2


@st.composite
def rows(draw: st.DrawFn) -> Tensor:
    """Two entries that differ, and any others, ties included."""
    low, gap = draw(grid(-2, 2)), draw(grid(STEP, 2))
    others = draw(st.lists(grid(-2, 2), max_size=6))
    return row(draw(st.permutations([low, low + gap, *others])))


@st.composite
def split_rows(draw: st.DrawFn, distinct_below: int = 1, distinct_above: int = 1) -> tuple[float, Tensor]:
    """b, and a row with so many distinct values below b and above it, besides ties and entries at b itself."""
    b = draw(grid(-1, 1))
    below = draw(st.lists(grid(STEP, 2), min_size=distinct_below, max_size=4, unique=True))
    above = draw(st.lists(grid(STEP, 2), min_size=distinct_above, max_size=4, unique=True))
    ties = draw(st.lists(st.sampled_from([0.0, *above, *(-value for value in below)]), max_size=2))
    return b, row(draw(st.permutations([b - v for v in below] + [b + v for v in [*above, *ties]])))


def relevant_thresholds(x: Tensor) -> SearchStrategy[float]:
    """Thresholds below at least one entry that is not the largest."""
    return grid(0, 4).map(lambda depth: second_largest(x) - depth - STEP / 2)


def irrelevant_thresholds(x: Tensor) -> SearchStrategy[float]:
    """Thresholds above at least one entry, up to above all of them."""
    return grid(STEP, 5).map(lambda height: x.min().item() + height)


SLOPES_ABOVE_ONE = grid(1 + STEP, 4)
REFERENCES = grid(STEP, 1)


@PROPERTY
@given(st.data())
def test_lemma_3_4_sparsity_falls_with_each_small_weight(data: st.DataObject) -> None:
    x = data.draw(rows())
    threshold = data.draw(irrelevant_thresholds(x))
    reference = data.draw(REFERENCES)
    weights = row(data.draw(st.lists(grid(0, 0.5), min_size=len(x), max_size=len(x))))
    index = data.draw(st.integers(0, len(x) - 1))
    more = weights.clone()
    more[index] += data.draw(grid(STEP, 0.5))
    before, after = s(x, weights, threshold, reference), s(x, more, threshold, reference)
    if x[index] < threshold:
        assert after < before
    else:
        assert after == before


@PROPERTY
@given(st.data())
def test_lemma_3_4_derivative(data: st.DataObject) -> None:
    x = data.draw(rows())
    threshold, reference = data.draw(irrelevant_thresholds(x)), data.draw(REFERENCES)
    weights = softmax(x).requires_grad_()
    sparsity(x, weights, threshold=threshold, reference=reference).backward()
    small = x < threshold
    expected = torch.where(small, -torch.exp(-weights.detach() / reference) / (reference * small.sum()), 0.0)
    torch.testing.assert_close(weights.grad, expected, rtol=ROUNDING, atol=ROUNDING)


@PROPERTY
@given(st.data())
def test_sparsity_of_softmax_at_the_default_reference_is_at_most_one_over_e(data: st.DataObject) -> None:
    x = data.draw(rows())
    assert s(x, softmax(x), data.draw(irrelevant_thresholds(x))) <= math.exp(-1) + ROUNDING


@PROPERTY
@given(st.data())
def test_proposition_3_5_1_multi_modality_of_softmax_rises_with_temperature(data: st.DataObject) -> None:
    x = data.draw(rows())
    threshold = data.draw(relevant_thresholds(x))
    cold = data.draw(grid(0.5, 4))
    hot = cold * (1 + data.draw(grid(2 * STEP, 2)))
    assert m(x, softmax(x, hot), threshold) > m(x, softmax(x, cold), threshold) + ROUNDING


@PROPERTY
@given(st.data())
def test_proposition_3_5_2_sparsity_of_softmax_falls_with_temperature_for_any_threshold(data: st.DataObject) -> None:
    x = data.draw(rows())
    threshold, reference = data.draw(irrelevant_thresholds(x)), data.draw(REFERENCES)
    cold = data.draw(grid(0.5, 4))
    hot = cold * (1 + data.draw(grid(2 * STEP, 2)))
    assert s(x, softmax(x, hot), threshold, reference) < s(x, softmax(x, cold), threshold, reference) - ROUNDING
    # at the paper's reference, often too small a scale for a difference to show
    assert s(x, softmax(x, hot), threshold) <= s(x, softmax(x, cold), threshold) + ROUNDING


@PROPERTY
@given(st.data())
def test_proposition_3_5_2_weights_of_entries_below_the_mean_rise_with_temperature(data: st.DataObject) -> None:
    x = data.draw(rows())
    cold = data.draw(grid(0.5, 4))
    hot = cold * (1 + data.draw(grid(2 * STEP, 2)))
    small = x < x.mean()
    assert (softmax(x, hot)[small] > softmax(x, cold)[small] + ROUNDING).all()


def test_proposition_3_5_2_weights_below_the_printed_threshold_can_fall_with_temperature() -> None:
    x, threshold = row([0.0, -1.0, -8.0]), -0.5
    assert threshold <= x.abs().mean()  # the printed condition; the mean is -3
    cold, hot = softmax(x, 4.0), softmax(x, 16.0)
    assert [cold[1].item(), hot[1].item()] == pytest.approx([0.4069, 0.3690], abs=5e-5)
    # the sum over all small entries falls all the same
    assert s(x, hot, threshold, 0.1) == pytest.approx(0.0587, abs=5e-5)
    assert s(x, cold, threshold, 0.1) == pytest.approx(0.2551, abs=5e-5)


@PROPERTY
@given(b=grid(-1, 1), distance=grid(STEP, 3), slope=grid(-2, 4))
def test_lemma_a_1(b: float, distance: float, slope: float) -> None:
    line = paper([slope], [slope], [b], [b])  # t x + (1 - t) b on both sides
    below, above = row([b - distance]), row([b + distance])
    if slope > 1:
        assert multimax.modulate(below, *line) < below
        assert multimax.modulate(above, *line) > above
    elif slope < 1:
        assert multimax.modulate(below, *line) > below
        assert multimax.modulate(above, *line) < above
    else:
        assert multimax.modulate(below, *line) == below
        assert multimax.modulate(above, *line) == above


def lemma_a_2_sums(below: Tensor, entry: float, slope: float, b: float) -> tuple[float, float]:
    """The sums of exp(t (x_l - x_i)) and of exp(x_l - x_i), the former by the modulator."""
    modulated = multimax.modulate(torch.cat([below, row([entry])]), *lower_only([slope], [b]))
    return (modulated[:-1] - modulated[-1]).exp().sum().item(), (below - entry).exp().sum().item()


@PROPERTY
@given(
    b=grid(-1, 1),
    depths=st.lists(grid(STEP, 2), min_size=1, max_size=6),
    slack=grid(0, 1),
    slope=SLOPES_ABOVE_ONE,
)
def test_lemma_a_2_for_entries_up_to_the_mean(b: float, depths: list[float], slack: float, slope: float) -> None:
    below = row([b - depth for depth in depths])
    steep, plain = lemma_a_2_sums(below, below.mean().item() - slack, slope, b)
    if slack == 0 and len(set(depths)) == 1:
        assert steep == pytest.approx(plain, rel=ROUNDING)
    else:
        assert steep > plain * (1 + ROUNDING)


@PROPERTY
@given(
    b=grid(-1, 1),
    depths=st.lists(grid(STEP, 2), min_size=2, max_size=6, unique=True),
    slope=SLOPES_ABOVE_ONE,
    offset=grid(STEP, 1),
)
def test_lemma_a_2_holds_up_to_the_weighted_mean_and_no_further(
    b: float, depths: list[float], slope: float, offset: float
) -> None:
    below = row([b - depth for depth in depths])
    weighted_mean = (below * softmax(below)).sum().item()
    log_mean_exp = (below.logsumexp(-1) - math.log(len(below))).item()
    assert below.mean().item() < log_mean_exp < weighted_mean
    steep, plain = lemma_a_2_sums(below, weighted_mean, slope, b)
    assert steep >= plain * (1 - ROUNDING)
    # a slope near enough to 1 shows that the bound is sharp
    entry = weighted_mean + offset * (b - weighted_mean)
    steep, plain = lemma_a_2_sums(below, entry, 1 + 1e-4, b)
    assert steep < plain * (1 - ROUNDING)


def test_lemma_a_2_printed_proof_has_a_false_step() -> None:
    below, entry = row([-6.0, -3.0, -3.0]), -6.0
    differences = below - entry
    # the printed condition, for a threshold above the entry
    assert entry < (below.sum().item() - math.log(3)) / 3 == pytest.approx(-4.3662, abs=5e-5)
    assert differences.exp().sum().item() == pytest.approx(41.1711, abs=5e-5)
    assert differences.sum().exp().item() == pytest.approx(403.4288, abs=5e-5)
    # Jensen's inequality as it is
    assert differences.exp().sum() >= 3 * differences.mean().exp()


def test_lemma_a_2_needs_its_condition() -> None:
    steep, plain = lemma_a_2_sums(row([-1.0, -3.0]), -1.0, 2.0, 0.0)
    assert [steep, plain] == pytest.approx([1.0183, 1.1353], abs=5e-5)


@st.composite
def lower_parameters(draw: st.DrawFn, b: float) -> tuple[list[float], list[float]]:
    """t_b and b of order 1 to 3, all slopes at least 1 and the first above 1."""
    further = draw(st.lists(st.tuples(grid(1, 3), grid(-1, 1)), max_size=2))
    return [draw(SLOPES_ABOVE_ONE), *(t for t, _ in further)], [b, *(knot for _, knot in further)]


@PROPERTY
@given(st.data())
def test_proposition_4_2_1_lower_term_is_sparser_than_softmax_for_any_threshold(data: st.DataObject) -> None:
    b, x = data.draw(split_rows(distinct_above=0))
    weights = multimax.multimax(x, *lower_only(*data.draw(lower_parameters(b))))
    threshold, reference = data.draw(irrelevant_thresholds(x)), data.draw(REFERENCES)
    gain = s(x, weights, threshold, reference) - s(x, softmax(x), threshold, reference)
    if x.min() == x.max():  # both uniform
        assert gain == pytest.approx(0, abs=ROUNDING)
    else:
        assert gain > ROUNDING
    assert s(x, weights, threshold) >= s(x, softmax(x), threshold) - ROUNDING


@PROPERTY
@given(case=split_rows(distinct_below=2, distinct_above=0), t_b=SLOPES_ABOVE_ONE)
def test_proposition_4_2_1_each_weight_below_the_mean_of_the_small_entries_falls(
    case: tuple[float, Tensor], t_b: float
) -> None:
    b, x = case
    small = x < x[x < b].mean()
    assert small.any()
    weights = multimax.multimax(x, *lower_only([t_b], [b]))
    assert (weights[small] < softmax(x)[small] - ROUNDING).all()


def test_proposition_4_2_1_a_small_weight_above_the_mean_can_rise() -> None:
    x, threshold = row([2.0, -0.01, -1.0, -1.0, -1.0]), 0.0
    weights = multimax.multimax(x, *lower_only([3.0], [0.0]))
    assert [softmax(x)[1].item(), weights[1].item()] == pytest.approx([0.1044, 0.1141], abs=5e-5)
    # which does not make the row less sparse
    assert s(x, softmax(x), threshold, 0.1) == pytest.approx(0.5968, abs=5e-5)
    assert s(x, weights, threshold, 0.1) == pytest.approx(0.7873, abs=5e-5)


def test_proposition_4_2_2_is_false_as_printed() -> None:
    x = row([2.0, 1.0, -1.0])
    weights = multimax.multimax(x, *lower_only([2.0], [0.0]))
    assert softmax(x).tolist() == pytest.approx([0.7054, 0.2595, 0.0351], abs=5e-5)
    assert weights.tolist() == pytest.approx([0.7214, 0.2654, 0.0132], abs=5e-5)
    assert m(x, softmax(x), 0.0) == pytest.approx(0.5541, abs=5e-5)
    assert m(x, weights, 0.0) == pytest.approx(0.5440, abs=5e-5)
    # the printed proof takes Lemma A.2 for the largest entry, where the inequality is reversed
    steep, plain = (2.0 * (x[2:] - 2.0)).exp().sum().item(), (x[2:] - 2.0).exp().sum().item()
    assert [steep, plain] == pytest.approx([0.0025, 0.0498], abs=5e-5)


@PROPERTY
@given(st.data())
def test_proposition_4_2_2_lower_term_is_less_multi_modal_than_softmax(data: st.DataObject) -> None:
    b, x = data.draw(split_rows(distinct_above=data.draw(st.integers(0, 2)), distinct_below=2))
    weights = multimax.multimax(x, *lower_only(*data.draw(lower_parameters(b))))
    threshold = data.draw(relevant_thresholds(x))
    assert m(x, weights, threshold) < m(x, softmax(x), threshold) - ROUNDING


@PROPERTY
@given(x=rows(), depth=grid(0, 2), t_b=SLOPES_ABOVE_ONE)
def test_lower_term_without_entries_below_b_is_softmax(x: Tensor, depth: float, t_b: float) -> None:
    weights = multimax.multimax(x, *lower_only([t_b], [x.min().item() - depth]))
    torch.testing.assert_close(weights, softmax(x), rtol=ROUNDING, atol=0)


@PROPERTY
@given(x=rows(), height=grid(STEP, 2), t_b=SLOPES_ABOVE_ONE)
def test_lower_term_with_all_entries_below_b_is_softmax_at_a_lower_temperature(
    x: Tensor, height: float, t_b: float
) -> None:
    weights = multimax.multimax(x, *lower_only([t_b], [x.max().item() + height]))
    torch.testing.assert_close(weights, softmax(x, 1 / t_b), rtol=ROUNDING, atol=0)


@PROPERTY
@given(case=split_rows(distinct_above=2), t_b=SLOPES_ABOVE_ONE)
def test_proposition_4_2_2_ratios_above_b_are_those_of_softmax(case: tuple[float, Tensor], t_b: float) -> None:
    b, x = case
    high = x[x >= b]
    weights = multimax.multimax(x, *lower_only([t_b], [b]))[x >= b]
    torch.testing.assert_close(weights / weights.max(), (high - high.max()).exp(), rtol=ROUNDING, atol=0)


@PROPERTY
@given(case=split_rows(distinct_above=2), t_b=SLOPES_ABOVE_ONE, reference=REFERENCES)
def test_proposition_4_2_2_lower_term_beats_softmax_of_equal_small_mass(
    case: tuple[float, Tensor], t_b: float, reference: float
) -> None:
    b, x = case
    weights = multimax.multimax(x, *lower_only([t_b], [b]))
    mass = weights[x < b].sum().item()
    assert softmax(x, 1 / t_b)[x < b].sum() < mass < softmax(x)[x < b].sum()
    temperature = temperature_of_mass(x, x < b, mass, 1 / t_b, 1.0)
    rival = softmax(x, temperature)
    assert rival[x < b].sum().item() == pytest.approx(mass, rel=ROUNDING)
    assert m(x, weights, b) > m(x, rival, b) + ROUNDING
    assert s(x, weights, b, reference) >= s(x, rival, b, reference) - ROUNDING


def test_proposition_4_2_2_lower_term_beats_softmax_of_equal_small_mass_in_numbers() -> None:
    x = row([2.0, 1.0, -1.0, -2.0])
    weights = multimax.multimax(x, *lower_only([2.0], [0.0]))
    temperature = temperature_of_mass(x, x < 0, weights[2:].sum().item(), 0.5, 1.0)
    assert temperature == pytest.approx(0.7166, abs=5e-5)
    plain, rival = softmax(x), softmax(x, temperature)
    assert [m(x, w, 0.0) for w in (plain, weights, rival)] == pytest.approx([0.5598, 0.5448, 0.4061], abs=5e-5)
    assert [s(x, w, 0.0) for w in (plain, weights, rival)] == pytest.approx([0.2169, 0.6125, 0.5912], abs=5e-5)


@st.composite
def full_parameters(
    draw: st.DrawFn, b: float, x: Tensor, lowest: float, part: float
) -> tuple[float, float, float, float]:
    """t_b, t_d, b and d >= b, so that `lowest` is at most b - (1 - t_d) / (t_b - 1) (x_max - d).

    x_max > d; `part` of the room for x_max - d is used at most.
    """
    t_b, t_d = draw(SLOPES_ABOVE_ONE), draw(grid(0, 1 - STEP))
    room = part * (t_b - 1) * (b - lowest) / (1 - t_d)
    top = x.max().item()
    return t_b, t_d, b, top - min(draw(grid(STEP, 1)) * (top - b), room)


def full(t_b: float, t_d: float, b: float, d: float) -> tuple[Tensor, Tensor]:
    return paper([t_b], [t_d], [b], [d])


@PROPERTY
@given(st.data())
def test_no_temperature_of_softmax_reaches_both_measures_of_multimax(data: st.DataObject) -> None:
    b, x = data.draw(split_rows(distinct_above=2))
    t_b, t_d, b, d = data.draw(full_parameters(b, x, x[x < b].max().item(), 1.0))
    reference = data.draw(REFERENCES)
    for weights in (multimax.multimax(x, *lower_only([t_b], [b])), multimax.multimax(x, *full(t_b, t_d, b, d))):
        mass = weights[x < b].sum().item()
        assert mass <= softmax(x)[x < b].sum() + ROUNDING
        equal = temperature_of_mass(x, x < b, mass, 1 / t_b, 1.0)
        rival = softmax(x, equal)
        assert m(x, weights, b) > m(x, rival, b) + ROUNDING
        assert s(x, weights, b, reference) >= s(x, rival, b, reference) - ROUNDING
        for factor in (0.3, 0.7, 0.9, 0.99, 1.01, 1.1, 1.5, 3.0):
            rival = softmax(x, equal * factor)
            assert m(x, rival, b) < m(x, weights, b) or s(x, rival, b, reference) < s(x, weights, b, reference)


@PROPERTY
@given(st.data())
def test_proposition_4_3_1_multimax_is_sparser_than_softmax_under_one_condition(data: st.DataObject) -> None:
    b, x = data.draw(split_rows())
    t_b, t_d, b, d = data.draw(full_parameters(b, x, x.min().item(), 0.9))
    threshold = b - (1 - t_d) / (t_b - 1) * (x.max().item() - d)
    assert x.min() < threshold
    weights, reference = multimax.multimax(x, *full(t_b, t_d, b, d)), data.draw(REFERENCES)
    assert s(x, weights, threshold, reference) > s(x, softmax(x), threshold, reference) + ROUNDING
    assert s(x, weights, threshold) >= s(x, softmax(x), threshold) - ROUNDING


@PROPERTY
@given(st.data())
def test_proposition_4_3_1_each_small_weight_falls_under_both_conditions(data: st.DataObject) -> None:
    b, x = data.draw(split_rows(distinct_below=2))
    t_b, t_d, b, d = data.draw(full_parameters(b, x, x.min().item(), 0.9))
    threshold = min(b - (1 - t_d) / (t_b - 1) * (x.max().item() - d), x[x < b].mean().item())
    small = x < threshold
    assert small.any()
    weights = multimax.multimax(x, *full(t_b, t_d, b, d))
    assert (weights[small] < softmax(x)[small] - ROUNDING).all()


def test_proposition_4_3_1_needs_its_condition_for_the_largest_entry() -> None:
    x, threshold = row([6.0, 1.5, -1.0, -3.0]), -2.0
    t_b, t_d, b, d = 2.0, 0.1, 0.0, 1.0
    assert threshold <= x[x < b].mean()  # the condition of Lemma A.2
    assert threshold <= b - (1 - t_d) / (t_b - 1) * (1.5 - d)  # -0.45: for the second largest entry
    assert threshold > b - (1 - t_d) / (t_b - 1) * (6.0 - d)  # -4.5: but not for the largest
    weights = multimax.multimax(x, *full(t_b, t_d, b, d))
    assert [softmax(x)[3].item(), weights[3].item()] == pytest.approx([0.000122, 0.000332], abs=5e-7)
    assert s(x, softmax(x), threshold) == pytest.approx(0.3679, abs=5e-5)
    assert s(x, weights, threshold) == pytest.approx(0.0659, abs=5e-5)


@PROPERTY
@given(st.data())
def test_proposition_4_3_2_multimax_is_more_multi_modal_than_its_lower_term(data: st.DataObject) -> None:
    x = data.draw(rows())
    t_b, b = data.draw(lower_parameters(data.draw(grid(-2, 2))))
    # neither d >= b nor t_d >= 0 is needed; higher orders of both terms may join in
    d = [x.max().item() - data.draw(grid(STEP, 4)), *(data.draw(grid(-2, 2)) for _ in b[1:])]
    t_d = [data.draw(grid(-1, 1 - STEP)), *(data.draw(grid(0, 1)) for _ in b[1:])]
    both, lower = multimax.multimax(x, *paper(t_b, t_d, b, d)), multimax.multimax(x, *lower_only(t_b, b))
    threshold = data.draw(relevant_thresholds(x))
    assert m(x, both, threshold) > m(x, lower, threshold) + ROUNDING


@PROPERTY
@given(case=split_rows(), height=grid(0, 2), t_b=SLOPES_ABOVE_ONE, t_d=grid(-1, 1))
def test_upper_term_without_entries_above_d_is_the_lower_term_alone(
    case: tuple[float, Tensor], height: float, t_b: float, t_d: float
) -> None:
    b, x = case
    weights = multimax.multimax(x, *full(t_b, t_d, b, x.max().item() + height))
    torch.testing.assert_close(weights, multimax.multimax(x, *lower_only([t_b], [b])), rtol=ROUNDING, atol=0)


def test_proposition_4_3_2_does_not_make_multimax_more_multi_modal_than_softmax() -> None:
    x = row([2.0, 1.0, -1.0])
    weights = multimax.multimax(x, *full(2.0, 0.99, 0.0, 1.5))
    assert m(x, softmax(x), 0.0) == pytest.approx(0.5541, abs=5e-5)
    assert m(x, weights, 0.0) == pytest.approx(0.5460, abs=5e-5)


@PROPERTY
@given(st.data())
def test_multimax_is_more_multi_modal_than_softmax_if_the_top_moves_at_least_as_far(data: st.DataObject) -> None:
    b, x = data.draw(split_rows(distinct_above=2))
    top, depth = x.max().item(), b - x.min().item()
    t_d, d = data.draw(grid(0, 1 - STEP)), b + data.draw(grid(0, 1 - STEP)) * (top - b)
    t_b = 1 + data.draw(grid(STEP, 1)) * (1 - t_d) * (top - d) / depth
    weights = multimax.multimax(x, *full(t_b, t_d, b, d))
    threshold = data.draw(relevant_thresholds(x))
    assert m(x, weights, threshold) > m(x, softmax(x), threshold) + ROUNDING


def test_multimax_can_be_better_in_both_measures_than_softmax() -> None:
    x = row([3.0, 2.0, -1.0])
    weights = multimax.multimax(x, *full(2.0, 0.5, 0.0, 1.0))
    assert [m(x, softmax(x), 0.0), m(x, weights, 0.0)] == pytest.approx([0.5440, 0.7578], abs=5e-5)
    assert [s(x, softmax(x), 0.0), s(x, weights, 0.0)] == pytest.approx([0.3679, 0.4261], abs=5e-5)


@PROPERTY
@given(case=split_rows(distinct_above=2), t_b=SLOPES_ABOVE_ONE)
def test_flat_upper_slope_makes_all_relevant_entries_equal(case: tuple[float, Tensor], t_b: float) -> None:
    b, x = case
    assert m(x, multimax.multimax(x, *full(t_b, 0.0, b, b)), b) == pytest.approx(1, abs=ROUNDING)


def value_and_slope(x: Tensor, coefs: Tensor, knots: Tensor) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    value = multimax.modulate(x, coefs, knots)
    (slope,) = torch.autograd.grad(value.sum(), x)
    return value.detach(), slope


NONZERO = st.lists(grid(-3, 3).filter(bool), min_size=1, max_size=8)


def compare_with_activation(values: list[float], slope_below: float, activation: Tensor, gradient: Tensor) -> None:
    value, slope = value_and_slope(row(values), *paper([slope_below], [1.0], [0.0], [0.0]))
    torch.testing.assert_close(value, activation, rtol=ROUNDING, atol=ROUNDING)
    torch.testing.assert_close(slope, gradient, rtol=ROUNDING, atol=ROUNDING)


@PROPERTY
@given(NONZERO)
def test_sigma_is_relu(values: list[float]) -> None:
    x = row(values).requires_grad_()
    expected = torch.nn.functional.relu(x)
    compare_with_activation(values, 0.0, expected.detach(), torch.autograd.grad(expected.sum(), x)[0])


@PROPERTY
@given(NONZERO, grid(0, 1))
def test_sigma_is_leaky_relu(values: list[float], slope: float) -> None:
    x = row(values).requires_grad_()
    expected = torch.nn.functional.leaky_relu(x, slope)
    compare_with_activation(values, slope, expected.detach(), torch.autograd.grad(expected.sum(), x)[0])


@PROPERTY
@given(NONZERO, grid(-1, 2))
def test_sigma_is_prelu_with_the_gradient_of_its_slope(values: list[float], slope: float) -> None:
    gradients, results = [], []
    for ours in (True, False):
        x, weight = row(values).requires_grad_(), row([slope]).requires_grad_()
        if ours:
            result = multimax.modulate(x, *multimax.from_paper(weight, [1.0], [0.0], [0.0]))
        else:
            result = torch.nn.functional.prelu(x, weight)
        results.append(result.detach())
        gradients.append(torch.autograd.grad((result * torch.arange(1.0, len(values) + 1)).sum(), (x, weight)))
    torch.testing.assert_close(results[0], results[1], rtol=ROUNDING, atol=ROUNDING)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=ROUNDING, atol=ROUNDING)


@PROPERTY
@given(rows(), grid(0.25, 4), grid(-2, 2))
def test_multimax_is_softmax_at_any_temperature(x: Tensor, temperature: float, knot: float) -> None:
    weights = multimax.multimax(x, *full(1 / temperature, 1 / temperature, knot, knot))
    torch.testing.assert_close(weights, softmax(x, temperature), rtol=ROUNDING, atol=0)


@PROPERTY
@given(b=grid(-1, 1), width=grid(STEP, 2), t_b=grid(-2, 4), t_d=grid(-2, 4))
def test_slope_at_the_knots_themselves_is_one(b: float, width: float, t_b: float, t_d: float) -> None:
    knots = row([b, b + width])
    value, slope = value_and_slope(knots, *full(t_b, t_d, b, b + width))
    assert value.tolist() == knots.tolist()
    assert slope.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("order", [1, 2, 3])
@PROPERTY
@given(st.data())
def test_sigma_is_continuous_at_its_knots_and_smooth_at_those_of_order_two_on(order: int, data: st.DataObject) -> None:
    slopes = data.draw(st.lists(grid(-2, 4), min_size=2 * order, max_size=2 * order))
    # distinct knots, so that each jump is one term's
    places = data.draw(st.lists(grid(-2, 2), min_size=2 * order, max_size=2 * order, unique=True))
    coefs, knots = paper(slopes[:order], slopes[order:], places[:order], places[order:])
    # bounds of the first and second derivative where all distances are below 5
    power = torch.arange(1, order + 1, dtype=torch.float64)
    size = coefs.abs().sum(-1)
    steepest = 1 + (power * size * 5 ** (power - 1)).sum().item()
    bend = (power * (power - 1) * size * 5 ** (power - 2).clamp(min=0)).sum().item()

    near = 2.0**-30
    at, _ = value_and_slope(knots, coefs, knots)
    left, slope_left = value_and_slope(knots - near, coefs, knots)
    right, slope_right = value_and_slope(knots + near, coefs, knots)
    assert ((left - at).abs() <= steepest * (near + ROUNDING)).all()
    assert ((right - at).abs() <= steepest * (near + ROUNDING)).all()
    # by 1 - t_b at b and by t_d - 1 at d of order 1, and not at all for the others
    jump = torch.cat([coefs[:1], torch.zeros_like(coefs[1:])])
    assert ((slope_right - slope_left - jump).abs() <= 2 * bend * near + steepest * ROUNDING).all()


@PROPERTY
@given(
    x=st.lists(grid(-3, 3), min_size=1, max_size=8),
    b=grid(-2, 2),
    width=grid(0, 2),
    t_b=grid(-2, 4),
    t_d=grid(-2, 4),
)
def test_equation_5_is_equation_4(x: list[float], b: float, width: float, t_b: float, t_d: float) -> None:
    d = b + width
    pieces = [t_b * v + (1 - t_b) * b if v < b else t_d * v + (1 - t_d) * d if v > d else v for v in x]
    got = multimax.modulate(row(x), *full(t_b, t_d, b, d))
    torch.testing.assert_close(got, row(pieces), rtol=ROUNDING, atol=ROUNDING)


def test_equation_5_is_not_equation_4_for_knots_in_reverse() -> None:
    b, d, t_b, t_d = 1.0, -1.0, 2.0, 0.5
    # 0 is both below b and above d: the pieces give -1 or -0.5, equation 4 adds both terms
    assert multimax.modulate(row([0.0]), *full(t_b, t_d, b, d)).item() == -1.5
    # which is no rare case: learned knots are often in this order
    first = multimax.presets["deit_small"][0]
    assert first.b[0] > first.d[0]
