"""Where the attention heads look, drawn over the photo."""

from collections.abc import Collection, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from multimax import metrics
from multimax.convert.observable import observable_attention
from multimax.metrics.evaluation import evaluating
from multimax.ops import checks
from multimax.plots import pictures, style
from multimax.training.groups import reweighting_modules

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MARK = style.COLOURS[5]


def called(model: nn.Module, inputs: object) -> Any:
    """What a model returns for a tensor, or for arguments by name."""
    return model(**inputs) if isinstance(inputs, Mapping) else model(inputs)


def attention_of(model: nn.Module, inputs: object, *, layers: Collection[str] | None = None) -> dict[str, Tensor]:
    """The attention weights of every layer of a model, for inputs that are few enough to keep them.

    A model with softmax is converted for the moment, to observe its weights, and is then restored.

    Args:
        model: with attention that :func:`multimax.metrics.collect` observes or :func:`multimax.convert_` converts.
        inputs: a tensor, or a mapping of the arguments of its forward.
        layers: full names of the layers to keep, all unless given.

    Returns:
        By the full name of the layer, (batch, heads, queries, keys) in float32.

    Example:
        >>> import torch
        >>> from multimax import plots
        >>> model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2).eval()
        >>> {name: tuple(weights.shape) for name, weights in plots.attention_of(model, torch.randn(1, 9, 32)).items()}
        {'layers.0.self_attn': (1, 4, 9, 9), 'layers.1.self_attn': (1, 4, 9, 9)}
    """
    checks.module(model)
    has_reweighting = next(reweighting_modules(model), None) is not None
    kept: dict[str, list[Tensor]] = {}

    def keep(layer: str, weights: Tensor, mask: Tensor) -> None:
        kept.setdefault(layer, []).append(weights.float().cpu())

    with (
        torch.no_grad(),
        evaluating(model),
        nullcontext() if has_reweighting else observable_attention(model),
        metrics.collect(model, (), layers=layers, on_weights=keep),
    ):
        called(model, inputs)
    return {name: torch.cat(blocks, 2) for name, blocks in kept.items()}


def _maps(attention: object, inputs: object, layers: Collection[str] | None) -> dict[str, Tensor]:
    """(H, Lq, Lk) by label."""
    if isinstance(attention, nn.Module):
        if inputs is None:
            raise ValueError(
                "multimax: expected the model's inputs, got none; give inputs=, the image as the model takes it"
            )
        found: dict[str, Any] = attention_of(attention, inputs, layers=layers)
        short = style.layer_names(found)
        found = {short[name]: weights for name, weights in found.items()}
    elif isinstance(attention, Mapping):
        found = style.runs_by_label(attention, "attention")
    else:
        found = {"": attention}
    maps = {}
    for label, given in found.items():
        weights = style.numbers("attention weights", given, finite=True)
        weights = weights[0] if weights.ndim == 4 and len(weights) == 1 else weights
        if weights.ndim != 3 or 0 in weights.shape:
            raise ValueError(
                f"multimax: expected attention of one image, (heads, queries, keys), got {tuple(weights.shape)}"
            )
        maps[label] = weights
    return maps


def attention_maps(
    image: object,
    attention: Tensor | Mapping[str, Tensor] | nn.Module,
    *,
    query: int,
    inputs: object = None,
    layers: Collection[str] | None = None,
    grid: tuple[int, int] | None = None,
) -> "Figure":
    """Where every head looks from one patch of a photo: Figure 7 of the paper.

    Args:
        image: the photo, (height, width) or with channels first or last.
        attention: weights of one image, (heads, queries, keys), or several by label, such as "softmax, layer 5",
            one row each; or a model, whose layers are the rows.
        query: the patch that looks, counted from 0 row by row, without the class token.
        inputs: what the model takes, if there is one.
        layers: full names of the model's layers to show, all unless given.
        grid: rows and columns of patches. Without it there are as many rows as columns, and one more token is a class
            token; with it, all further tokens come before the patches.

    Returns:
        A figure with a row for each label: the photo with the query marked, then one map per head, over the photo in
        grey. All heads of a row share one scale, up to its largest weight. What the query gives to tokens other than
        patches is not shown.

    Example:
        >>> import torch
        >>> from multimax import plots
        >>> weights = torch.softmax(3 * torch.randn(6, 17, 17), -1)  # a class token, and 4 x 4 patches
        >>> figure = plots.attention_maps(torch.rand(3, 32, 32), weights, query=5)
        >>> len(figure.axes)  # the photo, six heads, the scale
        8
    """
    photo = pictures.picture(image)
    maps = _maps(attention, inputs, layers)
    query = checks.integer("query", query)
    heads = max(map(len, maps.values()))
    figure = style.figure(len(maps), heads + 1, 1.25, 1.35)
    from matplotlib.colors import Normalize
    from matplotlib.patches import Rectangle

    for row, (label, weights) in enumerate(maps.items()):
        skip, down, across = pictures.patches(weights.shape[2], grid)
        if not 0 <= query < down * across or skip + query >= weights.shape[1]:
            raise ValueError(
                f"multimax: expected query in [0, {down * across - 1}], a patch of {down} x {across}, got {query}"
            )
        shown = weights[:, skip + query, skip:].reshape(-1, down, across)
        axes = style.picture_panel(figure, len(maps), heads + 1, row * (heads + 1), "" if row else "query")
        axes.imshow(photo.numpy())
        axes.set_ylabel(style.plain(label, 22), fontsize=style.TEXT)
        height, width = photo.shape[0] / down, photo.shape[1] / across
        place = (query % across * width - 0.5, query // across * height - 0.5)
        for colour, line in (("black", 3.0), (MARK, 1.8)):  # visible on light and dark
            axes.add_patch(Rectangle(place, width, height, fill=False, edgecolor=colour, linewidth=line))
        panels: list[Any] = [axes]
        last: Any = None
        scale = Normalize(0.0, max(shown.max().item(), 1e-12))
        for head, map_ in enumerate(shown):
            number = row * (heads + 1) + head + 1
            axes = style.picture_panel(figure, len(maps), heads + 1, number, "" if row else f"head {head + 1}")
            last = pictures.overlay(axes, photo, map_, scale, smooth=False)
            panels.append(axes)
        bar: Any = figure.colorbar(last, ax=panels, aspect=12, pad=0.01, fraction=0.03)
        bar.ax.tick_params(labelsize=6)
        bar.solids.set_alpha(1)
    return figure
