"""MultiMax as a module: it owns the parameters and calls the function."""

from typing import Any

import torch
from torch import Tensor, nn

from multimax.ops import checks
from multimax.ops.parameters import from_paper, to_paper
from multimax.ops.presets import presets
from multimax.reweighting.registry import Reweighter

TERMS = ("both", "lower", "upper")
INITS = ("paper", "identity", *presets)
SYMBOLS = ("t_b", "t_d", "b", "d")  # as to_paper gives them


class MultiMax(Reweighter):
    r"""MultiMax as a layer that holds its parameters, instead of ``nn.Softmax``.

    .. math:: \phi(x) = \operatorname{softmax}(\sigma(x)), \qquad
        \sigma(x) = x + \sum_{n=1}^{N} (1 - t_{b_n}) \max(b_n - x, 0)^n + (t_{d_n} - 1) \max(x - d_n, 0)^n

    (equation 6 of the paper). The state_dict has two tensors: ``coefs`` with :math:`(1 - t_{b_n}, t_{d_n} - 1)` and
    ``knots`` with :math:`(b_n, d_n)`, of shape (N, 2) or (H, N, 2). All-zero coefs is softmax.

    Args:
        order: N, at least 1; the paper uses 1 and 2.
        terms: "both", "lower" (the paper's MultiMax-l: only entries below b are modulated) or "upper". A term that is
            switched off stays at zero whatever is stored for it.
        heads: H for one set of parameters per head, for scores of shape (..., H, queries, keys); None for one set.
        dim: the dim along which the weights sum to 1.
        init: "paper" (both from a normal distribution of standard deviation 0.02, truncated), "identity" (zero coefs,
            which gives softmax, and knots spread over [-1, 1], which lets training begin), the name of a model in
            ``multimax.presets`` (what its layer at the same depth has learned; order 1 or 2), or a pair of tensors
            (coefs, knots), such as :func:`from_paper` gives.
        monotone: keep sigma non-decreasing, by construction: see :meth:`parameters_in_use`. The paper leaves the
            parameters unconstrained.
        depth: where in its model the layer stands, from 0, the first, to 1, the last, for an init out of
            ``multimax.presets``. :func:`convert_` fills it in.

    Shape:
        input (any shape), output of the same shape and dtype.

    Example:
        >>> import torch, multimax
        >>> layer = multimax.MultiMax(init=multimax.from_paper(*multimax.presets["deit_small"][11]))
        >>> layer
        MultiMax(order=2, t_b=[0.1638, 3.207], t_d=[0.2557, 0.991], b=[1.685, 0.9796], d=[-0.04795, 2.184])
        >>> layer(torch.tensor([3.0, 2.0, 0.5])).detach()
        tensor([0.3788, 0.2951, 0.3261])
    """

    reweighting_name = "multimax"
    coefs: nn.Parameter
    knots: nn.Parameter

    def __init__(
        self,
        order: int = 2,
        *,
        terms: str = "both",
        heads: int | None = None,
        dim: int = -1,
        init: str | tuple[Tensor, Tensor] = "paper",
        monotone: bool = False,
        depth: float = 1.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(dim=dim)
        for name, value in (("order", order), ("heads", heads)):
            if value is not None:
                checks.at_least(name, value, 1)
        checks.choice("terms", terms, TERMS)
        checks.flag("monotone", monotone)
        self.order, self.terms, self.heads = order, terms, heads
        self.init, self.monotone, self.depth = init, monotone, depth
        shape = (order, 2) if heads is None else (heads, order, 2)
        if isinstance(init, str):
            checks.choice("init", init, INITS)
            if init in presets:
                checks.learned_init(init, order, monotone, depth)
        else:
            checks.initial_pair(init, shape, monotone)
        self.coefs = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.knots = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Sets the parameters according to ``init``."""
        if not isinstance(self.init, str):
            self.coefs.copy_(self.init[0])
            self.knots.copy_(self.init[1])
        elif self.init in presets:
            layers = presets[self.init]
            learned = layers[round(self.depth * (len(layers) - 1))]
            coefs, knots = from_paper(*(torch.tensor(values, dtype=torch.float64) for values in learned))
            self.coefs.copy_(coefs[: self.order])
            self.knots.copy_(knots[: self.order])
        elif self.init == "paper":
            nn.init.trunc_normal_(self.coefs, std=0.02)
            nn.init.trunc_normal_(self.knots, std=0.02)
        else:
            self.coefs.zero_()
            spread = torch.arange(1, self.order + 1) / self.order
            self.knots.copy_(torch.stack([-spread, spread], -1))
        if self.terms != "both":  # terms that are off are zero in the state_dict too
            self.coefs[..., 1 if self.terms == "lower" else 0] = 0

    def parameters_in_use(self) -> tuple[Tensor, Tensor]:
        """Coefs and knots as the function gets them: without the terms that are off, and monotone if asked for.

        sigma is non-decreasing if its slope is positive in the first order and the higher orders only add to it. So
        monotone=True takes t_b = exp(-coefs) and t_d = exp(coefs) in the first order, with the smaller of its knots as
        b and the larger as d, and beyond it -|coefs| below and |coefs| above. Zero stays zero, with slope 1.
        """
        coefs: Tensor = self.coefs
        knots: Tensor = self.knots
        if self.monotone:
            lower, upper = coefs[..., :1, 0], coefs[..., :1, 1]
            first = torch.stack([-torch.expm1(-lower), torch.expm1(upper)], -1)  # (..., 1, 2)
            # not -abs and abs: their gradient at zero is zero, and training from the identity would never begin
            lower, upper = coefs[..., 1:, 0], coefs[..., 1:, 1]
            higher = torch.stack([torch.where(lower > 0, -lower, lower), torch.where(upper < 0, -upper, upper)], -1)
            coefs = torch.cat([first, higher], -2)
            knots = torch.cat([knots[..., :1, :].sort(-1).values, knots[..., 1:, :]], -2)
        if self.terms != "both":
            on = torch.tensor([self.terms == "lower", self.terms == "upper"], dtype=coefs.dtype, device=coefs.device)
            coefs = coefs * on
        return coefs, knots

    def options(self, ndim: int, dim: int) -> dict[str, Any]:
        """The coefs and knots in use: the function itself knows where the heads are."""
        coefs, knots = self.parameters_in_use()
        return {"coefs": coefs, "knots": knots}

    def settings(self) -> dict[str, Any]:
        """As given, except for the initial parameters."""
        return {"order": self.order, "terms": self.terms, "heads": self.heads, "monotone": self.monotone}

    def learned(self) -> dict[str, Tensor]:
        """The paper's parameters of the terms in use, by order: t_b_1, t_d_1, b_1, d_1, t_b_2 and so on."""
        values = {symbol: getattr(self, symbol) for symbol in self._symbols()}
        return {f"{symbol}_{n + 1}": value[..., n] for n in range(self.order) for symbol, value in values.items()}

    def _symbols(self) -> list[str]:
        """The paper's symbols of the terms in use."""
        off = {"lower": "d", "upper": "b"}.get(self.terms)
        return [symbol for symbol in SYMBOLS if symbol[-1] != off]

    def _paper(self, symbol: str) -> Tensor:
        coefs, knots = self.parameters_in_use()
        return to_paper(coefs.detach(), knots.detach())[SYMBOLS.index(symbol)]

    @property
    def t_b(self) -> Tensor:
        """The paper's t_b, (N,) or (H, N): the slope below b in the first order, 1 plus its part in the others."""
        return self._paper("t_b")

    @property
    def t_d(self) -> Tensor:
        """The paper's t_d, (N,) or (H, N)."""
        return self._paper("t_d")

    @property
    def b(self) -> Tensor:
        """The paper's lower knots, (N,) or (H, N)."""
        return self._paper("b")

    @property
    def d(self) -> Tensor:
        """The paper's upper knots, (N,) or (H, N)."""
        return self._paper("d")

    def extra_repr(self) -> str:
        """The settings, and, for one set of parameters, their values in the paper's symbols."""
        parts = [f"order={self.order}"]
        if self.terms != "both":
            parts.append(f"terms={self.terms!r}")
        if self.heads is not None:
            parts.append(f"heads={self.heads}")
        if self.dim != -1:
            parts.append(f"dim={self.dim}")
        if self.monotone:
            parts.append("monotone=True")
        if self.heads is None and checks.readable(self.coefs):
            for symbol in self._symbols():
                values = ", ".join(f"{value:.4g}" for value in getattr(self, symbol).tolist())
                parts.append(f"{symbol}=[{values}]")
        return ", ".join(parts)


def state_as_softmax(module: nn.Module) -> dict[str, Tensor]:
    """The state_dict of a reweighting module that a checkpoint does not contain: MultiMax becomes softmax, and
    everything else stays as it is."""
    return {
        name: torch.zeros_like(value) if name.rpartition(".")[2] == "coefs" else value.detach().clone()
        for name, value in module.state_dict().items()
    }
