"""Models of transformers, through its attention and mask interfaces."""

import itertools
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from multimax.convert.library import Library
from multimax.convert.outline import Outline
from multimax.convert.sites import Converted, Mark, Site, put_function, take_function
from multimax.convert.softmax_code import package
from multimax.convert.transformers import configuration
from multimax.convert.transformers.interface import callers, number_of_heads, only, why_not

CLASSIFIERS = (
    "classifier",
    "score",
    "qa_outputs",
    "classification_head",
    "cls_classifier",
    "distillation_classifier",
    "lm_head",  # for CTC, where it is not an output embedding
    "ctc_head",
)
# Settings of models that change the logits of words after the output layer, which would then come after sigma.
AFTER_HEAD = (
    "final_logit_softcapping",
    "logits_soft_cap",
    "logit_scale",
    "logits_scaling",
    "output_multiplier",
    "lm_head_multiplier",
)


class Transformers(Library):
    """Hugging Face transformers. A converted module runs its original forward: only the attention function, which that
    forward calls, knows that it was reached."""

    name = "transformers"
    notes_reached = True
    keeps_class = True

    def sites(self, outline: Outline) -> list[Site]:
        """Attention modules that use the interface."""
        return [
            Site(name, module, "attention", self.name, number_of_heads(module), why_not(module), only(module))
            for name, module in callers(outline).items()
        ]

    def why_not_in_code(self, cls: type) -> str | None:
        """Attention of transformers outside its interface."""
        if package(cls) == self.name:
            return f"{cls.__name__} does not use transformers' attention interface"
        return None

    def attach(self, model: nn.Module, site: Site, function: nn.Module, mark: Mark) -> nn.Module:
        """Gives the attention module the function as a child; the attention function finds it there."""
        put_function(site.module, function)
        return site.module

    def detach(self, model: nn.Module, name: str, module: nn.Module) -> None:
        """Removes the child."""
        take_function(module)

    def output_names(self, outline: Outline) -> list[str]:
        """The layer, or layers, that give the logits."""
        model = outline.model
        if not isinstance(model, PreTrainedModel):
            return []
        head = model.get_output_embeddings()
        if head is not None and (name := outline.name_of(head)) is not None:
            return [name]
        found = []
        for classifier in CLASSIFIERS:
            module = model._modules.get(classifier)
            if module is not None:  # the last linear layer of a head with several
                linears = [inner for inner in module.modules() if isinstance(inner, nn.Linear)]
                found += [outline.name_of(linear) for linear in linears[-1:]]
        return [name for name in found if name is not None]

    def why_not_output(self, model: nn.Module, name: str) -> str | None:
        """Why logits of this model cannot be modulated in this layer."""
        if not isinstance(model, PreTrainedModel):
            return None
        model_name, config = type(model).__name__, model.config
        if model.get_output_embeddings() is model.get_submodule(name):
            for setting, value in itertools.chain.from_iterable(_settings(config)):
                if setting in AFTER_HEAD and value is not None and value != 1:
                    return f"{model_name} changes the logits after it ({setting}={value}), and sigma must come last"
            added = getattr(model, "final_logits_bias", None)
            if isinstance(added, Tensor) and bool(added.any()):
                return f"{model_name} adds final_logits_bias to the logits after it, and sigma must come last"
        elif getattr(config, "classifier_pooling", None) == "late":
            return f"{model_name} takes means of the logits after it, and sigma must come last"
        elif config.problem_type in ("regression", "multi_label_classification"):
            return f"{model_name} has no softmax after it (problem_type={config.problem_type!r})"
        elif config.num_labels == 1:
            return f"{model_name} has no softmax after it (num_labels=1)"
        return None

    def models(self, outline: Outline) -> dict[str, nn.Module]:
        """Such as the model for images and the model for text in one for both."""
        return {name: module for name, module in outline.modules.items() if isinstance(module, PreTrainedModel)}

    def finish(self, outline: Outline, converted: list[Converted]) -> None:
        """Sets the attention implementation of the model's configurations, or restores the previous one.

        The model gets copies of its configurations: other models made from the same objects keep theirs.
        """
        configuration.forget_hooks(outline)
        if not converted:
            configuration.switch_off(outline)
            return
        models = self.models(outline)
        attention = any(layer.mark.converter == self.name for layer in converted)
        if models or attention:
            configuration.copy_configurations(outline, models)
        if attention:
            configuration.switch_on(outline, models)
        configuration.write_settings(models, converted)


def _settings(config: Any) -> Iterator[Any]:
    """Names and values of a configuration, and of those in it."""
    yield config.__dict__.items()
    for name in config.sub_configs:
        if getattr(config, name, None) is not None:
            yield from _settings(getattr(config, name))


CONVERTER = Transformers()
