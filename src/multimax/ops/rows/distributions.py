"""Categorical distributions with MultiMax instead of softmax, and samples that gradients flow through."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import Categorical, Distribution

from multimax.ops import checks, masking
from multimax.ops.rows.api import log_multimax, modulate


def gumbel_multimax(
    logits: Tensor, coefs: Tensor, knots: Tensor, tau: float = 1.0, hard: bool = False, dim: int = -1
) -> Tensor:
    r"""``torch.nn.functional.gumbel_softmax`` of modulated logits: relaxed samples of MultiMax.

    .. math:: y = \operatorname{softmax}((\sigma(x) + g) / \tau), \qquad g_i \sim \operatorname{Gumbel}(0, 1)

    The largest entry of y is distributed as :math:`\phi(x)`, whatever the temperature: sigma comes before the noise.
    With zero ``coefs`` it is torch's function, draw by draw. Entries that count as masked (see
    :func:`multimax.multimax`) are never drawn; a row with nothing left is all zeros.

    Args:
        logits: of any shape.
        coefs: as for :func:`multimax.multimax`.
        knots: as for :func:`multimax.multimax`.
        tau: temperature, above 0.
        hard: return one-hot samples, with the gradient of the relaxed ones (straight-through).
        dim: the dim along which a sample sums to 1.

    Returns:
        Samples of the shape of ``logits``.

    Example:
        >>> import torch, multimax
        >>> layer = multimax.MultiMax()
        >>> sample = multimax.gumbel_multimax(torch.randn(3, 5), layer.coefs, layer.knots, tau=0.5, hard=True)
        >>> sample.sum(-1)
        tensor([1., 1., 1.], grad_fn=<SumBackward1>)
    """
    checks.tensor("logits", logits)
    dim = checks.dimension(dim, logits.ndim)
    checks.gumbel_temperature(tau)
    coefs, knots = checks.parameters(logits, coefs, knots, dim)
    last = logits[None] if logits.ndim == 0 else logits.movedim(dim, -1)
    masked = masking.masked(last)
    empty = masked.all(-1, keepdim=True)
    # a row without entries still gets a sample, to avoid NaN, and is zeroed
    scores = torch.where(masked, torch.where(empty, 0.0, -torch.inf), modulate(last, coefs, knots))
    samples = F.gumbel_softmax(scores.movedim(-1, dim), tau, hard, dim=dim)
    return torch.where(empty.movedim(-1, dim), 0.0, samples).reshape(logits.shape)


class MultiMaxCategorical(Categorical):
    r"""``torch.distributions.Categorical`` with MultiMax instead of softmax.

    .. math:: P(i) = \phi(x)_i

    Everything that torch's distribution has: sample, log_prob, entropy, mode, enumerate_support, expand, and the
    Kullback-Leibler divergence from and to other categorical distributions. Gradients flow to the logits and to the
    parameters. Entries that count as masked (see :func:`multimax.multimax`) have probability 0; one entry must
    be left.

    Args:
        logits: (..., C).
        coefs: as for :func:`multimax.multimax`.
        knots: as for :func:`multimax.multimax`.
        validate_args: as in torch.

    Example:
        >>> import torch, multimax
        >>> coefs, knots = multimax.from_paper(t_b=[2.0], t_d=[0.5], b=[0.0], d=[1.0])
        >>> policy = multimax.MultiMaxCategorical(torch.tensor([3.0, 2.0, -1.0]), coefs, knots)
        >>> policy.probs
        tensor([0.6154, 0.3733, 0.0113])
        >>> policy.log_prob(torch.tensor(0))
        tensor(-0.4854)
    """

    def __init__(self, logits: Tensor, coefs: Tensor, knots: Tensor, validate_args: bool | None = None) -> None:
        self.coefs, self.knots = coefs, knots
        log_weights = log_multimax(logits, coefs, knots)
        validate = Distribution._validate_args if validate_args is None else validate_args
        if validate:
            checks.not_all_masked(log_weights)
        super().__init__(logits=log_weights, validate_args=validate_args)

    def expand(self, batch_shape: Any, _instance: Any = None) -> "MultiMaxCategorical":
        """The same distribution for a batch of that shape, without copies."""
        new = self._get_checked_instance(MultiMaxCategorical, _instance)
        new.coefs, new.knots = self.coefs, self.knots
        result: MultiMaxCategorical = super().expand(batch_shape, _instance=new)
        return result
