"""Parameters in the paper's symbols and in the published code's layout, to and from the library's."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from multimax.ops import checks

_PUBLISHED = {
    "ranges": "knots",
    "ts": "coefs",
    "multimax_ranges": "knots",
    "multimax_ts": "coefs",
}
Values = Tensor | Sequence[float] | float


def from_paper(t_b: Values, t_d: Values, b: Values, d: Values) -> tuple[Tensor, Tensor]:
    r"""Coefs and knots from the paper's temperatures and knots.

    .. math:: \text{coefs}_n = (1 - t_{b_n},\ t_{d_n} - 1), \qquad \text{knots}_n = (b_n,\ d_n)

    Args:
        t_b: slopes below b, one per order: shape (N,), or (H, N) for one set per head; a number for order 1.
        t_d: slopes above d, of the same shape.
        b: lower knots, of the same shape.
        d: upper knots, of the same shape.

    Returns:
        coefs and knots, (N, 2) or (H, N, 2), in the dtype of the tensors given, else in torch's default dtype.

    Example:
        >>> import multimax
        >>> multimax.from_paper(t_b=[2.0], t_d=[0.5], b=[0.0], d=[1.0])
        (tensor([[-1.0000, -0.5000]]), tensor([[0., 1.]]))
    """
    given = [value for value in (t_b, t_d, b, d) if isinstance(value, Tensor)]
    dtype = given[0].dtype if given else torch.get_default_dtype()
    device = given[0].device if given else None
    # in double up to the last step: each stored value is the nearest to what was given
    values = [torch.atleast_1d(torch.as_tensor(v, dtype=torch.float64, device=device)) for v in (t_b, t_d, b, d)]
    checks.paper_values(*values)
    slopes_below, slopes_above, lower_knots, upper_knots = values
    coefs = torch.stack([1 - slopes_below, slopes_above - 1], -1).to(dtype)
    knots = torch.stack([lower_knots, upper_knots], -1).to(dtype)
    checks.pair(coefs, knots)
    return coefs, knots


def to_paper(coefs: Tensor, knots: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The paper's t_b, t_d, b and d, each of shape (N,) or (H, N): the inverse of :func:`from_paper`.

    Example:
        >>> import multimax
        >>> t_b, t_d, b, d = multimax.to_paper(*multimax.from_paper([2.0], [0.5], [0.0], [1.0]))
        >>> t_b, t_d
        (tensor([2.]), tensor([0.5000]))
    """
    checks.pair(coefs, knots)
    return 1 - coefs[..., 0], 1 + coefs[..., 1], knots[..., 0], knots[..., 1]


def from_published(
    state_dict: Mapping[str, Tensor], name: str = "multimax", *, output: str | None = None
) -> dict[str, Tensor]:
    """A state_dict of the published code, with its MultiMax parameters under the library's names.

    The published code keeps them in each attention layer and in the model itself, as vectors ``[b1, d1, b2, d2]``
    called ``ranges`` (or ``multimax_ranges``) and, as deviations, ``ts`` (or ``multimax_ts``). Here
    ``<layer>.ranges`` becomes ``<layer>.<name>.knots`` and ``<layer>.ts`` becomes ``<layer>.<name>.coefs``, of shape
    (N, 2). All other entries are kept. The given state_dict is not changed.

    Args:
        state_dict: of a model of the published code.
        name: what the layers call their :class:`MultiMax` module; "" if the layer is one itself.
        output: the layer that gets the parameters kept in the model itself, which belong to the output layer:
            ``"head"`` in timm models after :func:`multimax.convert_`. The model itself unless given.

    Example:
        >>> import torch, multimax
        >>> old = {"blocks.0.attn.ranges": torch.zeros(4), "blocks.0.attn.ts": torch.zeros(4)}
        >>> {key: tuple(value.shape) for key, value in multimax.from_published(old).items()}
        {'blocks.0.attn.multimax.knots': (2, 2), 'blocks.0.attn.multimax.coefs': (2, 2)}
    """
    result: dict[str, Tensor] = {}
    for key, value in state_dict.items():
        prefix, dot, last = key.rpartition(".")
        new = key
        if last in _PUBLISHED:
            checks.published(key, value)
            layer = prefix or output
            new = ".".join(part for part in (layer, name, _PUBLISHED[last]) if part)
            value = value.reshape(-1, 2)
        checks.first_entry(new, key, result)
        result[new] = value
    for key in result:
        prefix, dot, last = key.rpartition(".")
        if key in state_dict or last not in _PUBLISHED.values():
            continue
        partner = prefix + dot + ("coefs" if last == "knots" else "knots")
        checks.partner_entry(partner, key, result)
    return result
