"""Figure 1 of the paper: that MultiMax with learned parameters reaches what no other function does, S and M at once.

The figure's inputs are not printed; they are rows of R^3 with a largest, a second largest and a negative entry. When
the claim holds is worked out in docs/theory.md. A function *reaches* MultiMax on a row if neither its S nor its M is
smaller.
"""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from torch import Tensor

import multimax
from multimax import reweighting
from multimax.metrics import multi_modality, sparsity

PROPERTY = settings(deadline=None, derandomize=True, max_examples=120)
STEP = 1 / 16
ROUNDING = 1e-12
DEIT, LANGUAGE = "deit_small", "wikitext103_lm"
LAYERS = [(DEIT, number) for number in range(1, 13)] + [(LANGUAGE, number) for number in range(1, 7)]
SPARSE: dict[str, Callable[..., Tensor]] = {
    "sparsemax": reweighting.sparsemax,
    "entmax15": reweighting.entmax15,
    "evsoftmax": reweighting.evsoftmax,
}
TEMPERATURES = torch.logspace(-1, 2, 50, dtype=torch.float64)[:, None]


def row(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def grid(low: float, high: float) -> SearchStrategy[float]:
    return st.integers(round(low / STEP), round(high / STEP)).map(lambda k: k * STEP)


@st.composite
def rows(draw: st.DrawFn) -> Tensor:
    """x1 > x2 > 0 > x3."""
    second = draw(grid(STEP, 2))
    return row(second + draw(grid(STEP, 2)), second, -draw(grid(STEP, 2)))


def layer(preset: str, number: int) -> tuple[Tensor, Tensor]:
    """Learned parameters, layers counted from 1."""
    return multimax.from_paper(*(row(*values) for values in multimax.presets[preset][number - 1]))


def bent(x: Tensor, lower: float, upper: float) -> tuple[Tensor, Tensor]:
    """Order 1 with b = d = x2: any two slopes of sigma, from x3 to x2 and from x2 to x1."""
    return multimax.from_paper(row(lower), row(upper), x[1:2], x[1:2])


def measures(x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    return sparsity(x, weights, threshold=0.0), multi_modality(x, weights, threshold=0.0)


def reached(x: Tensor, weights: Tensor, by: Tensor) -> Tensor:
    """Whether the second weights have at least the S and the M of the first."""
    (s, m), (other_s, other_m) = measures(x, weights), measures(x, by)
    return (other_s >= s) & (other_m >= m)


def slopes(x: Tensor, coefs: Tensor, knots: Tensor) -> tuple[Tensor, Tensor]:
    """Of sigma, from x3 to x2 and from x2 to x1."""
    sigma = multimax.modulate(x, coefs, knots)
    lower, upper = sigma[..., 1] - sigma[..., 2], sigma[..., 0] - sigma[..., 1]
    return lower / (x[..., 1] - x[..., 2]), upper / (x[..., 0] - x[..., 1])


def reached_by_softmax(x: Tensor, coefs: Tensor, knots: Tensor) -> Tensor:
    """At some temperature, by the statement that is tested below."""
    lower, upper = slopes(x, coefs, knots)
    return (upper > 0) & (lower <= upper + ROUNDING)  # equal where sigma is one line


def temperature_where(rising: Callable[[float], float], value: float) -> float:
    low, high = -8.0, 8.0
    for _ in range(52):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(math.exp(middle)) < value else (low, middle)
    return math.exp((low + high) / 2)


def temperatures(x: Tensor, weights: Tensor) -> tuple[float, float]:
    """At which softmax has the S, and the M, of the weights."""
    s, m = (value.item() for value in measures(x, weights))

    def at(temperature: float) -> tuple[float, float]:
        s, m = measures(x, reweighting.softmax(x, temperature=temperature))
        return -s.item(), m.item()

    return temperature_where(lambda t: at(t)[0], -s), temperature_where(lambda t: at(t)[1], m)


# what is compared


@PROPERTY
@given(rows(), st.data())
def test_with_three_entries_neither_threshold_nor_reference_matters(x: Tensor, data: st.DataObject) -> None:
    """S only compares the weight of x3, M only the difference of the other two."""
    parts = st.lists(st.integers(1, 40), min_size=3, max_size=3)
    p, q = (row(*values) / sum(values) for values in (data.draw(parts), data.draw(parts)))
    threshold = data.draw(st.floats(x[2].item() + 1e-3, x[1].item() - 1e-3))
    reference = data.draw(st.one_of(st.none(), grid(STEP, 1)))
    third, gap = (p[2] - q[2]).item(), ((p[0] - p[1]) - (q[0] - q[1])).item()
    assume(min(abs(third), abs(gap)) > 1e-6)
    s_p, s_q = (sparsity(x, w, threshold=threshold, reference=reference) for w in (p, q))
    m_p, m_q = (multi_modality(x, w, threshold=threshold) for w in (p, q))
    assert (s_p > s_q) == (third < 0) or s_p == s_q == 0  # far beyond the reference, S underflows
    assert (m_p > m_q) == (gap < 0)


# softmax


@PROPERTY
@given(rows(), grid(0.25, 3), grid(0.25, 3))
def test_softmax_reaches_multimax_exactly_if_sigma_is_not_steeper_below(x: Tensor, lower: float, upper: float) -> None:
    assume(lower != upper)
    weights = multimax.multimax(x, *bent(x, lower, upper))
    same_s, same_m = temperatures(x, weights)
    between = reweighting.softmax(x, temperature=math.sqrt(same_s * same_m))
    (s, m), (other_s, other_m) = measures(x, weights), measures(x, between)
    if lower > upper:
        # S is that of MultiMax only where M is smaller already; and in between MultiMax has more of both
        assert same_s < same_m
        assert s > other_s
        assert m > other_m
    else:
        assert same_m < same_s
        assert s < other_s
        assert m < other_m
    assert reached_by_softmax(x, *bent(x, lower, upper)) == (lower < upper)


@PROPERTY
@given(rows(), grid(0.25, 3))
def test_equal_slopes_are_softmax_at_a_temperature(x: Tensor, slope: float) -> None:
    weights = multimax.multimax(x, *bent(x, slope, slope))
    torch.testing.assert_close(weights, reweighting.softmax(x, temperature=1 / slope), rtol=1e-12, atol=0)


@PROPERTY
@given(rows(), grid(0.25, 3), grid(-2, 0), grid(STEP, 8))
def test_softmax_does_not_reach_a_sigma_that_loses_the_order(
    x: Tensor, lower: float, upper: float, temperature: float
) -> None:
    _, m = measures(x, multimax.multimax(x, *bent(x, lower, upper)))
    assert m >= 1
    assert measures(x, reweighting.softmax(x, temperature=temperature))[1] < 1


# the sparse functions


@PROPERTY
@given(rows(), grid(-1, 1), grid(STEP, 3))
def test_no_function_reaches_a_sigma_of_slope_at_most_one_above_and_more_below(
    x: Tensor, upper: float, more: float
) -> None:
    parameters = bent(x, upper + more, upper)
    weights = multimax.multimax(x, *parameters)
    for function in SPARSE.values():
        assert not reached(x, weights, function(x))
    assert not reached_by_softmax(x, *parameters)
    x, weights = x.expand(50, 3), weights.expand(50, 3)
    assert not reached(x, weights, reweighting.softmax(x, temperature=TEMPERATURES)).any()


@PROPERTY
@given(rows(), grid(0.25, 3), grid(0.25, 4))
def test_evsoftmax_reaches_a_sigma_that_is_steeper_above(x: Tensor, lower: float, upper: float) -> None:
    """With two entries kept: exactly if (1 - phi_3) tanh(g / 2) >= tanh(delta / 2)."""
    weights = multimax.multimax(x, *bent(x, lower, upper))
    delta = (x[0] - x[1]).item()
    kept = x[1] >= x.mean()
    gap = (1 - weights[2].item()) * math.tanh(upper * delta / 2)
    expected = bool(kept) and gap >= math.tanh(delta / 2)
    assume(abs(gap - math.tanh(delta / 2)) > 1e-12)
    assert bool(reached(x, weights, reweighting.evsoftmax(x))) == expected


@pytest.mark.parametrize(
    ("x", "sparsemax", "entmax15", "evsoftmax"),
    [
        ((2.0, 1.6, -1.0), (0.7, 0.3, 0.0), (0.64, 0.36, 0.0), (0.5987, 0.4013, 0.0)),
        ((3.0, 2.0, -1.0), (1.0, 0.0, 0.0), (0.8307, 0.1693, 0.0), (0.7311, 0.2689, 0.0)),
        ((3.0, 1.0, -1.0), (1.0, 0.0, 0.0), (1.0, 0.0, 0.0), (0.8808, 0.1192, 0.0)),
        ((3.0, 0.5, -1.0), (1.0, 0.0, 0.0), (1.0, 0.0, 0.0), (1.0, 0.0, 0.0)),
    ],
    ids=str,
)
def test_which_sparse_functions_ignore_the_second_largest_entry(
    x: tuple[float, ...],
    sparsemax: tuple[float, ...],
    entmax15: tuple[float, ...],
    evsoftmax: tuple[float, ...],
) -> None:
    """The caption says that sparsemax and entmax do; that needs differences of 1 and 2."""
    for name, expected in (("sparsemax", sparsemax), ("entmax15", entmax15), ("evsoftmax", evsoftmax)):
        assert SPARSE[name](row(*x)).tolist() == pytest.approx(expected, abs=5e-5)


def test_softmax_does_not_tend_to_sparsemax() -> None:
    """Which section 4 of the paper says, for temperatures towards 0; it tends to a single mode."""
    x = row(2.0, 1.6, -1.0)
    assert reweighting.softmax(x, temperature=0.01).tolist() == pytest.approx([1.0, 0.0, 0.0], abs=1e-15)
    assert reweighting.sparsemax(x).tolist() == pytest.approx([0.7, 0.3, 0.0])


# learned parameters


EXAMPLE = (3.0, 2.0, -1.0)
# S and M, the temperatures at which softmax has the same S and the same M, and who reaches the layer
AT_EXAMPLE = {
    (DEIT, 1): (0.9998, 0.1594, 0.3135, 0.4087, {"entmax15", "evsoftmax"}),
    (DEIT, 2): (0.9333, 0.3013, 0.5854, 0.5774, {"entmax15", "evsoftmax", "softmax"}),
    (DEIT, 3): (1.0000, 0.3234, 0.2385, 0.6066, {"entmax15", "evsoftmax"}),
    (DEIT, 4): (1.0000, 0.5759, 0.2817, 1.0825, set()),
    (DEIT, 5): (0.9998, 0.6029, 0.3111, 1.1607, set()),
    (DEIT, 6): (1.0000, 0.7555, 0.2657, 1.8605, set()),
    (DEIT, 7): (0.9999, 0.6607, 0.2847, 1.3620, set()),
    (DEIT, 8): (0.9998, 0.8113, 0.3060, 2.3511, set()),
    (DEIT, 9): (1.0000, 0.8098, 0.2545, 2.3340, set()),
    (DEIT, 10): (0.9995, 0.6705, 0.3362, 1.4020, set()),
    (DEIT, 11): (0.9994, 0.6658, 0.3443, 1.3824, set()),
    (DEIT, 12): (0.9876, 0.8758, 0.4653, 3.3979, set()),
    (LANGUAGE, 1): (0.0069, 0.7225, 1.8184, 1.6537, {"softmax"}),
    (LANGUAGE, 2): (0.0474, 0.6956, 1.4468, 1.5145, set()),
    (LANGUAGE, 3): (0.1137, 0.6641, 1.2718, 1.3757, set()),
    (LANGUAGE, 4): (0.3056, 0.5676, 1.0486, 1.0602, set()),
    (LANGUAGE, 5): (0.3841, 0.5033, 0.9882, 0.9075, {"evsoftmax", "softmax"}),
    (LANGUAGE, 6): (0.6090, 0.4546, 0.8411, 0.8115, {"evsoftmax", "softmax"}),
}


def who_reaches(x: Tensor, preset: str, number: int) -> set[str]:
    parameters = layer(preset, number)
    weights = multimax.multimax(x, *parameters)
    names = {name for name, function in SPARSE.items() if reached(x, weights, function(x))}
    return names | ({"softmax"} if reached_by_softmax(x, *parameters) else set())


@pytest.mark.parametrize(("preset", "number"), LAYERS)
def test_every_layer_at_one_example(preset: str, number: int) -> None:
    x = row(*EXAMPLE)
    expected_s, expected_m, expected_same_s, expected_same_m, names = AT_EXAMPLE[preset, number]
    weights = multimax.multimax(x, *layer(preset, number))
    s, m = measures(x, weights)
    assert s.item() == pytest.approx(expected_s, abs=6e-5)
    assert m.item() == pytest.approx(expected_m, abs=6e-5)
    same_s, same_m = temperatures(x, weights)
    assert same_s == pytest.approx(expected_same_s, abs=6e-5)
    assert same_m == pytest.approx(expected_same_m, abs=6e-5)
    assert who_reaches(x, preset, number) == names
    assert ("softmax" in names) == (same_m <= same_s)
    # full support: a function with an exact zero there is never below in S
    assert weights[2] > 0
    assert s < 1


def test_other_functions_at_the_example() -> None:
    x = row(*EXAMPLE)
    pairs = {name: [value.item() for value in measures(x, function(x))] for name, function in SPARSE.items()}
    assert pairs["sparsemax"] == pytest.approx([1, 0])
    assert pairs["entmax15"] == pytest.approx([1, 0.3386], abs=5e-5)
    assert pairs["evsoftmax"] == pytest.approx([1, 0.5379], abs=5e-5)
    pair = [value.item() for value in measures(x, reweighting.softmax(x))]
    assert pair == pytest.approx([0.3679, 0.5440], abs=5e-5)


@pytest.mark.parametrize("number", range(1, 13))
def test_hidden_layers_have_more_of_both_than_softmax_at_the_example(number: int) -> None:
    x = row(*EXAMPLE)
    more = reached(x, reweighting.softmax(x), multimax.multimax(x, *layer(DEIT, number)))
    assert bool(more) == (number >= 4)


# the layers of DeiT-small that each function reaches, as the second largest entry comes closer to the largest
SERIES: dict[tuple[float, ...], dict[str, list[int]]] = {
    (3.0, 0.5, -1.0): {"softmax": [2]},
    (3.0, 1.0, -1.0): {"softmax": [2], "evsoftmax": [1, 2, 3, 4, 5]},
    (3.0, 1.5, -1.0): {"softmax": [2], "evsoftmax": [1, 2, 3, 4, 5], "entmax15": [1, 3]},
    (3.0, 2.0, -1.0): {"softmax": [2], "evsoftmax": [1, 2, 3], "entmax15": [1, 2, 3]},
    (3.0, 2.5, -1.0): {"evsoftmax": [1, 2, 3], "entmax15": [1, 2], "sparsemax": [1]},
    (2.0, 1.6, -1.0): {"softmax": [2], "evsoftmax": [1, 2, 3, 4, 5], "entmax15": [1, 2, 3, 4], "sparsemax": [1, 3]},
    (2.0, 1.0, -1.0): {"softmax": [2], "evsoftmax": [*range(1, 9)], "entmax15": [1, 2, 3, 4, 5]},
    (1.0, 0.5, -1.0): {
        "softmax": [1, 2],  # where sigma of layer 1 is one line, and so a temperature
        "evsoftmax": [*range(1, 11)],
        "entmax15": [*range(1, 10)],
        "sparsemax": [1, *range(3, 10)],
    },
}


@pytest.mark.parametrize("x", SERIES, ids=str)
def test_which_layers_are_reached_on_a_series_of_examples(x: tuple[float, ...]) -> None:
    found: dict[str, list[int]] = {}
    for number in range(1, 13):
        for name in who_reaches(row(*x), DEIT, number):
            found.setdefault(name, []).append(number)
    assert found == SERIES[x]


def all_rows() -> Tensor:
    """Every row with x1 <= 4, x3 >= -3 on a grid of quarters."""
    quarters = [k / 4 for k in range(1, 17)]
    return torch.tensor([(a, b, -c) for a in quarters for b in quarters if b < a for c in quarters[:12]]).double()


# of 1440 rows, those on which a layer is reached by softmax at some temperature, sparsemax, entmax15, evsoftmax, any
# of these, and those on which itself reaches softmax at temperature 1
REACHED = {
    (DEIT, 1): (221, 348, 955, 1189, 1230, 0),
    (DEIT, 2): (933, 0, 602, 1189, 1420, 0),
    (DEIT, 3): (23, 252, 602, 1021, 1055, 168),
    (DEIT, 4): (0, 180, 424, 746, 771, 436),
    (DEIT, 5): (0, 144, 329, 629, 650, 561),
    (DEIT, 6): (0, 108, 206, 356, 373, 884),
    (DEIT, 7): (0, 72, 148, 339, 349, 898),
    (DEIT, 8): (0, 96, 184, 338, 348, 935),
    (DEIT, 9): (0, 72, 122, 242, 249, 1070),
    (DEIT, 10): (0, 24, 36, 93, 93, 1306),
    (DEIT, 11): (0, 12, 17, 35, 35, 1387),
    (DEIT, 12): (0, 11, 17, 24, 24, 1323),
    (LANGUAGE, 1): (1271, 0, 0, 0, 1271, 0),
    (LANGUAGE, 2): (704, 0, 0, 0, 704, 0),
    (LANGUAGE, 3): (0, 0, 0, 0, 0, 0),
    (LANGUAGE, 4): (260, 0, 0, 19, 262, 52),
    (LANGUAGE, 5): (1418, 0, 0, 916, 1418, 0),
    (LANGUAGE, 6): (1427, 0, 0, 1185, 1431, 0),
}


@pytest.mark.parametrize(("preset", "number"), LAYERS)
def test_how_often_a_layer_is_reached(preset: str, number: int) -> None:
    x, parameters = all_rows(), layer(preset, number)
    weights = multimax.multimax(x, *parameters)
    found = [reached_by_softmax(x, *parameters), *(reached(x, weights, function(x)) for function in SPARSE.values())]
    any_of_them = torch.stack(found).any(0)
    found += [any_of_them, reached(x, reweighting.softmax(x), weights)]
    assert tuple(int(rows.sum()) for rows in found) == REACHED[preset, number]
    lower, upper = slopes(x, *parameters)
    assert not (any_of_them & (lower > upper + ROUNDING) & (upper <= 1)).any()
    many = x.expand(10, *x.shape)
    by = reweighting.softmax(many, temperature=TEMPERATURES[::5, None])
    assert not (reached(many, weights.expand_as(many), by) & ~found[0]).any()


# from where on sigma rises by less than its input
FLAT_FROM = {4: 2.333, 5: 2.107, 6: 1.466, 7: 1.360, 8: 1.447, 9: 1.177, 10: 0.805, 11: 0.625, 12: 0.622}


@pytest.mark.parametrize("number", FLAT_FROM)
def test_from_where_sigma_is_flat(number: int) -> None:
    x = torch.arange(-3000, 4001, dtype=torch.float64).div(1000).requires_grad_()
    (slope,) = torch.autograd.grad(multimax.modulate(x, *layer(DEIT, number)).sum(), x)
    assert torch.equal(slope <= 1, x >= FLAT_FROM[number])


@PROPERTY
@given(st.sampled_from(sorted(FLAT_FROM)), st.data())
def test_no_function_reaches_layers_4_to_12_where_sigma_is_flat(number: int, data: st.DataObject) -> None:
    second = data.draw(st.floats(FLAT_FROM[number], 3.9))
    x = row(data.draw(st.floats(second + 0.01, 4)), second, data.draw(st.floats(-3, -0.01)))
    lower, upper = slopes(x, *layer(DEIT, number))
    assert upper <= 1 < lower
    assert who_reaches(x, DEIT, number) == set()


def test_the_last_layer_loses_the_order_of_the_two_largest() -> None:
    """Its sigma falls from 0.85 to 1.69: a pair that nothing reaches, but not by sharing evenly."""
    x = row(2.0, 1.0, -1.0)
    weights = multimax.multimax(x, *layer(DEIT, 12))
    assert weights.tolist() == pytest.approx([0.4213, 0.5786, 0.0002], abs=5e-5)
    assert measures(x, weights)[1].item() == pytest.approx(1.1573, abs=5e-5)
    lost = {
        number: int((weights[:, 1] > weights[:, 0]).sum())
        for number in range(1, 13)
        for weights in [multimax.multimax(all_rows(), *layer(DEIT, number))]
    }
    assert lost == {**dict.fromkeys(range(1, 12), 0), 12: 360}
