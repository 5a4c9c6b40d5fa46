"""The functions: check the arguments, choose an implementation, call it."""

from torch import Tensor

from multimax.ops import checks, dispatch
from multimax.ops.rows.call import KINDS, RowsCall

IMPLEMENTATIONS = dispatch.load("rows")


def _rows(kind: str, x: Tensor, coefs: Tensor, knots: Tensor, dim: int, mask: Tensor | None, impl: str) -> Tensor:
    checks.tensor("x", x)
    dim = checks.dimension(dim, x.ndim)
    coefs, knots = checks.parameters(x, coefs, knots, dim)
    mask = checks.mask_for(x, mask)
    scalar = x.ndim == 0
    if scalar:
        x, mask = x[None], None if mask is None else mask[None]
    call = RowsCall(x, coefs, knots, mask, dim, KINDS.index(kind))
    weights: Tensor = dispatch.choose(IMPLEMENTATIONS, impl, call).run(call)
    return weights[0] if scalar else weights


def multimax(
    x: Tensor, coefs: Tensor, knots: Tensor, *, dim: int = -1, mask: Tensor | None = None, impl: str = "auto"
) -> Tensor:
    r"""MultiMax along a dim: softmax of a learned, piece-wise modulated input.

    .. math::
        \phi(x)_i = \frac{e^{\sigma(x_i)}}{\sum_k e^{\sigma(x_k)}}, \qquad
        \sigma(x) = x + \sum_{n=1}^{N} c_n \max(b_n - x, 0)^n + e_n \max(x - d_n, 0)^n

    with :math:`c_n = 1 - t_{b_n}` and :math:`e_n = t_{d_n} - 1` of the paper (equations 4 and 6). All-zero ``coefs``
    is softmax. Entries that are ``-inf``, or at or below half of the dtype's lowest finite value, count as masked: they
    get weight 0 and no gradient. A row with nothing left is all zeros. A NaN makes its whole row NaN.

    Where :math:`\sigma` overflows in the dtype of computation, each term multiplied out from its coefficient, the same
    holds: what becomes ``-inf`` counts as masked, and what becomes ``inf`` or NaN makes its row NaN, but for entries
    that are masked, which keep weight 0 and gradient 0. An entry whose :math:`\sigma` has gradient 0 adds nothing to
    any gradient, whatever its powers overflow to. So on every path and instruction set, and in attention; only the GPU
    kernels of attention let a term grow no further at a distance of 2**30 from its knot. Gradients are defined where
    n times each coefficient of order n is finite, too.

    Half-precision inputs are computed in float32 and returned in their dtype; the parameters may be of another dtype.
    Gradients flow to ``x``, ``coefs`` and ``knots``; equal calls give bitwise equal results.

    Args:
        x: input of any shape, float32, float64, bfloat16 or float16.
        coefs: :math:`(c_n, e_n)`, of shape (N, 2) for one set of parameters or (H, N, 2) for one per head. (H, N, 2) is
            made for attention scores (..., H, queries, keys): the heads are the second to last of x's other dims. For
            heads on any other axis give leading dims that broadcast against x's shape without ``dim``: for x of
            (batch, queries, H, keys) that is (H, N, 2) viewed as (1, H, N, 2).
        knots: :math:`(b_n, d_n)`, of the same shape as ``coefs``.
        dim: the dim along which the weights sum to 1.
        mask: boolean, broadcastable to ``x``; True where an entry takes part.
        impl: "auto", "cpu" (the compiled kernels), "triton" (those for GPUs) or "reference" (the formulas in plain
            PyTorch). An implementation given by name runs or raises; "auto" takes the kernels of the input's device,
            except under forward-mode differentiation.

    Returns:
        Weights of the shape and dtype of ``x``.

    Example:
        >>> import torch, multimax
        >>> coefs, knots = multimax.from_paper(t_b=[2.0], t_d=[0.5], b=[0.0], d=[1.0])
        >>> x = torch.tensor([3.0, 2.0, -1.0])
        >>> torch.softmax(x, -1)
        tensor([0.7214, 0.2654, 0.0132])
        >>> multimax.multimax(x, coefs, knots)
        tensor([0.6154, 0.3733, 0.0113])

    References:
        Zhou, Fritz, Keuper: MultiMax: Sparse and Multi-Modal Attention Learning. ICML 2024, equations 4 to 6.
    """
    return _rows("multimax", x, coefs, knots, dim, mask, impl)


def log_multimax(
    x: Tensor, coefs: Tensor, knots: Tensor, *, dim: int = -1, mask: Tensor | None = None, impl: str = "auto"
) -> Tensor:
    r"""The logarithm of :func:`multimax`, computed without leaving the log domain.

    .. math:: \log \phi(x)_i = \sigma(x_i) - \log \sum_k e^{\sigma(x_k)}

    Masked entries, and rows with nothing left, are ``-inf`` and pass no gradient.

    Args:
        x: input of any shape.
        coefs: as for :func:`multimax`.
        knots: as for :func:`multimax`.
        dim: the dim along which the weights sum to 1.
        mask: boolean, broadcastable to ``x``; True where an entry takes part.
        impl: as for :func:`multimax`.

    Returns:
        Log-weights of the shape and dtype of ``x``.

    Example:
        >>> import torch, multimax
        >>> coefs, knots = multimax.from_paper(t_b=[2.0], t_d=[0.5], b=[0.0], d=[1.0])
        >>> multimax.log_multimax(torch.tensor([3.0, 2.0, -1.0]), coefs, knots)
        tensor([-0.4854, -0.9854, -4.4854])
    """
    return _rows("log_multimax", x, coefs, knots, dim, mask, impl)


def modulate(x: Tensor, coefs: Tensor, knots: Tensor, *, impl: str = "auto") -> Tensor:
    r"""The modulator :math:`\sigma` alone, entry by entry (equation 6).

    .. math:: \sigma(x) = x + \sum_{n=1}^{N} c_n \max(b_n - x, 0)^n + e_n \max(x - d_n, 0)^n

    ReLU, Leaky ReLU and PReLU are special cases: ``b = d = 0``, ``t_d = 1`` and ``t_b`` the slope below zero. Entries
    that count as masked (see :func:`multimax`) pass through unchanged and without gradient:
    ``torch.softmax(modulate(x, coefs, knots), -1)`` treats them as masked too.

    Args:
        x: input of any shape.
        coefs: as for :func:`multimax` with ``dim=-1``.
        knots: as for :func:`multimax` with ``dim=-1``.
        impl: as for :func:`multimax`.

    Returns:
        Modulated input of the shape and dtype of ``x``.

    Example:
        >>> import torch, multimax
        >>> relu = multimax.from_paper(t_b=[0.0], t_d=[1.0], b=[0.0], d=[0.0])
        >>> multimax.modulate(torch.tensor([-2.0, 0.5, 3.0]), *relu)
        tensor([0.0000, 0.5000, 3.0000])
    """
    return _rows("modulate", x, coefs, knots, -1, None, impl)
