"""What tells data from other data: sizes, and a checksum of the content. Names and places of files do not count."""

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from multimax.experiments.data.images import ArrayImages, FileImages, ImageData, ImageSet

SAMPLE = 1000  # files or rows whose content is read, of images that are not in memory
SHOWN = 12  # digits of a checksum, in messages
Fingerprint = dict[str, dict[str, Any]]  # of each part: how many, and a checksum


def _bytes(tensor: Tensor) -> Any:
    return tensor.detach().contiguous().view(torch.uint8).numpy()


def _images(images: ImageSet, classes: Sequence[str]) -> dict[str, Any]:
    digest = hashlib.sha256("\0".join(classes).encode())
    digest.update(_bytes(images.labels))
    if isinstance(images, ArrayImages):
        digest.update(_bytes(images.images))
        return {"examples": len(images), "sha256": digest.hexdigest()}
    chosen = range(0, len(images), max(len(images) // SAMPLE, 1))
    if isinstance(images, FileImages):  # to read them all could take hours
        root = Path(os.path.commonpath(images.paths)) if len(images) > 1 else images.paths[0].parent
        for path in images.paths:
            digest.update(f"{path.relative_to(root)}\0{path.stat().st_size}\0".encode(errors="surrogateescape"))
        for index in chosen:
            digest.update(images.paths[index].read_bytes())
    else:
        for index in chosen:
            image = images.image(index)
            digest.update(f"{tuple(image.shape)}".encode())
            digest.update(_bytes(image))
    return {"examples": len(images), "sha256": digest.hexdigest()}


def of_images(data: ImageData) -> Fingerprint:
    """Of images in memory all pixels; of others the names and sizes of all files, and the content of some 1,000."""
    return {part: _images(getattr(data, part), data.classes) for part in ("train", "test")}


def of_text(parts: Mapping[str, tuple[str, Tensor]]) -> Fingerprint:
    """Of texts, each with its tokens: another tokenizer is other data, too."""
    found = {}
    for part, (text, ids) in parts.items():
        digest = hashlib.sha256(text.encode())
        digest.update(_bytes(ids))
        found[part] = {"characters": len(text), "tokens": len(ids), "sha256": digest.hexdigest()}
    return found


def of_pairs(parts: Mapping[str, tuple[Sequence[tuple[str, str]], Sequence[Sequence[int]]]]) -> Fingerprint:
    """Of pairs of sentences, with the tokens of both sides."""
    found = {}
    for part, (pairs, tokens) in parts.items():
        digest = hashlib.sha256()
        for pair in pairs:
            digest.update("\0".join((*pair, "")).encode())
        for ids in tokens:
            digest.update((",".join(map(str, ids)) + ";").encode())
        found[part] = {"pairs": len(pairs), "tokens": sum(map(len, tokens)), "sha256": digest.hexdigest()}
    return found


def differences(there: Mapping[str, Mapping[str, Any]], here: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """In words, what parts differ."""
    parts = [*here, *(part for part in there if part not in here)]
    return [
        f"{part}: {_words(there.get(part))} there, {_words(here.get(part))} now"
        for part in parts
        if there.get(part) != here.get(part)
    ]


def _words(part: Mapping[str, Any] | None) -> str:
    if part is None:
        return "none"
    counts = [f"{value:,} {name}" for name, value in part.items() if isinstance(value, int)]
    return ", ".join([*counts, f"checksum {str(part.get('sha256'))[:SHOWN]}"])
