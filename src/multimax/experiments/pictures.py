"""One picture at a time: crops, colours, RandAugment and erasing as timm has them, with which DeiT was trained.

All is computed by Pillow on bytes. kornia is not used. Its ``RandAugment`` is another recipe: a magnitude of 9 is 0.3
of each range and not 0.9 (a translation by 3% and not by 40%), always of the same sign for brightness, contrast and
colour (0.64, never brighter), with no noise on the magnitude, and both operations are always applied, for timm each
with probability 0.5. Its ``RandomErasing`` fills with one value and not with noise, its ``RandomMixUpV2`` draws from a
uniform and not from a beta distribution.
"""

import math
import random
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:  # only a run that changes its pictures by more than a shift and a flip needs Pillow
    from PIL.Image import Image, Resampling

CROP_SCALE = (0.08, 1.0)  # shares of the area
CROP_RATIO = (3 / 4, 4 / 3)  # width to height
EVAL_CROP = 0.875  # what evaluation keeps of the short side
ERASE_SCALE = (0.02, 1 / 3)
ERASE_RATIO = (0.3, 1 / 0.3)  # height to width
ATTEMPTS = 10  # at a rectangle that fits

RANDAUGMENT_COUNT = 2
RANDAUGMENT_PROBABILITY = 0.5  # of each of the operations chosen
RANDAUGMENT_STD = 0.5  # noise on the magnitude
RANDAUGMENT_MAX = 10
RANDAUGMENT = (
    "autocontrast",
    "equalize",
    "invert",
    "rotate",
    "posterize",
    "solarize",
    "solarize_add",
    "color",
    "contrast",
    "brightness",
    "sharpness",
    "shear_x",
    "shear_y",
    "translate_x",
    "translate_y",
)


def random_resized_crop(image: Tensor, size: int, dice: random.Random) -> Tensor:
    """A random part of a uint8 picture (channels, height, width), resized to size x size (bicubic, antialiased)."""
    height, width = image.shape[-2:]
    for _ in range(ATTEMPTS):
        area = dice.uniform(*CROP_SCALE) * height * width
        ratio = _ratio(CROP_RATIO, dice)
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            top, left = dice.randint(0, height - h), dice.randint(0, width - w)
            break
    else:  # none did fit, as for very long pictures: the largest part of a ratio allowed, in the middle
        low, high = CROP_RATIO
        w, h = min(width, round(height * high)), min(height, round(width / low))
        top, left = (height - h) // 2, (width - w) // 2
    part = image[:, top : top + h, left : left + w]
    return to_tensor(to_pil(part).resize((size, size), bicubic()))


def resized_centre(image: Tensor, size: int) -> Tensor:
    """The centre of a uint8 picture whose short side was resized to size / 0.875."""
    height, width = image.shape[-2:]
    short = math.floor(size / EVAL_CROP)
    w, h = (short * side // min(height, width) for side in (width, height))
    picture = to_tensor(to_pil(image).resize((w, h), bicubic()))
    top, left = round((h - size) / 2), round((w - size) / 2)
    return picture[:, top : top + size, left : left + size]


def color_jitter(picture: "Image", strength: float, dice: random.Random) -> "Image":
    """Changes brightness, contrast and saturation in random order."""
    for name in dice.sample(("brightness", "contrast", "color"), 3):
        picture = _enhance(picture, name, dice.uniform(1 - strength, 1 + strength))
    return picture


def randaugment(picture: "Image", magnitude: int, fill: tuple[int, ...], dice: random.Random) -> "Image":
    """Two random operations out of ``RANDAUGMENT``, each of them with probability 0.5."""
    for name in dice.choices(RANDAUGMENT, k=RANDAUGMENT_COUNT):
        if dice.random() < RANDAUGMENT_PROBABILITY:
            noisy = dice.gauss(magnitude, RANDAUGMENT_STD)
            level = min(max(noisy, 0), RANDAUGMENT_MAX) / RANDAUGMENT_MAX
            picture = operate(picture, name, level, dice.choice((-1, 1)), fill)
    return picture


def operate(picture: "Image", name: str, level: float, sign: int, fill: tuple[int, ...]) -> "Image":
    """One operation of RandAugment, stronger for a higher level.

    Args:
        picture: grey or RGB.
        name: one of ``RANDAUGMENT``.
        level: in [0, 1].
        sign: -1 or 1, the direction of what has two.
        fill: colour of what is outside of the picture.
    """
    from PIL import ImageOps

    width, height = picture.size
    if name == "autocontrast":
        return ImageOps.autocontrast(picture)
    if name == "equalize":
        return ImageOps.equalize(picture)
    if name == "invert":
        return ImageOps.invert(picture)
    if name == "posterize":
        return ImageOps.posterize(picture, max(1, 4 - int(level * 4)))  # timm's 0 bits, at the very end, are all black
    if name == "solarize":
        return ImageOps.solarize(picture, 256 - int(level * 256))
    if name == "solarize_add":
        added = int(level * 110)
        return picture.point([min(255, i + added) if i < 128 else i for i in range(256)] * len(picture.getbands()))
    if name in ("color", "contrast", "brightness", "sharpness"):
        return _enhance(picture, name, max(0.1, 1 + sign * 0.9 * level))
    colour = fill if len(fill) > 1 else fill[0]
    if name == "rotate":
        return picture.rotate(sign * 30 * level, bicubic(), fillcolor=colour)
    matrices = {
        "shear_x": (1, sign * 0.3 * level, 0, 0, 1, 0),
        "shear_y": (1, 0, 0, sign * 0.3 * level, 1, 0),
        "translate_x": (1, 0, sign * 0.45 * level * width, 0, 1, 0),
        "translate_y": (1, 0, 0, 0, 1, sign * 0.45 * level * height),
    }
    from PIL.Image import Transform

    return picture.transform(picture.size, Transform.AFFINE, matrices[name], bicubic(), fillcolor=colour)


def erase_(pixels: Tensor, dice: random.Random) -> None:
    """Puts noise into a random rectangle of a normalised picture (channels, height, width), in place."""
    channels, height, width = pixels.shape
    for _ in range(ATTEMPTS):
        area = dice.uniform(*ERASE_SCALE) * height * width
        ratio = _ratio(ERASE_RATIO, dice)
        h, w = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if h < height and w < width:
            top, left = dice.randint(0, height - h), dice.randint(0, width - w)
            generator = torch.Generator().manual_seed(dice.getrandbits(63))
            noise = torch.randn(channels, h, w, generator=generator)
            pixels[:, top : top + h, left : left + w] = noise
            return


def _ratio(bounds: tuple[float, float], dice: random.Random) -> float:
    """A ratio of sides, by whose logarithm tall and wide are equally likely."""
    low, high = bounds
    return math.exp(dice.uniform(math.log(low), math.log(high)))


def _enhance(picture: "Image", name: str, factor: float) -> "Image":
    """Moves a picture away from grey, from its mean, from black or from its blurred copy; 1 leaves it as it is."""
    from PIL import ImageEnhance

    kinds: dict[str, type[ImageEnhance._Enhance]] = {
        "color": ImageEnhance.Color,
        "contrast": ImageEnhance.Contrast,
        "brightness": ImageEnhance.Brightness,
        "sharpness": ImageEnhance.Sharpness,
    }
    return kinds[name](picture).enhance(factor)  # type: ignore[call-arg]


def bicubic() -> "Resampling":
    """How pictures are resized."""
    from PIL.Image import Resampling

    return Resampling.BICUBIC


def to_pil(image: Tensor) -> "Image":
    """A picture of uint8 for Pillow."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError(
            "multimax: expected Pillow for pictures that are resized or changed in colour, got none; pip install pillow"
        ) from error
    values = image[0] if image.shape[0] == 1 else image.permute(1, 2, 0)
    return Image.fromarray(values.contiguous().numpy())


def to_tensor(picture: "Image") -> Tensor:
    """Back to (channels, height, width)."""
    values = torch.from_numpy(np.array(picture))
    return values[None] if values.ndim == 2 else values.permute(2, 0, 1).contiguous()
