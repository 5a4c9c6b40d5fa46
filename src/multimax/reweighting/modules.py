"""The functions as modules, to use instead of ``nn.Softmax``; :class:`multimax.MultiMax` is in `layer`."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from multimax.ops import checks
from multimax.reweighting.registry import Reweighter


def _on_heads(values: Tensor | float, ndim: int, dim: int) -> Tensor | float:
    """A number as it is; (heads,) as a tensor that broadcasts against an input of (..., heads, queries, keys), as for
    MultiMax: the heads are the second to last of the input's dims without `dim`."""
    if not isinstance(values, Tensor) or values.ndim == 0:
        return values
    checks.dims_with_heads(ndim)
    others = [i for i in range(ndim) if i != dim % ndim]
    shape = [1] * ndim
    shape[others[-2] if len(others) > 1 else others[0]] = values.shape[0]
    return values.reshape(shape)


def _repr(*parts: str) -> str:
    return ", ".join(part for part in parts if part)


class Sparsemax(Reweighter):
    """:func:`sparsemax` as a module."""

    reweighting_name = "sparsemax"


class Entmax15(Reweighter):
    """:func:`entmax15` as a module."""

    reweighting_name = "entmax15"


class Softmax(Reweighter):
    r""":func:`softmax` as a module, with a fixed or a trained temperature.

    .. math:: \phi(x) = \operatorname{softmax}(x / T), \qquad T = e^{\theta}

    The state_dict has ``log_temperature``, :math:`\theta`, if it is trained.

    Args:
        temperature: T > 0, fixed or initial.
        learn: whether T is trained.
        heads: the number of heads, for one temperature per head, for x of (..., heads, queries, keys); trained only.
        dim: the dim along which the weights sum to 1.

    Example:
        >>> import torch
        >>> from multimax import reweighting
        >>> layer = reweighting.Softmax(2.0, learn=True)
        >>> layer(torch.tensor([3.0, 2.0, -1.0])).detach()
        tensor([0.5741, 0.3482, 0.0777])
        >>> layer.temperature
        tensor(2., grad_fn=<ExpBackward0>)
    """

    reweighting_name = "softmax"

    def __init__(
        self, temperature: float = 1.0, *, learn: bool = False, heads: int | None = None, dim: int = -1
    ) -> None:
        super().__init__(dim=dim)
        checks.number_above("temperature", temperature, 0)
        checks.heads_to_learn(heads, learn)
        self.initial = float(temperature)
        self.log_temperature = nn.Parameter(torch.empty(() if heads is None else (heads,))) if learn else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Back to the given temperature."""
        if self.log_temperature is not None:
            self.log_temperature.fill_(math.log(self.initial))

    @property
    def temperature(self) -> Tensor | float:
        """T: a number, or () or (heads,)."""
        return self.initial if self.log_temperature is None else self.log_temperature.exp()

    def options(self, ndim: int, dim: int) -> dict[str, Any]:
        """The temperature."""
        return {"temperature": _on_heads(self.temperature, ndim, dim)}

    def settings(self) -> dict[str, Any]:
        """As given."""
        return {"temperature": self.initial, **_learned(self.log_temperature)}

    def extra_repr(self) -> str:
        """The settings."""
        return _repr(_number("temperature", self.temperature), super().extra_repr())


class Entmax(Reweighter):
    r""":func:`entmax` as a module, with a fixed or a trained :math:`\alpha`.

    .. math:: \alpha = l + (h - l)\, \frac{1}{1 + e^{-\theta}}

    stays in [l, h] throughout training. The state_dict has ``shape``, :math:`\theta`, if it is trained.

    Args:
        alpha: above 1, fixed or initial.
        learn: whether alpha is trained.
        heads: the number of heads, for one alpha per head, for x of (..., heads, queries, keys); trained only.
        bounds: (l, h), 1 < l < h, for a trained alpha. By default from nearly softmax to sparsemax.
        dim: the dim along which the weights sum to 1.

    Example:
        >>> import torch
        >>> from multimax import reweighting
        >>> layer = reweighting.Entmax(1.5, learn=True, heads=6)
        >>> layer(torch.randn(2, 6, 10, 10)).sum(-1).mean()
        tensor(1., grad_fn=<MeanBackward0>)
        >>> layer.alpha
        tensor([1.5000, 1.5000, 1.5000, 1.5000, 1.5000, 1.5000],
               grad_fn=<AddBackward0>)

    References:
        Correia, Niculae, Martins: Adaptively Sparse Transformers. EMNLP 2019.
    """

    reweighting_name = "entmax"

    def __init__(
        self,
        alpha: float = 1.5,
        *,
        learn: bool = False,
        heads: int | None = None,
        bounds: tuple[float, float] = (1.01, 2.0),
        dim: int = -1,
    ) -> None:
        super().__init__(dim=dim)
        checks.number_above("alpha", alpha, 1)
        checks.heads_to_learn(heads, learn)
        low, high = bounds
        if learn:
            checks.trained_alpha(alpha, low, high)
        self.initial, self.bounds = float(alpha), (float(low), float(high))
        self.shape = nn.Parameter(torch.empty(() if heads is None else (heads,))) if learn else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Back to the given alpha."""
        if self.shape is not None:
            low, high = self.bounds
            share = (self.initial - low) / (high - low)
            self.shape.fill_(math.log(share / (1 - share)))

    @property
    def alpha(self) -> Tensor | float:
        """A number, or () or (heads,)."""
        if self.shape is None:
            return self.initial
        low, high = self.bounds
        return low + (high - low) * torch.sigmoid(self.shape)

    def options(self, ndim: int, dim: int) -> dict[str, Any]:
        """The alpha."""
        return {"alpha": _on_heads(self.alpha, ndim, dim)}

    def settings(self) -> dict[str, Any]:
        """As given."""
        return {"alpha": self.initial, "bounds": self.bounds, **_learned(self.shape)}

    def extra_repr(self) -> str:
        """The settings."""
        return _repr(_number("alpha", self.alpha), super().extra_repr())


class EvSoftmax(Reweighter):
    """:func:`evsoftmax` as a module: with ``eps`` in training, without in evaluation."""

    reweighting_name = "evsoftmax"

    def __init__(self, eps: float = 1e-6, *, dim: int = -1) -> None:
        super().__init__(dim=dim)
        self.eps = checks.finite("eps", eps)

    def options(self, ndim: int, dim: int) -> dict[str, Any]:
        """The eps."""
        return {"eps": self.eps if self.training else 0.0}

    def settings(self) -> dict[str, Any]:
        """As given."""
        return {"eps": self.eps}

    def extra_repr(self) -> str:
        """The settings."""
        return _repr(f"eps={self.eps:g}", super().extra_repr())


class Sparsehourglass(Reweighter):
    """:func:`sparsehourglass` as a module."""

    reweighting_name = "sparsehourglass"

    def __init__(self, q: float = 1.0, *, dim: int = -1) -> None:
        super().__init__(dim=dim)
        checks.number_above("q", q, 0, infinite=True)
        self.q = float(q)

    def options(self, ndim: int, dim: int) -> dict[str, Any]:
        """The q."""
        return {"q": self.q}

    def settings(self) -> dict[str, Any]:
        """As given."""
        return {"q": self.q}

    def extra_repr(self) -> str:
        """The settings."""
        return _repr(f"q={self.q:g}", super().extra_repr())


class TopK(Reweighter):
    """:func:`topk` as a module."""

    reweighting_name = "topk"

    def __init__(self, k: int | float, *, dim: int = -1) -> None:
        super().__init__(dim=dim)
        checks.count_or_share("k", k)
        self.k = k

    def options(self, ndim: int, dim: int) -> dict[str, Any]:
        """The k."""
        return {"k": self.k}

    def settings(self) -> dict[str, Any]:
        """As given."""
        return {"k": self.k}

    def extra_repr(self) -> str:
        """The settings."""
        return _repr(f"k={self.k}", super().extra_repr())


class AttnScaledSoftmax(Reweighter):
    r""":func:`attnscale` as a module, with a trained or a fixed :math:`\omega`.

    .. math:: \phi(x) = \frac{1}{n} + (1 + \omega) \left(\operatorname{softmax}(x) - \frac{1}{n}\right)

    Unless told otherwise :math:`\omega` is trained and starts at 0, where the function is softmax. **The weights may
    become negative**, see :func:`attnscale`. The state_dict has ``omega``, if it is trained. To use AttnScale after
    a function other than softmax, see :class:`multimax.oversmoothing.AttnScale`.

    Args:
        omega: :math:`\omega`, initial or fixed.
        learn: whether omega is trained.
        heads: the number of heads, for one omega per head, as in the paper, for x of (..., heads, queries, keys);
            trained only.
        dim: the dim along which the weights sum to 1.

    Example:
        >>> import torch
        >>> from multimax import reweighting
        >>> layer, x = reweighting.AttnScaledSoftmax(heads=6), torch.randn(2, 6, 10, 10)
        >>> torch.equal(layer(x), reweighting.softmax(x))
        True
        >>> reweighting.AttnScaledSoftmax(0.5, learn=False)(torch.tensor([3.0, 2.0, -1.0]))
        tensor([ 0.9154,  0.2314, -0.1468])

    References:
        Wang, Zheng, Chen, Wang: Anti-Oversmoothing in Deep Vision Transformers via the Fourier Domain Analysis.
        ICLR 2022.
    """

    reweighting_name = "attnscale"
    omega: nn.Parameter | float

    def __init__(self, omega: float = 0.0, *, learn: bool = True, heads: int | None = None, dim: int = -1) -> None:
        super().__init__(dim=dim)
        checks.number_above("omega", omega, -math.inf)
        checks.heads_to_learn(heads, learn)
        self.initial = float(omega)
        self.omega = nn.Parameter(torch.empty(() if heads is None else (heads,))) if learn else self.initial
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Back to the given omega."""
        if isinstance(self.omega, Tensor):
            self.omega.fill_(self.initial)

    def options(self, ndim: int, dim: int) -> dict[str, Any]:
        """The omega: the function itself knows where the heads are."""
        return {"omega": self.omega}

    def settings(self) -> dict[str, Any]:
        """As given."""
        return {"omega": self.initial, **_learned(self.omega if isinstance(self.omega, Tensor) else None)}

    def extra_repr(self) -> str:
        """The settings."""
        return _repr(_number("omega", self.omega), super().extra_repr())


def _learned(parameter: Tensor | None) -> dict[str, Any]:
    """How a parameter was made: as one number, or as one per head."""
    heads = parameter.shape[0] if parameter is not None and parameter.ndim else None
    return {"learn": parameter is not None, "heads": heads}


def _number(name: str, value: Tensor | float) -> str:
    if not isinstance(value, Tensor):
        return f"{name}={value:g}"
    if not checks.readable(value):
        return f"learned {name}"
    numbers = value.detach().reshape(-1).tolist()
    return f"learned {name}=" + (
        "[" + ", ".join(f"{v:.4g}" for v in numbers) + "]" if value.ndim else f"{numbers[0]:.4g}"
    )
