"""The one list of reweighting functions, and what derives from it."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import multimax
import multimax.nn
from multimax import reweighting
from multimax.reweighting import registry
from multimax.reweighting.high_pass import AttnScale

OTHERS = {"SPECS", "Reweighter", "Reweighting", "Spec", "attention", "get", "learned", "module", "names"}
specs = pytest.mark.parametrize("spec", reweighting.SPECS, ids=lambda spec: spec.name)
# values with which a function can be called, where it has no default
NEEDED: dict[str, dict[str, Any]] = {
    "multimax": {"coefs": torch.zeros(2, 2), "knots": torch.zeros(2, 2)},
    "topk": {"k": 2},
    "attnscale": {"omega": 0.5},
}
MAKE: dict[str, dict[str, Any]] = {"topk": {"k": 2}}  # and with which a module can be made


def test_the_package_exports_what_the_list_holds() -> None:
    listed = {}
    for spec in reweighting.SPECS:
        listed[spec.name] = spec.function
        for one in (spec.module, spec.loss, spec.loss_module):
            if one is not None:
                listed[one.__name__] = one
    assert set(reweighting.__all__) == set(listed) | OTHERS
    for name, one in listed.items():
        assert getattr(reweighting, name) is one
    assert reweighting.names() == tuple(spec.name for spec in reweighting.SPECS)


def test_nn_has_every_module() -> None:
    listed = {one for spec in reweighting.SPECS for one in (spec.module, spec.loss_module) if one is not None}
    listed |= {AttnScale, multimax.MultiheadAttention, multimax.MultiMaxHead, multimax.MultiMaxCrossEntropyLoss}
    listed |= {multimax.LinearMultiMaxCrossEntropyLoss}
    assert {getattr(multimax.nn, name) for name in multimax.nn.__all__} == listed
    assert sorted(multimax.nn.__all__) == sorted(one.__name__ for one in listed)


@specs
def test_names_agree(spec: reweighting.Spec) -> None:
    assert spec.function.__name__ == spec.name == spec.module.reweighting_name
    assert (spec.loss is None) == (spec.loss_module is None)
    assert spec.loss is None or spec.loss.__name__ == f"{spec.name}_loss"


@specs
def test_differentiable_options(spec: reweighting.Spec) -> None:
    """These may be tensors, and get a gradient; the others may not."""
    x, options = torch.randn(2, 3, 4, 5), dict(NEEDED.get(spec.name, {}))
    for name in spec.differentiable:
        if not isinstance(options.get(name), Tensor):
            options[name] = torch.tensor(1.5)
        options[name] = options[name].clone().requires_grad_()
    leaves = [options[name] for name in spec.differentiable]
    loss = reweighting.get(spec.name, **options)(x)[..., 0].square().sum()
    for grad in torch.autograd.grad(loss, leaves, allow_unused=True) if leaves else ():
        assert grad is not None
    for name in spec.options.keys() - spec.differentiable.keys():
        with pytest.raises((TypeError, ValueError), match=f"multimax: expected {name}"):
            reweighting.get(spec.name, **options | {name: torch.tensor(1.5)})(x)


@specs
def test_heads(spec: reweighting.Spec) -> None:
    trained = spec.takes_heads()
    assert trained == bool(spec.learns) == ("heads" in spec.module(**MAKE.get(spec.name, {})).settings())
    if trained:
        options = {} if spec.name in ("multimax", "attnscale") else {"learn": True}
        module = spec.module(heads=3, **options)
        values = reweighting.learned(module)
        assert values
        assert all(value.shape == (3,) for value in values.values())
        assert module(torch.randn(2, 3, 4, 5)).shape == (2, 3, 4, 5)


def test_what_a_module_has_learned() -> None:
    assert reweighting.learned(reweighting.Softmax(2.0)) == {}
    assert reweighting.learned(reweighting.Entmax(1.2)) == {}
    assert reweighting.learned(reweighting.AttnScaledSoftmax(0.5, learn=False)) == {}
    assert reweighting.learned(reweighting.Sparsemax()) == {}
    for module, name, value in (
        (reweighting.Softmax(2.0, learn=True), "temperature", 2.0),
        (reweighting.Entmax(1.2, learn=True), "alpha", 1.2),
        (reweighting.AttnScaledSoftmax(0.5), "omega", 0.5),
    ):
        found = reweighting.learned(module)
        assert list(found) == [name]
        torch.testing.assert_close(found[name].detach(), torch.tensor(value))
    assert list(reweighting.learned(AttnScale(heads=2))) == ["omega"]
    layer = multimax.MultiMax(2, init=multimax.from_paper([2.0, 3.0], [0.5, 0.25], [-1.0, -2.0], [1.0, 2.0]))
    values = {name: value.item() for name, value in reweighting.learned(layer).items()}
    first = {"t_b_1": 2.0, "t_d_1": 0.5, "b_1": -1.0, "d_1": 1.0}
    assert values == first | {"t_b_2": 3.0, "t_d_2": 0.25, "b_2": -2.0, "d_2": 2.0}
    assert list(reweighting.learned(multimax.MultiMax(1, terms="lower"))) == ["t_b_1", "b_1"]
    assert list(reweighting.learned(multimax.MultiMax(1, terms="upper"))) == ["t_d_1", "d_1"]
    linear = nn.Linear(2, 3)  # any other module
    assert list(reweighting.learned(linear)) == ["weight", "bias"]


def test_modules_of_one_base() -> None:
    for name in reweighting.names():
        module = reweighting.module(name, **MAKE.get(name, {}))
        assert isinstance(module, reweighting.Reweighter)
        function = registry.function_of(module)
        assert isinstance(function, reweighting.Reweighting)
        assert function.name == module.reweighting_name == name
        x = torch.randn(2, 3, 4, 5)
        assert torch.equal(function(x), module(x))


# ---- options that differ between queries


def per_query(name: str) -> dict[str, Tensor]:
    """Options for x of (2, 3, 6, 9) that are different for each head and query, without a batch dim."""
    if name == "multimax":
        return {"coefs": 0.3 * torch.randn(3, 6, 2, 2), "knots": 0.3 * torch.randn(3, 6, 2, 2)}
    option = "temperature" if name == "softmax" else "alpha"
    return {option: 1.2 + torch.rand(3, 6, 1)}


@pytest.mark.parametrize("name", ["softmax", "multimax", "entmax"])
@pytest.mark.parametrize("batch", [False, True])
def test_an_option_per_query_is_cut_to_the_block(name: str, batch: bool) -> None:
    query, key, value = torch.randn(2, 3, 6, 4), torch.randn(2, 3, 9, 4), torch.randn(2, 3, 9, 5)
    options = per_query(name)
    if batch:
        options = {option: t[None].expand(2, *t.shape) for option, t in options.items()}
    function = reweighting.get(name, **options)
    weights = function(query @ key.transpose(-1, -2) / 2)
    for block in (None, 1, 4):
        out, given = reweighting.attention(query, key, value, reweight=function, block=block, return_weights=True)
        torch.testing.assert_close(given, weights)
        torch.testing.assert_close(out, weights @ value)
        out = reweighting.attention(query, key, value, reweight=function, block=block)
        torch.testing.assert_close(out, weights @ value)


# ---- one more function


def squared(x: Tensor, *, shift: Tensor, dim: int = -1, mask: Tensor | None = None, impl: str = "auto") -> Tensor:
    """A toy: shares of (x + shift)^2."""
    part = (x + shift).square() if mask is None else torch.where(mask, (x + shift).square(), 0.0)
    return part / part.sum(dim, keepdim=True)


class Squared(reweighting.Reweighter):
    """The toy as a module."""

    reweighting_name = "squared"

    def __init__(self, *, dim: int = -1) -> None:
        super().__init__(dim=dim)
        self.log_shift = nn.Parameter(torch.zeros(()))

    @property
    def shift(self) -> Tensor:
        return self.log_shift.exp()

    def options(self, ndim: int, dim: int) -> dict[str, Any]:
        return {"shift": self.shift}


@pytest.fixture
def one_more(monkeypatch: pytest.MonkeyPatch) -> reweighting.Spec:
    spec = reweighting.Spec(
        name="squared",
        function=squared,
        module=Squared,
        learns=("shift",),
        differentiable={"shift": lambda ndim: (-4, -3, -2)},
    )
    monkeypatch.setitem(registry.BY_NAME, spec.name, spec)
    return spec


def test_a_further_function_needs_a_spec_alone(one_more: reweighting.Spec) -> None:
    assert reweighting.names()[-1] == "squared"
    x, shift = torch.randn(2, 3, 6, 9), torch.rand(3, 6, 1)
    assert torch.equal(reweighting.get("squared", shift=shift)(x), squared(x, shift=shift))
    with pytest.raises(TypeError, match=re.escape("expected shift for squared, got no such option; a reweighting.Squ")):
        reweighting.get("squared")
    module = reweighting.module("squared")
    assert isinstance(module, Squared)
    assert {name: value.item() for name, value in reweighting.learned(module).items()} == {"shift": 1.0}
    query, key, value = torch.randn(2, 3, 6, 4), torch.randn(2, 3, 9, 4), torch.randn(2, 3, 9, 5)
    weights = squared(query @ key.transpose(-1, -2) / 2, shift=shift)
    out = reweighting.attention(query, key, value, reweight=reweighting.get("squared", shift=shift), block=4)
    torch.testing.assert_close(out, weights @ value)
    attention = multimax.MultiheadAttention(16, 4, reweight="squared")
    rows = torch.randn(5, 2, 16)
    attention(rows, rows, rows)[0].sum().backward()
    assert attention.reweight.log_shift.grad is not None
    assert [name for name, _ in multimax.reweighting_parameters(attention)] == ["reweight.log_shift"]


# ---- True or False


@pytest.mark.parametrize("reweight", ["softmax", "entmax15"])
@pytest.mark.parametrize("weights", [False, True])
def test_flags_of_attention(reweight: str, weights: bool) -> None:
    query = torch.randn(1, 2, 3, 4)
    given = {"reweight": reweight, "return_weights": weights}
    if reweight != "softmax" or weights:  # what is computed in blocks; the fused attention checks for itself
        with pytest.raises(TypeError, match=re.escape("multimax: expected is_causal to be True or False, got 'no'")):
            reweighting.attention(query, query, query, **{**given, "is_causal": "no"})
    with pytest.raises(TypeError, match="multimax: expected return_weights to be True or False, got 1"):
        reweighting.attention(query, query, query, **{**given, "return_weights": 1})


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda value: reweighting.Softmax(learn=value), "learn"),
        (lambda value: reweighting.Entmax(learn=value), "learn"),
        (lambda value: reweighting.AttnScaledSoftmax(learn=value), "learn"),
        (lambda value: multimax.MultiMax(monotone=value), "monotone"),
        (lambda value: multimax.MultiheadAttention(8, 2, per_head=value), "per_head"),
        (lambda value: multimax.MultiheadAttention(8, 2, attn_scale=value), "attn_scale"),
        (lambda value: multimax.MultiheadAttention(8, 2)(*[torch.randn(3, 8)] * 3, is_causal=value), "is_causal"),
    ],
    ids=["Softmax", "Entmax", "AttnScaledSoftmax", "MultiMax", "per_head", "attn_scale", "is_causal"],
)
def test_flags_of_modules(make: Any, name: str) -> None:
    with pytest.raises(TypeError, match=f"multimax: expected {name} to be True or False, got 'no'"):
        make("no")
