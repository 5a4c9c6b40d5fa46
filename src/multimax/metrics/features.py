"""How alike the features of an image's patches, or a text's tokens, have become: the measures of over-smoothing.

Shapes: n patches of d features each, after any number of batch dims.
"""

import torch
from torch import Tensor

from multimax.ops import checks
from multimax.ops.dtypes import compute_dtype


def _cosines(features: Tensor, part: Tensor | None) -> Tensor:
    """The cosine of every pair of patches, (..., n, n), 0 where one is zero or does not take part."""
    features = features.to(compute_dtype(features.dtype))
    if part is not None:  # not by multiplication: what is left out may be NaN
        features = torch.where(part[..., None], features, 0)
    if features.shape[-1] == 0:
        return features.new_zeros(*features.shape[:-1], features.shape[-2])
    # scaled first, since squares of large features overflow and squares of small ones underflow
    largest = features.abs().amax(-1, keepdim=True)
    features = features / torch.where(largest > 0, largest, 1)
    length = torch.linalg.vector_norm(features, dim=-1, keepdim=True)
    features = features / torch.where(length == 0, 1, length)
    return (features @ features.transpose(-1, -2)).clamp(-1, 1)


def _others(features: Tensor) -> Tensor:
    """(n, n), True for pairs of different patches."""
    return ~torch.eye(features.shape[-2], dtype=torch.bool, device=features.device)


def patch_similarity(features: Tensor, mask: Tensor | None = None) -> Tensor:
    r"""The mean absolute cosine of pairs of patches: 1 where all point the same way, up to sign.

    .. math:: \frac{1}{n (n - 1)} \sum_{i \ne j} \frac{|h_i^\top h_j|}{\lVert h_i \rVert \lVert h_j \rVert}

    Args:
        features: (..., n, d).
        mask: boolean, broadcastable to (..., n); True for patches that take part, which leaves out padding.

    Returns:
        (...), in [0, 1], in float32 for half precision. NaN for fewer than two patches, which make no pair. A patch of
        zeros has no direction: its cosine counts as 0, as in ``torch.nn.functional.cosine_similarity``.

    Example:
        >>> import torch
        >>> from multimax import metrics
        >>> metrics.patch_similarity(torch.tensor([[1.0, 0.0], [-2.0, 0.0], [0.0, 3.0]]))
        tensor(0.3333)

    References:
        Gong, Wang, Li, Chandra, Liu: Vision Transformers with Patch Diversification. 2021.
    """
    checks.features(features)
    part = checks.features_mask(mask, features, tuple(features.shape[:-1]), "patches")
    pairs = _others(features)
    if part is not None:
        pairs = pairs & part[..., :, None] & part[..., None, :]
    cosines = _cosines(features, part)
    return torch.where(pairs, cosines.abs(), 0).sum((-2, -1)) / pairs.sum((-2, -1))


def mean_average_distance(features: Tensor, mask: Tensor | None = None) -> Tensor:
    r"""The mean cosine distance of patches to their targets: 0 where all point the same way.

    .. math:: \frac{1}{|R|} \sum_{i \in R} \frac{1}{|T_i|} \sum_{j \in T_i} D_{ij}, \qquad
        D_{ij} = 1 - \frac{h_i^\top h_j}{\lVert h_i \rVert \lVert h_j \rVert}

    where :math:`T_i` are the targets of patch i, all others unless a mask restricts them, and :math:`R` the patches
    that have any. Chen et al. divide by the number of nonzero entries, which is the same unless two patches are exactly
    parallel; here such a pair counts, with distance 0, so the value does not jump where patches become equal.

    Args:
        features: (..., n, d).
        mask: boolean, broadcastable to (..., n, n); True where patch j is a target of patch i. A patch is never its
            own target.

    Returns:
        (...), in [0, 2], in float32 for half precision. NaN where no patch has a target, as for a single patch. A patch
        of zeros has no direction: it is at distance 1 from all others.

    Example:
        >>> import torch
        >>> from multimax import metrics
        >>> metrics.mean_average_distance(torch.tensor([[1.0, 0.0], [-2.0, 0.0], [0.0, 3.0]]))
        tensor(1.3333)

    References:
        Chen, Lin, Li, Li, Zhou, Sun: Measuring and Relieving the Over-smoothing Problem for Graph Neural Networks from
        the Topological View. AAAI 2020, equations 1 to 4.
    """
    checks.features(features)
    pairs = _others(features).expand(*features.shape[:-1], features.shape[-2])
    targets = checks.features_mask(mask, features, tuple(pairs.shape), "pairs of patches")
    part = None
    if targets is not None:
        pairs = pairs & targets
        part = pairs.any(-1) | pairs.any(-2)  # patches in no pair may hold anything, even NaN
    distances = torch.where(pairs, 1 - _cosines(features, part), 0).sum(-1)  # (..., n)
    counts = pairs.sum(-1)
    rows = torch.where(counts > 0, distances / counts, 0).sum(-1)
    return rows / (counts > 0).sum(-1)
