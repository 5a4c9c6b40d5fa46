"""Reading data: real data where it is there, and small files with every fault that one may have."""

import gzip
import json
import lzma
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from multimax.experiments.data import ImageSet, files, load_images, load_parallel, load_text
from places import DATA

REAL = DATA.resolve()


def real(name: str) -> Path:
    if not (REAL / name).is_dir():
        pytest.skip(f"no {name} in ../shared/data")
    return REAL / name


def write(path: Path, data: bytes | str) -> Path:
    """Writes a file, packed if its name says so."""
    raw = data.encode() if isinstance(data, str) else data
    pack = {".gz": gzip.compress, ".xz": lzma.compress}.get(path.suffix, bytes)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pack(raw))
    return path


def fails(call: Callable[[], object], *parts: object, error: type[Exception] = ValueError) -> None:
    """Raises our error, with all of the parts in its text."""
    with pytest.raises(error, match=r"^multimax: expected ") as info:
        call()
    for part in parts:
        assert str(part) in str(info.value)


def counts(images: ImageSet) -> list[int]:
    assert images.labels.dtype == torch.int64
    assert len(images) == len(images.labels)
    return images.labels.bincount().tolist()


def all_images(images: ImageSet) -> Tensor:
    return torch.stack([images.image(i) for i in range(len(images))])


# files


def test_a_file_plain_or_packed(tmp_path: Path) -> None:
    for name, end in (("a", ""), ("b", ".gz"), ("c", ".xz")):
        path = write(tmp_path / (name + end), "grüße\r\n\u2028 end\n")
        assert files.require(tmp_path, name) == path
        assert files.unpacked(path) == name
        assert files.read_bytes(path) == "grüße\r\n\u2028 end\n".encode()
        assert files.read_text(path) == "grüße\n\u2028 end\n"
    assert files.find(tmp_path, "none", "b") == tmp_path / "b.gz"
    write(tmp_path / "b", "plain")
    assert files.require(tmp_path, "b") == tmp_path / "b"
    assert files.read_text(write(tmp_path / "bom", b"\xef\xbb\xbfx")) == "x"
    (tmp_path / "folder").mkdir()
    assert files.find(tmp_path, "folder") is None
    fails(lambda: files.require(tmp_path, "d", "e"), tmp_path / "d", "d.gz, d.xz, e,", error=FileNotFoundError)


@pytest.mark.parametrize("end", [".gz", ".xz"])
@pytest.mark.parametrize("keep", [5, 40, -1])
def test_a_truncated_file(tmp_path: Path, end: str, keep: int) -> None:
    path = write(tmp_path / f"a{end}", bytes(range(256)) * 3)
    path.write_bytes(path.read_bytes()[:keep])
    fails(lambda: files.read_bytes(path), path, "damaged", "get it again")


@pytest.mark.parametrize("end", [".gz", ".xz"])
def test_a_damaged_file(tmp_path: Path, end: str) -> None:
    path = write(tmp_path / f"a{end}", bytes(range(256)) * 3)
    whole = path.read_bytes()
    for place in (10, 60):  # where packing begins, which cannot be read then, and where only the checksum tells
        path.write_bytes(whole[:place] + bytes((whole[place] ^ 0xFF,)) + whole[place + 1 :])
        fails(lambda: files.read_bytes(path), path, "damaged")
    path.write_bytes(b"not packed at all")
    fails(lambda: files.read_bytes(path), path, "damaged")
    fails(lambda: files.read_bytes(write(path, "")), path, "empty")


def test_an_empty_file_and_another_encoding(tmp_path: Path) -> None:
    path = write(tmp_path / "a", b"")
    fails(lambda: files.read_text(path), path, "empty")
    write(path, b"one\ntwo\nthr\xe9e\n")
    fails(lambda: files.read_text(path), path, "0xe9 at byte 11, in line 3", "iconv")


def test_a_library_that_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for library in ("datasets", "sklearn.datasets", "PIL.Image"):
        monkeypatch.setitem(sys.modules, library, None)
    fails(lambda: load_text("hub:a/b"), "pip install datasets", error=ImportError)
    fails(lambda: load_images("digits"), "pip install scikit-learn", error=ImportError)
    write(tmp_path / "train/a/1.png", "")
    write(tmp_path / "val/a/1.png", "")
    images = load_images(tmp_path).test
    fails(lambda: images.image(0), "pip install pillow", error=ImportError)


@pytest.mark.parametrize("load", [load_images, load_text, lambda source: load_parallel(source, ("de", "en"))])
def test_a_source_that_is_none(tmp_path: Path, load: Callable[[Any], object]) -> None:
    fails(lambda: load(tmp_path / "none"), tmp_path / "none", "not there", error=FileNotFoundError)
    fails(lambda: load(tmp_path), tmp_path, error=(ValueError, FileNotFoundError))  # type: ignore[arg-type]
    fails(lambda: load(3), "got 3", error=TypeError)
    fails(lambda: load(""), "got ''", error=TypeError)
    fails(lambda: load("hub:"), "'hub:'")


# images


def test_digits() -> None:
    pytest.importorskip("sklearn")
    data = load_images("digits")
    assert (len(data.train), len(data.test), data.channels, data.name) == (1347, 450, 1, "digits")
    assert data.classes == tuple("0123456789")
    assert all(44 <= count <= 46 for count in counts(data.test))
    # every image is in one of the parts
    assert [a + b for a, b in zip(counts(data.train), counts(data.test), strict=True)] == [
        *(178, 182, 177, 183, 181, 182, 181, 179, 174, 180)
    ]
    pixels = all_images(data.train)
    assert (pixels.dtype, pixels.shape) == (torch.uint8, (1347, 1, 8, 8))
    assert sorted(pixels.unique().tolist()) == [round(i * 255 / 16) for i in range(17)]
    # always the same: results of different days must be comparable
    assert data.test.labels[:20].tolist() == [2, 4, 6, 7, 0, 2, 6, 9, 5, 0, 9, 1, 0, 2, 7, 0, 1, 2, 7, 3]
    assert torch.equal(all_images(load_images("digits").test), all_images(data.test))


def test_fashion_mnist() -> None:
    data = load_images(real("fashion-mnist"))
    assert (counts(data.train), counts(data.test)) == ([6000] * 10, [1000] * 10)
    assert (data.channels, data.name, len(data.classes)) == (1, "fashion-mnist", 10)
    pixels = data.train.images / 255  # type: ignore[attr-defined]
    assert pixels.shape == (60000, 1, 28, 28)
    assert (round(pixels.mean().item(), 4), round(pixels.std().item(), 4)) == (0.2860, 0.3530)


def test_cifar10() -> None:
    data = load_images(str(real("cifar10")))
    assert (len(data.train), counts(data.test)) == (20000, [1000] * 10)
    assert (data.channels, data.classes[0], data.classes[9]) == (3, "airplane", "truck")
    means = (data.train.images / 255).mean((0, 2, 3))  # type: ignore[attr-defined]
    torch.testing.assert_close(means, torch.tensor([0.4914, 0.4822, 0.4465]), atol=2e-3, rtol=0)
    assert data.train.image(19999).shape == (3, 32, 32)


def test_tiny_imagenet() -> None:
    pytest.importorskip("PIL")
    data = load_images(real("tiny-imagenet-10"))
    assert (counts(data.train), counts(data.test)) == ([500] * 10, [50] * 10)
    assert (data.channels, data.classes) == (3, tuple(sorted(data.classes)))
    image = data.train.image(2600)
    assert (image.shape, image.dtype) == ((3, 64, 64), torch.uint8)
    assert 20 < image.float().mean() < 230


def idx(values: Tensor, kind: int = 8) -> bytes:
    sizes = struct.pack(f">{values.ndim}I", *values.shape)
    return bytes((0, 0, kind, values.ndim)) + sizes + bytes(values.flatten().tolist())


def mnist(folder: Path, end: str = "", style: str = "-") -> dict[str, Path]:
    """Six training images and four test images of 3 x 2."""
    found = {}
    for part, n in (("train", 6), ("t10k", 4)):
        images = torch.arange(n * 6).reshape(n, 3, 2)
        found[f"{part} images"] = write(folder / f"{part}-images{style}idx3-ubyte{end}", idx(images))
        found[f"{part} labels"] = write(folder / f"{part}-labels{style}idx1-ubyte{end}", idx(torch.arange(n) % 3))
    return found


@pytest.mark.parametrize("end", ["", ".gz", ".xz"])
@pytest.mark.parametrize("style", ["-", "."])
def test_idx(tmp_path: Path, end: str, style: str) -> None:
    mnist(tmp_path, end, style)
    data = load_images(tmp_path)
    assert torch.equal(all_images(data.train), torch.arange(36, dtype=torch.uint8).reshape(6, 1, 3, 2))
    assert (data.train.labels.tolist(), data.test.labels.tolist()) == ([0, 1, 2, 0, 1, 2], [0, 1, 2, 0])
    assert (data.classes, data.channels, data.name) == (("0", "1", "2"), 1, tmp_path.name)


def test_idx_with_faults(tmp_path: Path) -> None:
    def check(which: str, change: bytes | None, *parts: object, error: type[Exception] = ValueError) -> None:
        path = mnist(tmp_path)[which]
        if change is None:
            path.unlink()
        else:
            path.write_bytes(change)
        fails(lambda: load_images(tmp_path), *parts, error=error)

    images, labels = torch.zeros(6, 3, 2, dtype=torch.uint8), torch.zeros(6, dtype=torch.uint8)
    for which, path in mnist(tmp_path).items():
        check(which, None, path, f"{path.name}.gz", error=FileNotFoundError)
        check(which, b"", path, "empty")
    path = mnist(tmp_path)["train images"]
    check("train images", idx(images, 13), path, "00000803", "00000d03")
    check("train images", idx(labels), path, "00000803", "00000801")
    check("train images", idx(images)[:9], path, "at least 16 bytes", "got 9")
    check("train images", idx(images)[:-1], path, "16 + 6 x 3 x 2 bytes", "got 51")
    check("train images", idx(images) + b"0", path, "got 53")
    check("train images", idx(images[:0]), path, "0 x 3 x 2")
    check("train labels", idx(labels[:5]), path, "6 images", "5 labels", mnist(tmp_path)["train labels"])
    check("t10k labels", idx(torch.tensor([0, 1, 3, 0])), "[0, 2]", mnist(tmp_path)["t10k labels"], "3 in record 2")
    check("t10k images", idx(images[:4].reshape(4, 2, 3)), mnist(tmp_path)["t10k images"], "(3, 2)", "(2, 3)")


def records(labels: list[list[int]]) -> bytes:
    """CIFAR's records, with a first pixel of their own in each channel."""
    parts = []
    for i, label in enumerate(labels):
        pixels = bytearray(3072)
        pixels[0], pixels[1024], pixels[2048 + 33] = i, 100 + i, 200 + i
        parts.append(bytes(label) + bytes(pixels))
    return b"".join(parts)


def test_cifar_records(tmp_path: Path) -> None:
    write(tmp_path / "data_batch_1.bin", records([[3], [9]]))
    write(tmp_path / "data_batch_2.bin.gz", records([[0]]))
    write(tmp_path / "test_batch.bin.xz", records([[1]]))
    data = load_images(tmp_path)
    assert (data.train.labels.tolist(), data.test.labels.tolist()) == ([3, 9, 0], [1])
    image = data.train.image(1)
    assert (image[0, 0, 0], image[1, 0, 0], image[2, 1, 1], int(image.sum())) == (1, 101, 201, 303)
    assert data.classes == tuple("0123456789")
    names = write(tmp_path / "batches.meta.txt", "\n".join("abcdefghij") + "\n\n")
    assert load_images(tmp_path).classes == tuple("abcdefghij")
    write(names, "a\nb\n")
    fails(lambda: load_images(tmp_path), names, "10 names", "got 2")


def test_cifar100_records(tmp_path: Path) -> None:
    write(tmp_path / "train.bin", records([[19, 99], [2, 0]]))
    write(tmp_path / "test.bin", records([[3, 50]]))
    write(tmp_path / "fine_label_names.txt", "\n".join(f"name{i}" for i in range(100)))
    data = load_images(tmp_path)
    assert (data.train.labels.tolist(), data.test.labels.tolist()) == ([99, 0], [50])
    assert (data.classes[99], len(data.classes)) == ("name99", 100)
    assert data.train.image(1)[0, 0, 0] == 1
    write(tmp_path / "test.bin", records([[3, 50], [3, 100]]))
    fails(lambda: load_images(tmp_path), tmp_path / "test.bin", "[0, 99]", "100 in record 1")


def test_cifar_with_faults(tmp_path: Path) -> None:
    first = write(tmp_path / "data_batch_1.bin", records([[3], [9]]))
    fails(lambda: load_images(tmp_path), tmp_path / "test_batch.bin", error=FileNotFoundError)
    write(tmp_path / "test_batch.bin", records([[1]]))
    write(first, records([[3], [9]])[:-2])
    fails(lambda: load_images(tmp_path), first, "3073", "1 records and 3071 bytes")
    write(first, records([[3], [10]]))
    fails(lambda: load_images(tmp_path), first, "[0, 9]", "10 in record 1")
    write(first, records([[3]]))
    write(tmp_path / "data_batch_3.bin", records([[3]]))
    fails(lambda: load_images(tmp_path), tmp_path / "data_batch_2.bin", error=FileNotFoundError)
    first.unlink()
    (tmp_path / "data_batch_3.bin").unlink()
    fails(lambda: load_images(tmp_path), first, error=FileNotFoundError)
    (tmp_path / "test_batch.bin").unlink()
    write(tmp_path / "train.bin", records([[3, 4]]))
    fails(lambda: load_images(tmp_path), tmp_path / "test.bin", error=FileNotFoundError)


@pytest.mark.parametrize("names", [("data_batch_1", "test_batch", "batches.meta"), ("train", "test", "meta")])
def test_cifar_as_pickles_is_not_read(tmp_path: Path, names: tuple[str, ...]) -> None:
    for name in names:
        write(tmp_path / name, b"\x80\x02}q")
    fails(lambda: load_images(tmp_path), tmp_path, "pickle", "binary version")


def picture(path: Path, colour: Any = (10, 20, 30), mode: str = "RGB") -> Path:
    image = pytest.importorskip("PIL.Image")
    path.parent.mkdir(parents=True, exist_ok=True)
    image.new(mode, (5, 4), colour).save(path)
    return path


def tree(folder: Path, test: str = "test") -> Path:
    """Two classes, named against the order of their making."""
    for part, n in (("train", 3), (test, 1)):
        for label, name in ((1, "dog"), (0, "cat")):
            for i in range(n):
                picture(folder / part / name / f"{i}.png", (label, 20 + i, 255))
    return folder


@pytest.mark.parametrize("test", ["test", "val", "valid", "validation", "dev"])
def test_a_tree(tmp_path: Path, test: str) -> None:
    tree(tmp_path, test)
    write(tmp_path / "SOURCE.txt", "x")
    write(tmp_path / "train/SOURCE.txt", "x")
    write(tmp_path / "train/cat/notes.txt", "x")
    write(tmp_path / "train/cat/._0.png", "x")
    (tmp_path / "train/.cache").mkdir()
    picture(tmp_path / "train/cat/deep/9.PNG", (0, 29, 255))
    picture(tmp_path / "train/dog/grey.png", 7, "L")
    data = load_images(tmp_path)
    assert (data.classes, data.channels, data.name) == (("cat", "dog"), 3, tmp_path.name)
    assert (counts(data.train), counts(data.test)) == ([4, 4], [1, 1])
    corners = all_images(data.train)[:, :, 3, 4].tolist()
    assert corners[:4] == [[0, 20, 255], [0, 21, 255], [0, 22, 255], [0, 29, 255]]
    assert corners[4:] == [[1, 20, 255], [1, 21, 255], [1, 22, 255], [7, 7, 7]]
    assert data.train.image(0).shape == (3, 4, 5)


def test_the_labels_of_a_test_tree_are_those_of_training(tmp_path: Path) -> None:
    tree(tmp_path)
    (tmp_path / "test/cat/0.png").unlink()
    (tmp_path / "test/cat").rmdir()
    assert load_images(tmp_path).test.labels.tolist() == [1]
    # a test set without folders has no labels, so that the other one is taken
    picture(tmp_path / "val/cat/0.png")
    assert load_images(tmp_path).test.labels.tolist() == [1]
    (tmp_path / "test/dog/0.png").rename(tmp_path / "test/0.png")
    (tmp_path / "test/dog").rmdir()
    assert load_images(tmp_path).test.labels.tolist() == [0]


def test_pixels_are_as_stored(tmp_path: Path) -> None:
    """Three colours that differ in every place, and a note that it should be turned."""
    image = pytest.importorskip("PIL.Image")
    tree(tmp_path)
    pixels = torch.arange(60, dtype=torch.uint8).reshape(4, 5, 3)
    exif = image.Exif()
    exif[0x0112] = 6  # orientation: turned to the right
    image.frombytes("RGB", (5, 4), bytes(pixels.flatten().tolist())).save(tmp_path / "test/cat/0.png", exif=exif)
    assert torch.equal(load_images(tmp_path).test.image(0), pixels.permute(2, 0, 1))


def test_a_tree_with_faults(tmp_path: Path) -> None:
    folder = tree(tmp_path / "a")
    picture(folder / "test/bird/0.png")
    fails(lambda: load_images(folder), folder / "test", "'bird'")
    folder = tree(tmp_path / "b")
    (folder / "train/empty").mkdir()
    fails(lambda: load_images(folder), folder / "train/empty", ".jpg")
    folder = tree(tmp_path / "c", "other")
    fails(lambda: load_images(folder), folder / "test", "valid, validation, val, dev", error=FileNotFoundError)
    (tmp_path / "d/train").mkdir(parents=True)
    fails(lambda: load_images(tmp_path / "d"), tmp_path / "d/train")
    fails(lambda: load_images(tmp_path), "IDX", "CIFAR-10 binary", "train/<class>", tmp_path, "holds a/, b/, c/, d/")
    fails(lambda: load_images(write(tmp_path / "x.tar.gz", "x")), "x.tar.gz", "unpack", error=NotADirectoryError)


@pytest.mark.parametrize("end", ["jpg", "png"])
def test_a_damaged_image(tmp_path: Path, end: str) -> None:
    image = pytest.importorskip("PIL.Image")
    tree(tmp_path)
    path = tmp_path / f"test/cat/1.{end}"
    noise = torch.randint(256, (64 * 64 * 3,), generator=torch.Generator().manual_seed(0))
    image.frombytes("RGB", (64, 64), bytes(noise.tolist())).save(path)
    images = load_images(tmp_path).test
    assert images.image(1).shape == (3, 64, 64)
    whole = path.read_bytes()
    for bad in (whole[: len(whole) // 2], b"", b"text"):
        path.write_bytes(bad)
        fails(lambda: images.image(1), path)
    path.unlink()
    fails(lambda: images.image(1), path, error=FileNotFoundError)


# text


def test_the_text_of_python() -> None:
    data = load_text("python")
    assert data.name == f"python-{sys.version.split()[0]}"
    whole = len(data.train) + len(data.valid) + len(data.test)
    assert whole > 300_000
    assert 0.89 < len(data.train) / whole < 0.91
    assert "lambda" in data.train


def test_tiny_shakespeare() -> None:
    path = real("tinyshakespeare") / "input.txt"
    data = load_text(str(path))
    assert data.train + data.valid + data.test == path.read_text("utf-8")
    assert len(data.train) + len(data.valid) + len(data.test) == 1115394
    for part, share in ((data.train, 0.9), (data.valid, 0.05)):
        assert part.endswith("\n")
        assert len(part) == pytest.approx(1115394 * share, abs=100)
    assert data.name == "input"


def test_wikitext_2() -> None:
    data = load_text(real("wikitext-2"))
    tokens = [len(part.split()) + part.count("\n") for part in (data.train, data.valid, data.test)]
    assert tokens == [2088628, 217646, 245569]
    assert data.name == "wikitext-2"


@pytest.mark.parametrize("end", ["", ".gz", ".xz"])
@pytest.mark.parametrize(
    "names",
    [
        *[("train.txt", f"{valid}.txt", "test.txt") for valid in ("valid", "validation", "val", "dev")],
        ("wiki.train.tokens", "wiki.valid.tokens", "wiki.test.tokens"),
    ],
)
def test_a_folder_of_text(tmp_path: Path, names: tuple[str, str, str], end: str) -> None:
    paths = [write(tmp_path / (name + end), f"text of {name}\n") for name in names]
    data = load_text(tmp_path)
    assert (data.train, data.valid, data.test) == tuple(f"text of {name}\n" for name in names)
    assert data.name == tmp_path.name
    for path in paths:
        kept = path.read_bytes()
        path.unlink()
        stem = path.name.removesuffix(end).replace("validation", "valid").replace("val.", "valid.")
        fails(lambda: load_text(tmp_path), stem.replace("dev", "valid"), ".gz", error=FileNotFoundError)
        path.write_bytes(kept)
    write(paths[1], "")
    fails(lambda: load_text(tmp_path), paths[1], "empty")


@pytest.mark.parametrize("text", ["\n" * 9000, " \t\n" * 3000, "word\n" * 1700 + "\n" * 700])
def test_text_without_words(tmp_path: Path, text: str) -> None:
    file = write(tmp_path / "a.txt", text)
    fails(lambda: load_text(file), "expected words in the", f"part of {file}, got only spaces and line ends")
    folder = tmp_path / "folder"
    for name in ("train", "valid", "test"):
        write(folder / f"{name}.txt", "\n" * 50 if name == "valid" else "some words\n" * 9)
    fails(lambda: load_text(folder), f"expected words in the validation part of {folder}")


def test_a_file_of_text(tmp_path: Path) -> None:
    lines = "".join(f"line {i:03}\n" for i in range(1000))  # of 9 signs
    data = load_text(write(tmp_path / "a.txt.gz", lines))
    assert [len(part) for part in (data.train, data.valid, data.test)] == [8109, 450, 441]
    assert (data.train + data.valid + data.test, data.name) == (lines, "a")
    path = write(tmp_path / "b.txt", "x" * 3998 + "\n")
    fails(lambda: load_text(path), path, "4000", "3999")
    path = write(tmp_path / "b.txt", "x" * 5000 + "\n")
    fails(lambda: load_text(path), path, "too long", "train.txt")
    fails(lambda: load_text(tmp_path), tmp_path, "wiki.train.tokens", "a.txt.gz, b.txt", error=FileNotFoundError)


# parallel text


@pytest.mark.parametrize(
    ("test", "count"), [("test_2016_flickr", 1000), ("test_2017_flickr", 1000), ("test_2018_flickr", 1071)]
)
def test_multi30k(test: str, count: int) -> None:
    data = load_parallel(real("multi30k-de-en"), ("de", "en"), test=test)
    assert (len(data.train), len(data.valid), len(data.test)) == (29000, 1014, count)
    assert data.train[0] == (
        "Zwei junge weiße Männer sind im Freien in der Nähe vieler Büsche.",
        "Two young, White males are outside near many bushes.",
    )
    assert (data.languages, data.name) == (("de", "en"), f"multi30k-de-en ({test})")


def test_multi30k_has_several_test_sets() -> None:
    folder = real("multi30k-de-en")
    every = "test_2016_flickr, test_2017_flickr, test_2018_flickr"
    fails(lambda: load_parallel(folder, ("de", "en")), every, folder)
    fails(lambda: load_parallel(folder, ("de", "en"), test="test_2019"), every, "'test_2019'")


def parallel(folder: Path, valid: str = "valid", test: str = "test", end: str = "") -> Path:
    for language in ("de", "en"):
        for name, n in (("train", 3), (valid, 2), (test, 1)):
            lines = [f"{name} {language} {i}" for i in range(n)]
            write(folder / f"{name}.{language}{end}", "\n".join(lines) + "\n")
    return folder


@pytest.mark.parametrize("end", ["", ".gz", ".xz"])
@pytest.mark.parametrize("valid", ["valid", "validation", "val", "dev"])
def test_parallel_text(tmp_path: Path, valid: str, end: str) -> None:
    data = load_parallel(parallel(tmp_path, valid, end=end), ("en", "de"))
    assert data.train == [(f"train en {i}", f"train de {i}") for i in range(3)]
    assert data.valid == [(f"{valid} en {i}", f"{valid} de {i}") for i in range(2)]
    assert data.test == [("test en 0", "test de 0")]
    assert (data.languages, data.name) == (("en", "de"), tmp_path.name)


def test_which_test_set(tmp_path: Path) -> None:
    parallel(tmp_path, test="test_one")
    assert load_parallel(tmp_path, ("de", "en")).test == [("test_one de 0", "test_one en 0")]
    parallel(tmp_path, test="news")
    assert load_parallel(tmp_path, ("de", "en"), test="news").test == [("news de 0", "news en 0")]
    parallel(tmp_path, test="test_two")
    fails(lambda: load_parallel(tmp_path, ("de", "en")), "test_one, test_two", "got None")
    parallel(tmp_path, test="test")
    assert load_parallel(tmp_path, ("de", "en")).test == [("test de 0", "test en 0")]
    assert load_parallel(tmp_path, ("de", "en"), test="test_two").name == f"{tmp_path.name} (test_two)"


def test_lines_end_at_ends_of_lines_alone(tmp_path: Path) -> None:
    """Other signs that split lines elsewhere may stand inside of sentences."""
    parallel(tmp_path)
    write(tmp_path / "train.de", "a\u2028b\x85c\x0cd\r\n e \r\nf")
    data = load_parallel(tmp_path, ("de", "en"))
    assert [pair[0] for pair in data.train] == ["a\u2028b\x85c\x0cd", "e", "f"]


def test_pairs_without_a_sentence(tmp_path: Path) -> None:
    parallel(tmp_path)
    write(tmp_path / "train.de", "a\n \nc\n")
    assert load_parallel(tmp_path, ("de", "en")).train == [("a", "train en 0"), ("c", "train en 2")]
    write(tmp_path / "train.de", "\n\n\n")
    fails(lambda: load_parallel(tmp_path, ("de", "en")), tmp_path / "train.de", tmp_path / "train.en", "none")
    for name, lines in (("valid", "x\n\n"), ("test", "\n")):
        parallel(tmp_path)
        write(tmp_path / f"{name}.en", lines)
        fails(lambda: load_parallel(tmp_path, ("de", "en")), tmp_path / f"{name}.en")
    parallel(tmp_path)
    write(tmp_path / "valid.en", "x\n\n")
    fails(lambda: load_parallel(tmp_path, ("de", "en")), "line 2", "both sides")


def test_parallel_text_with_faults(tmp_path: Path) -> None:
    for name in ("train", "valid", "test"):
        for language in ("de", "en"):
            path = parallel(tmp_path) / f"{name}.{language}"
            path.unlink()
            fails(lambda: load_parallel(tmp_path, ("de", "en")), path, f"{path.name}.gz", error=FileNotFoundError)
            write(path, "a\nb\nc\nd\n")
            fails(lambda: load_parallel(tmp_path, ("de", "en")), tmp_path / f"{name}.de", "got", "4 in " + str(path))
    parallel(tmp_path)
    # the sides of a pair have the same name
    (tmp_path / "valid.en").rename(tmp_path / "val.en")
    fails(lambda: load_parallel(tmp_path, ("de", "en")), tmp_path / "valid.en", error=FileNotFoundError)
    fails(lambda: load_parallel(tmp_path, ("de", "fr")), tmp_path / "train.fr", error=FileNotFoundError)
    for languages in ("de", ("de",), ("de", "de"), ("de", ""), ("de", 1), None):
        fails(lambda: load_parallel(tmp_path, languages), repr(languages))  # type: ignore[arg-type] # noqa: B023


# the hub, which reads local folders in the same way


@pytest.fixture
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    return tmp_path / "data"


def rows(folder: Path, **splits: list[dict[str, Any]]) -> str:
    for name, lines in splits.items():
        write(folder / f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in lines))
    return f"hub:{folder}"


@pytest.mark.parametrize("column", ["text", "sentence"])
def test_text_of_the_hub(local: Path, column: str) -> None:
    source = rows(
        local, train=[{column: "a\n"}, {column: ""}, {column: "b"}], valid=[{column: "c"}], test=[{column: "d"}]
    )
    data = load_text(source)
    assert (data.train, data.valid, data.test, data.name) == ("a\n\nb\n", "c\n", "d\n", "data")


def test_text_of_the_hub_with_faults(local: Path) -> None:
    fails(lambda: load_text(f"hub:{local}"), f"hub:{local}", "FileNotFoundError")
    good = [{"text": "a"}]
    fails(lambda: load_text(rows(local / "a", train=good, test=good)), "valid or validation", "got train, test", local)
    odd = [{"words": "a", "n": 1}]
    fails(lambda: load_text(rows(local / "b", train=odd, valid=odd, test=odd)), "text or sentence", "got words, n")
    gap = [{"text": "a"}, {"text": None}]
    fails(lambda: load_text(rows(local / "c", train=gap, valid=gap, test=gap)), "row 1", "NoneType")
    void = [{"text": ""}]
    fails(lambda: load_text(rows(local / "d", train=good, valid=good, test=void)), "got none")
    (local / "d/train.jsonl").write_text("{ damaged")
    fails(lambda: load_text(f"hub:{local / 'd'}"), local / "d")


def test_how_the_hub_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    asked: list[object] = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *args: asked.append(args) or {})
    assert files.hub("hub:owner/name").name == "owner/name"
    assert files.hub("hub:owner/name:de-en").name == "owner/name:de-en"
    assert asked == [("owner/name", None), ("owner/name", "de-en")]
    found = files.Hub("hub:a", "a", {"train": 1, "dev": 2, "test": 3})
    assert (found.split("train"), found.split(*files.VALID), found.split("test", *files.VALID)) == (1, 2, 3)
    monkeypatch.setattr(datasets, "__version__", "3.9.1")
    fails(lambda: files.hub("hub:owner/name"), "3.9.1", "code", error=ImportError)


@pytest.mark.parametrize("valid", ["validation", "valid", "val", "dev"])
def test_parallel_text_of_the_hub(local: Path, valid: str) -> None:
    def row(name: str) -> dict[str, Any]:
        return {"translation": {"de": f"{name} de", "en": f" {name} en"}}

    gap = {"translation": {"de": "", "en": "x"}}
    source = rows(local, **{"train": [row("a"), gap, row("b")], valid: [row("c")], "test": [row("d")]})
    data = load_parallel(source, ("en", "de"))
    assert data.train == [("a en", "a de"), ("b en", "b de")]
    assert (data.valid, data.test) == ([("c en", "c de")], [("d en", "d de")])
    assert (data.languages, data.name) == (("en", "de"), "data")
    fails(lambda: load_parallel(source, ("fr", "de")), "'fr'", "NoneType", "en")
    fails(lambda: load_parallel(source, ("en", "de"), test="other"), "one of test", "'other'")


def test_parallel_text_of_the_hub_in_columns(local: Path) -> None:
    pair = [{"de": "a", "en": "b", "id": 1}]
    data = load_parallel(rows(local, train=pair, dev=pair, test=pair), ("de", "en"))
    assert data.train == data.valid == data.test == [("a", "b")]
    fails(lambda: load_parallel(f"hub:{local}", ("de", "fr")), "translation", "de and fr", "got de, en, id")
    gap = [*pair, {"de": "", "en": "b", "id": 2}]
    fails(
        lambda: load_parallel(rows(local / "x", train=pair, dev=pair, test=gap), ("de", "en")), "split test", "line 2"
    )


def test_images_of_the_hub(local: Path) -> None:
    data = load_images(f"hub:{tree(local)}")
    assert (data.classes, data.channels, data.name) == (("cat", "dog"), 3, "data")
    assert (counts(data.train), counts(data.test)) == ([3, 3], [1, 1])
    for images in (data.train, data.test):
        assert all_images(images)[:, 0, 3, 4].tolist() == images.labels.tolist()
    assert data.train.image(0).shape == (3, 4, 5)


def labelled(folder: Path, mode: str = "RGB", **splits: list[Any]) -> str:
    """Images whose labels stand in a file, one to each."""
    for name, labels in splits.items():
        lines = []
        for i, label in enumerate(labels):
            picture(folder / name / f"{i}.png", i if mode == "L" else (i, 0, 0), mode)
            lines.append(json.dumps({"file_name": f"{i}.png", "label": label}) + "\n")
        write(folder / name / "metadata.jsonl", "".join(lines))
    return f"hub:{folder}"


def test_labels_of_the_hub(local: Path) -> None:
    data = load_images(labelled(local / "a", "L", train=[0, 2, 1], test=[2]))
    assert (data.classes, data.channels) == (("0", "1", "2"), 1)
    assert (data.train.labels.tolist(), data.test.labels.tolist()) == ([0, 2, 1], [2])
    assert all_images(data.train)[:, :, 1, 1].tolist() == [[0], [1], [2]]
    # names, and a test set whose labels are kept back
    data = load_images(labelled(local / "b", train=["dog", "cat", "dog"], validation=["cat"]))
    assert (data.classes, data.channels) == (("cat", "dog"), 3)
    assert (data.train.labels.tolist(), data.test.labels.tolist()) == ([1, 0, 1], [0])
    data = load_images(labelled(local / "c", train=[0, 1], validation=[1], test=[-1, -1]))
    assert data.test.labels.tolist() == [1]


def test_images_of_the_hub_with_faults(local: Path) -> None:
    def check(name: str, *parts: object, **splits: list[Any]) -> None:
        fails(lambda: load_images(labelled(local / name, **splits)), *parts)

    check("a", "test split", "[0, 1]", "got 2 in row 1", train=[0, 1], test=[0, 2])
    check("b", "test split", "got -1", train=[0, 1], test=[-1])
    check("c", "'bird' in row 0", train=["cat", "dog"], test=["bird"])
    check("d", "all numbers or all names", "0.5 in row 0", train=[0.5, 1.5], test=[0.5])
    check("e", "test or valid", "got train", train=[0, 1])
    text = [{"image": "x", "label": 0}]
    fails(lambda: load_images(rows(local / "f", train=text, test=text)), "row 0", "got str")
    bare = [{"image": "x", "name": "y"}]
    fails(lambda: load_images(rows(local / "g", train=bare, test=bare)), "fine_label", "got image, name", local / "g")
    source = labelled(local / "h", train=[0, 1], test=[0])
    (local / "h/train/1.png").write_bytes(b"damaged")
    fails(lambda: load_images(source), "row 1", "training split", local / "h")


def test_colour_among_grey_images_of_the_hub(local: Path) -> None:
    """The first images tell; a later one that is not like them is not made grey in silence."""
    source = labelled(local, "L", train=[0] * 20, test=[0, 0])
    picture(local / "test/1.png", (1, 2, 3))
    data = load_images(source)
    assert (data.channels, data.test.image(0).shape) == (1, (1, 4, 5))
    fails(lambda: data.test.image(1), "grey", "RGB", "row 1")
    picture(local / "train/1.png", (1, 2, 3))
    assert load_images(source).channels == 3
