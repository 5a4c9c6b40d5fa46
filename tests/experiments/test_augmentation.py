"""Pictures for training: pure functions of seed and draw, and what each step does."""

import math
import random
from dataclasses import fields

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader

from multimax.experiments import augmentation, pictures
from multimax.experiments.augmentation import Augmentation, DrawSampler, EvalImages, Mix, TrainImages
from places import DATA

DATA = DATA / "tiny-imagenet-10"
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
DEIT = Augmentation(random_resized_crop=True, flip=True, randaugment=9, erasing=0.25, mixup=0.8, cutmix=1.0, repeats=3)
EVERYTHING = {
    "plain": Augmentation(),
    "cifar": Augmentation(padding=2, flip=True),
    "jitter": Augmentation(flip=True, color_jitter=0.3),
    "deit": DEIT,
}


class Arrays:
    """Pictures in memory."""

    def __init__(self, pictures: list[Tensor] | Tensor) -> None:
        self.pictures = pictures
        self.labels = torch.arange(len(pictures)) % 7

    def __len__(self) -> int:
        return len(self.pictures)

    def image(self, index: int) -> Tensor:
        return self.pictures[index]


def noise(n: int = 6, channels: int = 3, height: int = 12, width: int = 12) -> Arrays:
    generator = torch.Generator().manual_seed(7)
    return Arrays(torch.randint(0, 256, (n, channels, height, width), generator=generator, dtype=torch.uint8))


def smooth(n: int = 4, height: int = 24, width: int = 24) -> Arrays:
    """Pictures on which what is turned, moved or recoloured is another picture."""
    y, x = torch.meshgrid(torch.linspace(0, 1, height), torch.linspace(0, 1, width), indexing="ij")
    pictures = [torch.stack([x, y, (x * y * (i + 1)).frac()]).mul(200).add(20 + i).byte() for i in range(n)]
    return Arrays(pictures)


def train(images: Arrays, augmentation: Augmentation, size: int = 12, seed: int = 3) -> TrainImages:
    channels = images.image(0).shape[0]
    return TrainImages(images, size, augmentation, MEAN[:channels], STD[:channels], seed)


def pixels(items: list[dict]) -> Tensor:
    return torch.stack([item["pixel_values"] for item in items])


def in_bytes(values: Tensor) -> Tensor:
    """Normalised pictures as they were."""
    channels = values.shape[-3]
    mean, std = (torch.tensor(v[:channels]).view(-1, 1, 1) for v in (MEAN, STD))
    return ((values * std + mean) * 255).round().byte()


# --- settings


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        ({"random_resized_crop": 1}, TypeError, "expected random_resized_crop to be true or false, got 1"),
        ({"flip": "yes"}, TypeError, "expected flip to be true or false, got 'yes'"),
        ({"padding": -1}, ValueError, "expected padding of at least 0, got -1"),
        ({"padding": 1.5}, TypeError, "expected padding to be an int, got float"),
        ({"repeats": 0}, ValueError, "expected repeats of at least 1, got 0"),
        ({"repeats": True}, TypeError, "expected repeats to be an int, got bool"),
        ({"randaugment": 11}, ValueError, r"expected randaugment in \[0, 10\], got 11"),
        ({"randaugment": 9.0}, TypeError, "expected randaugment to be an int, got float"),
        ({"color_jitter": 1.1}, ValueError, r"expected color_jitter in \[0, 1\], got 1.1"),
        ({"erasing": -0.1}, ValueError, r"expected erasing in \[0, 1\], got -0.1"),
        ({"erasing": math.nan}, ValueError, r"expected erasing in \[0, 1\], got nan"),
        ({"mixup": -1}, ValueError, "expected mixup in"),
        ({"mixup": "0.8"}, TypeError, "expected mixup to be a number, got str"),
        ({"cutmix": math.inf}, ValueError, "expected cutmix to be finite, got inf"),
        ({"random_resized_crop": True, "padding": 4}, ValueError, "no padding with random_resized_crop, got 4"),
    ],
)
def test_settings_are_checked(settings: dict, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=f"multimax: .*{text}"):
        Augmentation(**settings)


def test_nothing_happens_by_default() -> None:
    assert not any(getattr(Augmentation(), field.name) for field in fields(Augmentation) if field.name != "repeats")
    images = noise()
    for draw in (0, 5, 6, 31):
        item = train(images, Augmentation())[draw]
        assert torch.equal(in_bytes(item["pixel_values"]), images.image(draw % 6))
        assert item["labels"] == draw % 6
        assert isinstance(item["labels"], int)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"size": 0}, "expected size of at least 1, got 0"),
        ({"seed": -1}, "expected seed of at least 0, got -1"),
        ({"mean": (0.5, 0.5)}, "1 or 3 numbers, one a channel, got 2 and 3"),
        ({"std": (0.5,)}, "1 or 3 numbers, one a channel, got 3 and 1"),
        ({"std": (0.5, 0, 1)}, "expected std above 0 and finite, got 0"),
        ({"images": Arrays([])}, "expected at least one image, got none"),
    ],
)
def test_arguments_are_checked(change: dict, text: str) -> None:
    arguments = {"images": noise(), "size": 12, "augmentation": DEIT, "mean": MEAN, "std": STD, "seed": 0}
    with pytest.raises(ValueError, match=f"multimax: .*{text}"):
        TrainImages(**{**arguments, **change})


def test_images_are_checked() -> None:
    wrong = noise()
    wrong.labels = wrong.labels[:5]
    with pytest.raises(ValueError, match="expected one label per image, got 5 for 6 images"):
        train(wrong, Augmentation())
    for image, got in (
        (torch.rand(3, 12, 12), r"torch.float32 of \(3, 12, 12\)"),
        (torch.zeros(1, 12, 12, dtype=torch.uint8), r"torch.uint8 of \(1, 12, 12\)"),
        (torch.zeros(12, 12, dtype=torch.uint8), r"torch.uint8 of \(12, 12\)"),
    ):
        images = Arrays([noise().image(0), image])
        with pytest.raises(ValueError, match=rf"expected images of uint8 .* got {got} for image 1"):
            train(images, Augmentation())[1]
    with pytest.raises(IndexError, match="draws of at least 0, got -1"):
        train(noise(), Augmentation())[-1]
    with pytest.raises(IndexError, match=r"expected an index in \[0, 5\], got 6"):
        EvalImages(noise(), 12, Augmentation(), MEAN, STD)[6]


# --- randomness


@pytest.mark.parametrize("name", EVERYTHING)
def test_an_item_is_a_function_of_seed_and_draw(name: str) -> None:
    images = smooth()
    draws = [5, 2, 9, 2, 30]
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    first = train(images, EVERYTHING[name], 16)
    together = pixels(first.__getitems__(draws))
    torch.manual_seed(123)
    random.seed(123)
    again = train(images, EVERYTHING[name], 16)
    alone = pixels([again[draw] for draw in reversed(draws)]).flip(0)  # one by one, in another order
    assert torch.equal(together, alone)
    assert together.dtype == torch.float32
    assert together.shape == (5, 3, 16, 16)
    torch.set_rng_state(before[0])
    random.setstate(before[1])
    first.__getitems__(draws)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert (np.random.get_state()[1] == before[2]).all()


@pytest.mark.parametrize("name", ["cifar", "jitter", "deit"])
def test_draws_and_seeds_differ(name: str) -> None:
    images = smooth(n=1)
    many = pixels(train(images, EVERYTHING[name], 16).__getitems__(range(12)))  # 12 views of one picture
    assert len(torch.unique(many.flatten(1), dim=0)) >= 8  # two may agree: there are few shifts
    other = pixels(train(images, EVERYTHING[name], 16, seed=4).__getitems__(range(12)))
    assert sum(torch.equal(a, b) for a, b in zip(many, other, strict=True)) <= 4


@pytest.mark.parametrize("name", ["plain", "cifar", "deit"])
def test_pictures_are_not_changed_in_place(name: str) -> None:
    images = noise()
    train(images, EVERYTHING[name]).__getitems__(range(6))
    assert torch.equal(images.pictures, noise().pictures)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # how torch starts workers on Linux
@pytest.mark.parametrize("name", ["cifar", "deit"])
def test_workers_change_nothing(name: str) -> None:
    data = train(smooth(), EVERYTHING[name], 16)
    sampler = DrawSampler(4, 2, seed=1)
    alone, shared = (
        [
            (batch["pixel_values"], batch["labels"])
            for batch in DataLoader(data, 2, sampler=sampler, num_workers=workers)
        ]
        for workers in (0, 2)
    )
    assert len(alone) == 2
    for (x, label), (x2, label2) in zip(alone, shared, strict=True):
        assert torch.equal(x, x2)
        assert torch.equal(label, label2)


def test_iteration_ends_after_one_epoch() -> None:
    assert [item["labels"] for item in train(noise(), Augmentation())] == list(range(6))


def test_no_draws_no_items() -> None:
    assert train(noise(), DEIT).__getitems__([]) == []
    assert EvalImages(noise(), 12, DEIT, MEAN, STD).__getitems__([]) == []


def test_hashed_numbers_are_uniform_and_independent() -> None:
    draws = np.arange(20000)
    a, b, c = augmentation._uniform(0, draws, 1), augmentation._uniform(0, draws, 2), augmentation._uniform(1, draws, 1)
    for u in (a, b, c):
        counts = np.histogram(u, bins=10, range=(0, 1))[0]
        assert ((counts - 2000) ** 2 / 2000).sum() < 33  # chi square of 9 degrees, 1e-4
        assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.03  # neighbours
    assert abs(np.corrcoef([a, b, c]) - np.eye(3)).max() < 0.03
    assert len(np.unique(augmentation._hash(5, draws, 0))) == len(draws)
    x = 0  # the same in Python's integers
    for part in (11, 22, 33):
        x = ((x ^ part) + 0x9E3779B97F4A7C15) % 2**64
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
        x ^= x >> 31
    assert augmentation._hash(11, np.array([33]), 22).tolist() == [x]


# --- the sampler


def test_an_epoch_has_every_image_once() -> None:
    sampler = DrawSampler(50, 1, seed=0)
    epochs = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        draws = list(sampler)
        assert sorted(draws) == list(range(epoch * 50, epoch * 50 + 50))
        assert draws == list(sampler)
        epochs.append([draw % 50 for draw in draws])
    assert epochs[0] != epochs[1] != epochs[2] != sorted(epochs[2])
    assert list(DrawSampler(50, 1, seed=1)) != list(DrawSampler(50, 1, seed=0)) == epochs[0]
    assert len(sampler) == 50


@pytest.mark.parametrize(("n", "repeats"), [(50, 3), (51, 3), (4, 2), (2, 5), (1, 1)])
def test_repeated_augmentation(n: int, repeats: int) -> None:
    sampler = DrawSampler(n, repeats, seed=0)
    seen = set()
    for epoch in range(4):
        sampler.set_epoch(epoch)
        draws = list(sampler)
        assert len(draws) == len(sampler) == n
        assert len(set(draws)) == n  # each repeat is another draw
        assert not seen & set(draws)  # and so is each epoch
        seen |= set(draws)
        for start in range(0, n, repeats):
            group = draws[start : start + repeats]
            assert len({draw % n for draw in group}) == 1  # one picture, next to each other
            assert [draw // n for draw in group] == [epoch * repeats + r for r in range(len(group))]
        assert len({draw % n for draw in draws}) == math.ceil(n / repeats)


def test_sampler_checks() -> None:
    for arguments in ((0, 1, 0), (5, 0, 0), (5, 1, -1)):
        with pytest.raises(ValueError, match="multimax: expected"):
            DrawSampler(*arguments)
    with pytest.raises(ValueError, match="epoch of at least 0, got -1"):
        DrawSampler(5, 1, 0).set_epoch(-1)


# --- crops and flips


def shifted(image: Tensor, down: int, right: int) -> Tensor:
    """What a window sees that was moved, black where there is no picture, pixel by pixel."""
    out = torch.zeros_like(image)
    for y in range(image.shape[1]):
        for x in range(image.shape[2]):
            if 0 <= y + down < image.shape[1] and 0 <= x + right < image.shape[2]:
                out[:, y, x] = image[:, y + down, x + right]
    return out


@pytest.mark.parametrize("channels", [1, 3])
def test_padded_crop_and_flip_by_hand(channels: int) -> None:
    images, padding = noise(4, channels, 10, 10), 2
    cropped = in_bytes(pixels(train(images, Augmentation(padding=padding), 10).__getitems__(range(400))))
    both = in_bytes(pixels(train(images, Augmentation(padding=padding, flip=True), 10).__getitems__(range(400))))
    crops = [
        {(top, left): shifted(image, top - padding, left - padding) for top in range(5) for left in range(5)}
        for image in images.pictures
    ]
    places, mirrored = [], 0
    for draw in range(400):
        (place,) = [place for place, crop in crops[draw % 4].items() if torch.equal(crop, cropped[draw])]
        places.append(place)
        mirror = torch.equal(both[draw], cropped[draw].flip(-1))
        assert mirror or torch.equal(both[draw], cropped[draw])
        mirrored += mirror
    assert set(places) == {(top, left) for top in range(5) for left in range(5)}
    assert abs(np.corrcoef(np.array(places).T)[0, 1]) < 0.2
    assert 150 < mirrored < 250


def test_another_size_is_resized() -> None:
    images = smooth(2, 20, 30)
    for data in (train(images, Augmentation(), 12), EvalImages(images, 12, Augmentation(), MEAN, STD)):
        by_hand = Image.fromarray(images.image(1).permute(1, 2, 0).numpy()).resize((12, 12), Image.Resampling.BICUBIC)
        assert (in_bytes(data[1]["pixel_values"]).permute(1, 2, 0).numpy() == np.asarray(by_hand)).all()
    grey = Arrays([images.image(0)[:1]])
    by_hand = Image.fromarray(grey.image(0)[0].numpy()).resize((12, 12), Image.Resampling.BICUBIC)
    assert (in_bytes(train(grey, Augmentation(), 12)[0]["pixel_values"])[0].numpy() == np.asarray(by_hand)).all()


class Script(random.Random):
    """Random numbers that were written down."""

    def __init__(self, uniform: list[float], integers: list[int]) -> None:
        super().__init__(0)
        self.uniforms, self.integers, self.bounds = iter(uniform), iter(integers), []

    def uniform(self, a: float, b: float) -> float:
        self.bounds.append((a, b))
        return next(self.uniforms)

    def randint(self, a: int, b: int) -> int:
        self.bounds.append((a, b))
        return next(self.integers)


@pytest.mark.parametrize("channels", [1, 3])
def test_random_resized_crop_by_hand(channels: int) -> None:
    image = smooth(1, 40, 60).image(0)[:channels]
    # the first part is too high: 0.9 of 2400 at a ratio of 3/4 is 40 x 54; the second is 24 wide and 20 high
    dice = Script([0.9, math.log(0.75), 0.2, math.log(1.2)], [5, 7])
    cut = pictures.random_resized_crop(image, 16, dice)
    part = image[:, 5:25, 7:31]
    array = part.permute(1, 2, 0).numpy() if channels == 3 else part[0].numpy()
    by_hand = np.asarray(Image.fromarray(np.ascontiguousarray(array)).resize((16, 16), Image.Resampling.BICUBIC))
    assert (cut.permute(1, 2, 0).numpy().squeeze() == by_hand).all()
    ratios = (math.log(3 / 4), math.log(4 / 3))
    assert dice.bounds == [(0.08, 1.0), ratios, (0.08, 1.0), ratios, (0, 20), (0, 36)]


@pytest.mark.parametrize(("height", "width", "part"), [(100, 10, (10, 13)), (10, 100, (13, 10)), (10, 10, (10, 10))])
def test_random_resized_crop_of_what_never_fits(height: int, width: int, part: tuple[int, int]) -> None:
    image = smooth(1, height, width).image(0)
    cut = pictures.random_resized_crop(image, 8, Script([10.0, 0.0] * pictures.ATTEMPTS, []))
    w, h = part
    top, left = (height - h) // 2, (width - w) // 2
    middle = image[:, top : top + h, left : left + w].permute(1, 2, 0).numpy()
    by_hand = Image.fromarray(np.ascontiguousarray(middle)).resize((8, 8), Image.Resampling.BICUBIC)
    assert (cut.permute(1, 2, 0).numpy() == np.asarray(by_hand)).all()


def test_random_resized_crop_statistics() -> None:
    # red is the column and green the row: the corners of what comes out say what was cut
    y, x = torch.meshgrid(torch.arange(250), torch.arange(250), indexing="ij")
    image = torch.stack([x, y, torch.zeros_like(x)]).byte()
    areas, ratios = [], []
    for seed in range(200):
        cut = pictures.random_resized_crop(image, 100, random.Random(seed)).float()
        w, h = ((cut[c].amax() - cut[c].amin()).item() + 1 for c in (0, 1))
        areas.append(w * h / 250**2)
        ratios.append(math.log(w / h))
    assert 0.07 < min(areas) < 0.12
    assert 0.9 < max(areas) <= 1.01
    assert 0.45 < np.mean(areas) < 0.58
    assert abs(np.mean(ratios)) < 0.04
    assert math.log(0.7) < min(ratios) < max(ratios) < math.log(1.42)


@pytest.mark.parametrize(("height", "width", "resized"), [(30, 45, (48, 32)), (50, 33, (32, 48)), (28, 28, (32, 32))])
def test_evaluation_takes_the_centre(height: int, width: int, resized: tuple[int, int]) -> None:
    images = smooth(2, height, width)
    item = EvalImages(images, 28, Augmentation(random_resized_crop=True, flip=True, erasing=1.0), MEAN, STD)[1]
    picture = Image.fromarray(images.image(1).permute(1, 2, 0).numpy()).resize(resized, Image.Resampling.BICUBIC)
    left, top = ((side - 28) // 2 for side in resized)
    by_hand = np.asarray(picture)[top : top + 28, left : left + 28]
    assert item["labels"] == 1
    assert (in_bytes(item["pixel_values"]).permute(1, 2, 0).numpy() == by_hand).all()
    normalised = (by_hand[3, 4] / 255 - np.array(MEAN)) / np.array(STD)
    np.testing.assert_allclose(item["pixel_values"][:, 3, 4].numpy(), normalised, rtol=1e-5, atol=1e-6)


# --- colours


def picture(channels: int = 3) -> Image.Image:
    values = noise(1, channels, 8, 10).image(0)
    return Image.fromarray(values.permute(1, 2, 0).numpy().squeeze())


def test_colour_jitter() -> None:
    image = picture()
    factors = [f for seed in range(200) for f in jitter_factors(seed)]
    assert 0.7 <= min(factors) < 0.72
    assert 1.28 < max(factors) <= 1.3
    # a factor of 1 is no change, of 0 it is black
    assert (np.asarray(pictures.color_jitter(image, 0.0, random.Random(0))) == np.asarray(image)).all()
    dark = pictures.color_jitter(image, 0.3, Fixed(0.7))
    values = np.asarray(image).astype(float)
    for name in ("brightness", "contrast", "color"):  # the order that Fixed keeps
        if name == "brightness":
            values = values * 0.7
        else:
            grey = values @ np.array([0.299, 0.587, 0.114])
            values = 0.7 * values + 0.3 * (grey.mean() if name == "contrast" else grey[..., None])
    assert np.abs(np.asarray(dark) - values).max() < 4  # each step rounds to bytes


class Fixed(random.Random):
    """No order, and one factor."""

    def __init__(self, factor: float) -> None:
        super().__init__(0)
        self.factor = factor

    def sample(self, population, k, *, counts=None):
        return list(population)[:k]

    def uniform(self, a: float, b: float) -> float:
        return self.factor


def jitter_factors(seed: int) -> list[float]:
    """What pictures.color_jitter draws."""
    dice, found = random.Random(seed), []
    draw = dice.uniform
    dice.uniform = lambda a, b: found.append(draw(a, b)) or found[-1]  # type: ignore[method-assign]
    pictures.color_jitter(picture(), 0.3, dice)
    assert len(found) == 3
    return found


def operated(name: str, level: float, sign: int = 1, channels: int = 3) -> np.ndarray:
    return np.asarray(pictures.operate(picture(channels), name, level, sign, (124, 116, 104)[:channels])).astype(int)


def test_operations_by_hand() -> None:
    """Magnitude 9 of timm's increasing set."""
    values = np.asarray(picture()).astype(int)
    assert (operated("invert", 0.9) == 255 - values).all()
    assert (operated("posterize", 0.9) == values // 128 * 128).all()  # 4 - 3 bits
    assert (operated("posterize", 0.3) == values // 32 * 32).all()
    assert (operated("posterize", 1.0) == values // 128 * 128).all()
    assert (operated("solarize", 0.9) == np.where(values < 26, values, 255 - values)).all()
    assert (operated("solarize", 0.0) == values).all()
    assert (operated("solarize_add", 0.9) == np.where(values < 128, values + 99, values)).all()
    low, high = (getattr(values, f)((0, 1), keepdims=True) for f in ("min", "max"))
    assert np.abs(operated("autocontrast", 0.9) - (values - low) * 255 / (high - low)).max() <= 1
    assert (np.diff(np.sort(operated("equalize", 0.9)[..., 0].ravel())) < 30).all()
    for sign, factor in ((1, 1.81), (-1, 0.19)):
        grey = values @ np.array([0.299, 0.587, 0.114])
        blends = {"brightness": 0.0, "contrast": grey.mean(), "color": grey[..., None]}
        for name, other in blends.items():
            by_hand = np.clip(other + factor * (values - other), 0, 255)
            assert np.abs(operated(name, 0.9, sign) - by_hand).max() < 2.5
    assert (operated("brightness", 1.0, -1) == operated("brightness", 0.999999, -1)).all()
    inside = operated("sharpness", 0.9, -1)[1:-1, 1:-1].std()
    assert inside < values[1:-1, 1:-1].std() < operated("sharpness", 0.9, 1)[1:-1, 1:-1].std()


def test_moves_by_hand() -> None:
    values = np.asarray(picture()).astype(int)  # 8 high, 10 wide
    fill = np.array([124, 116, 104])
    moved = operated("translate_x", 2 / 3, 1)  # 0.45 * 2/3 of 10 pixels: 3
    assert np.abs(moved[:, :7] - values[:, 3:]).max() <= 1
    assert (moved[:, 8:] == fill).all()
    moved = operated("translate_x", 2 / 3, -1)
    assert np.abs(moved[:, 3:] - values[:, :7]).max() <= 1
    moved = operated("translate_y", 5 / 9, 1)  # 2 pixels
    assert np.abs(moved[:6] - values[2:]).max() <= 1
    assert (moved[7:] == fill).all()
    left = pictures.operate(picture(), "rotate", 0.9, 1, (124, 116, 104))
    assert (np.asarray(left) == np.asarray(picture().rotate(27, Image.Resampling.BICUBIC, fillcolor=tuple(fill)))).all()
    for name, matrix in {"shear_x": (1, -0.27, 0, 0, 1, 0), "shear_y": (1, 0, 0, -0.27, 1, 0)}.items():
        by_hand = picture().transform(
            (10, 8), Image.Transform.AFFINE, matrix, Image.Resampling.BICUBIC, fillcolor=tuple(fill)
        )
        assert (operated(name, 0.9, -1) == np.asarray(by_hand)).all()


@pytest.mark.parametrize("name", pictures.RANDAUGMENT)
@pytest.mark.parametrize("level", [0.0, 0.9, 1.0])
def test_operations_take_grey_pictures(name: str, level: float) -> None:
    for sign in (-1, 1):
        grey = pictures.operate(picture(1), name, level, sign, (124,))
        assert grey.mode == "L"
        assert grey.size == (10, 8)
        if name == "color":
            assert (np.asarray(grey) == np.asarray(picture(1))).all()


def test_randaugment_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, pairs = [], []
    monkeypatch.setattr(pictures, "operate", lambda p, name, level, sign, fill: calls.append((name, level, sign)) or p)
    for seed in range(2000):
        before = len(calls)
        pictures.randaugment(picture(), 9, (0, 0, 0), random.Random(seed))
        pairs.append(len(calls) - before)
    counts = np.bincount(pairs, minlength=3) / 2000  # two operations, each with probability 0.5
    np.testing.assert_allclose(counts, [0.25, 0.5, 0.25], atol=0.04)
    names = [name for name, _, _ in calls]
    shares = np.array([names.count(name) / len(calls) for name in pictures.RANDAUGMENT])
    np.testing.assert_allclose(shares, 1 / 15, atol=0.02)
    levels = np.array([level for _, level, _ in calls])
    assert abs(levels.mean() - 0.9) < 0.005
    assert abs(levels.std() - 0.05) < 0.005
    assert levels.max() == 1.0
    assert abs(np.mean([sign for _, _, sign in calls])) < 0.08
    assert {sign for _, _, sign in calls} == {-1, 1}


def test_what_is_uncovered_has_the_mean_colour() -> None:
    assert train(noise(), DEIT).fill == (124, 116, 104)
    assert train(noise(channels=1), DEIT).fill == (124,)


@pytest.mark.parametrize("settings", [{"color_jitter": 0.3}, {"randaugment": 9}, {"erasing": 1.0}])
@pytest.mark.parametrize("channels", [1, 3])
def test_each_setting_does_something(settings: dict, channels: int) -> None:
    images = Arrays([image[:channels] for image in smooth().pictures])
    plain, changed = (
        pixels(train(images, Augmentation(**chosen), 24).__getitems__(range(8))) for chosen in ({}, settings)
    )
    assert changed.shape == (8, channels, 24, 24)
    assert sum(not torch.equal(a, b) for a, b in zip(plain, changed, strict=True)) >= 3


# --- erasing


def test_erasing_puts_noise_into_a_rectangle() -> None:
    areas, values, ratios = [], [], []
    for seed in range(300):
        blank = torch.full((3, 40, 40), 9.0)
        pictures.erase_(blank, random.Random(seed))
        hit = (blank != 9).all(0)
        rows, columns = hit.any(1).nonzero().flatten(), hit.any(0).nonzero().flatten()
        h, w = len(rows), len(columns)
        assert hit.sum() == h * w
        assert rows.tolist() == list(range(int(rows[0]), int(rows[0]) + h))
        assert columns.tolist() == list(range(int(columns[0]), int(columns[0]) + w))
        areas.append(h * w / 1600)
        ratios.append(math.log(h / w))
        values.append(blank[:, hit].flatten())
    assert 0.015 < min(areas) < 0.04
    assert 0.3 < max(areas) < 0.35
    assert abs(np.mean(areas) - (0.02 + 1 / 3) / 2) < 0.02
    assert abs(np.mean(ratios)) < 0.15
    assert -1.35 < min(ratios) < -0.9
    every = torch.cat(values)
    assert abs(every.mean().item()) < 0.02
    assert abs(every.std().item() - 1) < 0.02
    assert not torch.equal(values[0][:5], values[1][:5])


def test_erasing_happens_with_its_probability() -> None:
    images = noise(1)
    plain = train(images, Augmentation())[0]["pixel_values"]
    many = pixels(train(images, Augmentation(erasing=0.25)).__getitems__(range(1000)))
    assert 200 < sum(not torch.equal(plain, other) for other in many) < 300


# --- mixing


def batch(n: int = 6, classes: int = 5) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(n, 3, 20, 30, generator=generator), torch.randint(0, classes, (n,), generator=generator)


@pytest.mark.parametrize(("n", "alpha"), [(6, 0.2), (7, 8.0)])
def test_mixup_by_hand(n: int, alpha: float) -> None:
    x, labels = batch(n)
    mix = Mix(Augmentation(mixup=alpha))
    shares = []
    for seed in range(400):
        mixed, soft = mix(x, labels, 5, seed=seed)
        # the share of the first picture by least squares, which then explains all
        difference = x[0] - x[-1]
        share = ((mixed[0] - x[-1]) * difference).sum() / difference.square().sum()
        shares.append(share.item())
        if seed < 20:
            torch.testing.assert_close(mixed, share * x + (1 - share) * x.flip(0), rtol=1e-4, atol=1e-5)
            by_hand = torch.zeros(n, 5)
            for i in range(n):
                by_hand[i, labels[i]] += share
                by_hand[i, labels[n - 1 - i]] += 1 - share
            torch.testing.assert_close(soft, by_hand, rtol=1e-4, atol=1e-5)
    assert abs(np.mean(shares) - 0.5) < 0.06
    assert abs(np.std(shares) - math.sqrt(1 / (4 * (2 * alpha + 1)))) < 0.03  # that of Beta(alpha, alpha)


@pytest.mark.parametrize("n", [6, 7])
def test_cutmix_by_hand(n: int) -> None:
    x, labels = batch(n)
    mix = Mix(Augmentation(cutmix=1.0))
    shares = []
    for seed in range(400):
        mixed, soft = mix(x, labels, 5, seed=seed)
        cut = (mixed[0] != x[0]).all(0)
        rows, columns = cut.any(1).nonzero().flatten(), cut.any(0).nonzero().flatten()
        assert int(cut.sum()) == len(rows) * len(columns)  # a rectangle
        for i in range(n):
            assert torch.equal(mixed[i], torch.where(cut, x[n - 1 - i], x[i]))
        share = 1 - cut.float().mean()
        shares.append(share.item())
        by_hand = torch.zeros(n, 5)
        for i in range(n):
            by_hand[i, labels[i]] += share
            by_hand[i, labels[n - 1 - i]] += 1 - share
        torch.testing.assert_close(soft, by_hand, rtol=1e-5, atol=1e-6)
    # what lies outside is cut off, so more than the half that Beta(1, 1) has is kept
    assert 0.55 < np.mean(shares) < 0.75
    assert min(shares) < 0.25
    assert max(shares) > 0.97


def test_cutmix_box_by_hand() -> None:
    class Centre(random.Random):
        def randrange(self, stop: int) -> int:  # type: ignore[override]
            return stop - 2

    assert augmentation._middle_part(20, 0.5, Centre()) == (13, 20)  # 5 to each side of 18
    assert augmentation._middle_part(20, 0.0, Centre()) == (18, 18)
    assert augmentation._middle_part(7, 1.0, Centre()) == (2, 7)


def test_both_are_switched() -> None:
    x, _ = batch()
    mix = Mix(Augmentation(mixup=1000.0, cutmix=0.05))  # each has an alpha of its own
    cut, whole = 0, 0
    for seed in range(300):
        mixed, soft = mix(x, torch.arange(6), 6, seed=seed)
        if ((mixed == x) | (mixed == x.flip(0))).all():
            cut += 1
            whole += bool(soft[0, 0] > 0.99)
        else:
            assert 0.4 < soft[0, 0] < 0.6
        torch.testing.assert_close(soft.sum(-1), torch.ones(6))
    assert 115 < cut < 185
    assert 0.3 < whole / cut < 0.7


def test_mix_is_a_function_of_the_seed() -> None:
    x, labels = batch()
    before = torch.get_rng_state(), random.getstate()
    kept = x.clone()
    mix = Mix(Augmentation(mixup=0.8, cutmix=1.0))
    first, second, third = (mix(x, labels, 5, seed=seed) for seed in (3, 3, 4))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not torch.equal(first[0], third[0])
    assert torch.equal(x, kept)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


def test_nothing_to_mix() -> None:
    x, labels = batch()
    assert not Mix(Augmentation())
    assert Mix(Augmentation(cutmix=1.0))
    for mix, n in ((Mix(Augmentation()), 6), (Mix(Augmentation(mixup=0.8, cutmix=1.0)), 1), (Mix(DEIT), 0)):
        mixed, soft = mix(x[:n], labels[:n], 5, seed=0)
        assert torch.equal(mixed, x[:n])
        assert torch.equal(soft, torch.eye(5)[labels[:n]])
        assert soft.dtype == torch.float32


def test_mix_keeps_the_dtype() -> None:
    x, labels = batch()
    for seed in range(4):
        mixed, soft = Mix(DEIT)(x.bfloat16(), labels.int(), 5, seed=seed)
        assert mixed.dtype == torch.bfloat16
        assert soft.dtype == torch.float32


def test_mix_checks() -> None:
    x, labels = batch()
    mix = Mix(DEIT)
    for arguments, text in (
        ((x[0], labels, 5), r"pixel_values of shape \(batch, channels, height, width\), got \(3, 20, 30\)"),
        ((x, labels[:3], 5), r"labels of shape \(6,\), one class per picture, got torch.int64 of shape \(3,\)"),
        ((x, labels.float(), 5), "got torch.float32"),
        ((x, labels, 2), r"expected labels in \[0, 1\], got some from"),
        ((x, labels, 0), "expected classes of at least 1, got 0"),
    ):
        with pytest.raises(ValueError, match=text):
            mix(*arguments, seed=0)
    with pytest.raises(ValueError, match="seed of at least 0, got -1"):
        mix(x, labels, 5, seed=-1)


# --- real pictures


@pytest.mark.skipif(not DATA.is_dir(), reason=f"no Tiny ImageNet in {DATA}")
def test_real_pictures() -> None:
    paths = [sorted(folder.rglob("*.JPEG"))[0] for folder in sorted((DATA / "train").iterdir())]
    pictures = [torch.from_numpy(np.array(Image.open(path).convert("RGB"))).permute(2, 0, 1) for path in paths]
    images = Arrays(pictures)
    images.labels = torch.arange(10)
    assert images.image(0).shape == (3, 64, 64)
    data = TrainImages(images, 48, DEIT, MEAN, STD, seed=0)
    loader = DataLoader(data, batch_size=10, sampler=DrawSampler(10, 3, seed=0))
    (found,) = loader
    x, soft = Mix(DEIT)(found["pixel_values"], found["labels"], 10, seed=0)
    assert x.shape == (10, 3, 48, 48)
    assert x.isfinite().all()
    assert 0.3 < x.std() < 2.5
    assert len(torch.unique(found["labels"])) == 4  # ten draws of threes
    torch.testing.assert_close(soft.sum(-1), torch.ones(10))
    # many views of one picture have on average about the colours of the picture
    views = pixels(
        TrainImages(images, 48, Augmentation(True, flip=True), MEAN, STD, 0).__getitems__(range(0, 1000, 10))
    )
    plain = EvalImages(images, 48, Augmentation(True), MEAN, STD)[0]["pixel_values"]
    torch.testing.assert_close(views.mean((0, 2, 3)), plain.mean((1, 2)), rtol=0, atol=0.25)
