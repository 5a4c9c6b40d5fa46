"""What a task is to a run: data, model, loss and metrics."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler
from transformers import PreTrainedModel

from multimax.experiments import models, tasks
from multimax.experiments.data.fingerprint import Fingerprint
from multimax.experiments.settings import Settings


def mixed_seed(*numbers: int) -> int:
    """One seed out of several numbers, so that neighbours have nothing in common."""
    import numpy

    return int(numpy.random.SeedSequence(numbers).generate_state(1, numpy.uint64)[0] >> 1)


class ShuffledSampler(Sampler[int]):
    """A permutation for each epoch, which depends on the seed and the epoch alone: a resumed run sees the same order.

    Args:
        n: how many examples there are.
        seed: of the run.
    """

    def __init__(self, n: int, seed: int) -> None:
        self.n, self.seed, self.epoch = n, seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Which permutation comes next."""
        self.epoch = epoch

    def generator(self) -> torch.Generator:
        """Of this epoch."""
        return torch.Generator().manual_seed(mixed_seed(self.seed, self.epoch))

    def __iter__(self) -> Any:
        """The numbers of the examples."""
        return iter(torch.randperm(self.n, generator=self.generator()).tolist())

    def __len__(self) -> int:
        """How many examples there are."""
        return self.n


class Task(ABC):
    """A task with its data.

    Args:
        settings: of the run.
        data: what :meth:`load` gave for them, or for others that load the same. It is shared, and stays as it is. Its
            attribute fingerprint tells it from other data.

    Attributes:
        classes: of transformers, that its models are of.
        spec: what the list of tasks says of it.
        train: examples for training.
        evaluation: examples for the evaluations during training.
        test: examples for the last one.
        collate: makes a batch of examples.
        data_name: what the data is called.
        fingerprint: of the data: sizes and checksums, by part.
        others: further examples for the last evaluation, by name: its metrics are there again as ``metric@name``.
        evaluated: the examples that :meth:`metrics` gets the results of.
    """

    classes: tuple[Any, ...]
    train: Dataset[Any]
    evaluation: Dataset[Any]
    test: Dataset[Any]
    collate: Callable[[list[Any]], Any]
    data_name: str
    evaluated: Dataset[Any]

    def __init__(self, settings: Settings, data: Any) -> None:
        self.settings, self.spec = settings, tasks.get(settings.task)
        self.fingerprint: Fingerprint = data.fingerprint
        self.others: Mapping[str, Dataset[Any]] = {}

    @staticmethod  # noqa: B027, there may be nothing
    def check(settings: Settings) -> None:
        """Raises for settings that the task cannot take, before any data is loaded."""

    @classmethod
    def check_start(cls, settings: Settings) -> Any:
        """Raises if the model to start from is not one that the settings describe.

        Returns:
            Its configuration.
        """
        return models.start_config(settings, cls.classes)

    @staticmethod
    @abstractmethod
    def load(settings: Settings) -> Any:
        """The data, by those settings alone that the list of tasks names."""

    @abstractmethod
    def model(self) -> PreTrainedModel:
        """A new model with softmax, or the one to start from."""

    def use(self, model: PreTrainedModel) -> None:  # noqa: B027, there may be nothing
        """Makes batches for this model, if they differ from model to model."""

    @abstractmethod
    def sampler(self, batch: int) -> Sampler[int]:
        """The order of the training examples.

        Args:
            batch: examples per step.
        """

    def loss(self, model: Any, inputs: dict[str, Any]) -> tuple[Tensor, Any] | None:
        """Loss and outputs of a batch; None for the model's own."""
        return None

    def reduce_logits(self, logits: Any, labels: Tensor) -> Tensor:
        """What is kept of the logits of a batch for :meth:`metrics`."""
        raise NotImplementedError

    @abstractmethod
    def metrics(self, reduced: Any, labels: Any) -> dict[str, float]:
        """Metrics of an evaluation.

        Args:
            reduced: what :meth:`reduce_logits` gave, of all batches.
            labels: of all batches.
        """

    def final(self, model: PreTrainedModel, folder: Path, progress: bool) -> Mapping[str, float]:
        """Metrics of the trained model that only the last evaluation has.

        Args:
            model: in evaluation mode.
            folder: of the run, for files that users may want to look at.
            progress: whether to show a bar.
        """
        return {}

    def save(self, folder: Path) -> None:  # noqa: B027, there may be nothing
        """Saves what belongs to the data, such as a tokenizer, into the run's folder, at the beginning."""

    def trained(self, model: PreTrainedModel) -> None:  # noqa: B027, there may be nothing
        """Takes out of a trained model what was for training alone."""

    @staticmethod
    def unwrapped(model: Any) -> Any:
        """The model in ``DistributedDataParallel``."""
        return getattr(model, "module", model)
