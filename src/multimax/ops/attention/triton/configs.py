"""Tiles and options that the autotuner chooses from: few, and each compiled for every target without spills.

A product runs fastest on tiles of 128 queries, as far as registers go: an accumulator of 128 x 64 takes 64 registers of
each of 128 threads. Long rows of a head, and float32, which needs three products for one, take smaller tiles. The first
of each list is what runs where nothing is timed.
"""

from triton import Config


def _config(queries: int, keys: int, warps: int, stages: int) -> Config:
    return Config({"BLOCK_M": queries, "BLOCK_N": keys}, num_warps=warps, num_stages=stages)


# by the head's width, at most; of half precision, then of float32
HALF = {
    "forward": {
        64: [_config(128, 64, 4, 3), _config(64, 64, 4, 3), _config(128, 64, 8, 2)],
        128: [_config(128, 64, 8, 2), _config(64, 64, 4, 2)],
        256: [_config(64, 32, 8, 1)],
    },
    "of_query": {
        64: [_config(64, 64, 4, 2), _config(128, 64, 8, 2)],
        128: [_config(64, 64, 8, 1), _config(64, 32, 4, 2)],
        256: [_config(32, 32, 8, 1)],
    },
    "of_key": {
        64: [_config(64, 64, 4, 2), _config(64, 128, 8, 2)],
        128: [_config(32, 64, 8, 2), _config(32, 64, 4, 1)],
        256: [_config(16, 32, 8, 1)],
    },
}
SINGLE = {
    "forward": {64: [_config(64, 32, 4, 2)], 128: [_config(32, 32, 4, 1)], 256: [_config(16, 16, 4, 1)]},
    "of_query": {64: [_config(32, 32, 4, 1)], 128: [_config(32, 32, 8, 1)], 256: [_config(16, 16, 8, 1)]},
    "of_key": {64: [_config(32, 32, 4, 1)], 128: [_config(16, 32, 8, 1)], 256: [_config(16, 16, 8, 1)]},
}
SMALL = _config(16, 64, 4, 2)  # a few queries


def configs(name: str, width: int, itemsize: int) -> list[Config]:
    """Of a kernel, for a head's width (a power of 2) and the size of an entry."""
    by_width = (HALF if itemsize == 2 else SINGLE)[name]
    return next((found for most, found in by_width.items() if width <= most), by_width[256])


def smallest(name: str, width: int, itemsize: int) -> int:
    """The smallest block of queries among them."""
    return min(config.kwargs["BLOCK_M"] for config in configs(name, width, itemsize))
