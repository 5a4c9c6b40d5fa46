"""The modules of torch.nn: multi-head attention and softmax."""

from torch import nn

from multimax.convert.sites import Mark, Site, mark_of, marked, put_function, take_function
from multimax.nn.multihead import MultiheadAttention

LIBRARY = "torch_nn"
NESTED = "_multimax_use_nested_tensor"  # what the encoder had before


def sites(model: nn.Module) -> list[Site]:
    """Every multi-head attention and every softmax module."""
    found = []
    for name, module in model.named_modules():
        why_not = None
        if isinstance(module, nn.MultiheadAttention) and not isinstance(module, MultiheadAttention):
            if type(module) is not nn.MultiheadAttention:
                why_not = "a subclass of nn.MultiheadAttention may compute anything"
            found.append(Site(name, module, "attention", LIBRARY, module.num_heads, why_not))
        elif isinstance(module, nn.Softmax):
            if not name:
                why_not = "the whole model is one softmax; use multimax.MultiMax() in its place"
            elif module.dim is None:
                why_not = "nn.Softmax without a dim"
            found.append(Site(name, module, "attention", LIBRARY, None, why_not))
    return found


def attach(model: nn.Module, site: Site, function: nn.Module, mark: Mark) -> nn.Module:
    """Puts the reweighting function into the site; gives the module that now stands there."""
    module = site.module
    if isinstance(module, nn.Softmax):
        function.__dict__["dim"] = module.dim
        mark.before["softmax"] = module
        _set_child(model, site.name, function)
        return function
    mark.before["_qkv_same_embed_dim"] = module.__dict__["_qkv_same_embed_dim"]
    module.__class__ = MultiheadAttention
    module.__dict__["_qkv_same_embed_dim"] = False  # see MultiheadAttention
    module.__dict__["softmax_if_missing"] = False  # the whole model has a say: see loading.py
    put_function(module, function)
    module.register_module("attn_scale", None)
    return module


def detach(model: nn.Module, name: str, module: nn.Module) -> None:
    """Brings back what was there."""
    mark = mark_of(module)
    assert mark is not None
    if "softmax" in mark.before:
        _set_child(model, name, mark.before["softmax"])
    elif isinstance(module, nn.MultiheadAttention):
        take_function(module)
        module._modules.pop("attn_scale", None)
        module.__dict__.pop("softmax_if_missing", None)
        module.__class__ = nn.MultiheadAttention
        module.__dict__.update(mark.before)


def _set_child(model: nn.Module, name: str, child: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    model.get_submodule(parent)._modules[last] = child


def output_names(model: nn.Module) -> list[str]:
    """None: which linear layer is the last is not to be seen."""
    return []


def why_not_output(model: nn.Module, name: str) -> str | None:
    """No reason."""
    return None


def finish(model: nn.Module) -> None:
    """Keeps encoders with converted layers from packing padded batches into nested tensors, in evaluation, for a fast
    path that these layers do not take."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder):
            before = module.__dict__.setdefault(NESTED, getattr(module, "use_nested_tensor", False))
            converted = next(marked(module), None) is not None
            module.use_nested_tensor = before and not converted
            if not converted:
                del module.__dict__[NESTED]
