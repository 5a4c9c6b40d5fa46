"""Sparsehourglass."""

from torch import Tensor

from multimax.ops import checks
from multimax.ops.entmax.api import of_kind


def sparsehourglass(
    x: Tensor, *, q: float = 1.0, dim: int = -1, mask: Tensor | None = None, impl: str = "auto"
) -> Tensor:
    r"""Sparsehourglass: sparsemax of an input that is scaled towards sum-normalisation.

    .. math:: \phi(x) = \operatorname{sparsemax}\left(\frac{1 + K q}{\lvert \sum_k x_k \rvert + K q}\, x\right)

    for K entries. q to infinity is sparsemax, q to 0 projects :math:`x / \lvert \sum_k x_k \rvert`. Unlike the other
    functions here, it changes if a constant is added to x.

    Args:
        x: input of any shape.
        q: above 0; infinity is allowed.
        dim: the dim along which the weights sum to 1.
        mask: True where an entry takes part; K and the sum are of these.
        impl: "auto", "cpu" or "reference".

    Returns:
        Weights of the shape and dtype of ``x``.

    Example:
        >>> import torch
        >>> from multimax import reweighting
        >>> reweighting.sparsehourglass(torch.tensor([1.0, 0.6, -1.0]), q=0.5)
        tensor([0.7381, 0.2619, 0.0000])

    References:
        Laha, Chemmengath, Agrawal, Khapra, Sankaranarayanan, Ramaswamy: On Controllable Sparse Alternatives to Softmax.
        NeurIPS 2018.
    """
    dim, mask = checks.rows(x, dim, mask)
    checks.number_above("q", q, 0, infinite=True)
    return of_kind("sparsehourglass", x, dim, mask, impl, option=1 / float(q))
