"""Images with labels, from digits that need no file to folders and datasets of the hub.

Shapes: n images, C channels, H high, W wide.
"""

import math
import os
import random
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from multimax.experiments.data import files

# of torchvision's ImageFolder, so that a tree has the same images here
SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
DIGITS_SEED = 0
HELD_OUT = 10  # one image of so many, of each class, is to validate on where the test part is not read
GREY = ("1", "L")  # modes of PIL
UNDERSTOOD = (
    "IDX files (train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte, t10k-labels-idx1-ubyte), "
    "CIFAR-10 binary files (data_batch_1.bin, ..., test_batch.bin), CIFAR-100 binary files (train.bin, test.bin), each "
    "also .gz or .xz, or a tree train/<class>/*.jpg with test/ or val/ beside train/"
)


class ImageSet(Protocol):
    """Images with labels."""

    @property
    def labels(self) -> Tensor:
        """The class of each image, int64 of shape (n,)."""

    def __len__(self) -> int:
        """How many images there are."""

    def image(self, index: int) -> Tensor:
        """One image, uint8 of shape (C, H, W)."""

    def part(self, chosen: Tensor) -> "ImageSet":
        """Those with these numbers."""


@dataclass(frozen=True)
class ImageData:
    """Images to train on and images to test on.

    Attributes:
        train: the images to train on.
        test: those that the results are of.
        classes: the names of the classes, in the order of the labels.
        channels: of every image: 1 for grey, 3 for colour.
        name: what the data is called.
    """

    train: ImageSet
    test: ImageSet
    classes: tuple[str, ...]
    channels: int
    name: str


@dataclass(frozen=True, eq=False)
class ArrayImages:
    """Images in memory."""

    images: Tensor  # (n, C, H, W), uint8
    labels: Tensor

    def __len__(self) -> int:
        """How many images there are."""
        return len(self.labels)

    def image(self, index: int) -> Tensor:
        """One image, uint8 of shape (C, H, W), not copied."""
        return self.images[index]

    def part(self, chosen: Tensor) -> "ArrayImages":
        """Those with these numbers."""
        return ArrayImages(self.images[chosen], self.labels[chosen])


@dataclass(frozen=True, eq=False)
class FileImages:
    """Images in files, each read when it is asked for, as RGB and as it is stored: EXIF turns nothing."""

    paths: Sequence[Path]
    labels: Tensor

    def __len__(self) -> int:
        """How many images there are."""
        return len(self.labels)

    def image(self, index: int) -> Tensor:
        """One image, uint8 of shape (3, H, W)."""
        pil = files.optional("PIL.Image", "pip install pillow")
        path = self.paths[index]
        try:
            with pil.open(path) as image:
                return _pixels(image.convert("RGB"))
        except FileNotFoundError:
            raise FileNotFoundError(f"multimax: expected the image {path}, got none; it was there before") from None
        except Exception as error:  # decoders raise errors of many kinds, few of which name the file
            raise ValueError(
                f"multimax: expected an image in {path}, got {type(error).__name__}: {error}; get it again or remove it"
            ) from error

    def part(self, chosen: Tensor) -> "FileImages":
        """Those with these numbers."""
        return FileImages(tuple(self.paths[i] for i in chosen.tolist()), self.labels[chosen])


@dataclass(frozen=True, eq=False)
class HubImages:
    """Images of a dataset of the hub, each decoded when it is asked for."""

    dataset: Any
    column: str
    labels: Tensor
    mode: str  # of PIL: RGB or L
    name: str  # for messages

    def __len__(self) -> int:
        """How many images there are."""
        return len(self.labels)

    def image(self, index: int) -> Tensor:
        """One image, uint8 of shape (C, H, W)."""
        image = _decoded(self.dataset, self.column, index, self.name)
        if self.mode == "L" and image.mode not in GREY:
            raise ValueError(
                f"multimax: expected grey images in {self.name}, as the first ones are, got mode {image.mode} in "
                f"row {index}; convert all to one mode"
            )
        return _pixels(image.convert(self.mode))

    def part(self, chosen: Tensor) -> "HubImages":
        """Those with these numbers."""
        return replace(self, dataset=self.dataset.select(chosen.tolist()), labels=self.labels[chosen])


def _parted(train: ImageSet, test: ImageSet | None, classes: tuple[str, ...], channels: int, name: str) -> ImageData:
    """The parts; some of the training images are to validate on if the test part was not read."""
    if test is not None:
        return ImageData(train, test, classes, channels, name)
    held_out = torch.zeros(len(train), dtype=torch.bool)
    for label in range(len(classes)):
        held_out[(train.labels == label).nonzero().flatten()[::HELD_OUT]] = True
    kept, validation = ((~held_out).nonzero().flatten(), held_out.nonzero().flatten())
    if not len(kept):
        raise ValueError(
            f"multimax: expected several images of a class in {name}, to train and to validate on, got one"
        )
    return ImageData(train.part(kept), train.part(validation), classes, channels, f"{name}{files.VALIDATION}")


def _pixels(image: Any) -> Tensor:
    """A PIL image of mode L or RGB as (C, H, W)."""
    flat = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return flat.reshape(image.height, image.width, -1).permute(2, 0, 1).contiguous()


def _decoded(dataset: Any, column: str, index: int, name: str) -> Any:
    try:
        image = dataset[index][column]
    except IndexError:
        raise
    except Exception as error:  # as with files
        raise ValueError(
            f"multimax: expected an image in row {index} of {name}, got {type(error).__name__}: {error}"
        ) from error
    if not hasattr(image, "convert"):  # not even decoded: the column is of something else, or has a gap
        raise ValueError(f"multimax: expected an image in row {index} of {name}, got {type(image).__name__}")
    return image


def _check_labels(labels: Tensor, classes: int, where: object) -> None:
    wrong = ((labels < 0) | (labels >= classes)).nonzero().flatten()
    if len(wrong):
        first = int(wrong[0])
        raise ValueError(
            f"multimax: expected labels in [0, {classes - 1}] in {where}, got {int(labels[first])} in record {first}"
        )


def _numbered(classes: int) -> tuple[str, ...]:
    return tuple(map(str, range(classes)))


def _digits(with_test: bool) -> ImageData:
    datasets = files.optional("sklearn.datasets", "pip install scikit-learn")
    found = datasets.load_digits()
    images = (torch.tensor(found.images) * (255 / 16)).round().to(torch.uint8)[:, None]  # from 0..16
    labels = torch.tensor(found.target, dtype=torch.int64)
    # Every fourth of each class, in an order by chance. Python keeps random() the same in all versions, and no other
    # generator of numbers promises that.
    chance = random.Random(DIGITS_SEED)
    order = sorted(range(len(labels)), key=lambda i: (int(labels[i]), chance.random()))
    part = torch.zeros(len(labels), dtype=torch.bool)
    part[order[::4]] = True
    train, test = (ArrayImages(images[chosen], labels[chosen]) for chosen in (~part, part))
    return _parted(train, test if with_test else None, _numbered(10), 1, "digits")


def _idx_names(part: str, kind: str) -> tuple[str, str]:
    """MNIST's names, as they were published and as some programs unpack them."""
    return f"{part}-{kind}-ubyte", f"{part}-{kind}-ubyte".replace("-idx", ".idx")


IDX = [(_idx_names(part, "images-idx3"), _idx_names(part, "labels-idx1")) for part in ("train", "t10k")]


def _idx(path: Path, dims: int) -> Tensor:
    """An IDX file of bytes."""
    data = files.read_bytes(path)
    magic, start = bytes((0, 0, 8, dims)), 4 + 4 * dims
    if data[:4] != magic:
        raise ValueError(
            f"multimax: expected an IDX file of bytes in {dims} dims in {path}, which begins with {magic.hex()}, "
            f"got {data[:4].hex()}"
        )
    sizes = struct.unpack(f">{dims}I", data[4:start]) if len(data) >= start else ()
    if not sizes or start + math.prod(sizes) != len(data) or 0 in sizes:
        wanted = f"{start} + {' x '.join(map(str, sizes))} bytes" if sizes else f"at least {start} bytes"
        raise ValueError(f"multimax: expected {wanted} in {path}, got {len(data)}; get it again")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8, offset=start).reshape(sizes)


def _idx_folder(folder: Path, with_test: bool) -> ImageData:
    sets: list[ArrayImages] = []
    classes = 0
    for image_names, label_names in IDX if with_test else IDX[:1]:
        images_path, labels_path = files.require(folder, *image_names), files.require(folder, *label_names)
        images, labels = _idx(images_path, 3), _idx(labels_path, 1).long()
        if len(images) != len(labels):
            raise ValueError(
                f"multimax: expected as many labels as images, got {len(images)} images in {images_path} and "
                f"{len(labels)} labels in {labels_path}"
            )
        classes = classes or int(labels.max()) + 1  # those of training
        _check_labels(labels, classes, labels_path)
        if sets and sets[0].images.shape[2:] != images.shape[1:]:
            raise ValueError(
                f"multimax: expected images of {tuple(sets[0].images.shape[2:])} in {images_path}, as in training, "
                f"got {tuple(images.shape[1:])}"
            )
        sets.append(ArrayImages(images[:, None], labels))
    return _parted(sets[0], sets[1] if with_test else None, _numbered(classes), 1, folder.name)


def _cifar(path: Path, label_bytes: int, classes: int) -> ArrayImages:
    """A file of records: one or two labels, the last of which is the finest, and 3 x 32 x 32 bytes."""
    data = files.read_bytes(path)
    size = label_bytes + 3 * 32 * 32
    if len(data) % size:
        raise ValueError(
            f"multimax: expected records of {size} bytes in {path}, got {len(data)} bytes, which are "
            f"{len(data) // size} records and {len(data) % size} bytes; get it again"
        )
    records = torch.frombuffer(bytearray(data), dtype=torch.uint8).reshape(-1, size)
    labels = records[:, label_bytes - 1].long()
    _check_labels(labels, classes, path)
    return ArrayImages(records[:, label_bytes:].reshape(-1, 3, 32, 32).contiguous(), labels)


def _cifar_folder(folder: Path, train: Sequence[str], test: str | None, label_bytes: int, names: str) -> ImageData:
    count = 100 if label_bytes == 2 else 10
    # all, before the first is read
    paths = [files.require(folder, name) for name in (*train, *([] if test is None else [test]))]
    names_path = files.find(folder, names)
    classes = _numbered(count)
    if names_path is not None:
        classes = tuple(line.strip() for line in files.read_text(names_path).split("\n") if line.strip())
        if len(classes) != count:
            raise ValueError(f"multimax: expected {count} names of classes in {names_path}, got {len(classes)}")
    found = [_cifar(path, label_bytes, count) for path in paths]
    tested = None if test is None else found.pop()
    trained = ArrayImages(torch.cat([part.images for part in found]), torch.cat([part.labels for part in found]))
    return _parted(trained, tested, classes, 3, folder.name)


def _batches(folder: Path) -> list[str]:
    """The training files of CIFAR-10, from the first to the last that is there: there are five, but fewer do."""
    found = (re.fullmatch(r"data_batch_(\d+)\.bin", files.unpacked(path)) for path in folder.iterdir())
    numbers = [int(match[1]) for match in found if match]
    return [f"data_batch_{i}.bin" for i in range(1, max(numbers, default=1) + 1)]


def _subfolders(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def _tree(folder: Path, classes: Sequence[str]) -> FileImages:
    """A folder of folders, one a class, with images at any depth."""
    paths: list[Path] = []
    labels: list[int] = []
    for subfolder in _subfolders(folder):
        if subfolder.name not in classes:
            raise ValueError(
                f"multimax: expected the classes of {folder} to be among the {len(classes)} of training, "
                f"got {subfolder.name!r}, which is not; a folder in it is a class"
            )
        found = sorted(
            Path(place, name)
            for place, _, names in os.walk(subfolder, followlinks=True)
            for name in names
            if name.lower().endswith(SUFFIXES) and not name.startswith(".")
        )
        if not found:
            raise ValueError(
                f"multimax: expected images in {subfolder}, got none that ends in {', '.join(SUFFIXES)}; "
                "remove the folder or fill it"
            )
        paths += found
        labels += [classes.index(subfolder.name)] * len(found)
    return FileImages(tuple(paths), torch.tensor(labels, dtype=torch.int64))


def _tree_folder(folder: Path, with_test: bool) -> ImageData:
    classes = tuple(subfolder.name for subfolder in _subfolders(folder / "train"))
    if not classes:
        raise ValueError(f"multimax: expected one folder per class in {folder / 'train'}, got none")
    if not with_test:
        return _parted(_tree(folder / "train", classes), None, classes, 3, folder.name)
    tests = [folder / name for name in ("test", *files.VALID)]
    test = next((candidate for candidate in tests if _subfolders(candidate)), None)
    if test is None:
        raise FileNotFoundError(
            f"multimax: expected {tests[0]} with one folder per class, got none; "
            f"looked for {', '.join(candidate.name for candidate in tests)} in {folder}"
        )
    return ImageData(_tree(folder / "train", classes), _tree(test, classes), classes, 3, folder.name)


def _hub_labels(dataset: Any, column: str, where: str) -> list[Any]:
    labels: list[Any] = dataset[column][:]
    if not labels:
        raise ValueError(f"multimax: expected images in {where}, got none")
    return labels


def _hub_classes(feature: Any, labels: list[Any], where: str) -> tuple[str, ...]:
    """The classes of a dataset: those that it names, or what its labels are, or as many as the highest label says."""
    if getattr(feature, "names", None):
        return tuple(feature.names)
    if all(isinstance(label, str) for label in labels):
        return tuple(sorted(set(labels)))
    for row, label in enumerate(labels):
        if type(label) is not int:
            raise ValueError(
                f"multimax: expected labels that are all numbers or all names in {where}, got {label!r} in row {row}"
            )
    return _numbered(max(labels) + 1)


def _hub_set(dataset: Any, image: str, label: str, classes: Sequence[str], mode: str, where: str) -> HubImages:
    places = {name: i for i, name in enumerate(classes)}
    labels = []
    for row, value in enumerate(_hub_labels(dataset, label, where)):
        number = places.get(value) if isinstance(value, str) else value
        if type(number) is not int or not 0 <= number < len(classes):
            raise ValueError(
                f"multimax: expected labels in [0, {len(classes) - 1}], or names of classes of training, in {where}, "
                f"got {value!r} in row {row}"
            )
        labels.append(number)
    return HubImages(dataset, image, torch.tensor(labels, dtype=torch.int64), mode, where)


def _hub_images(source: str, with_test: bool) -> ImageData:
    found = files.hub(source)
    train = found.split("train")
    image = found.column(train, "image", "img")
    label = found.column(train, "label", "labels", "fine_label")
    in_train, in_test = f"the training split of {source}", f"the test split of {source}"
    if with_test:
        test = found.split("test", *files.VALID)
        hidden = all(number == -1 for number in _hub_labels(test, found.column(test, label), in_test))
        if hidden and any(
            name in found.splits for name in files.VALID
        ):  # contests keep the labels of the test set back
            test, in_test = found.split(*files.VALID), f"the validation split of {source}"
        found.column(test, image)
    classes = _hub_classes(train.features[label], _hub_labels(train, label, in_train), in_train)
    # one grey image may be among many in colour, so that the first alone does not tell
    first = [_decoded(train, image, i, in_train) for i in range(min(len(train), 16))]
    mode = "L" if all(image.mode in GREY for image in first) else "RGB"
    tested = _hub_set(test, image, label, classes, mode, in_test) if with_test else None
    trained = _hub_set(train, image, label, classes, mode, in_train)
    return _parted(trained, tested, classes, 1 if mode == "L" else 3, found.name)


def load_images(source: str | Path, *, with_test: bool = True) -> ImageData:
    """Loads images with labels.

    Args:
        source: one of

            - ``"digits"``: the 1,797 digits of 8 x 8 that come with scikit-learn, 1,347 to train on and 450 to test on,
              the same at every call;
            - a folder of IDX files under MNIST's names;
            - a folder of CIFAR-10's or CIFAR-100's binary files, where CIFAR-10 may have fewer than five batches;
            - a folder with ``train/<class>/`` and ``test/<class>/``, or else ``validation``, ``valid``, ``val`` or
              ``dev``, with images in them at any depth. The classes are the folders of training in alphabetical order;
              other files do not matter;
            - ``"hub:owner/name"`` or ``"hub:owner/name:configuration"``: what ``datasets.load_dataset`` loads, with
              columns image or img, and label, labels or fine_label. Results are of the split test, or of the
              validation split if there is none or all its labels are -1.

            IDX and CIFAR files may be packed, as .gz or .xz. A ``Path`` is always a folder, also when named digits.
        with_test: whether to read the test part. If not, a tenth of the training images of each class, always the
            same, stands in its place, and is not trained on.

    Returns:
        The images. Those of trees and of the hub are decoded when they are asked for.

    Raises:
        FileNotFoundError: a file or folder is missing, and the message names it.
        ValueError: a file is damaged or holds something else, and the message names it.

    Example:
        >>> from multimax.experiments.data import load_images
        >>> data = load_images("digits")
        >>> len(data.train), len(data.test), data.train.image(0).shape
        (1347, 450, torch.Size([1, 8, 8]))
    """
    if source == "digits":
        return _digits(with_test)
    if files.is_hub(source):
        return _hub_images(str(source), with_test)
    folder = files.folder(source, "'digits', hub:owner/name or a folder of images")
    if any(files.find(folder, *names) for part in IDX for names in part):
        return _idx_folder(folder, with_test)
    batches = _batches(folder)
    if files.find(folder, *batches, "test_batch.bin"):
        return _cifar_folder(folder, batches, "test_batch.bin" if with_test else None, 1, "batches.meta.txt")
    if files.find(folder, "train.bin", "test.bin"):
        return _cifar_folder(folder, ["train.bin"], "test.bin" if with_test else None, 2, "fine_label_names.txt")
    if (folder / "train").is_dir():
        return _tree_folder(folder, with_test)
    if files.find(folder, "data_batch_1") or all(files.find(folder, name) for name in ("train", "test", "meta")):
        raise ValueError(
            f"multimax: expected CIFAR's binary files in {folder}, got its Python version, which is made of pickles, "
            "and a pickle can run any code when it is read; get the binary version, cifar-10-binary.tar.gz or "
            "cifar-100-binary.tar.gz, and unpack it"
        )
    raise ValueError(f"multimax: expected {UNDERSTOOD} in {folder}, which {files.holds(folder)}")
