"""Trains over several processes and compares with one process; torchrun or accelerate start it: folder and parts.

Every process has the joint batch, so that each can train the model in the plain way too, and see what it should be.
"""

import copy
import gc
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2Model

import multimax
from multimax import training
from multimax.training.monitor import Monitor

V, E, STEPS = 20, 16, 3


class Model(nn.Module):
    """A small language model with layers of transformers and of torch.nn."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"n_embd": E, "n_layer": 1, "n_head": 2, "vocab_size": V, "n_positions": 8, "initializer_range": 0.3}
        self.trunk = GPT2Model(GPT2Config(**sizes, embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(E, 2, 32, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(E, V)

    def forward(self, tokens: Tensor, target: Tensor | None = None) -> Tensor:
        hidden = self.trunk(tokens, use_cache=False).last_hidden_state
        for layer in self.layers:
            hidden = layer(hidden)
        out: Tensor = self.head(hidden) if target is None else self.head(hidden, target)
        return out


def seeded(order: int = 2) -> Model:
    torch.manual_seed(order)
    model = Model()
    report = multimax.convert_(model, where=("attention", "output"), output="head", order=order)
    assert len(report) == 4
    with torch.no_grad():  # far enough from softmax to tell
        for _, p in training.reweighting_parameters(model):
            p.normal_(std=0.3)
    return model


def joint(step: int) -> tuple[Tensor, Tensor]:
    """The batch of all processes together, of six rows, which two and three can divide."""
    generator = torch.Generator().manual_seed(step)
    tokens, target = torch.randint(V, (2, 6, 5), generator=generator)
    return tokens, target


def own_part(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """This process's part of it."""
    first, second = (t.chunk(dist.get_world_size())[dist.get_rank()] for t in batch)
    return first, second


def whole(t: Tensor) -> Tensor:
    return t.full_tensor() if hasattr(t, "full_tensor") else t


def optimizer_for(model: nn.Module) -> torch.optim.Optimizer:
    groups = training.param_groups(model, lr=1e-2, weight_decay=0.1, multimax_lr_factor=2.0)
    return torch.optim.AdamW(groups)


def same_everywhere(model: nn.Module) -> None:
    """All processes hold the same parameters."""
    for name, p in model.named_parameters():
        value = whole(p.detach())
        others = [torch.empty_like(value) for _ in range(dist.get_world_size())]
        dist.all_gather(others, value)
        assert all(torch.equal(value, other) for other in others), name


def equal_states(state: dict[str, Tensor], plain: nn.Module) -> None:
    expected = plain.state_dict()
    assert list(state) == list(expected)
    for name, value in state.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}")


def train(model: nn.Module, parallel: nn.Module, plain: Model, mode: str) -> None:
    """Both on the same batches: gradients, norms, what the monitor reads, and parameters have to agree."""
    optimizers = [optimizer_for(each) for each in (parallel, plain)]
    monitors = [Monitor(each, measures=("entropy",), every=2) for each in (parallel, plain)]
    for step in range(STEPS):
        batch = joint(step)
        with monitors[0]:
            parallel(*own_part(batch)).backward()
        with monitors[1]:
            plain(*batch).backward()
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert p.grad is not None
            assert q.grad is not None
            torch.testing.assert_close(whole(p.grad), q.grad, rtol=1e-4, atol=1e-6, msg=lambda t, n=name: f"{n}: {t}")
        norms = [whole(training.clip_grad_norm_(each, 0.1, mode=mode)) for each in (parallel, plain)]
        assert norms[1] > 0.1  # so that clipping does something
        torch.testing.assert_close(norms[0], norms[1], rtol=1e-4, atol=1e-6)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    read, expected = (monitor.values for monitor in monitors)
    assert list(read) == list(expected)
    for name, value in expected.items():
        if not name.endswith("entropy"):  # of a part of the batch
            assert abs(read[name] - value) <= 1e-4 * abs(value) + 1e-5, (name, read[name], value)
    same_everywhere(model)


def save_result(model: nn.Module, folder: Path) -> None:
    """The logits, for who loads the checkpoint."""
    with torch.no_grad():
        logits = model(joint(0)[0])
    if dist.get_rank() == 0:
        torch.save(logits, folder / "logits.pt")


def ddp(folder: Path) -> None:
    for mode in training.MODES:
        model, plain = seeded(), seeded()
        train(model, DistributedDataParallel(model), plain, mode)
        equal_states(model.state_dict(), plain)
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), folder / "state.pt")
    save_result(model, folder)
    # only 8 numbers per layer: nothing else is reduced or changed
    model, plain = seeded(), seeded()
    for each in (model, plain):
        assert training.train_only_reweighting_(each).numel == 32
    parallel = DistributedDataParallel(model)
    optimizers = [optimizer_for(parallel), optimizer_for(plain)]
    parallel(*own_part(joint(0))).backward()
    plain(*joint(0)).backward()
    for optimizer in optimizers:
        optimizer.step()
    equal_states(model.state_dict(), plain)
    same_everywhere(model)


def shard(model: Model, **options: Any) -> Model:
    for layer in model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    return model


def fsdp(folder: Path) -> None:
    for order, mode in ((1, "separate"), (2, "scaled"), (2, "separate")):  # (1, 2) leaves the second process nothing
        plain = seeded(order)
        model = shard(copy.deepcopy(plain))
        train(model, model, plain, mode)
        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if dist.get_rank() == 0:
            equal_states(state, plain)
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=folder / "checkpoint")
    if dist.get_rank() == 0:
        torch.save(state, folder / "state.pt")
    save_result(model, folder)


def half(model: Model) -> Model:
    """A bfloat16 model with MultiMax's parameters in float32, unrounded."""
    kept = {module: copy.deepcopy(module.state_dict()) for _, module in training.reweighting_modules(model)}
    model.bfloat16()
    for module, state in kept.items():
        module.float().load_state_dict(state)
    return model


def separate_groups(model: Model) -> Model:
    """MultiMax apart from the others, as docs/training.md has it."""
    for _, module in training.reweighting_modules(model):
        fully_shard(module)
    return model


def fsdp_dtypes(folder: Path) -> None:
    try:
        shard(half(seeded()))(*own_part(joint(0)))
    except AssertionError as error:
        found = str(error)
    else:
        found = "nothing: fully_shard takes several dtypes in a group by now; say so in docs/training.md"
    assert "uniform original parameter dtype" in found, found

    train_once(shard(separate_groups(half(seeded()))), half(seeded()))
    # float32 parameters, computed in bfloat16: MultiMax's are rounded too for the step, not where they are stored
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    train_once(shard(seeded(), mp_policy=policy), seeded().bfloat16())
    # and not for the step either
    train_once(shard(separate_groups(seeded()), mp_policy=policy), half(seeded()))


def fsdp_first(folder: Path) -> None:
    """FSDP's first version, with every MultiMax wrapped by itself, and every output layer."""
    for classes in ({multimax.MultiMax}, {multimax.MultiMaxHead, nn.TransformerEncoderLayer}):
        plain = seeded()
        model = FullyShardedDataParallel(
            seeded(), auto_wrap_policy=ModuleWrapPolicy(classes), device_id=torch.device("cpu"), use_orig_params=True
        )
        torch.testing.assert_close(model(joint(0)[0]), plain(joint(0)[0]))
        plain(*joint(0)).backward()
        model(*own_part(joint(0))).backward()
        with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
            found = {name.replace("_fsdp_wrapped_module.", ""): p.grad for name, p in model.named_parameters()}
            for name, p in plain.named_parameters():
                torch.testing.assert_close(found[name], p.grad, rtol=1e-4, atol=1e-6, msg=lambda t, n=name: f"{n}: {t}")


def train_once(model: Model, plain: Model) -> None:
    """One step: gradients of MultiMax's parameters in float32, equal to the mean over the parts."""
    optimizer = optimizer_for(model)
    model(*own_part(joint(0))).backward()
    expected: dict[str, Tensor] = {}
    parts = [t.chunk(dist.get_world_size()) for t in joint(0)]
    for tokens, target in zip(*parts, strict=True):
        plain.zero_grad()
        plain(tokens, target).backward()
        for name, p in training.reweighting_parameters(plain):
            assert p.grad is not None
            expected[name] = expected.get(name, torch.zeros(())) + p.grad.float() / len(parts[0])
    before = {}
    for name, p in training.reweighting_parameters(model):
        assert p.grad is not None
        assert p.dtype == p.grad.dtype == torch.float32, name
        off = ((whole(p.grad) - expected[name]).norm() / expected[name].norm()).item()
        assert off < 1e-5, (name, off)
        before[name] = whole(p.detach()).clone()
    training.clip_grad_norm_(model, 0.1)
    optimizer.step()
    for name, p in training.reweighting_parameters(model):
        assert (whole(p.detach()) - before[name]).abs().max() > 1e-3, name
    same_everywhere(model)


def with_accelerate(folder: Path) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    plain, model = seeded(), seeded()
    parallel, optimizer = accelerator.prepare(model, optimizer_for(model))
    assert accelerator.num_processes == dist.get_world_size() == int(os.environ["WORLD_SIZE"]) > 1
    plain_optimizer = optimizer_for(plain)
    monitor = Monitor(parallel)
    for step in range(STEPS):
        with monitor:
            accelerator.backward(parallel(*own_part(joint(step))))
        plain(*joint(step)).backward()
        for each, by in ((parallel, optimizer), (plain, plain_optimizer)):
            training.clip_grad_norm_(each, 0.1)
            by.step()
            by.zero_grad()
    assert "multimax/layers.1.self_attn/entropy" in monitor.values
    equal_states(accelerator.unwrap_model(parallel).state_dict(), plain)
    same_everywhere(model)
    accelerator.save_model(parallel, str(folder))  # safetensors
    save_result(model, folder)


PARTS = {"ddp": ddp, "fsdp": fsdp, "fsdp_dtypes": fsdp_dtypes, "fsdp_first": fsdp_first, "accelerate": with_accelerate}


def main(folder: str, *parts: str) -> None:
    torch.set_num_threads(1)
    if parts != ("accelerate",):  # which does it itself
        dist.init_process_group("gloo")
    for part in parts:
        (Path(folder) / part).mkdir(exist_ok=True)
        PARTS[part](Path(folder) / part)
        dist.barrier()
        if dist.get_rank() == 0:
            print(f"{part} agrees", flush=True)
    gc.collect()  # what holds the group holds its threads, and those can abort a Python that ends
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
