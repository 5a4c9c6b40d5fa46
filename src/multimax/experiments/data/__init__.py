"""Data for experiments, from what people have: images, text and pairs of sentences, in files or on the hub."""

from multimax.experiments.data.images import ImageData, ImageSet, load_images
from multimax.experiments.data.parallel import ParallelData, load_parallel
from multimax.experiments.data.text import TextData, load_text

__all__ = [
    "ImageData",
    "ImageSet",
    "ParallelData",
    "TextData",
    "load_images",
    "load_parallel",
    "load_text",
]
