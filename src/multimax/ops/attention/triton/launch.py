"""The operators of attention on GPUs: from a call to launches.

Shapes: B batches, H query heads, Hkv key heads, Lq queries, Lk keys, D and Dv entries per head.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from multimax.ops import dtypes, gpu, masking
from multimax.ops.attention.call import AttentionBackwardCall, AttentionCall, heads_like
from multimax.ops.attention.triton import backward as backward_kernels
from multimax.ops.attention.triton import forward as forward_kernels
from multimax.ops.attention.triton.configs import FEW_QUERIES, OF_BIAS, configs, smallest

FEW = 16  # rows: what one tile of a few queries holds
SPLIT_KEYS = 256  # the fewest keys that are worth a program of their own


class Shape(NamedTuple):
    """The sizes of a call."""

    batches: int
    heads: int
    group: int
    queries: int
    keys: int
    width: int
    value_width: int
    sequences: int  # packed; 0 if none are

    @classmethod
    def of(cls, call: AttentionCall) -> "Shape":
        """Those of a call."""
        b, h, queries, width = call.query.shape
        _, key_heads, keys, value_width = call.value.shape
        packed = 0 if call.query_starts is None else call.query_starts.shape[0] - 1
        return cls(b, h, h // max(key_heads, 1), queries, keys, width, value_width, packed)


def padded(width: int) -> int:
    """The power of 2 that a tile takes for a head's entries; a product takes 16 at least."""
    return max(1 << max(width - 1, 0).bit_length(), 16)


def heads_strides(t: Tensor) -> tuple[int, int, int]:
    """Of (B, H, L, D): from one batch, head and row to the next."""
    return t.stride(0), t.stride(1), t.stride(2)


def scores_strides(t: Tensor | None) -> tuple[int, int, int, int]:
    """Of a mask or a bias, 0 where it is the same for all."""
    if t is None:
        return (0, 0, 0, 0)
    steps = [0 if size == 1 else step for size, step in zip(t.shape, t.stride(), strict=True)]
    return (steps[0], steps[1], steps[2], steps[3])


def precision(query: Tensor) -> str:
    """How float32 is multiplied: on tensor cores only as exactly as torch's own products are to be."""
    if query.dtype != torch.float32:
        return "tf32"  # says nothing about half precision
    if gpu.AMD or query.device.type == "xpu":  # tf32 is NVIDIA's
        return "ieee"
    return "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def common(call: AttentionCall, shape: Shape) -> dict[str, Any]:
    """What all kernels are compiled for."""
    mask, bias = call.mask, call.bias
    return {
        "ORDER": call.coefs.shape[-2],
        "SETS": call.coefs.ndim == 3 and call.coefs.shape[0] > 1,
        "MASK": 0 if mask is None else 1 if mask.dtype == torch.bool else 2,
        "BIAS": bias is not None,
        "CAUSAL": call.causal,
        "LEFT": call.left >= 0,
        "RIGHT": call.right >= 0,
        "DROPOUT": call.seed is not None,
        "FLOOR": masking.floor(torch.float32),
        "MASK_FLOOR": 0.0 if mask is None or mask.dtype == torch.bool else masking.floor(mask.dtype),
        "BIAS_FLOOR": 0.0 if bias is None else masking.floor(bias.dtype),
        "PRECISION": precision(call.query),
        "D": padded(shape.width),
        "DV": padded(shape.value_width),
        "EVEN": padded(shape.width) == shape.width and padded(shape.value_width) == shape.value_width,
    }


def numbers(call: AttentionCall, shape: Shape) -> tuple[float | int, ...]:
    """Scale, which hashes are dropped and the factor of the others, and the bounds of the band: no larger than makes a
    difference, so that nothing overflows."""
    most = shape.queries + shape.keys
    below = min(int(call.dropout_p * 2**32), 2**32 - 1)
    kept = 1 / (1 - call.dropout_p) if call.dropout_p < 1 else 0.0
    return call.scale, below, kept, min(call.left, most), min(call.right, most)


def given(*tensors: Tensor | None, instead: Tensor) -> list[Tensor]:
    """A pointer for each, to something else where there is none: it is not read."""
    return [instead if t is None else t for t in tensors]


def starts_of(call: AttentionCall) -> list[Tensor | None]:
    """Where packed sequences begin, one after the other."""
    return [None if t is None else t.contiguous() for t in (call.query_starts, call.key_starts)]


def tiles_of(rows: int, sequences: int, block: int) -> int:
    """Blocks of rows, of all packed sequences together if there are any."""
    return rows // block + sequences if sequences else -(-rows // block)


@cache
def tuned(kernel: Any, name: str, width: int, itemsize: int, large: bool) -> Any:
    """A kernel with the configurations to choose from. Options are tuned apart, and so are short and long sequences,
    but not each length."""
    keys = [key for key in ("ORDER", "MASK", "BIAS", "CAUSAL", "LEFT", "DROPOUT", "PARAMS") if key in kernel.arg_names]
    return triton.autotune(configs(name, width, itemsize), keys, prune_configs_by={"early_config_prune": gpu.one_of})(
        kernel
    )


def kernel_for(name: str, kernel: Any, call: AttentionCall, shape: Shape) -> Any:
    """That kernel as it is tuned for a call."""
    width = max(padded(shape.width), padded(shape.value_width))
    return tuned(kernel, name, width, call.query.dtype.itemsize, max(shape.queries, shape.keys) > 1024)


@cache
def processors(device: torch.device) -> int:
    """How many programs a device runs at once, at the least."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    if device.type == "xpu":
        return int(torch.xpu.get_device_properties(device).gpu_subslice_count)
    return 8  # the interpreter's, to have the keys split there too


def splits_of(shape: Shape, programs: int, device: torch.device) -> int:
    """Programs that share the keys of a few queries, so that all processors have work."""
    return max(1, min(-(-2 * processors(device) // max(programs, 1)), -(-shape.keys // SPLIT_KEYS)))


def forward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """multimax::attention_forward."""
    *fields, for_backward = args
    call = AttentionCall(*fields)
    shape = Shape.of(call)
    query, value = call.query, call.value
    out = heads_like(query, shape.queries, shape.value_width)
    stats = query.new_empty((2, *query.shape[:3]), dtype=torch.float32)
    with_rest = for_backward and query.dtype != torch.float32
    rest = heads_like(query, shape.queries, shape.value_width) if with_rest else query.new_empty(0)
    rows = stats[0].numel()
    if rows == 0 or shape.keys == 0:
        return out.zero_(), stats.zero_(), rest.zero_()
    options = common(call, shape)
    options |= {"VARLEN": shape.sequences > 0, "REST": with_rest}
    small = FEW_QUERIES[query.dtype.itemsize]
    few = shape.queries * shape.group <= FEW and not shape.sequences
    pack = few and shape.group > 1
    programs = shape.batches * shape.heads // (shape.group if pack else 1)
    splits = splits_of(shape, programs, query.device) if few else 1
    parts = query
    split_keys = shape.keys
    if splits > 1:
        block = small.kwargs["BLOCK_N"]
        each = -(-shape.keys // splits)
        split_keys = -(-each // block) * block
        splits = -(-shape.keys // split_keys)
        parts = query.new_empty((splits, rows, 2 + options["DV"]), dtype=torch.float32)
    coefs, knots = call.coefs.contiguous(), call.knots.contiguous()
    mask, bias, query_starts, key_starts, seed = given(call.mask, call.bias, *starts_of(call), call.seed, instead=query)
    arguments = (
        query, call.key, value, coefs, knots, mask, bias, query_starts, key_starts, seed, out, rest, stats, parts,
        programs, shape.heads, shape.group, shape.queries, shape.keys, shape.width, shape.value_width, shape.sequences,
        splits, split_keys, *heads_strides(query), *heads_strides(call.key), *heads_strides(value), *heads_strides(out),
        *scores_strides(call.mask), *scores_strides(call.bias), shape.heads * shape.queries, shape.queries, rows,
        *numbers(call, shape),
    )  # fmt: skip
    options |= {"PACK": pack, "SPLIT": splits > 1}
    if few:
        tiles = -(-shape.queries * (shape.group if pack else 1) // small.kwargs["BLOCK_M"])
        gpu.launch(forward_kernels.forward, (tiles * splits * programs,), *arguments, **options, **small.all_kwargs())
    else:
        gpu.launch(
            kernel_for("forward", forward_kernels.forward, call, shape),
            lambda meta: (tiles_of(shape.queries, shape.sequences, meta["BLOCK_M"]) * programs,),
            *arguments,
            **options,
        )
    if splits > 1:
        gpu.launch(
            forward_kernels.merge, (rows,), parts, out, rest, stats, shape.heads, shape.queries, shape.value_width,
            splits, rows, *heads_strides(out), FLOOR=options["FLOOR"], REST=with_rest, DV=options["DV"], num_warps=1,
        )  # fmt: skip
    return out, stats, rest


def backward(*args: Any) -> tuple[Tensor, ...]:
    """multimax::attention_backward."""
    given_back = AttentionBackwardCall(*args)
    call = given_back.call()
    shape = Shape.of(call)
    query, key, value = call.query, call.key, call.value
    grad, out, rest, stats = given_back.grad_out, given_back.out, given_back.rest, given_back.stats
    of_query = query.new_empty(query.shape)
    of_key = heads_like(key, shape.keys, shape.width)
    of_value = heads_like(value, shape.keys, shape.value_width)
    size = call.coefs.shape if given_back.params_grad else (0,)
    of_coefs, of_knots = call.coefs.new_zeros(size), call.knots.new_zeros(size)
    bias_size = call.bias.shape if call.bias is not None and given_back.bias_grad else (0,)
    of_bias = query.new_zeros(bias_size, dtype=torch.float32)
    rows = stats[0].numel()
    if rows == 0 or shape.keys == 0:
        of_query.zero_(), of_key.zero_(), of_value.zero_()
        return of_query, of_key, of_value, of_coefs, of_knots, of_bias
    options = common(call, shape)
    coefs, knots = call.coefs.contiguous(), call.knots.contiguous()
    mask, bias, query_starts, key_starts, seed, grad_lse = given(
        call.mask, call.bias, *starts_of(call), call.seed, given_back.grad_lse, instead=query
    )
    minus = stats.new_empty(4, rows)  # as `prepare` has it, and delta once more for the bias
    gpu.launch(
        backward_kernels.prepare, (-(-rows // 16),), grad, out, rest if rest.numel() else out, grad_lse, stats, minus,
        rows, shape.heads, shape.queries, shape.value_width, *heads_strides(grad), *heads_strides(out),
        REST=rest.numel() > 0, LSE=given_back.grad_lse is not None, DV=options["DV"], BLOCK=16, num_warps=4,
    )  # fmt: skip
    sizes = (shape.heads, shape.group, shape.queries, shape.keys, shape.width, shape.value_width)
    strides = [s for t in (grad, query, key, value) for s in heads_strides(t)]
    masks = (*scores_strides(call.mask), *scores_strides(call.bias))
    where = (shape.heads * shape.queries, shape.queries, rows)
    varlen = {"VARLEN": shape.sequences > 0}

    order = call.coefs.shape[-2]
    programs, key_programs = shape.batches * shape.heads, shape.batches * shape.heads // shape.group
    blocks = smallest("of_query", max(options["D"], options["DV"]), query.dtype.itemsize)
    tiles = tiles_of(shape.queries, shape.sequences, blocks)
    sums = stats.new_zeros((shape.heads, shape.batches * tiles if given_back.params_grad else 0, order, 2, 2))
    gpu.launch(
        kernel_for("of_query", backward_kernels.of_query, call, shape),
        lambda meta: (tiles_of(shape.queries, shape.sequences, meta["BLOCK_M"]) * programs,),
        grad, grad_lse, query, key, value, coefs, knots, mask, bias, query_starts, key_starts, seed, minus,
        of_query, sums, programs, *sizes, shape.sequences, tiles, *strides, *heads_strides(of_query), *masks, *where,
        *numbers(call, shape), PARAMS=given_back.params_grad, LSE=given_back.grad_lse is not None, **varlen, **options,
    )  # fmt: skip
    gpu.launch(
        kernel_for("of_key", backward_kernels.of_key, call, shape),
        lambda meta: (tiles_of(shape.keys, shape.sequences, meta["BLOCK_N"]) * key_programs,),
        grad, query, key, value, coefs, knots, mask, bias, query_starts, key_starts, seed, minus, of_key,
        of_value, key_programs, *sizes, shape.sequences, *strides, *heads_strides(of_key), *heads_strides(of_value),
        *masks, *where, *numbers(call, shape), **varlen, **options,
    )  # fmt: skip
    if of_bias.numel():
        _of_bias(call, shape, options, (grad, query, key, value, coefs, knots, mask, bias, seed, minus), of_bias)
    if given_back.params_grad:
        exact = dtypes.exact_dtype(query.device)
        total = sums.sum(1, dtype=exact)  # (H, order, 2, 2)
        if not options["SETS"]:
            total = total.sum(0)
        of_coefs.copy_(total[..., 0, :].reshape(call.coefs.shape))
        of_knots.copy_(total[..., 1, :].reshape(call.knots.shape))
    return of_query, of_key, of_value, of_coefs, of_knots, of_bias


def _of_bias(
    call: AttentionCall, shape: Shape, options: dict[str, Any], tensors: tuple[Tensor, ...], of_bias: Tensor
) -> None:
    """Writes the gradient of the bias."""
    config = OF_BIAS[call.query.dtype.itemsize]
    block_m, block_n = config.kwargs["BLOCK_M"], config.kwargs["BLOCK_N"]
    batches, heads, queries, keys = of_bias.shape
    rows = shape.batches * shape.heads * shape.queries
    shared_rows, shared_columns = queries == 1 != shape.queries, keys == 1 != shape.keys
    query_tiles, key_tiles = -(-shape.queries // block_m), -(-shape.keys // block_n)
    grid_queries, grid_keys = 1 if shared_rows else query_tiles, 1 if shared_columns else key_tiles
    strides = [s for t in tensors[:4] for s in heads_strides(t)]
    gpu.launch(
        backward_kernels.of_bias,
        (grid_queries * grid_keys * batches * heads,),
        *tensors, of_bias, batches * heads, grid_keys, shape.heads, shape.group, shape.queries, shape.keys, shape.width,
        shape.value_width, shape.batches // batches, shape.heads // heads, query_tiles if shared_rows else 1,
        key_tiles if shared_columns else 1, *strides, *scores_strides(call.mask), *scores_strides(call.bias),
        *scores_strides(of_bias), shape.heads * shape.queries, shape.queries, rows, *numbers(call, shape),
        SHARED_ROWS=shared_rows, SHARED_COLUMNS=shared_columns, BLOCK_M=block_m, BLOCK_N=block_n, num_warps=4,
        num_stages=1, **{name: value for name, value in options.items() if name != "BIAS"},
    )  # fmt: skip
