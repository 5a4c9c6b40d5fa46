"""Small models, and small data of every kind that the presets read, made on the spot."""

import gzip
import random
from pathlib import Path

import numpy
from PIL import Image

SMALL_VIT = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
SMALL_GPT = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_inner": 16}
SMALL_MARIAN = {
    "d_model": 16,
    **{f"{side}_{key}": v for side in ("encoder", "decoder") for key, v in (("layers", 1), ("attention_heads", 2))},
    "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16,
}


def idx(folder: Path, n: int = 40, size: int = 28) -> Path:
    dice = numpy.random.default_rng(0)
    folder.mkdir()
    for part in ("train", "t10k"):
        images = dice.integers(0, 256, (n, size, size), dtype=numpy.uint8)
        labels = (numpy.arange(n) % 10).astype(numpy.uint8)
        head = b"\x00\x00\x08\x03" + b"".join(int(v).to_bytes(4, "big") for v in images.shape)
        with gzip.open(folder / f"{part}-images-idx3-ubyte.gz", "wb") as file:
            file.write(head + images.tobytes())
        with gzip.open(folder / f"{part}-labels-idx1-ubyte.gz", "wb") as file:
            file.write(b"\x00\x00\x08\x01" + n.to_bytes(4, "big") + labels.tobytes())
    return folder


def cifar(folder: Path, n: int = 40) -> Path:
    dice = numpy.random.default_rng(0)
    folder.mkdir()
    for name in ("data_batch_1.bin", "test_batch.bin"):
        records = dice.integers(0, 256, (n, 3073), dtype=numpy.uint8)
        records[:, 0] = numpy.arange(n) % 10
        (folder / name).write_bytes(records.tobytes())
    return folder


def tree(folder: Path, n: int = 8, size: int = 64) -> Path:
    dice = numpy.random.default_rng(0)
    for part in ("train", "val"):
        for name in ("n01", "n02"):
            (folder / part / name).mkdir(parents=True)
            for i in range(n):
                pixels = dice.integers(0, 256, (size, size + 8, 3), dtype=numpy.uint8)
                Image.fromarray(pixels).save(folder / part / name / f"{i}.JPEG")
    return folder


# ruff: noqa: SIM905
WORDS = """the a dog cat runs sleeps near under red small house tree and then it was seen by some""".split()
GERMAN = """der ein hund katze rennt schläft nahe unter rot klein haus baum und dann es wurde gesehen""".split()


def _sentences(words: list[str], n: int, seed: int) -> list[str]:
    dice = random.Random(seed)
    return [" ".join(dice.choices(words, k=dice.randint(3, 9))) + " ." for _ in range(n)]


def text(folder: Path, n: int = 200) -> Path:
    folder.mkdir()
    for part in ("train", "valid", "test"):
        lines = _sentences(WORDS, n if part == "train" else n // 4, seed=len(part))
        (folder / f"{part}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def parallel(folder: Path, n: int = 64, test: str = "test") -> Path:
    folder.mkdir()
    for part in ("train", "val", test):
        count = n if part == "train" else n // 4
        for language, words in (("de", GERMAN), ("en", WORDS)):
            lines = _sentences(words, count, seed=len(part))
            (folder / f"{part}.{language}").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder
