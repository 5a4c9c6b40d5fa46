"""Tiles and options that the autotuner chooses from: few, and each compiled for every target without spills.

A product runs fastest on tiles of 128 queries, as far as registers go; what the backward holds of a tile, and float32,
which takes three products for one, leave room for less. AMD's warps have 64 threads, and 512 registers each as long as
there are no more than four: there tiles are of four. The first of each list is what runs where nothing is timed.
"""

from triton import Config

from multimax.ops import gpu, kernels


def _config(queries: int, keys: int, warps: int, stages: int, skip: bool = False) -> Config:
    """skip: products with weights that are all 0 are left out, for which each tile has to be asked."""
    return Config({"BLOCK_M": queries, "BLOCK_N": keys, "SKIP": skip}, num_warps=warps, num_stages=stages)


Configs = dict[str, dict[int, list[Config]]]  # by kernel, and by the head's width, at most
NVIDIA_HALF: Configs = {
    "forward": {
        64: [_config(128, 64, 8, 2), _config(128, 64, 8, 2, skip=True), _config(64, 64, 4, 3)],
        128: [_config(128, 64, 8, 2), _config(128, 32, 8, 2, skip=True)],
        256: [_config(64, 32, 8, 1)],
    },
    "of_query": {
        64: [_config(64, 32, 4, 1), _config(64, 16, 4, 2, skip=True)],
        128: [_config(32, 32, 4, 1)],
        256: [_config(16, 16, 4, 1)],
    },
    "of_key": {
        64: [_config(32, 64, 4, 2), _config(32, 128, 8, 2), _config(32, 32, 4, 2, skip=True)],
        128: [_config(32, 32, 4, 1)],
        256: [_config(16, 16, 4, 1)],
    },
}
NVIDIA_SINGLE: Configs = {
    "forward": {64: [_config(32, 32, 4, 2)], 128: [_config(16, 32, 4, 1)]},
    "of_query": {64: [_config(16, 32, 4, 1)], 128: [_config(16, 16, 4, 1)]},
    "of_key": {64: [_config(16, 32, 4, 1)], 128: [_config(16, 16, 4, 1)]},
}
AMD_HALF: Configs = {
    "forward": {64: [_config(64, 64, 4, 1)], 128: [_config(64, 32, 4, 1)], 256: [_config(32, 32, 4, 1)]},
    "of_query": {64: [_config(64, 16, 4, 1)], 128: [_config(64, 16, 4, 1)], 256: [_config(16, 16, 4, 1)]},
    "of_key": {64: [_config(32, 64, 4, 1)], 128: [_config(16, 64, 4, 1)], 256: [_config(16, 16, 4, 1)]},
}
AMD_SINGLE: Configs = {
    "forward": {64: [_config(32, 32, 4, 1)], 128: [_config(32, 16, 4, 1)]},
    "of_query": {128: [_config(16, 16, 4, 1)]},
    "of_key": {128: [_config(16, 16, 4, 1)]},
}
# The interpreter's time goes by the tile, not by its size.
INTERPRETED: Configs = {
    "forward": {256: [_config(64, 64, 4, 1, skip=True)]},
    "of_query": {256: [_config(64, 32, 4, 1, skip=True)]},
    "of_key": {256: [_config(32, 64, 4, 1, skip=True)]},
}
FEW_QUERIES = {2: _config(16, 64, 4, 2), 4: _config(16, 16, 8, 1)}  # by the size of an entry
OF_BIAS = {2: _config(64, 32, 4, 1), 4: _config(16, 32, 4, 1)}


def configs(name: str, width: int, itemsize: int) -> list[Config]:
    """Of a kernel, for a head's width (a power of 2) and the size of an entry."""
    if kernels.INTERPRETED:
        table = INTERPRETED
    elif gpu.AMD:
        table = AMD_HALF if itemsize == 2 else AMD_SINGLE
    else:
        table = NVIDIA_HALF if itemsize == 2 else NVIDIA_SINGLE
    return next(found for most, found in table[name].items() if width <= most)


def smallest(name: str, width: int, itemsize: int) -> int:
    """The smallest block of queries among them."""
    return min(int(config.kwargs["BLOCK_M"]) for config in configs(name, width, itemsize))
