"""Language modelling."""

import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset, Sampler, default_collate
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from multimax import reweighting
from multimax.experiments import models, tokenizers
from multimax.experiments.data import fingerprint
from multimax.experiments.data.fingerprint import Fingerprint
from multimax.experiments.data.text import load_text
from multimax.experiments.settings import LOSSES, Settings
from multimax.experiments.tasks.task import ShuffledSampler, Task

IGNORED = -100


def _encoded(tokenizer: PreTrainedTokenizerFast, text: str) -> Tensor:
    """The tokens of a text, line by line."""
    lines = text.splitlines(keepends=True)
    encoded = tokenizer.backend_tokenizer.encode_batch_fast(lines, add_special_tokens=False)
    ids = [numpy.asarray(line.ids, dtype=numpy.int32) for line in encoded]
    return torch.from_numpy(numpy.concatenate(ids)).long()


def count_words(text: str) -> int:
    """Words between spaces, and the end of each line as one more, as perplexity on WikiText is counted."""
    return len(text.split()) + text.count("\n")


class Blocks(Dataset[dict[str, Tensor]]):
    """Sequences side by side, for training.

    Args:
        ids: of all tokens.
        length: tokens per sequence.
    """

    def __init__(self, ids: Tensor, length: int) -> None:
        self.ids = ids[: len(ids) // length * length].reshape(-1, length)

    def __len__(self) -> int:
        """How many sequences."""
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """One sequence; the model itself compares it with its next tokens."""
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


class Windows(Dataset[dict[str, Tensor]]):
    """Windows over all of a text, in which every token but the first is predicted exactly once.

    Args:
        ids: of all tokens.
        length: tokens per window.
        stride: tokens from one window to the next, at most length - 1; a small one gives every token much context.
        words: how many words the text has.
    """

    def __init__(self, ids: Tensor, length: int, stride: int, words: int) -> None:
        self.ids, self.length, self.words = ids, length, words
        starts = list(range(0, max(len(ids) - length, 0) + 1, stride))
        if starts[-1] + length < len(ids):
            starts.append(len(ids) - length)
        self.starts = starts

    def __len__(self) -> int:
        """How many windows."""
        return len(self.starts)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """One window; what an earlier one has predicted does not count."""
        start = self.starts[index]
        ids = self.ids[start : start + self.length]
        labels = ids.clone()
        if index:
            labels[: self.starts[index - 1] + self.length - start] = IGNORED
        return {"input_ids": ids, "labels": labels}


class Tokens(NamedTuple):
    """A text, as tokens."""

    name: str
    tokenizer: PreTrainedTokenizerFast
    train: Blocks
    valid: Windows
    test: Windows
    longer: dict[str, Windows]  # the test part again, by the length of its windows
    fingerprint: Fingerprint


def _stride(settings: Settings) -> int:
    return settings.stride or settings.length - 1


class Language(Task):
    """Perplexity on text."""

    classes = (GPT2LMHeadModel, GPTNeoXForCausalLM)

    def __init__(self, settings: Settings, data: Tokens) -> None:
        super().__init__(settings, data)
        self.data_name, self.tokenizer, self.train, self.evaluation, self.test, self.others, _ = data
        self.collate = default_collate

    @staticmethod
    def check(settings: Settings) -> None:
        """Windows must overlap."""
        most, stride = settings.length - 1, _stride(settings)
        if not 1 <= stride <= most:
            raise ValueError(f"multimax: expected a stride from 1 to {most}, below the length, got {stride}")
        if settings.longer and settings.positions != "rotary":
            raise ValueError("multimax: expected rotary positions for longer, got learned ones, which end at length")

    @classmethod
    def check_start(cls, settings: Settings) -> Any:
        """It has as many positions as a sequence has tokens."""
        config = super().check_start(settings)
        positions = "learned" if isinstance(config, GPT2Config) else "rotary"
        models.check_same(settings, {"positions": (positions, settings.positions)})
        most = config.max_position_embeddings
        if settings.length > most:
            raise ValueError(
                f"multimax: expected length of at most {most}, the positions of the model in {settings.start!r}, got "
                f"{settings.length}"
            )
        return config

    @staticmethod
    def load(settings: Settings) -> Tokens:
        """Reads the text, and trains the tokenizer on it, unless the model to start from has one."""
        text, length = load_text(settings.data, with_test=settings.test), settings.length
        if settings.start:
            tokenizer = PreTrainedTokenizerFast.from_pretrained(settings.start)
        else:
            lines = text.train.splitlines(keepends=True)
            tokenizer = tokenizers.for_text(settings.tokenizer, lines, settings.vocabulary)
        ids = _encoded(tokenizer, text.train)
        train, windows, parts = Blocks(ids, length), {}, {"train": (text.train, ids)}
        for name, part in (("valid", text.valid), ("test", text.test)):
            ids = _encoded(tokenizer, part)
            if len(ids) < length or not len(train):
                raise ValueError(
                    f"multimax: expected at least {length} tokens, one sequence, in each part of {settings.data!r}, "
                    f"got {len(ids)} in {name}; make length smaller"
                )
            parts[name] = part, ids
            windows[name] = Windows(ids, length, _stride(settings), count_words(part))
        words, longer = count_words(text.test), {}
        while (length := 2 * length) <= min(settings.longer, len(ids)):
            longer[str(length)] = Windows(ids, length, length - 1, words)
        return Tokens(text.name, tokenizer, train, **windows, longer=longer, fingerprint=fingerprint.of_text(parts))

    def model(self) -> PreTrainedModel:
        """A GPT-style decoder."""
        if self.settings.start:
            return models.trained(self.settings, self.classes, {})
        from_data: dict[str, Any] = {"vocab_size": len(self.tokenizer), "bos_token_id": None, "eos_token_id": None}
        if self.settings.positions == "learned":
            from_data |= {"n_positions": self.settings.length, "loss_type": "ForCausalLM"}
            return GPT2LMHeadModel(models.configured(GPT2Config, self.settings.model, from_data))
        # one more than needed: transformers takes adapted rotary embeddings back below this length only
        from_data |= {"max_position_embeddings": self.settings.length + 1}
        return GPTNeoXForCausalLM(models.configured(GPTNeoXConfig, self.settings.model, from_data))

    def sampler(self, batch: int) -> Sampler[int]:
        """Permutations."""
        return ShuffledSampler(len(self.train), self.settings.seed)  # type: ignore[arg-type]

    def save(self, folder: Path) -> None:
        """The tokenizer."""
        self.tokenizer.save_pretrained(folder)

    def loss(self, model: Any, inputs: dict[str, Any]) -> tuple[Tensor, Any] | None:
        """The loss of the output's function, where it has one of its own."""
        if self.settings.output not in LOSSES:
            return None
        outputs = model(input_ids=inputs["input_ids"])
        logits, labels = outputs.logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten()
        return LOSSES[self.settings.output](logits, labels, ignore_index=IGNORED), outputs

    def reduce_logits(self, logits: Any, labels: Tensor) -> Tensor:
        """The negative log-likelihood of each token, 0 where none counts."""
        logits = logits[0] if isinstance(logits, tuple) else logits
        return token_losses(logits[:, :-1], labels[:, 1:], self.settings.output)

    def metrics(self, reduced: Any, labels: Any) -> dict[str, float]:
        """Perplexity of words, and of tokens."""
        counted = labels[:, 1:] != IGNORED
        total, tokens = float(reduced[counted].sum(dtype="float64")), int(counted.sum())
        assert isinstance(self.evaluated, Windows)
        words = self.evaluated.words
        return {
            "perplexity": exponential(total / words),
            "token_perplexity": exponential(total / tokens),
        }


def exponential(value: float) -> float:
    """Its exponential, infinity where that is too large for a number."""
    return math.exp(value) if value < 700 else math.inf


def token_losses(logits: Tensor, labels: Tensor, output: str) -> Tensor:
    """Negative log-likelihood of tokens under the output's function: infinite where a sparse one gives none.

    Args:
        logits: (B, L, V), already modulated where the output layer is MultiMax.
        labels: (B, L).
        output: the name of the function.

    Returns:
        (B, L), 0 for ignored labels.
    """
    rows, targets = logits.float().flatten(0, 1), labels.flatten()
    if output in LOSSES:
        chosen = reweighting.get(output)(rows).gather(1, targets.clamp(min=0)[:, None])[:, 0]
        found = -chosen.log() * (targets != IGNORED)
        return torch.where(targets == IGNORED, 0, found).view_as(labels)
    return F.cross_entropy(rows, targets, reduction="none", ignore_index=IGNORED).view_as(labels)
