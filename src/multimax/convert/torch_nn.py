"""The modules of torch.nn: multi-head attention and softmax."""

from torch import nn

from multimax.convert.library import Library
from multimax.convert.outline import Outline, around
from multimax.convert.sites import Converted, Mark, Site, mark_of, put_function, take_function
from multimax.nn.fast_path import keep_off, let_on
from multimax.nn.multihead import MultiheadAttention

NESTED = "_multimax_use_nested_tensor"  # what the encoder had before


class TorchNN(Library):
    """torch.nn. Which linear layer of a model gives the logits cannot be found out: ``output=`` has to name it."""

    name = "torch"

    def sites(self, outline: Outline) -> list[Site]:
        """Every multi-head attention and every softmax module."""
        found = []
        for name, module in outline.modules.items():
            why_not = None
            if isinstance(module, nn.MultiheadAttention) and not isinstance(module, MultiheadAttention):
                if type(module) is not nn.MultiheadAttention:
                    why_not = "a subclass of nn.MultiheadAttention may compute anything"
                found.append(Site(name, module, "attention", self.name, module.num_heads, why_not))
            elif isinstance(module, nn.Softmax):
                if not name:
                    why_not = "the whole model is one softmax; use multimax.MultiMax() instead"
                elif module.dim is None:
                    why_not = "nn.Softmax without a dim"
                found.append(Site(name, module, "attention", self.name, None, why_not))
        return found

    def attach(self, model: nn.Module, site: Site, function: nn.Module, mark: Mark) -> nn.Module:
        """Puts the function in softmax's place, or gives it to the attention as a child, with a class that uses it."""
        module = site.module
        if isinstance(module, nn.Softmax):
            function.__dict__["dim"] = module.dim
            mark.before["softmax"] = module
            _set_child(model, site.name, function)
            return function
        module.__class__ = MultiheadAttention
        keep_off(module)
        module.__dict__["softmax_if_missing"] = False  # the whole model decides: see loading.py
        put_function(module, function)
        module.register_module("attn_scale", None)
        return module

    def detach(self, model: nn.Module, name: str, module: nn.Module) -> None:
        """Restores the original."""
        mark = mark_of(module)
        assert mark is not None
        if "softmax" in mark.before:
            _set_child(model, name, mark.before["softmax"])
        elif isinstance(module, nn.MultiheadAttention):
            take_function(module)
            module._modules.pop("attn_scale", None)
            module.__dict__.pop("softmax_if_missing", None)
            module.__class__ = nn.MultiheadAttention
            let_on(module)

    def finish(self, outline: Outline, converted: list[Converted]) -> None:
        """Keeps encoders with converted layers from packing padded batches into nested tensors, in evaluation, for a
        fast path that these layers do not take."""
        outer = around([layer.name for layer in converted])
        for name, module in outline.modules.items():
            if isinstance(module, nn.TransformerEncoder):
                before = module.__dict__.setdefault(NESTED, getattr(module, "use_nested_tensor", False))
                module.use_nested_tensor = before and name not in outer
                if name not in outer:
                    del module.__dict__[NESTED]


def _set_child(model: nn.Module, name: str, child: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    model.get_submodule(parent)._modules[last] = child


CONVERTER = TorchNN()
