"""Modules of the output layer: they own the parameters and call the losses."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from multimax.ops import checks
from multimax.ops.loss.api import linear_multimax_cross_entropy, multimax_cross_entropy
from multimax.ops.rows.api import modulate
from multimax.reweighting.layer import MultiMax
from multimax.reweighting.registry import in_use

Init = str | tuple[Tensor, Tensor]


def _parameters(module: nn.Module) -> tuple[Tensor, Tensor]:
    """The coefs and knots of a MultiMax module, whatever wraps it."""
    options = in_use(module).options
    return options["coefs"], options["knots"]


class MultiMaxCrossEntropyLoss(nn.Module):
    r"""``torch.nn.CrossEntropyLoss`` with MultiMax instead of softmax, and with its parameters.

    .. math:: \ell = -\sum_c w_c\, q_c \log \phi(x)_c

    see :func:`multimax.multimax_cross_entropy`. The parameters are trained with the model: give them to the
    optimizer too. In inference the model's logits have to pass through :func:`multimax.modulate` with the same
    parameters; :class:`MultiMaxHead` does both in one module.

    Args:
        weight: (C,), one weight per class.
        ignore_index: rows with this target do not count.
        reduction: "mean", "sum" or "none".
        label_smoothing: in [0, 1].
        z_loss: factor of the squared log-sums.
        order: order of sigma, see :class:`MultiMax`.
        terms: terms of sigma, see :class:`MultiMax`.
        init: initial parameters, see :class:`MultiMax`.
        monotone: keep sigma non-decreasing, see :class:`MultiMax`.

    Shape:
        As ``torch.nn.CrossEntropyLoss``.

    Example:
        >>> import torch, multimax
        >>> criterion = multimax.MultiMaxCrossEntropyLoss(label_smoothing=0.1, init="identity")
        >>> logits, target = torch.randn(4, 10), torch.randint(10, (4,))
        >>> expected = torch.nn.CrossEntropyLoss(label_smoothing=0.1)(logits, target)
        >>> torch.allclose(criterion(logits, target), expected)
        True
    """

    weight: Tensor | None

    def __init__(
        self,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        *,
        z_loss: float = 0.0,
        order: int = 2,
        terms: str = "both",
        init: Init = "paper",
        monotone: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.ignore_index, self.reduction, self.label_smoothing = ignore_index, reduction, label_smoothing
        self.z_loss = z_loss
        self.multimax = MultiMax(order, terms=terms, init=init, monotone=monotone, device=device, dtype=dtype)

    def options(self) -> dict[str, Any]:
        """What the functions take by name."""
        names = ("weight", "ignore_index", "reduction", "label_smoothing", "z_loss")
        return {name: getattr(self, name) for name in names}

    def forward(self, input: Tensor, target: Tensor, **options: Any) -> Any:
        """The loss of logits; ``return_stats=True`` as for the function."""
        coefs, knots = _parameters(self.multimax)
        return multimax_cross_entropy(input, target, coefs, knots, **{**self.options(), **options})

    def extra_repr(self) -> str:
        """What differs from the defaults."""
        defaults = {"weight": None, "ignore_index": -100, "reduction": "mean", "label_smoothing": 0.0, "z_loss": 0.0}
        given = {name: value for name, value in self.options().items() if name != "weight" and value != defaults[name]}
        return ", ".join(f"{name}={value!r}" for name, value in given.items())


class LinearMultiMaxCrossEntropyLoss(MultiMaxCrossEntropyLoss):
    r"""``torch.nn.LinearCrossEntropyLoss`` with MultiMax: a linear layer and its loss, without holding the logits.

    .. math:: \ell = \operatorname{CE}(\sigma(h W^\top + \beta),\, y)

    see :func:`multimax.linear_multimax_cross_entropy`. The layer is ``linear``, as in torch.

    Args:
        in_features: D, entries of a hidden state.
        num_classes: C.
        bias: whether the layer has one.
        chunk: rows whose logits are held at once; None for the default.
        device: of the parameters.
        dtype: of the parameters.
        options: as for :class:`MultiMaxCrossEntropyLoss`.

    Shape:
        input (..., D), target (...) of indices or (..., C) of probabilities.

    Example:
        >>> import torch, multimax
        >>> criterion = multimax.LinearMultiMaxCrossEntropyLoss(16, 1000)
        >>> criterion(torch.randn(2, 10, 16), torch.randint(1000, (2, 10))).shape
        torch.Size([])
    """

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        bias: bool = False,
        chunk: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__(device=device, dtype=dtype, **options)
        self.linear = nn.Linear(in_features, num_classes, bias, device=device, dtype=dtype)
        self.chunk = chunk

    def forward(self, input: Tensor, target: Tensor, **options: Any) -> Any:
        """The loss of hidden states; ``return_stats=True`` as for the function."""
        coefs, knots = _parameters(self.multimax)
        weight, bias = self.linear.weight, self.linear.bias
        options = {**self.options(), "chunk": self.chunk, **options}
        return linear_multimax_cross_entropy(input, weight, target, coefs, knots, linear_bias=bias, **options)


class MultiMaxHead(nn.Linear):
    r"""A model's last layer: a linear layer that carries MultiMax's parameters.

    .. math:: \operatorname{head}(h) = \sigma(h W^\top + \beta), \qquad
        \operatorname{head}(h, y) = \operatorname{CE}(\sigma(h W^\top + \beta),\, y)

    Without a target it gives modulated logits, whose softmax is MultiMax: argmax, sampling, beam search and temperature
    work on them as on any logits. With a target it gives the loss, and never holds the logits
    (:func:`multimax.linear_multimax_cross_entropy`). The state_dict has the keys of ``nn.Linear``, and also
    ``multimax.coefs`` and ``multimax.knots``. To tie it to an embedding: ``head.weight = embedding.weight``.

    Args:
        in_features: D, entries of a hidden state.
        out_features: C, classes.
        bias: whether the layer has one.
        order: order of sigma, see :class:`MultiMax`.
        terms: terms of sigma, see :class:`MultiMax`.
        init: initial parameters, see :class:`MultiMax`.
        monotone: keep sigma non-decreasing, see :class:`MultiMax`.
        device: of the parameters.
        dtype: of the parameters.

    Shape:
        input (..., D); output (..., C), or with a target a loss.

    Example:
        >>> import torch, multimax
        >>> head = multimax.MultiMaxHead(16, 1000)
        >>> hidden, target = torch.randn(2, 10, 16), torch.randint(1000, (2, 10))
        >>> head(hidden).shape
        torch.Size([2, 10, 1000])
        >>> loss = head(hidden, target, label_smoothing=0.1)
        >>> torch.allclose(loss, torch.nn.functional.cross_entropy(head(hidden).mT, target, label_smoothing=0.1))
        True
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        order: int = 2,
        terms: str = "both",
        init: Init = "paper",
        monotone: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self.multimax = MultiMax(order, terms=terms, init=init, monotone=monotone, device=device, dtype=dtype)

    @classmethod
    def from_linear(cls, linear: nn.Linear, *, init: Init = "identity", **options: Any) -> "MultiMaxHead":
        """A head with the weight and bias of an existing layer, shared, not copied.

        Args:
            linear: the layer.
            init: initial parameters; the default leaves the model's output as it is.
            options: further options of :class:`MultiMaxHead`.
        """
        device, dtype = linear.weight.device, linear.weight.dtype
        bias = linear.bias is not None
        head = cls(linear.in_features, linear.out_features, bias, init=init, device="meta", dtype=dtype, **options)
        head.weight, head.bias = linear.weight, linear.bias
        head.multimax.to_empty(device=device)
        head.multimax.reset_parameters()
        return head

    def forward(self, input: Tensor, target: Tensor | None = None, **options: Any) -> Any:
        """Modulated logits, or, with a target, the loss; the options are for the loss."""
        coefs, knots = _parameters(self.multimax)
        if target is not None:
            return linear_multimax_cross_entropy(
                input, self.weight, target, coefs, knots, linear_bias=self.bias, **options
            )
        checks.no_loss_options(options)
        return modulate(F.linear(input, self.weight, self.bias), coefs, knots)
