"""Photos with a map of their patches over them."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from multimax.plots import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

LEAST, MOST = 0.15, 0.85  # how much a map covers the photo, where it is 0 and where it is largest
DIM = 0.75  # darkens white in the photo, so that it does not outshine the map
HEAT = "inferno"
LARGEST, FINEST = 1024, 256  # pixels per side: more than a panel shows, and enough for one


def picture(image: object) -> Tensor:
    """A photo as (height, width, 3) in [0, 1].

    Takes (height, width), with 1, 3 or 4 channels first or last, as bytes or numbers; numbers outside [0, 1], as in
    a model's scaled inputs, are stretched from the least to the largest. Of a large photo, only every second or third
    pixel and so on is used.
    """
    import numpy

    try:
        pixels = image.detach().cpu() if isinstance(image, Tensor) else torch.from_numpy(numpy.array(image))
    except (TypeError, ValueError) as error:
        raise TypeError(f"multimax: expected an image as an array, got {type(image).__name__}: {error}") from None
    if pixels.ndim == 3 and pixels.shape[0] in (1, 3, 4) and pixels.shape[-1] not in (1, 3, 4):
        pixels = pixels.movedim(0, -1)
    if pixels.ndim == 2:
        pixels = pixels[..., None]
    if pixels.ndim != 3 or pixels.shape[-1] not in (1, 3, 4) or 0 in pixels.shape:
        raise ValueError(
            "multimax: expected an image of shape (height, width), (height, width, channels) or (channels, height, "
            f"width) with 1, 3 or 4 channels, got {tuple(pixels.shape)}"
        )
    step = -(-max(pixels.shape[:2]) // LARGEST)
    pixels = pixels[::step, ::step, :3]  # without transparency
    pixels = pixels.double() / 255 if pixels.dtype == torch.uint8 else pixels.double()
    low, high = pixels.min(), pixels.max()
    if not (low >= 0 and high <= 1):
        if not pixels.isfinite().all():
            raise ValueError("multimax: expected an image of finite numbers, got NaN or infinity among them")
        pixels = (pixels - low) / (high - low).clamp(min=1e-12)
    return pixels.expand(*pixels.shape[:2], 3)


def patches(length: int, grid: tuple[int, int] | None) -> tuple[int, int, int]:
    """Tokens before the patches, and rows and columns of patches, of a sequence."""
    if grid is not None:
        sizes = style.numbers("grid", grid)
        if sizes.shape != (2,) or not all(size >= 1 and size == int(size) for size in sizes.tolist()):
            raise ValueError(f"multimax: expected grid=(rows, columns), whole numbers of at least 1, got {grid!r}")
        rows, columns = map(int, sizes.tolist())
        if rows * columns > length:
            raise ValueError(f"multimax: expected a grid of at most {length} patches, got {rows} x {columns}")
        return length - rows * columns, rows, columns
    for skip in (0, 1):  # a class token, or none
        side = math.isqrt(max(length - skip, 0))
        if side and side * side == length - skip:
            return skip, side, side
    raise ValueError(
        f"multimax: expected a square number of patches, with a class token or without, got {length} tokens; give "
        "grid=(rows, columns)"
    )


def blend(grey: Tensor, share: Tensor) -> Tensor:
    """The colours (..., 3) of a map over a photo, both in [0, 1]: the photo where the map is 0, its own colour at 1.

    They are mixed here and not by transparency, which matplotlib applies twice in files of vectors.
    """
    heat = torch.from_numpy(style.colours(HEAT, 0.25, 0.97)(share.numpy()))[..., :3]
    cover = (LEAST + (MOST - LEAST) * share)[..., None]
    return cover * heat + (1 - cover) * grey[..., None] * DIM


def overlay(axes: "Axes", image: Tensor, map_: Tensor, scale: "Normalize", smooth: bool) -> Any:
    """A map (rows, columns) over the photo in grey, as one picture of plain colours."""
    height, width = image.shape[:2]
    finer = -(-FINEST // max(height, width))  # so that programs which smooth what they enlarge do not blur the patches
    grey = image.mean(-1).repeat_interleave(finer, 0).repeat_interleave(finer, 1)
    share = torch.as_tensor(scale(map_.numpy()), dtype=torch.float64).clamp(0, 1)
    ways: dict[str, Any] = {"mode": "bilinear", "align_corners": False} if smooth else {"mode": "nearest-exact"}
    share = functional.interpolate(share[None, None], grey.shape, **ways)[0, 0]
    colours = (255 * blend(grey, share)).round().to(torch.uint8)
    shown = axes.imshow(colours.numpy(), extent=(-0.5, width - 0.5, height - 0.5, -0.5), interpolation="none")
    rows, columns = map_.shape
    row, column = divmod(int(map_.argmax()), columns)
    shown.set_label(f"largest in row {row + 1} of {rows}, column {column + 1} of {columns}")  # for who cannot see it
    return shown


def bar(figure: "Figure", panels: Sequence["Axes"], scale: "Normalize", label: str, *, below: bool) -> "Axes":
    """What the colours of some panels mean: the values along it, and across it the photo from black to white."""
    from matplotlib.cm import ScalarMappable

    place: dict[str, Any] = (
        {"location": "bottom", "aspect": 14, "pad": 0.02} if below else {"location": "right", "aspect": 9}
    )
    made: Any = figure.colorbar(ScalarMappable(scale), ax=panels, fraction=0.06, shrink=0.9, **place)
    made.solids.set_visible(False)
    share, grey = torch.meshgrid(
        torch.linspace(0, 1, 256, dtype=torch.float64), torch.linspace(0, 1, 32, dtype=torch.float64), indexing="ij"
    )
    colours = (255 * blend(grey, share)).round().to(torch.uint8)
    ends: Any = (scale.vmin, scale.vmax)
    made.ax.imshow(
        (colours.movedim(0, 1) if below else colours).numpy(),
        extent=(*ends, 0, 1) if below else (0, 1, *ends),
        origin="lower",
        aspect="auto",
        interpolation="none",
    )
    made.ax.tick_params(labelsize=style.TICKS)
    made.set_label(label, fontsize=style.TICKS)
    found: Axes = made.ax
    return found
