"""Pictures for training and evaluation of vision models, after the recipe of DeiT.

All that is random is a pure function of the seed and of a *draw*, a number that says epoch, repeat and picture. A run
that was killed and resumed sees the same pictures to the last bit, whatever the number of workers or processes.

What changes a single picture is in ``pictures.py``.
"""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset, Sampler

from multimax.experiments import pictures
from multimax.ops import checks

SWITCH = 0.5  # probability of cutmix where mixup is possible too

# What a random number is for: numbers of different streams have nothing in common.
ORDER, CROP, SHIFT_Y, SHIFT_X, FLIP, COLOUR, ERASE, MIX = range(8)


@dataclass(frozen=True)
class Augmentation:
    """What happens to a picture in training, in the order of the fields.

    DeiT's recipe for ImageNet is ``Augmentation(random_resized_crop=True, flip=True, randaugment=9, erasing=0.25,
    mixup=0.8, cutmix=1.0, repeats=3)``. Its settings name a colour jitter of 0.3 too, but timm applies that only where
    there is no RandAugment; here both are applied if both are set.

    Args:
        random_resized_crop: cut out 0.08 to 1 of the area, with sides of 3/4 to 4/3, and resize that (bicubic).
            Evaluation then resizes too, and takes the centre. Without it, only a picture of another size is resized.
        padding: cut out a square at random after so many black pixels were added at each side, as usual for CIFAR.
        flip: mirror every second picture, left to right.
        color_jitter: brightness, contrast and saturation by factors of at most so much off 1, in random order.
        randaugment: magnitude m of timm's ``rand-m{m}-mstd0.5-inc1``, of at most 10; 0 for none.
        erasing: probability that a rectangle is replaced by noise.
        mixup: alpha of the beta distribution that two pictures are mixed by; 0 for none. See ``Mix``.
        cutmix: alpha of the one that says how much of a picture is replaced by another; 0 for none.
        repeats: how often a picture is drawn in an epoch, changed anew each time. See ``DrawSampler``.

    Grey pictures may have all of this; saturation does not change them.
    """

    random_resized_crop: bool = False
    padding: int = 0
    flip: bool = False
    color_jitter: float = 0.0
    randaugment: int = 0
    erasing: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0
    repeats: int = 1

    def __post_init__(self) -> None:
        """Checks the values, which come from a file."""
        for name in ("random_resized_crop", "flip"):
            if not isinstance(getattr(self, name), bool):
                got = getattr(self, name)
                raise TypeError(f"multimax: expected {name} to be true or false, got {got!r}")
        _at_least("padding", self.padding, 0)
        _at_least("repeats", self.repeats, 1)
        checks.integer("randaugment", self.randaugment)
        checks.number("randaugment", self.randaugment, 0, pictures.RANDAUGMENT_MAX)
        checks.number("color_jitter", self.color_jitter, 0, 1)
        checks.number("erasing", self.erasing, 0, 1)
        checks.finite("mixup", self.mixup)
        checks.finite("cutmix", self.cutmix)
        if self.random_resized_crop and self.padding:
            raise ValueError(
                f"multimax: expected no padding with random_resized_crop, got {self.padding}; both cut at random"
            )


class Images(Protocol):
    """Pictures that can be had one by one."""

    @property
    def labels(self) -> Tensor:
        """Classes, (n,)."""

    def __len__(self) -> int:
        """Number of pictures."""

    def image(self, index: int, /) -> Tensor:
        """A picture, uint8 of shape (channels, height, width)."""


class _Pictures(Dataset[dict[str, Tensor | int]]):
    """What training and evaluation share: checks, and pictures as a model wants them."""

    def __init__(
        self, images: Images, size: int, augmentation: Augmentation, mean: Sequence[float], std: Sequence[float]
    ) -> None:
        _at_least("size", size, 1)
        if len(images) == 0:
            raise ValueError("multimax: expected at least one image, got none")
        if len(images.labels) != len(images):
            raise ValueError(
                f"multimax: expected one label per image, got {len(images.labels)} for {len(images)} images"
            )
        if len(mean) not in (1, 3) or len(std) != len(mean):
            raise ValueError(
                f"multimax: expected mean and std of 1 or 3 numbers, one a channel, got {len(mean)} and {len(std)}"
            )
        for value in std:
            checks.number_above("std", value, 0)
        self.images, self.size, self.augmentation = images, size, augmentation
        self.labels: list[int] = images.labels.tolist()
        self.shape = (len(mean), size, size)
        self.mean, self.std = (torch.tensor(v, dtype=torch.float32).reshape(-1, 1, 1) for v in (mean, std))
        # what is outside of a picture that was turned or moved
        self.fill = tuple(min(255, round(255 * float(value))) for value in mean)

    def __len__(self) -> int:
        """The number of pictures of an epoch."""
        return len(self.images)

    def __iter__(self) -> Iterator[dict[str, Tensor | int]]:
        """The pictures in their order, once."""
        return (self[index] for index in range(len(self)))

    def __getitem__(self, draw: int) -> dict[str, Tensor | int]:
        """One picture; several at once are much faster, see __getitems__."""
        return self.__getitems__([draw])[0]

    def __getitems__(self, draws: Sequence[int]) -> list[dict[str, Tensor | int]]:
        """Several pictures, which is what torch's DataLoader asks for."""
        raise NotImplementedError

    def _read(self, index: int) -> Tensor:
        """A picture of any size, checked."""
        image = self.images.image(index)
        if image.dtype != torch.uint8 or image.ndim != 3 or image.shape[0] != self.shape[0]:
            raise ValueError(
                f"multimax: expected images of uint8 and shape ({self.shape[0]}, height, width) for a mean of "
                f"{self.shape[0]} numbers, got {image.dtype} of {checks.shape(image)} for image {index}"
            )
        return image

    def _fit(self, image: Tensor) -> Tensor:
        """Of the size wanted, whatever the shape was."""
        if image.shape == self.shape:
            return image
        picture = pictures.to_pil(image)
        return pictures.to_tensor(picture.resize((self.size, self.size), pictures.bicubic()))

    def _normalised(self, images: Tensor) -> Tensor:
        """In floats of about mean 0 and standard deviation 1."""
        return images.float().div_(255).sub_(self.mean).div_(self.std)

    def _items(self, pixels: Tensor, indices: Sequence[int]) -> list[dict[str, Tensor | int]]:
        return [
            {"pixel_values": image, "labels": self.labels[index]}
            for image, index in zip(pixels.unbind(0), indices, strict=True)
        ]


class TrainImages(_Pictures):
    """Pictures for training, changed at random.

    An item is asked for by a draw, ``(epoch * repeats + repeat) * n + index``, as ``DrawSampler`` yields them: what
    happens to the picture depends on the seed and the draw only. No global random state is read or changed.

    Args:
        images: pictures of uint8, of 1 or 3 channels.
        size: width and height of what comes out.
        augmentation: what to do to them. Mixing is for whole batches, see ``Mix``.
        mean: of the values in [0, 1], for each channel.
        std: likewise.
        seed: of all that is random.

    An item is ``{"pixel_values": float32 (channels, size, size), "labels": int}``.
    """

    def __init__(
        self,
        images: Images,
        size: int,
        augmentation: Augmentation,
        mean: Sequence[float],
        std: Sequence[float],
        seed: int,
    ) -> None:
        super().__init__(images, size, augmentation, mean, std)
        _at_least("seed", seed, 0)
        self.seed = seed

    def __getitems__(self, draws: Sequence[int]) -> list[dict[str, Tensor | int]]:
        """Several pictures by their draws, the cheap steps for all at once."""
        numbers = np.asarray(draws, dtype=np.int64)
        if numbers.min(initial=0) < 0:
            raise IndexError(f"multimax: expected draws of at least 0, got {numbers.min()}")
        if len(numbers) == 0:
            return []
        options = self.augmentation
        indices: list[int] = (numbers % len(self.images)).tolist()
        images = [self._read(index) for index in indices]
        if options.random_resized_crop:
            dice = self._dice(numbers, CROP)
            images = [pictures.random_resized_crop(p, self.size, d) for p, d in zip(images, dice, strict=True)]
        batch = torch.stack([self._fit(image) for image in images])
        if options.padding:
            batch = self._shifted(batch, numbers)
        if options.flip:
            values, mirrored = batch.numpy(), _uniform(self.seed, numbers, FLIP) < 0.5
            values[mirrored] = values[mirrored][..., ::-1]
        if options.color_jitter or options.randaugment:
            dice = self._dice(numbers, COLOUR)
            batch = torch.stack([self._coloured(p, d) for p, d in zip(batch, dice, strict=True)])
        pixels = self._normalised(batch)
        if options.erasing:
            for picture, d in zip(pixels, self._dice(numbers, ERASE), strict=True):
                if d.random() < options.erasing:
                    pictures.erase_(picture, d)
        return self._items(pixels, indices)

    def _dice(self, draws: npt.NDArray[np.int64], stream: int) -> list[random.Random]:
        """A source of random numbers for each draw."""
        return [random.Random(seed) for seed in _hash(self.seed, draws, stream).tolist()]

    def _shifted(self, batch: Tensor, draws: npt.NDArray[np.int64]) -> Tensor:
        """Squares of the padded pictures, each from a place of its own."""
        padding, size = self.augmentation.padding, self.size
        padded = F.pad(batch, (padding,) * 4)
        tops, lefts = (
            (_uniform(self.seed, draws, stream) * (2 * padding + 1)).astype(np.int64).tolist()
            for stream in (SHIFT_Y, SHIFT_X)
        )
        # numpy's views cost a fraction of torch's, which for small pictures is all the time
        source, shifted = padded.numpy(), torch.empty_like(batch)
        target = shifted.numpy()
        for i, (top, left) in enumerate(zip(tops, lefts, strict=True)):
            target[i] = source[i, :, top : top + size, left : left + size]
        return shifted

    def _coloured(self, image: Tensor, dice: random.Random) -> Tensor:
        picture = pictures.to_pil(image)
        if self.augmentation.color_jitter:
            picture = pictures.color_jitter(picture, self.augmentation.color_jitter, dice)
        if self.augmentation.randaugment:
            picture = pictures.randaugment(picture, self.augmentation.randaugment, self.fill, dice)
        return pictures.to_tensor(picture)


class EvalImages(_Pictures):
    """Pictures for evaluation; nothing is random.

    Where training cuts out parts of another size (``random_resized_crop``), the short side is resized to size / 0.875
    and the centre taken; else only a picture of another size is resized.

    Args:
        images: pictures of uint8, of 1 or 3 channels.
        size: width and height of what comes out.
        augmentation: that of training.
        mean: of the values in [0, 1], for each channel.
        std: likewise.
    """

    def __getitems__(self, draws: Sequence[int]) -> list[dict[str, Tensor | int]]:
        """Several pictures by their indices."""
        if len(draws) == 0:
            return []
        for index in draws:
            if not 0 <= index < len(self):
                raise IndexError(f"multimax: expected an index in [0, {len(self) - 1}], got {index}")
        images = [self._read(index) for index in draws]
        if self.augmentation.random_resized_crop:
            images = [pictures.resized_centre(image, self.size) for image in images]
        batch = torch.stack([self._fit(image) for image in images])
        return self._items(self._normalised(batch), draws)


class DrawSampler(Sampler[int]):
    """The draws of an epoch for ``TrainImages``, in random order.

    With ``repeats`` above 1 each picture comes so many times, one after the other, and an epoch still has n draws: it
    sees only ``ceil(n / repeats)`` of the pictures (repeated augmentation, as DeiT's sampler has it on one process;
    there, several processes share the repeats of a picture out among them).

    Args:
        n: the number of pictures.
        repeats: as in ``Augmentation``.
        seed: of the order. The order is a function of it and of the epoch.

    Example:
        >>> sampler = DrawSampler(4, 1, seed=0)
        >>> sampler.set_epoch(2)
        >>> sorted(sampler)  # two epochs of 4 lie behind
        [8, 9, 10, 11]
    """

    def __init__(self, n: int, repeats: int, seed: int) -> None:
        _at_least("n", n, 1)
        _at_least("repeats", repeats, 1)
        _at_least("seed", seed, 0)
        self.n, self.repeats, self.seed, self.epoch = n, repeats, seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Which epoch comes next, counted from 0; transformers' Trainer calls this."""
        _at_least("epoch", epoch, 0)
        self.epoch = epoch

    def __len__(self) -> int:
        """The number of draws of an epoch."""
        return self.n

    def __iter__(self) -> Iterator[int]:
        """The draws of the epoch."""
        seed = int(_hash(self.seed, np.array([self.epoch]), ORDER)[0] >> 1)  # torch takes 63 bits
        order = torch.randperm(self.n, generator=torch.Generator().manual_seed(seed))
        order = order[: -(-self.n // self.repeats)]
        repeats = torch.arange(self.epoch * self.repeats, (self.epoch + 1) * self.repeats)
        draws = repeats * self.n + order[:, None]
        return iter(draws.flatten()[: self.n].tolist())


class Mix:
    """Mixes the pictures of a batch and their labels: mixup or cutmix, each batch in one way.

    As timm's ``Mixup`` in its mode "batch": the partner of a picture is its mirror image in the batch's order, so that
    the middle one of an odd batch stays. A batch of one is not changed. If both alphas are given, one of the two is
    done, each with probability 0.5. Cutmix gives labels the share of the area that was really cut.

    Args:
        augmentation: of which ``mixup`` and ``cutmix`` count.

    Example:
        >>> import torch
        >>> mix = Mix(Augmentation(mixup=0.8, cutmix=1.0))
        >>> pixels, labels = mix(torch.rand(4, 3, 8, 8), torch.tensor([0, 1, 2, 1]), 3, seed=0)
        >>> labels.shape, labels.sum(-1)
        (torch.Size([4, 3]), tensor([1., 1., 1., 1.]))
    """

    def __init__(self, augmentation: Augmentation) -> None:
        self.mixup, self.cutmix = augmentation.mixup, augmentation.cutmix

    def __bool__(self) -> bool:
        """Whether there is anything to do; labels stay class indices for who asks first."""
        return bool(self.mixup or self.cutmix)

    def __call__(self, pixel_values: Tensor, labels: Tensor, classes: int, *, seed: int) -> tuple[Tensor, Tensor]:
        """Mixes a batch; a pure function of what is given.

        Args:
            pixel_values: (batch, channels, height, width), floating point.
            labels: (batch,), of classes.
            classes: how many there are.
            seed: of all that is random, another for each batch.

        Returns:
            Pixel values of the shape and dtype of the given ones, and float32 probabilities of shape (batch, classes).
        """
        checks.tensor("pixel_values", pixel_values)
        _at_least("classes", classes, 1)
        _at_least("seed", seed, 0)
        if pixel_values.ndim != 4:
            raise ValueError(
                "multimax: expected pixel_values of shape (batch, channels, height, width), "
                f"got {checks.shape(pixel_values)}"
            )
        if labels.shape != pixel_values.shape[:1] or labels.is_floating_point():
            raise ValueError(
                f"multimax: expected labels of shape ({len(pixel_values)},), one class per picture, "
                f"got {labels.dtype} of shape {checks.shape(labels)}"
            )
        if len(labels) and not labels.is_cuda:  # where looking at values would wait for all that is under way
            low, high = (bound.item() for bound in labels.aminmax())
            if low < 0 or high >= classes:
                raise ValueError(f"multimax: expected labels in [0, {classes - 1}], got some from {low} to {high}")
        soft = F.one_hot(labels.long(), classes).float()
        if len(labels) < 2 or not self:
            return pixel_values, soft
        dice = random.Random(_hash(seed, np.array([0]), MIX).item())
        cut = dice.random() < SWITCH if self.mixup and self.cutmix else bool(self.cutmix)
        alpha = self.cutmix if cut else self.mixup
        share = dice.betavariate(alpha, alpha)
        if cut:
            height, width = pixel_values.shape[-2:]
            (top, bottom), (left, right) = (_middle_part(n, math.sqrt(1 - share), dice) for n in (height, width))
            share = 1 - (bottom - top) * (right - left) / (height * width)
            mixed = pixel_values.clone()
            mixed[..., top:bottom, left:right] = pixel_values.flip(0)[..., top:bottom, left:right]
        else:
            mixed = pixel_values * share + pixel_values.flip(0) * (1 - share)
        return mixed, soft * share + soft.flip(0) * (1 - share)


def _middle_part(length: int, share: float, dice: random.Random) -> tuple[int, int]:
    """Start and end of a share of a side around a random place; what lies outside is cut off."""
    half = int(length * share) // 2
    centre = dice.randrange(length)
    return max(0, centre - half), min(length, centre + half)


def _hash(seed: int, numbers: npt.NDArray[np.int64], stream: int) -> npt.NDArray[np.uint64]:
    """64 well mixed bits for each number, a function of all three: SplitMix64, once for each part."""
    state = np.zeros(len(numbers), dtype=np.uint64)  # arrays wrap around silently, which scalars do not
    for part in (np.array([seed % 2**64], dtype=np.uint64), np.array([stream], np.uint64), numbers.astype(np.uint64)):
        state = (state ^ part) + np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state = state ^ (state >> np.uint64(31))
    return state


def _uniform(seed: int, numbers: npt.NDArray[np.int64], stream: int) -> npt.NDArray[np.float64]:
    """A number in [0, 1) for each number."""
    bits = _hash(seed, numbers, stream) >> np.uint64(11)  # as many as a float64 holds
    uniform: npt.NDArray[np.float64] = bits * 2.0**-53
    return uniform


def _at_least(name: str, value: object, low: int) -> None:
    checks.integer(name, value)
    if not isinstance(value, int) or value < low:
        raise ValueError(f"multimax: expected {name} of at least {low}, got {value}")
