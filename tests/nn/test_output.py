"""The modules of the output layer."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import multimax


def grads(loss: Tensor, module: nn.Module) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(module.parameters()), allow_unused=True))


class TestMultiMaxCrossEntropyLoss:
    @pytest.mark.parametrize(
        "options",
        [{}, {"label_smoothing": 0.1}, {"reduction": "none"}, {"ignore_index": 3}, {"weight": torch.arange(10) / 10}],
        ids=lambda options: "".join(options) or "plain",
    )
    def test_at_identity_it_is_torch_s(self, options: dict[str, Any]) -> None:
        ours = multimax.MultiMaxCrossEntropyLoss(**options, init="identity")
        theirs = nn.CrossEntropyLoss(**options)
        logits, target = torch.randn(6, 10), torch.randint(10, (6,))
        torch.testing.assert_close(ours(logits, target), theirs(logits, target))

    def test_its_parameters_learn(self) -> None:
        criterion = multimax.MultiMaxCrossEntropyLoss(z_loss=0.01)
        logits, target = torch.randn(6, 10), torch.randint(10, (6,))
        expected = multimax.multimax_cross_entropy(
            logits, target, criterion.multimax.coefs, criterion.multimax.knots, z_loss=0.01
        )
        loss = criterion(logits, target)
        assert torch.equal(loss, expected)
        assert all((grad != 0).any() for grad in grads(loss, criterion))

    def test_state_and_repr(self) -> None:
        criterion = multimax.MultiMaxCrossEntropyLoss(torch.ones(3), label_smoothing=0.1, order=1)
        assert list(criterion.state_dict()) == ["weight", "multimax.coefs", "multimax.knots"]
        assert "label_smoothing=0.1" in repr(criterion)
        assert "order=1" in repr(criterion)

    def test_terms_and_monotone(self) -> None:
        logits, target = torch.randn(6, 10), torch.randint(10, (6,))
        for options in ({"terms": "lower"}, {"monotone": True}):
            criterion = multimax.MultiMaxCrossEntropyLoss(**options)
            expected = F.cross_entropy(multimax.modulate(logits, *criterion.multimax.parameters_in_use()), target)
            torch.testing.assert_close(criterion(logits, target), expected)


class TestLinearMultiMaxCrossEntropyLoss:
    @pytest.mark.skipif(not hasattr(nn, "LinearCrossEntropyLoss"), reason="this torch has no such loss")
    @pytest.mark.parametrize("bias", [False, True])
    def test_at_identity_it_is_torch_s(self, bias: bool) -> None:
        ours = multimax.LinearMultiMaxCrossEntropyLoss(6, 10, bias=bias, label_smoothing=0.1, init="identity")
        theirs = nn.LinearCrossEntropyLoss(6, 10, bias=bias, label_smoothing=0.1)
        missing = ours.load_state_dict(theirs.state_dict(), strict=False)
        assert missing.missing_keys == ["multimax.coefs", "multimax.knots"]
        assert not missing.unexpected_keys
        hidden, target = torch.randn(7, 6), torch.randint(10, (7,))
        torch.testing.assert_close(ours(hidden, target), theirs(hidden, target))
        for a, b in zip(grads(ours(hidden, target), ours.linear), grads(theirs(hidden, target), theirs), strict=True):
            torch.testing.assert_close(a, b)

    def test_stats(self) -> None:
        for criterion, x in (
            (multimax.LinearMultiMaxCrossEntropyLoss(6, 10), torch.randn(4, 6)),
            (multimax.MultiMaxCrossEntropyLoss(), torch.randn(4, 10)),
        ):
            loss, stats = criterion(x, torch.randint(10, (4,)), return_stats=True)
            assert loss.shape == ()
            assert stats.entropy.shape == (4,)

    def test_batches_of_sequences(self) -> None:
        criterion = multimax.LinearMultiMaxCrossEntropyLoss(6, 10, reduction="none", chunk=2)
        assert criterion(torch.randn(2, 3, 6), torch.randint(10, (2, 3))).shape == (2, 3)


class TestMultiMaxHead:
    def test_logits_and_loss_belong_together(self) -> None:
        head = multimax.MultiMaxHead(6, 10)
        hidden, target = torch.randn(7, 6), torch.randint(10, (7,))
        logits = head(hidden)
        torch.testing.assert_close(
            torch.softmax(logits, -1),
            multimax.multimax(F.linear(hidden, head.weight, head.bias), *head.multimax.parameters_in_use()),
        )
        ours, theirs = head(hidden, target, label_smoothing=0.1), F.cross_entropy(logits, target, label_smoothing=0.1)
        torch.testing.assert_close(ours, theirs)
        for a, b in zip(grads(ours, head), grads(theirs, head), strict=True):
            torch.testing.assert_close(a, b)

    def test_from_linear(self) -> None:
        linear = nn.Linear(6, 10, dtype=torch.float64)
        head = multimax.MultiMaxHead.from_linear(linear, order=1)
        assert head.weight is linear.weight
        assert head.bias is linear.bias
        assert head.multimax.coefs.dtype == torch.float64
        hidden = torch.randn(3, 6, dtype=torch.float64)
        assert torch.equal(head(hidden), linear(hidden))
        assert multimax.MultiMaxHead.from_linear(nn.Linear(6, 10, bias=False)).bias is None
        coefs, knots = multimax.from_paper([2.0], [0.5], [0.0], [1.0])
        head = multimax.MultiMaxHead.from_linear(nn.Linear(6, 10), order=1, init=(coefs, knots))
        assert torch.equal(head.multimax.coefs, coefs)

    def test_tied_to_an_embedding(self) -> None:
        embedding, head = nn.Embedding(10, 6), multimax.MultiMaxHead(6, 10, bias=False)
        head.weight = embedding.weight
        tokens = torch.randint(10, (4, 5))
        head(embedding(tokens), tokens).backward()
        assert embedding.weight.grad is head.weight.grad
        assert (embedding.weight.grad != 0).any(1).all()

    def test_state_dict(self) -> None:
        head = multimax.MultiMaxHead(6, 10)
        assert list(head.state_dict()) == ["weight", "bias", "multimax.coefs", "multimax.knots"]
        assert "order=2" in repr(head)

    def test_options_of_the_loss_need_a_target(self) -> None:
        with pytest.raises(TypeError, match="expected no label_smoothing without a target"):
            multimax.MultiMaxHead(6, 10)(torch.randn(2, 6), label_smoothing=0.1)

    def test_it_learns(self) -> None:
        torch.manual_seed(0)
        head = multimax.MultiMaxHead(8, 20)
        hidden, target = torch.randn(200, 8), torch.randint(20, (200,))
        optimizer = torch.optim.Adam(head.parameters(), 0.05)
        losses = []
        for _ in range(60):
            loss, stats = head(hidden, target, return_stats=True)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < 0.8 * losses[0]
        with torch.no_grad():
            assert (head(hidden).argmax(-1) == target).float().mean() > 2 / 20
        assert stats.accuracy > 2 / 20
