"""Remedies against over-smoothing that the paper compares with: AttnScale, and the losses of Patch Diversification.

Over-smoothing means that the patches of an image, or the tokens of a text, become more alike from layer to layer.

Shapes: B images, H heads, Lq queries, Lk keys; n patches of d features, C classes.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from multimax.metrics.features import patch_similarity
from multimax.ops import checks
from multimax.ops.dtypes import compute_dtype
from multimax.reweighting.high_pass import AttnScale, attn_scale

__all__ = [
    "AttnScale",
    "attn_scale",
    "patch_contrastive_loss",
    "patch_cosine_loss",
    "patch_mixing",
    "patch_mixing_loss",
]


def _exact(value: Tensor) -> Tensor:
    """At least float32."""
    return value.to(compute_dtype(value.dtype))


def patch_cosine_loss(features: Tensor) -> Tensor:
    r"""Patch Diversification's first loss: how alike the patches of the last layer are.

    .. math:: L_{cos} = \frac{1}{n (n - 1)} \sum_{i \ne j} \frac{|h_i^T h_j|}{\lVert h_i \rVert \lVert h_j \rVert}

    Args:
        features: :math:`h_1, \dots, h_n`, the patches of the last layer without the class token, (B, n, d), n >= 2.

    Returns:
        The mean over the batch, a scalar of the features' dtype: 0 if all patches are orthogonal, 1 if all are on one
        line. A patch of zeros counts as orthogonal to all.

    Example:
        >>> import torch
        >>> from multimax.oversmoothing import patch_cosine_loss
        >>> patch_cosine_loss(torch.tensor([[[1.0, 0.0], [1.0, 1.0], [0.0, -2.0]]]))
        tensor(0.4714)

    References:
        Gong, Wang, Li, Chandra, Liu: Vision Transformers with Patch Diversification, arXiv:2104.12753, 2021.
    """
    checks.patches("features", features)
    with torch.autocast(features.device.type, enabled=False):  # which would round the products to half precision
        return patch_similarity(features).mean().to(features.dtype)


def patch_contrastive_loss(first: Tensor, last: Tensor) -> Tensor:
    r"""Patch Diversification's second loss: how little a patch of the last layer still resembles itself in the first.

    .. math:: L_{con} = -\frac{1}{n} \sum_i \log \frac{\exp(g_i^T h_i)}{\exp(g_i^T h_i) + \exp(g_i^T \bar{h}_i)},
        \qquad \bar{h}_i = \frac{1}{n - 1} \sum_{j \ne i} h_j

    The first layer is the fixed target: no gradient flows to it, as in the paper and its code.

    Args:
        first: :math:`g_1, \dots, g_n`, the patches of the first layer without the class token, (B, n, d), n >= 2.
        last: :math:`h_1, \dots, h_n`, the patches of the last layer, of the same shape.

    Returns:
        The mean over the batch, a scalar of last's dtype, above 0; :math:`\log 2` if all patches of the last layer
        are equal.

    Example:
        >>> import torch
        >>> from multimax.oversmoothing import patch_contrastive_loss
        >>> first = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
        >>> patch_contrastive_loss(first, torch.ones(1, 2, 2)), patch_contrastive_loss(first, 4 * first)
        (tensor(0.6931), tensor(0.0181))

    References:
        Gong, Wang, Li, Chandra, Liu: Vision Transformers with Patch Diversification, arXiv:2104.12753, 2021.
    """
    checks.first_and_last(first, last)
    h = _exact(last)
    g = first.detach().to(h.dtype)
    others = (h.sum(1, keepdim=True) - h) / (h.shape[1] - 1)
    return F.softplus((g * (others - h)).sum(-1)).mean().to(last.dtype)


def patch_mixing(
    images: Tensor,
    targets: Tensor,
    patch_size: int | tuple[int, int],
    *,
    share: float | None = None,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    r"""Images that each have a rectangle of whole patches from another image, and the target of every patch.

    .. math:: x'_i = m_i\, x_{\pi, i} + (1 - m_i)\, x_i, \qquad y'_i = m_i\, y_\pi + (1 - m_i)\, y

    CutMix on the grid of patches: each patch comes from one image and has one target. As in the published code,
    the rectangle m and the permutation :math:`\pi` are drawn once for the batch.

    Args:
        images: x, (B, channels, height, width).
        targets: y, class indices (B,) or probabilities (B, C).
        patch_size: of the model, an int or (height, width).
        share: of the image that the rectangle covers, in [0, 1], up to rounding of its sides to whole patches; drawn
            uniformly if None, which is CutMix's Beta(1, 1).
        generator: for the random numbers, instead of torch's global one (which is drawn from on the CPU).

    Returns:
        The mixed images, and patch targets (B, n) or (B, n, C) with patches in row-major order, as in patch
        embeddings. The target of the whole image is the mean of its patches' probabilities.

    Example:
        >>> import torch
        >>> from multimax.oversmoothing import patch_mixing
        >>> images = torch.arange(2.0).reshape(2, 1, 1, 1).expand(2, 1, 4, 4)
        >>> generator = torch.Generator().manual_seed(0)
        >>> mixed, patch_targets = patch_mixing(images, torch.tensor([5, 7]), 1, share=0.25, generator=generator)
        >>> mixed[0, 0]
        tensor([[0., 0., 0., 0.],
                [0., 0., 0., 0.],
                [1., 1., 0., 0.],
                [1., 1., 0., 0.]])
        >>> patch_targets[0].reshape(4, 4)
        tensor([[5, 5, 5, 5],
                [5, 5, 5, 5],
                [7, 7, 5, 5],
                [7, 7, 5, 5]])

    References:
        Gong, Wang, Li, Chandra, Liu: Vision Transformers with Patch Diversification, arXiv:2104.12753, 2021.
        Yun et al.: CutMix, ICCV 2019.
    """
    height, width = checks.patch_size(patch_size, images)
    checks.image_targets(targets, images)
    batch, _, image_height, image_width = images.shape
    rows, columns = image_height // height, image_width // width
    # on the CPU, wherever the images are, so that a seed means the same everywhere
    device = generator.device if generator is not None else torch.device("cpu")

    def below(bound: int) -> int:
        return int(torch.randint(bound, (), generator=generator, device=device).item())

    if share is None:
        share = torch.rand((), generator=generator, device=device, dtype=torch.float64).item()
    side = math.sqrt(checks.number("share", share, 0, 1))
    high, wide = round(rows * side), round(columns * side)
    top, left = below(rows - high + 1), below(columns - wide + 1)
    partner = torch.randperm(batch, generator=generator, device=device).to(images.device)

    mask = torch.zeros(rows, columns, dtype=torch.bool, device=images.device)
    mask[top : top + high, left : left + wide] = True
    pixels = mask.repeat_interleave(height, 0).repeat_interleave(width, 1)  # (height, width) of the image
    mixed = torch.where(pixels, images[partner], images)
    inside, outside = targets[partner].unsqueeze(1), targets.unsqueeze(1)  # (B, 1) or (B, 1, C)
    patch_targets = torch.where(mask.reshape(-1, *(1,) * (targets.ndim - 1)), inside, outside)
    return mixed, patch_targets


def patch_mixing_loss(patch_logits: Tensor, patch_targets: Tensor, *, label_smoothing: float = 0.0) -> Tensor:
    r"""Patch Diversification's third loss: the class of each patch of images mixed by :func:`patch_mixing`.

    .. math:: L_{mix} = -\frac{1}{n} \sum_i \sum_c y_{i,c} \log \operatorname{softmax}(z_i)_c

    Args:
        patch_logits: :math:`z_i`, (B, n, C): what a separate linear classifier gives for each patch of the last layer.
        patch_targets: class indices (B, n) or probabilities y (B, n, C). Patches of index -100 are left out.
        label_smoothing: in [0, 1], as in ``F.cross_entropy``.

    Returns:
        The mean over the batch, a scalar of the logits' dtype.

    Example:
        >>> import torch
        >>> from multimax.oversmoothing import patch_mixing_loss
        >>> patch_mixing_loss(torch.zeros(2, 4, 10), torch.zeros(2, 4, dtype=torch.long))
        tensor(2.3026)

    References:
        Gong, Wang, Li, Chandra, Liu: Vision Transformers with Patch Diversification, arXiv:2104.12753, 2021.
    """
    checks.patch_logits(patch_logits)
    batch, patches, classes = patch_logits.shape
    checks.target(patch_targets, patch_logits, (batch, patches), (batch, patches, classes), -100)
    if not torch.compiler.is_compiling():
        checks.target_values(patch_targets, classes, -100)
    smoothing = checks.number("label_smoothing", label_smoothing, 0, 1)
    logits = _exact(patch_logits)
    targets = patch_targets.to(logits.dtype) if patch_targets.is_floating_point() else patch_targets.long()
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(0, 1), label_smoothing=smoothing)
    return loss.to(patch_logits.dtype)
