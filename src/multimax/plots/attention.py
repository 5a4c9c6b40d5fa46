"""Where the attention heads look, drawn over the photo."""

from collections.abc import Collection, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from multimax import metrics
from multimax.convert.observable import observable_attention
from multimax.metrics.evaluation import evaluating
from multimax.metrics.layer_names import layer_names
from multimax.ops import checks
from multimax.plots import pictures, style
from multimax.training.groups import reweighting_modules

if TYPE_CHECKING:
    from matplotlib.axes import Axes
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


def _of_image(given: object) -> Tensor:
    """(H, Lq, Lk)."""
    weights = style.numbers("attention weights", given, finite=True)
    weights = weights[0] if weights.ndim == 4 and len(weights) == 1 else weights
    if weights.ndim != 3 or 0 in weights.shape:
        raise ValueError(
            f"multimax: expected attention of one image, (heads, queries, keys), got {tuple(weights.shape)}"
        )
    return weights


def _groups(attention: object, inputs: object, layers: Collection[str] | None) -> dict[str, dict[str, Tensor]]:
    """(H, Lq, Lk) by label, in groups of what is compared."""
    if isinstance(attention, nn.Module):
        if inputs is None:
            raise ValueError(
                "multimax: expected the model's inputs, got none; give inputs=, the image as the model takes it"
            )
        found: Mapping[str, Any] = attention_of(attention, inputs, layers=layers)
        groups: dict[str, Any] = {shown: {"": found[name]} for name, shown in layer_names(found).items()}
    elif isinstance(attention, Mapping):
        groups = style.runs_by_label(attention, "attention")
        if not any(isinstance(group, Mapping) for group in groups.values()):
            groups = {"": groups}
    else:
        groups = {"": {"": attention}}
    return {
        name: {label: _of_image(given) for label, given in style.runs_by_label(group, "attention").items()}
        for name, group in groups.items()
    }


def attention_maps(
    image: object,
    attention: Tensor | Mapping[str, Tensor] | Mapping[str, Mapping[str, Tensor]] | nn.Module,
    *,
    query: int,
    inputs: object = None,
    layers: Collection[str] | None = None,
    grid: tuple[int, int] | None = None,
) -> "Figure":
    """Where every head looks from one patch of a photo: Figure 7 of the paper.

    Args:
        image: the photo, (height, width) or with channels first or last.
        attention: weights of one image, (heads, queries, keys), or several by label, such as "softmax" and "MultiMax",
            side by side; or such by layer, ``{"layer 1": {"softmax": ..., "MultiMax": ...}, ...}``; or a model, whose
            layers are shown.
        query: the patch that looks, counted from 0 row by row, without the class token.
        inputs: what the model takes, if there is one.
        layers: full names of the model's layers to show, all unless given.
        grid: rows and columns of patches. Without it there are as many rows as columns, and one more token is a class
            token; with it, all further tokens come before the patches.

    Returns:
        A figure with the photo, the query marked, and a column of maps for each label, a row for each head. What stands
        side by side has one scale, from 0 to its largest weight, and a bar below; layers have scales of their own. What
        the query gives to tokens other than patches is not shown.

    Example:
        >>> import torch
        >>> from multimax import plots
        >>> softmax, other = (torch.softmax(scale * torch.randn(6, 17, 17), -1) for scale in (1, 3))
        >>> maps = {"softmax": softmax, "sharper": other}  # of a class token, and 4 x 4 patches
        >>> figure = plots.attention_maps(torch.rand(3, 32, 32), maps, query=5)
        >>> len(figure.axes)  # the photo, two columns of six heads, the scale
        14
    """
    photo = pictures.picture(image)
    groups = _groups(attention, inputs, layers)
    query = checks.integer("query", query)
    heads = max(len(weights) for group in groups.values() for weights in group.values())
    columns = 1 + sum(map(len, groups.values()))
    figure = style.figure(heads, columns, 1.15, 1.15)
    figure.set_figheight(figure.get_figheight() + 0.9)  # titles and bars
    from matplotlib.colors import Normalize

    axes = style.picture_panel(figure, heads, columns, 0, "query")
    axes.imshow(photo.numpy(), interpolation="none")
    queried = axes
    place = 1
    for name, group in groups.items():
        shown: dict[str, Tensor] = {}
        for label, weights in group.items():
            skip, down, across = pictures.patches(weights.shape[2], grid)
            if not 0 <= query < down * across or skip + query >= weights.shape[1]:
                raise ValueError(
                    f"multimax: expected query in [0, {down * across - 1}], a patch of {down} x {across}, got {query}"
                )
            shown[label] = weights[:, skip + query, skip:].reshape(-1, down, across)
        scale = Normalize(0.0, max(*(maps.max().item() for maps in shown.values()), 1e-12))
        panels: list[Any] = []
        for column, (label, maps) in enumerate(shown.items(), start=place):
            title = "\n".join(part for part in (style.plain(name, 18), style.plain(label, 18)) if part)
            for head, map_ in enumerate(maps):
                axes = style.picture_panel(figure, heads, columns, head * columns + column, "" if head else title)
                pictures.overlay(axes, photo, map_, scale, smooth=False)
                _mark(axes, photo, query, down, across)
                if column == 1:
                    axes.set_ylabel(f"head {head + 1}", fontsize=style.TEXT)
                panels.append(axes)
        place += len(shown)
        pictures.bar(figure, panels, scale, "attention weight", below=True)
    _mark(queried, photo, query, down, across)
    return figure


def _mark(axes: "Axes", photo: Tensor, query: int, down: int, across: int) -> None:
    """A frame around the patch that looks."""
    from matplotlib.patches import Rectangle

    height, width = photo.shape[0] / down, photo.shape[1] / across
    place = (query % across * width - 0.5, query // across * height - 0.5)
    for colour, line in (("black", 2.4), (MARK, 1.4)):  # visible on light and dark
        axes.add_patch(Rectangle(place, width, height, fill=False, edgecolor=colour, linewidth=line))
