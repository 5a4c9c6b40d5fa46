"""Grad-CAM for transformer blocks: which patches speak for a class.

A small version, since pytorch-grad-cam needs torchvision.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from multimax.metrics.evaluation import evaluating
from multimax.metrics.outputs import first_tensor
from multimax.ops import checks
from multimax.plots import pictures, style
from multimax.plots.attention import called

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def _blocks(model: nn.Module, block: str | None) -> dict[str, nn.Module]:
    """The block of that name, or all of the model's largest stack of equal blocks."""
    modules = dict(model.named_modules())
    if block is not None:
        if block not in modules:
            raise ValueError(
                f"multimax: expected block to be the full name of one of the model's modules, got {block!r}; "
                "dict(model.named_modules()) has them"
            )
        return {block: modules[block]}
    stacks = {}
    for name, module in modules.items():
        if isinstance(module, nn.ModuleList | nn.Sequential) and len({type(part) for part in module}) == 1:
            stacks[name] = sum(p.numel() for p in module.parameters())
    if not stacks:
        raise ValueError(
            f"multimax: expected a model with a stack of blocks, got {type(model).__name__} without; name one with "
            "block="
        )
    best = max(stacks, key=lambda name: stacks[name])
    return {f"{best}.{index}" if best else index: part for index, part in modules[best].named_children()}


@contextmanager
def _features(blocks: Mapping[str, nn.Module]) -> Iterator[dict[str, Tensor]]:
    """What each block returns, kept in the graph."""
    found: dict[str, Tensor] = {}
    with ExitStack() as hooks:
        for name, module in blocks.items():

            def keep(_: nn.Module, __: object, output: object, name: str = name) -> None:
                features = first_tensor(output)
                if features is not None and features.is_floating_point() and features.ndim == 3:
                    found[name] = features

            hooks.callback(module.register_forward_hook(keep).remove)
        yield found


def _logits(output: Any) -> Tensor:
    """(B, classes)."""
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", output)
    if not isinstance(logits, Tensor) or logits.ndim != 2:
        got = tuple(logits.shape) if isinstance(logits, Tensor) else type(output).__name__
        raise ValueError(f"multimax: expected a model that returns logits of shape (images, classes), got {got}")
    return logits


def _classes(logits: Tensor, target: object) -> Tensor:
    """(B,), the class of each image."""
    if target is None:
        return logits.argmax(-1)
    classes = style.numbers("target", target)
    classes = classes.expand(len(logits)) if classes.ndim == 0 else classes
    if classes.shape != (len(logits),) or not all(number in range(logits.shape[1]) for number in classes.tolist()):
        raise ValueError(
            f"multimax: expected target in [0, {logits.shape[1] - 1}], one for all or one for each of "
            f"{len(logits)} images, got {target!r}"
        )
    return classes.long().to(logits.device)


def _watched(inputs: object) -> object:
    """Inputs that require a gradient, for models whose weights are all frozen."""
    if isinstance(inputs, Mapping):
        return {name: _watched(value) for name, value in inputs.items()}
    if isinstance(inputs, Tensor) and inputs.is_floating_point():
        return inputs.detach().clone().requires_grad_()
    return inputs


def class_activation(
    model: nn.Module,
    inputs: object,
    *,
    target: int | Sequence[int] | Tensor | None = None,
    block: str | None = None,
    grid: tuple[int, int] | None = None,
) -> Tensor:
    r"""Grad-CAM: how much each patch's features, after a block, speak for a class.

    .. math:: \mathrm{CAM}_p = \max\left(\sum_f \alpha_f A_{pf}, 0\right), \qquad
        \alpha_f = \frac{1}{P} \sum_p \frac{\partial y_c}{\partial A_{pf}}

    with the features A of P patches and the logit y of class c. The model runs in evaluation mode; its gradients,
    training mode and weights do not change.

    Args:
        model: returns logits (B, classes), itself or as ``.logits``.
        inputs: a tensor, or a mapping of the arguments of its forward.
        target: the class, one for all or one per image; what the model predicts unless given.
        block: full name of the module whose output (B, tokens, features) is used. Unless given, the last block of the
            model's largest stack from which the patches still reach the logits: with a class token, the second to last.
        grid: rows and columns of patches, see :func:`attention_maps`.

    Returns:
        (B, rows, columns), at least 0, detached. All zeros where no patch speaks for the class.

    Example:
        >>> import torch
        >>> from transformers import ViTConfig, ViTForImageClassification
        >>> from multimax import plots
        >>> config = ViTConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
        >>> model = ViTForImageClassification(config)
        >>> tuple(plots.class_activation(model, torch.randn(2, 3, 224, 224)).shape)
        (2, 14, 14)

    References:
        Selvaraju, Cogswell, Das, Vedantam, Parikh, Batra: Grad-CAM: Visual Explanations from Deep Networks via
        Gradient-based Localization. ICCV 2017.
    """
    checks.module(model)
    blocks = _blocks(model, block)
    with torch.inference_mode(False), torch.enable_grad(), evaluating(model), _features(blocks) as features:
        logits = _logits(called(model, _watched(inputs)))
        if not features:
            names = ", ".join(map(repr, blocks))
            raise ValueError(
                f"multimax: expected features of shape (images, tokens, features) from {names}, got none; name "
                "another block with block="
            )
        score = logits.gather(1, _classes(logits, target)[:, None]).sum()
        gradients = torch.autograd.grad(score, list(features.values()), allow_unused=True)
    for name, gradient in reversed(list(zip(features, gradients, strict=True))):
        activations = features[name].detach()
        skip, rows, columns = pictures.patches(activations.shape[1], grid)
        if gradient is not None and bool((gradient[:, skip:] != 0).any()):
            alpha = gradient[:, skip:].float().mean(1, keepdim=True)  # (B, 1, d)
            return (activations[:, skip:].float() * alpha).sum(-1).clamp(min=0).reshape(-1, rows, columns).cpu()
    raise ValueError(
        f"multimax: expected patches after {', '.join(features)} to reach the logits, got gradients of 0; where the "
        "class token alone is read after a block, name an earlier one with block="
    )


def grad_cam(
    images: object,
    maps: Mapping[str, object],
    *,
    inputs: object = None,
    target: int | Sequence[int] | Tensor | None = None,
    block: str | None = None,
    grid: tuple[int, int] | None = None,
) -> "Figure":
    """Which patches speak for the class, the models side by side: Figure 6 of the paper.

    Args:
        images: photos, a list of arrays or a tensor (n, channels, height, width).
        maps: by label, one column each from left to right: what :func:`class_activation` gave, (n, rows, columns), or
            a model to take it from.
        inputs: what the models take, if there are any.
        target: of :func:`class_activation`.
        block: likewise.
        grid: likewise.

    Returns:
        A figure with a row for each photo: the photo, and beside it the map of each label over the photo in grey. All
        maps of a row have one scale, from 0 to their largest value, and a bar.

    Example:
        >>> import torch
        >>> from multimax import plots
        >>> maps = {"softmax": torch.rand(2, 4, 4), "MultiMax": torch.rand(2, 4, 4)}
        >>> figure = plots.grad_cam(torch.rand(2, 3, 32, 32), maps)
        >>> [axes.get_title() for axes in figure.axes[:3]]
        ['photo', 'softmax', 'MultiMax']
    """
    if not isinstance(images, Sequence) and getattr(images, "ndim", 0) not in (3, 4):
        raise TypeError(f"multimax: expected images as a list, or a tensor of 4 dims, got {type(images).__name__}")
    photos = [pictures.picture(image) for image in images]  # type: ignore[attr-defined]
    if not photos:
        raise ValueError("multimax: expected at least one image, got none")
    columns: dict[str, Tensor] = {}
    for label, given in style.runs_by_label(maps, "maps or models").items():
        if isinstance(given, nn.Module):
            if inputs is None:
                raise ValueError("multimax: expected the models' inputs, got none; give inputs=")
            given = class_activation(given, inputs, target=target, block=block, grid=grid)
        found = style.numbers(f"the maps of {label!r}", given, finite=True)
        if found.ndim != 3 or len(found) != len(photos) or 0 in found.shape:
            raise ValueError(
                f"multimax: expected maps of shape ({len(photos)}, rows, columns) for {label!r}, one per image, got "
                f"{tuple(found.shape)}"
            )
        columns[label] = found
    across = len(columns) + 1
    figure = style.figure(len(photos), across, 1.5, 1.45)
    figure.set_figwidth(figure.get_figwidth() + 0.7)  # bars
    from matplotlib.colors import Normalize

    for row, photo in enumerate(photos):
        panels = [style.picture_panel(figure, len(photos), across, row * across, "" if row else "photo")]
        panels[0].imshow(photo.numpy(), interpolation="none")
        scale = Normalize(0.0, max(*(found[row].max().item() for found in columns.values()), 1e-12))
        for column, (label, found) in enumerate(columns.items(), start=1):
            title = "" if row else style.plain(label, 22)
            axes = style.picture_panel(figure, len(photos), across, row * across + column, title)
            pictures.overlay(axes, photo, found[row], scale, smooth=True)
            panels.append(axes)
        pictures.bar(figure, panels, scale, "for the class", below=False)
    return figure
