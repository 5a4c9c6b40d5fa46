import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from multimax.metrics import Rollout, rollout, rollout_discrepancy


def close(got: Tensor, expected: object) -> None:
    torch.testing.assert_close(got, torch.as_tensor(expected, dtype=got.dtype), rtol=1e-12, atol=1e-12, equal_nan=True)


def maps(layers: int, *shape: int) -> list[Tensor]:
    return [torch.softmax(torch.randn(shape, dtype=torch.float64), -1) for _ in range(layers)]


def slow_rollout(maps: list[list[list[float]]], residual: bool) -> list[list[list[float]]]:
    """Of one sequence, whose rows sum to 1, by loops."""
    found: list[list[list[float]]] = []
    for layer in maps:
        size = range(len(layer))
        a = [[(layer[i][j] + (i == j)) / 2 if residual else layer[i][j] for j in size] for i in size]
        if found:
            a = [[sum(a[i][k] * found[-1][k][j] for k in size) for j in size] for i in size]
        found.append(a)
    return found


@pytest.mark.parametrize("residual", [True, False])
def test_against_loops(residual: bool) -> None:
    attentions = maps(4, 2, 5, 5)
    accumulated = rollout(attentions, residual=residual)
    discrepancy = rollout_discrepancy(attentions, residual=residual)
    for b in range(2):
        expected = slow_rollout([layer[b].tolist() for layer in attentions], residual)
        for layer in range(4):
            close(accumulated[layer][b], expected[layer])
            rows = [
                sum(abs(r - a) for r, a in zip(expected[layer][i], attentions[layer][b, i].tolist(), strict=True)) / 2
                for i in range(5)
            ]
            close(discrepancy[layer][b], sum(rows) / 5)


def test_by_hand() -> None:
    first, second = torch.tensor([[0.5, 0.5], [0.0, 1.0]]), torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    one, two = rollout([first, second])
    assert one.tolist() == [[0.75, 0.25], [0.0, 1.0]]
    assert two.tolist() == [[0.75, 0.25], [0.375, 0.625]]
    assert [value.item() for value in rollout_discrepancy([first, second])] == [0.125, 0.4375]
    assert [value.item() for value in rollout_discrepancy([first, second], residual=False)] == [0.0, 0.5]


def test_heads_are_averaged_and_not_guessed() -> None:
    attentions = maps(3, 2, 4, 5, 5)
    averaged = [attention.mean(1) for attention in attentions]
    for heads_dim in (1, -3):
        for got, expected in zip(rollout(attentions, heads_dim=heads_dim), rollout(averaged), strict=True):
            close(got, expected)
        got = torch.stack(rollout_discrepancy(attentions, heads_dim=heads_dim))
        close(got, torch.stack(rollout_discrepancy(averaged)))
    assert [tuple(accumulated.shape) for accumulated in rollout(attentions)] == [(2, 4, 5, 5)] * 3


@settings(deadline=None, derandomize=True, max_examples=50)
@given(seed=st.integers(0, 10**6), layers=st.integers(1, 5), length=st.integers(1, 6), residual=st.booleans())
def test_properties(seed: int, layers: int, length: int, residual: bool) -> None:
    torch.manual_seed(seed)
    attentions = maps(layers, length, length)
    for accumulated in rollout(attentions, residual=residual):
        close(accumulated.sum(-1), torch.ones(length))  # still distributions
        assert (accumulated >= 0).all()
    for value in rollout_discrepancy(attentions, residual=residual):
        assert 0 <= value <= 1 + 1e-12
    # a layer that looks at itself alone changes nothing
    eye = torch.eye(length, dtype=torch.float64)
    close(rollout([*attentions, eye], residual=residual)[-1], rollout(attentions, residual=residual)[-1])


def test_causal_stays_causal() -> None:
    attentions = [torch.softmax(torch.randn(6, 6).masked_fill(~torch.ones(6, 6).tril().bool(), -torch.inf), -1)] * 3
    for accumulated in rollout(attentions):
        assert torch.equal(accumulated, accumulated.tril())


def test_queries_without_keys() -> None:
    attentions = maps(2, 4, 4)
    for attention in attentions:
        attention[2] = 0
    first, second = rollout(attentions)
    close(first[2], [0.0, 0.0, 1.0, 0.0])
    close(second[2], [0.0, 0.0, 1.0, 0.0])
    kept = [0, 1, 3]
    expected = (second - attentions[1])[kept].abs().sum(-1).mean() / 2
    close(rollout_discrepancy(attentions)[1], expected)
    assert rollout_discrepancy([torch.zeros(3, 3)])[0].isnan()


def test_step_by_step() -> None:
    attentions = maps(3, 2, 4, 4)
    accumulated = Rollout()
    assert accumulated.map is None
    with pytest.raises(ValueError, match="expected a layer before the discrepancy, got none; call update first"):
        accumulated.discrepancy(attentions[0])
    for attention, expected, away in zip(attentions, rollout(attentions), rollout_discrepancy(attentions), strict=True):
        assert torch.equal(accumulated.update(attention), expected)
        assert torch.equal(accumulated.discrepancy(attention), away)


def test_half_precision_and_nan() -> None:
    attentions = [attention.bfloat16() for attention in maps(2, 5, 5)]
    got = rollout_discrepancy(attentions)
    assert got[1].dtype == torch.float32
    assert torch.equal(got[1], rollout_discrepancy([attention.float() for attention in attentions])[1])
    attentions[0][1, 1] = math.nan
    assert rollout_discrepancy(attentions)[0].isnan()


def test_errors() -> None:
    with pytest.raises(
        ValueError, match=r"expected self-attention, \(..., L, L\), .* got \(2, 3\); rollout is not defined"
    ):
        rollout([torch.rand(2, 3)])
    with pytest.raises(ValueError, match="expected attention of one length in all layers, 3, got 4"):
        rollout([torch.rand(3, 3), torch.rand(4, 4)])
    with pytest.raises(ValueError, match="expected heads_dim to be a dim before the queries and keys"):
        rollout([torch.rand(2, 3, 3)], heads_dim=1)
    assert rollout([]) == rollout_discrepancy([]) == []
