"""Machine translation."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset, Sampler
from tqdm.auto import tqdm  # type: ignore[import-untyped]
from transformers import (
    DataCollatorForSeq2Seq,
    MarianConfig,
    MarianMTModel,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.trainer_pt_utils import get_length_grouped_indices

from multimax.experiments import models, tokenizers
from multimax.experiments.data import fingerprint
from multimax.experiments.data.fingerprint import Fingerprint
from multimax.experiments.data.parallel import load_parallel
from multimax.experiments.settings import LOSSES, Settings
from multimax.experiments.tasks.language import IGNORED, exponential, token_losses
from multimax.experiments.tasks.task import ShuffledSampler, Task


class Pairs(Dataset[dict[str, list[int]]]):
    """Sentences and their translations, as tokens, cut at the largest length.

    Args:
        pairs: of sentences.
        tokenizer: of both languages.
        length: the largest number of tokens.
    """

    def __init__(self, pairs: list[tuple[str, str]], tokenizer: PreTrainedTokenizerFast, length: int) -> None:
        end = tokenizer.eos_token_id
        sides = []
        for sentences in ([source for source, _ in pairs], [target for _, target in pairs]):
            ids = [line.ids for line in tokenizer.backend_tokenizer.encode_batch_fast(sentences)]
            sides.append([line if len(line) <= length else [*line[: length - 1], end] for line in ids])
        self.sources, self.targets = sides

    def __len__(self) -> int:
        """How many pairs."""
        return len(self.sources)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        """One pair."""
        return {"input_ids": self.sources[index], "labels": self.targets[index]}


class LengthSampler(ShuffledSampler):
    """Permutations in which the sentences of a batch have about the same length, so that little is padded.

    Args:
        lengths: of the examples.
        batch: examples per step.
        seed: of the run.
    """

    def __init__(self, lengths: list[int], batch: int, seed: int) -> None:
        super().__init__(len(lengths), seed)
        self.lengths, self.batch = lengths, batch

    def __iter__(self) -> Any:
        """The numbers of the examples."""
        return iter(get_length_grouped_indices(self.lengths, self.batch, generator=self.generator()))


class Sentences(NamedTuple):
    """Parallel text: the test set as it is, and all of it as tokens."""

    name: str
    test_pairs: list[tuple[str, str]]
    tokenizer: PreTrainedTokenizerFast
    train: Pairs
    valid: Pairs
    test: Pairs
    fingerprint: Fingerprint


class Translation(Task):
    """BLEU of translated sentences."""

    classes = (MarianMTModel,)

    def __init__(self, settings: Settings, data: Sentences) -> None:
        super().__init__(settings, data)
        self.data_name, self.pairs, self.tokenizer, self.train, self.evaluation, self.test, _ = data

    @classmethod
    def check_start(cls, settings: Settings) -> Any:
        """It has as many positions as a sentence has tokens."""
        config = super().check_start(settings)
        if settings.length >= config.max_position_embeddings:
            raise ValueError(
                f"multimax: expected length below {config.max_position_embeddings}, the positions of the model in "
                f"{settings.start!r}, got {settings.length}"
            )
        return config

    @staticmethod
    def load(settings: Settings) -> Sentences:
        """Reads the text, and trains the tokenizer on both languages, unless the model to start from has one."""
        source, target = settings.languages.split("-")
        data = load_parallel(settings.data, (source, target), test=settings.test_set or None, with_test=settings.test)
        if settings.start:
            tokenizer = PreTrainedTokenizerFast.from_pretrained(settings.start)
        else:
            sentences = [sentence for pair in data.train for sentence in pair]
            tokenizer = tokenizers.for_sentences(sentences, settings.vocabulary)
        pairs = {"train": data.train, "valid": data.valid, "test": data.test}
        parts = {name: Pairs(part, tokenizer, settings.length) for name, part in pairs.items()}
        tokens = {name: (pairs[name], part.sources + part.targets) for name, part in parts.items()}
        return Sentences(data.name, data.test, tokenizer, **parts, fingerprint=fingerprint.of_pairs(tokens))

    def model(self) -> PreTrainedModel:
        """An encoder and a decoder."""
        if self.settings.start:
            model = models.trained(self.settings, self.classes, {})
        else:
            model = translator(self.settings, self.tokenizer)
        self.use(model)
        return model

    def use(self, model: PreTrainedModel) -> None:
        """The model says what its decoder begins with."""
        self.collate = DataCollatorForSeq2Seq(self.tokenizer, model)

    def sampler(self, batch: int) -> Sampler[int]:
        """Sentences of a length together."""
        assert isinstance(self.train, Pairs)
        lengths = [
            len(source) + len(target) for source, target in zip(self.train.sources, self.train.targets, strict=True)
        ]
        return LengthSampler(lengths, batch, self.settings.seed)

    def save(self, folder: Path) -> None:
        """The tokenizer, as it was before it translated: else it would pad whatever it is given later."""
        self.tokenizer.backend_tokenizer.no_padding()
        self.tokenizer.backend_tokenizer.no_truncation()
        self.tokenizer.save_pretrained(folder)

    def loss(self, model: Any, inputs: dict[str, Any]) -> tuple[Tensor, Any]:
        """Cross entropy with label smoothing, or the loss of the output's function.

        Not the model's own, a mean which the Trainer would take for a part of that over all it accumulates.
        """
        labels = inputs["labels"].flatten()
        outputs = model(**{name: value for name, value in inputs.items() if name != "labels"})
        smoothing = float(self.settings.trainer.get("label_smoothing_factor", 0.0)) if model.training else 0.0
        cross_entropy = LOSSES.get(self.settings.output, F.cross_entropy)
        logits = outputs.logits.flatten(0, 1)
        return cross_entropy(logits, labels, ignore_index=IGNORED, label_smoothing=smoothing), outputs

    def reduce_logits(self, logits: Any, labels: Tensor) -> Tensor:
        """The negative log-likelihood of each token, 0 where none counts."""
        logits = logits[0] if isinstance(logits, tuple) else logits
        return token_losses(logits, labels, self.settings.output)

    def metrics(self, reduced: Any, labels: Any) -> dict[str, float]:
        """Perplexity of tokens."""
        counted = labels != IGNORED
        return {"token_perplexity": exponential(float(reduced[counted].mean(dtype="float64")))}

    @torch.no_grad()
    def final(self, model: PreTrainedModel, folder: Path, progress: bool) -> Mapping[str, float]:
        """Translates the test set by beam search and compares it with the references, in plain text.

        Not where the test set is not read: what is chosen then is chosen by the loss.
        """
        if not self.settings.test:
            return {}
        import sacrebleu

        found = translate(model, self.tokenizer, [source for source, _ in self.pairs], self.settings, progress)
        (folder / "translations.txt").write_text("\n".join(found) + "\n", encoding="utf-8")
        references = [[target for _, target in self.pairs]]
        bleu = sacrebleu.BLEU()
        score = bleu.corpus_score(found, references).score
        (folder / "sacrebleu.txt").write_text(f"{bleu.get_signature()}\n", encoding="utf-8")
        return {"bleu": score, "chrf": sacrebleu.corpus_chrf(found, references).score}


def translator(settings: Settings, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """An encoder and decoder as in the first Transformer: sinusoidal positions, layer norms after the sums."""
    pad, end = tokenizer.pad_token_id, tokenizer.eos_token_id
    from_data = {
        "vocab_size": len(tokenizer),
        "pad_token_id": pad,
        "eos_token_id": end,
        "decoder_start_token_id": pad,
        "forced_eos_token_id": None,
        "max_position_embeddings": settings.length + 1,
    }
    model = MarianMTModel(models.configured(MarianConfig, settings.model, from_data))
    assert model.generation_config is not None
    model.generation_config.max_length = settings.length
    model.generation_config.num_beams = settings.beams
    model.generation_config.bad_words_ids = [[pad]]
    return model


@torch.no_grad()
def translate(
    model: Any, tokenizer: PreTrainedTokenizerFast, sentences: list[str], settings: Settings, progress: bool
) -> list[str]:
    """Translations of sentences, in their order.

    Args:
        model: an encoder and decoder, in evaluation mode.
        tokenizer: of both languages.
        sentences: to translate.
        settings: beams and length.
        progress: whether to show a bar.
    """
    batch = int(settings.trainer.get("per_device_eval_batch_size", 32))
    # sentences of a length together, the longest first: what does not fit into memory shows at once
    order = sorted(range(len(sentences)), key=lambda i: -len(sentences[i]))
    found = [""] * len(sentences)
    for first in tqdm(range(0, len(order), batch), desc="translating", disable=None if progress else True):
        chosen = order[first : first + batch]
        inputs = tokenizer(
            [sentences[i] for i in chosen],
            padding=True,
            truncation=True,
            max_length=settings.length,
            return_tensors="pt",
        )
        inputs.pop("token_type_ids", None)
        ids = model.generate(**inputs.to(model.device), num_beams=settings.beams, max_length=settings.length)
        for i, text in zip(chosen, tokenizer.batch_decode(ids, skip_special_tokens=True), strict=True):
            found[i] = text.strip()
    return found
