"""Image classification."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Sampler, default_collate
from transformers import (
    IJepaConfig,
    IJepaForImageClassification,
    PreTrainedModel,
    ViTConfig,
    ViTForImageClassification,
)

from multimax.experiments import models
from multimax.experiments.augmentation import Augmentation, DrawSampler, EvalImages, Mix, TrainImages
from multimax.experiments.data import fingerprint
from multimax.experiments.data.fingerprint import Fingerprint
from multimax.experiments.data.images import ImageData, load_images
from multimax.experiments.settings import LOSSES, Settings
from multimax.experiments.tasks.task import Task
from multimax.training import oversmoothing

SAMPLE = 1000  # images that mean and standard deviation are taken from


class Images(NamedTuple):
    """Images, the mean and standard deviation of each channel, and what tells them from others."""

    data: ImageData
    mean: tuple[float, ...]
    std: tuple[float, ...]
    fingerprint: Fingerprint


class Vision(Task):
    """Accuracy on images."""

    classes = (ViTForImageClassification, IJepaForImageClassification)

    def __init__(self, settings: Settings, data: Images) -> None:
        super().__init__(settings, data)
        images, mean, std, _ = data
        self.augmentation = _augmentation(settings)
        self.labels, self.channels, self.data_name = images.classes, images.channels, images.name
        self.train = TrainImages(images.train, settings.image_size, self.augmentation, mean, std, settings.seed)
        self.evaluation = self.test = EvalImages(images.test, settings.image_size, self.augmentation, mean, std)
        self.collate = default_collate
        self.mix = Mix(self.augmentation)
        self.smoothing = float(settings.trainer.get("label_smoothing_factor", 0.0))

    @staticmethod
    def check(settings: Settings) -> None:
        """Its augmentation must be known."""
        _augmentation(settings)
        for name, chosen in (
            ("load_best_model_at_end", settings.trainer.get("load_best_model_at_end")),
            ("patience", settings.patience),
        ):
            if settings.test and chosen:
                raise ValueError(f"multimax: expected no {name}: evaluation is on the test set, got it set")

    @classmethod
    def check_start(cls, settings: Settings) -> Any:
        """Its images and its pooling are those of the settings."""
        config = super().check_start(settings)
        pooling = "class" if isinstance(config, ViTConfig) else "average"
        models.check_same(
            settings,
            {"image_size": (config.image_size, settings.image_size), "pooling": (pooling, settings.pooling)},
        )
        return config

    @staticmethod
    def load(settings: Settings) -> Images:
        """Finds the images, and looks at some."""
        data = load_images(settings.data, with_test=settings.test)
        return Images(data, *mean_and_std(data.train), fingerprint.of_images(data))

    def model(self) -> PreTrainedModel:
        """ViT with a class token, or with the average of the patches."""
        if self.settings.start:
            wanted = {"num_channels": self.channels, "num_labels": len(self.labels)}
            model = models.trained(self.settings, self.classes, wanted)
            model.config.id2label = dict(enumerate(self.labels))
            model.config.label2id = {name: number for number, name in enumerate(self.labels)}
        else:
            model = image_classifier(self.settings, self.channels, self.labels)
        add_stochastic_depth(model, self.settings.stochastic_depth)
        if self.settings.patch_diversification:
            # the third loss has a classifier of its own
            head = nn.Linear(model.config.hidden_size, len(self.labels))
            nn.init.trunc_normal_(head.weight, std=model.config.initializer_range)
            nn.init.zeros_(head.bias)
            model.patch_classifier = head
        return model

    def sampler(self, batch: int) -> Sampler[int]:
        """Permutations, with repeated augmentation if asked for."""
        return DrawSampler(len(self.train), self.augmentation.repeats, self.settings.seed)  # type: ignore[arg-type]

    def loss(self, model: Any, inputs: dict[str, Any]) -> tuple[Tensor, Any]:
        """Cross entropy with label smoothing, mixup and CutMix, or the loss of the output's function."""
        pixels, labels = inputs["pixel_values"], inputs["labels"]
        training = model.training
        diverse = self.settings.patch_diversification if training else 0.0
        patch_labels = None
        if training and diverse:
            patch = self.unwrapped(model).config.patch_size
            pixels, patch_labels = oversmoothing.patch_mixing(pixels, labels, patch)
            labels = F.one_hot(patch_labels, len(self.labels)).to(pixels.dtype).mean(1)
        elif training and self.mix:
            seed = int(torch.randint(2**62, ()).item())  # of the global generator, whose state is in checkpoints
            pixels, labels = self.mix(pixels, labels, len(self.labels), seed=seed)
        outputs = model(pixel_values=pixels, output_hidden_states=bool(diverse))
        cross_entropy = LOSSES.get(self.settings.output, F.cross_entropy)
        loss = cross_entropy(outputs.logits, labels, label_smoothing=self.smoothing if training else 0.0)
        if patch_labels is not None:
            loss = loss + diverse * self._diversity(model, outputs.hidden_states, patch_labels)
        return loss, outputs

    def _diversity(self, model: Any, hidden: Any, patch_labels: Tensor) -> Tensor:
        """The three losses of Patch Diversification."""
        skip = int(self.settings.pooling == "class")
        first, last = hidden[1][:, skip:], hidden[-1][:, skip:]
        mixing = oversmoothing.patch_mixing_loss(self.unwrapped(model).patch_classifier(last), patch_labels)
        return mixing + oversmoothing.patch_cosine_loss(last) + oversmoothing.patch_contrastive_loss(first, last)

    def reduce_logits(self, logits: Any, labels: Tensor) -> Tensor:
        """The predicted class."""
        logits = logits[0] if isinstance(logits, tuple) else logits
        best: Tensor = logits.argmax(-1)
        return best

    def metrics(self, reduced: Any, labels: Any) -> dict[str, float]:
        """The share of images whose class is right."""
        return {"accuracy": float((reduced == labels).mean())}

    def trained(self, model: PreTrainedModel) -> None:
        """The classifier of patches was for training alone."""
        if self.settings.patch_diversification:
            del model.patch_classifier


def _augmentation(settings: Settings) -> Augmentation:
    try:
        return Augmentation(**settings.augmentation)
    except TypeError as error:
        raise ValueError(f"multimax: expected options of augmentation, got {settings.augmentation}: {error}") from None


def mean_and_std(images: Any) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Of each channel, over some 1,000 images that are spread over the set."""
    step = max(len(images) // SAMPLE, 1)
    chosen = [images.image(i).double() / 255 for i in range(0, len(images), step)]
    count = sum(image[0].numel() for image in chosen)
    mean = sum((image.sum((1, 2)) for image in chosen), start=torch.zeros(len(chosen[0]))) / count
    square = sum((image.square().sum((1, 2)) for image in chosen), start=torch.zeros(len(chosen[0]))) / count
    std = (square - mean.square()).clamp(min=1e-12).sqrt()
    return tuple(mean.tolist()), tuple(std.tolist())


def image_classifier(settings: Settings, channels: int, labels: tuple[str, ...]) -> PreTrainedModel:
    """A vision transformer sized as DeiT: with a class token, or with the average of the patches and no class token."""
    from_data = {
        "image_size": settings.image_size,
        "num_channels": channels,
        "id2label": dict(enumerate(labels)),
        "label2id": {name: number for number, name in enumerate(labels)},
    }
    if settings.pooling == "class":
        return ViTForImageClassification(models.configured(ViTConfig, settings.model, from_data))
    return IJepaForImageClassification(models.configured(IJepaConfig, settings.model, from_data))


class StochasticDepth:
    """A forward hook of a branch of a residual block: in training it leaves the branch out for some examples.

    Args:
        rate: the probability.
    """

    def __init__(self, rate: float) -> None:
        self.rate = rate

    def __call__(self, module: nn.Module, args: object, output: Any) -> Any:
        """The output, zero for some examples and larger for the others."""
        if not module.training or not self.rate:
            return output
        first: Tensor = output[0] if isinstance(output, tuple) else output
        keep = torch.rand(first.shape[0], *[1] * (first.ndim - 1), device=first.device) >= self.rate
        first = first * keep / (1 - self.rate)
        return (first, *output[1:]) if isinstance(output, tuple) else first


def add_stochastic_depth(model: PreTrainedModel, rate: float) -> None:
    """Stochastic depth in every layer of a vision transformer, from 0 in the first to the rate in the last."""
    if not 0 <= rate < 1:
        raise ValueError(f"multimax: expected stochastic_depth in [0, 1), got {rate}")
    if not rate:
        return
    layers: Any = model.base_model.layers
    for number, layer in enumerate(layers):
        hook = StochasticDepth(rate * number / max(len(layers) - 1, 1))
        layer.attention.register_forward_hook(hook)
        layer.mlp.register_forward_hook(hook)
