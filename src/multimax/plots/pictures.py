"""Photos with a map of their patches over them."""

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from multimax.plots import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Normalize

OVER = 0.6  # how much the map covers the photo
DIM = 1.3  # darkens white in the photo, so that it does not outshine the map
HEAT = "inferno"
LARGEST = 1024  # pixels per side, more than a panel shows


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


def overlay(axes: "Axes", image: Tensor, map_: Tensor, scale: "Normalize", smooth: bool) -> Any:
    """A map (rows, columns) over the photo in dark grey."""
    grey = image.mean(-1)
    height, width = grey.shape
    extent = (-0.5, width - 0.5, height - 0.5, -0.5)
    axes.imshow(grey.numpy(), cmap="gray", vmin=0, vmax=DIM, extent=extent)
    return axes.imshow(
        map_.numpy(),
        cmap=HEAT,
        norm=scale,
        alpha=OVER,
        extent=extent,
        interpolation="bilinear" if smooth else "nearest",
    )
