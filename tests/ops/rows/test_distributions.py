"""Distributions and relaxed samples."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import Categorical, kl_divergence

import multimax


@pytest.fixture
def params() -> tuple[Tensor, Tensor]:
    return multimax.from_paper(t_b=[2.0, 1.2], t_d=[0.5, 0.9], b=[0.0, -0.5], d=[1.0, 0.5])


class TestGumbelMultimax:
    @pytest.mark.parametrize("hard", [False, True])
    @pytest.mark.parametrize("dim", [-1, 0, 1])
    @pytest.mark.parametrize("tau", [0.5, 2.0])
    def test_at_zero_coefs_it_is_torch_s(self, hard: bool, dim: int, tau: float) -> None:
        x, knots = torch.randn(4, 5, 6), torch.randn(2, 2)
        results = []
        for ours in (True, False):
            logits = x.clone().requires_grad_()
            torch.manual_seed(3)
            if ours:
                y = multimax.gumbel_multimax(logits, torch.zeros(2, 2), knots, tau, hard, dim)
            else:
                y = F.gumbel_softmax(logits, tau, hard, dim=dim)
            (grad,) = torch.autograd.grad(y, logits, torch.linspace(-1, 1, 120).reshape(4, 5, 6))
            results.append((y, grad))
        torch.testing.assert_close(results[0], results[1])

    @pytest.mark.parametrize("tau", [0.3, 3.0])
    def test_hard_samples_are_distributed_as_multimax(self, params: tuple[Tensor, Tensor], tau: float) -> None:
        x = torch.tensor([2.0, 1.5, 0.0, -1.0])
        draws = 100_000
        samples = multimax.gumbel_multimax(x.expand(draws, 4), *params, tau=tau, hard=True)
        assert ((samples == 0) | (samples == 1)).all()
        p = multimax.multimax(x, *params)
        # five standard deviations
        assert ((samples.mean(0) - p).abs() < 5 * (p * (1 - p) / draws).sqrt() + 1e-6).all()

    def test_gradients_reach_the_parameters(self, params: tuple[Tensor, Tensor]) -> None:
        leaves = [t.requires_grad_() for t in (torch.randn(8, 5), *params)]
        (multimax.gumbel_multimax(*leaves, hard=True) * torch.arange(5)).sum().backward()
        assert all((t.grad != 0).any() for t in leaves)

    def test_masked(self, params: tuple[Tensor, Tensor]) -> None:
        for fill in (-torch.inf, torch.finfo(torch.float32).min):
            x = torch.randn(50, 5)
            x[:, 2] = fill
            x[7] = fill
            x.requires_grad_()
            for tau in (1.0, 0.1):
                y = multimax.gumbel_multimax(x, *params, tau=tau)
                assert (y[:, 2] == 0).all()
                assert (y[7] == 0).all()
                (grad,) = torch.autograd.grad(y.square().sum(), x)
                assert grad.isfinite().all()
                assert (grad[:, 2] == 0).all()
                assert (grad[7] == 0).all()

    def test_heads_and_scalars(self, params: tuple[Tensor, Tensor]) -> None:
        coefs, knots = (p.expand(3, 2, 2) for p in params)
        torch.manual_seed(1)
        a = multimax.gumbel_multimax(torch.ones(2, 3, 4, 5), coefs, knots)
        torch.manual_seed(1)
        b = multimax.gumbel_multimax(torch.ones(2, 3, 4, 5), *params)
        torch.testing.assert_close(a, b)
        assert multimax.gumbel_multimax(torch.tensor(1.0), *params) == 1

    def test_errors(self, params: tuple[Tensor, Tensor]) -> None:
        with pytest.raises(ValueError, match="expected tau above 0"):
            multimax.gumbel_multimax(torch.randn(3), *params, tau=0)
        with pytest.raises(ValueError, match="expected tau in"):
            multimax.gumbel_multimax(torch.randn(3), *params, tau=-1.0)
        with pytest.raises(TypeError, match="expected logits of dtype"):
            multimax.gumbel_multimax(torch.ones(3, dtype=torch.int64), *params)


class TestMultiMaxCategorical:
    def test_it_is_a_categorical_of_multimax(self, params: tuple[Tensor, Tensor]) -> None:
        x = torch.randn(3, 4, 5)
        ours = multimax.MultiMaxCategorical(x, *params)
        theirs = Categorical(probs=multimax.multimax(x, *params))
        assert isinstance(ours, Categorical)
        assert ours.batch_shape == (3, 4)
        torch.testing.assert_close(ours.probs, theirs.probs)
        torch.testing.assert_close(ours.entropy(), theirs.entropy())
        assert torch.equal(ours.mode, theirs.mode)
        value = torch.randint(5, (3, 4))
        torch.testing.assert_close(ours.log_prob(value), theirs.log_prob(value))
        torch.manual_seed(2)
        sample = ours.sample((7,))
        assert sample.shape == (7, 3, 4)
        assert ours.enumerate_support().shape == (5, 3, 4)

    def test_samples(self, params: tuple[Tensor, Tensor]) -> None:
        x = torch.tensor([2.0, 1.5, 0.0, -1.0])
        draws = 100_000
        counts = multimax.MultiMaxCategorical(x, *params).sample((draws,)).bincount(minlength=4) / draws
        p = multimax.multimax(x, *params)
        assert ((counts - p).abs() < 5 * (p * (1 - p) / draws).sqrt() + 1e-6).all()

    def test_expand(self, params: tuple[Tensor, Tensor]) -> None:
        narrow = multimax.MultiMaxCategorical(torch.randn(4, 5), *params)
        wide = narrow.expand((3, 4))
        assert isinstance(wide, multimax.MultiMaxCategorical)
        assert wide.batch_shape == (3, 4)
        assert wide.coefs is narrow.coefs
        assert torch.equal(wide.entropy(), narrow.entropy().expand(3, 4))

    def test_kl(self, params: tuple[Tensor, Tensor]) -> None:
        x = torch.randn(4, 5)
        ours, other = multimax.MultiMaxCategorical(x, *params), Categorical(logits=x)
        p, q = ours.probs, other.probs
        torch.testing.assert_close(kl_divergence(ours, other), (p * (p / q).log()).sum(-1))
        torch.testing.assert_close(kl_divergence(other, ours), (q * (q / p).log()).sum(-1))
        assert (kl_divergence(ours, ours) == 0).all()

    def test_gradients(self, params: tuple[Tensor, Tensor]) -> None:
        leaves = [t.double().requires_grad_() for t in (torch.randn(4, 5), *params)]

        def surrogate(*inputs: Tensor) -> Tensor:
            ours = multimax.MultiMaxCategorical(*inputs)
            return ours.log_prob(torch.tensor([0, 1, 2, 3])) + 0.1 * ours.entropy()

        assert torch.autograd.gradcheck(surrogate, leaves)

    def test_masked_actions(self, params: tuple[Tensor, Tensor]) -> None:
        x = torch.randn(200, 5)
        x[:, 3] = -torch.inf
        ours = multimax.MultiMaxCategorical(x, *params)
        assert (ours.sample() != 3).all()
        assert ours.entropy().isfinite().all()
        x[5] = -torch.inf
        with pytest.raises(ValueError, match="at least one entry that is not masked"):
            multimax.MultiMaxCategorical(x, *params, validate_args=True)  # torch's compiler switches the default off
