"""The module MultiMax."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import multimax
from multimax import MultiMax


def test_state_dict_has_two_tensors() -> None:
    assert {key: tuple(value.shape) for key, value in MultiMax().state_dict().items()} == {
        "coefs": (2, 2),
        "knots": (2, 2),
    }
    assert tuple(MultiMax(3, heads=6).coefs.shape) == (6, 3, 2)


def test_forward_is_the_function() -> None:
    for heads, dim in ((None, -1), (3, -1), (None, 1)):
        layer = MultiMax(heads=heads, dim=dim)
        x, mask = torch.randn(2, 3, 4, 5), torch.rand(2, 3, 4, 5) < 0.7
        expected = multimax.multimax(x, layer.coefs, layer.knots, dim=dim, mask=mask)
        assert torch.equal(layer(x, mask), expected)


def test_init_of_the_paper() -> None:
    values = torch.cat([torch.cat([layer.coefs, layer.knots]).flatten() for layer in (MultiMax() for _ in range(500))])
    assert abs(values.mean().item()) < 1e-3
    assert abs(values.std().item() - 0.02) < 1e-3


def test_init_identity_is_softmax_and_can_learn() -> None:
    layer = MultiMax(3, init="identity")
    x = torch.randn(40, 30)
    torch.testing.assert_close(layer(x), torch.softmax(x, -1))
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    layer(x)[:, 0].log().mean().neg().backward()
    assert (layer.coefs.grad != 0).all()
    assert (layer.knots.grad == 0).all()
    optimizer.step()
    layer(x)[:, 0].log().mean().neg().backward()
    assert (layer.knots.grad != 0).all()
    assert len(set(layer.knots.detach().flatten().tolist())) == 6


def test_init_by_tensors() -> None:
    coefs, knots = multimax.from_paper(*multimax.presets["deit_small"][4])
    layer = MultiMax(init=(coefs, knots))
    assert torch.equal(layer.coefs, coefs)
    with torch.no_grad():
        layer.coefs.zero_()
    layer.reset_parameters()
    assert torch.equal(layer.coefs, coefs)
    torch.testing.assert_close(layer.t_b, torch.tensor(multimax.presets["deit_small"][4].t_b))
    torch.testing.assert_close(layer.t_d, torch.tensor(multimax.presets["deit_small"][4].t_d))
    assert layer.b.tolist() == knots[:, 0].tolist()
    assert layer.d.tolist() == knots[:, 1].tolist()
    with pytest.raises(AttributeError):
        layer.t_b = torch.zeros(2)


@pytest.mark.parametrize(("terms", "off"), [("lower", 1), ("upper", 0)])
def test_a_term_that_is_off_stays_off(terms: str, off: int) -> None:
    layer = MultiMax(terms=terms)
    assert (layer.coefs[:, off] == 0).all()
    x = torch.randn(8, 9)
    with torch.no_grad():
        layer.coefs.fill_(0.3)  # whatever a checkpoint may hold
    expected = torch.full((2, 2), 0.3)
    expected[:, off] = 0
    assert torch.equal(layer(x), multimax.multimax(x, expected, layer.knots))
    layer(x).square().sum().backward()
    assert (layer.coefs.grad[:, off] == 0).all()
    assert (layer.coefs.grad[:, 1 - off] != 0).all()
    assert ((layer.t_d if terms == "lower" else layer.t_b) == 1).all()


@given(st.lists(st.floats(-3, 3), min_size=12, max_size=12), st.sampled_from(["both", "lower", "upper"]))
@settings(deadline=None, derandomize=True)
def test_monotone_is_never_decreasing(values: list[float], terms: str) -> None:
    layer = MultiMax(3, monotone=True, terms=terms, dtype=torch.float64)
    with torch.no_grad():
        layer.coefs.copy_(torch.tensor(values[:6]).reshape(3, 2))
        layer.knots.copy_(torch.tensor(values[6:]).reshape(3, 2))
    x = torch.linspace(-6, 6, 400, dtype=torch.float64)
    curve = multimax.modulate(x, *layer.parameters_in_use())
    assert (curve.diff() >= -1e-9).all()


def test_monotone_starts_at_the_identity_and_can_learn() -> None:
    layer = MultiMax(init="identity", monotone=True)
    x = torch.randn(40, 30)
    torch.testing.assert_close(layer(x), torch.softmax(x, -1))
    layer(x)[:, 0].log().mean().neg().backward()
    assert (layer.coefs.grad != 0).all()


def test_without_monotone_sigma_may_decrease() -> None:
    coefs, knots = multimax.from_paper(*multimax.presets["deit_small"][4])
    assert (multimax.modulate(torch.linspace(-6, 6, 400), coefs, knots).diff() < 0).any()


def test_repr_speaks_the_papers_symbols() -> None:
    layer = MultiMax(1, init=multimax.from_paper([1.5], [0.25], [-1.0], [2.0]))
    assert repr(layer) == "MultiMax(order=1, t_b=[1.5], t_d=[0.25], b=[-1], d=[2])"
    lower = MultiMax(1, terms="lower", init=multimax.from_paper([1.5], [0.25], [-1.0], [2.0]), dim=0)
    assert repr(lower) == "MultiMax(order=1, terms='lower', dim=0, t_b=[1.5], b=[-1])"
    assert repr(MultiMax(heads=6, monotone=True)) == "MultiMax(order=2, heads=6, monotone=True)"
    assert "order=2" in repr(MultiMax(device="meta"))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"order": 0}, "multimax: expected order to be an int of at least 1, got 0"),
        ({"order": -2}, "multimax: expected order to be an int of at least 1, got -2"),
        ({"order": 1.5}, "multimax: expected order to be an int of at least 1, got 1.5"),
        ({"heads": 0}, "multimax: expected heads to be an int of at least 1, got 0"),
        ({"terms": "none"}, "multimax: expected terms to be one of 'both', 'lower', 'upper', got 'none'"),
        (
            {"init": "zeros"},
            "multimax: expected init to be one of 'paper', 'identity', 'deit_small', 'wikitext103_lm', got 'zeros'",
        ),
        (
            {"init": "deit_small", "order": 3},
            "multimax: expected an order of at most 2 with init='deit_small', got 3",
        ),
        (
            {"init": "deit_small", "monotone": True},
            "multimax: expected init to be 'paper' or 'identity' with monotone=True, got 'deit_small'",
        ),
        (
            {"init": "deit_small", "depth": 1.5},
            "multimax: expected depth from 0, the first layer, to 1, the last, got 1.5",
        ),
        (
            {"init": (torch.zeros(1, 2), torch.zeros(1, 2))},
            "multimax: expected init tensors of shape (2, 2), got (1, 2)",
        ),
        ({"init": (torch.zeros(2, 2), torch.zeros(2, 2)), "monotone": True}, "multimax: expected init to be"),
    ],
)
def test_bad_settings(options: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        MultiMax(**options)


@pytest.mark.parametrize("init", [None, (torch.zeros(2, 2),), torch.zeros(2, 2)], ids=["none", "one", "a tensor"])
def test_an_init_that_is_no_pair(init: object) -> None:
    with pytest.raises(TypeError, match="expected init to be a name or a pair of tensors"):
        MultiMax(init=init)


@pytest.mark.parametrize(("name", "layers"), [("deit_small", 12), ("wikitext103_lm", 6)])
def test_an_init_that_was_learned(name: str, layers: int) -> None:
    for depth, number in ((0.0, 0), (1.0, layers - 1), (0.5, round(0.5 * (layers - 1)))):
        layer = MultiMax(init=name, depth=depth)
        for symbol, values in multimax.presets[name][number]._asdict().items():
            assert torch.allclose(getattr(layer, symbol), torch.tensor(values))
    whole, first = MultiMax(init=name), MultiMax(1, init=name)
    assert torch.equal(first.coefs, whole.coefs[:1])
    assert torch.equal(first.knots, whole.knots[:1])
    heads = MultiMax(init=name, heads=3, terms="lower")
    assert torch.equal(heads.knots, whole.knots.expand(3, 2, 2))
    assert torch.equal(heads.coefs[..., 0], whole.coefs[:, 0].expand(3, 2))
    assert not heads.coefs[..., 1].any()


def test_moves_and_casts_as_modules_do() -> None:
    layer = MultiMax().to(torch.bfloat16)
    assert layer(torch.randn(3, 7, dtype=torch.bfloat16)).dtype == torch.bfloat16
    other = MultiMax()
    other.load_state_dict(MultiMax().state_dict())
    with pytest.raises(RuntimeError, match="size mismatch"):
        other.load_state_dict(MultiMax(3).state_dict())
