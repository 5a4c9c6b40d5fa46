"""Another function instead of softmax in existing models: the two public functions."""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from multimax.convert import adapters, heads, verification
from multimax.convert.library import HEADS, KNOWN, Library, converter, in_use
from multimax.convert.loading import allow_softmax, forbid_softmax
from multimax.convert.outline import Outline, around, within
from multimax.convert.recipe import Recipe, from_description, name_of
from multimax.convert.report import Layer, Report
from multimax.convert.sites import (
    KINDS,
    ROLES,
    Converted,
    Mark,
    Site,
    class_name,
    has_other_forward,
    marked_in,
    set_mark,
)
from multimax.convert.softmax_code import computes_softmax, package
from multimax.ops import checks
from multimax.reweighting.registry import inner

LIKE_ATTENTION = re.compile("Attention|Attn")
ROOT = "_multimax_root"  # on the module that convert_ was given
WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "OptimizedModule", "DataParallel", "FSDPModule")


def _check_not_wrapped(outline: Outline) -> None:
    for module_type, name in outline.types.items():
        for cls in module_type.__mro__:
            if cls.__name__ in WRAPPERS and cls.__module__.startswith("torch."):
                where = f"{name!r} in {cls.__name__}" if name else cls.__name__
                raise ValueError(
                    f"multimax: expected a model that is not wrapped yet, got {where}; convert it first, then wrap it "
                    "and give the new parameters to the optimizer"
                )
    found = adapters.adapter_in(outline)
    if found is not None:
        raise ValueError(
            f"multimax: expected a model without adapters, got {found}; convert the model first, then add or load the "
            "adapter, with modules_to_save=['multimax'] in its configuration (['reweight'] for other functions)"
        )


def _check_not_converted(outline: Outline) -> None:
    names = [layer.name for layer in marked_in(outline)]
    if names:
        raise ValueError(
            f"multimax: expected a model that is not converted yet, got one with {', '.join(map(repr, names))} "
            "converted; multimax.revert_(model) brings it back"
        )


def _check_not_shared(outline: Outline, sites: Collection[Site]) -> None:
    for site in sites if outline.repeated else ():
        if outline.repeated & around([site.name]):
            everywhere = outline.model.named_modules(remove_duplicate=False)
            names = [name for name, module in everywhere if module is site.module]
            raise ValueError(
                "multimax: expected layers in one place each, got one module as "
                f"{', '.join(map(repr, names))}; give each place its own copy, by copy.deepcopy"
            )


def _sites(outline: Outline, libraries: list[Library], where: Collection[str], output: str | None) -> list[Site]:
    """The places of these kinds."""
    found = {}
    if set(where) - {"output"}:
        found = {site.name: site for site in _attention_sites(outline, libraries) if _part(site, where) in where}
    if "output" in where:
        found |= {site.name: site for site in _output_sites(outline, libraries, output)}
    return list(found.values())


def _part(site: Site, where: Collection[str]) -> str:
    """Which part of where a place belongs to: attention may be asked for as a whole, or by its roles."""
    return site.kind if site.kind in where else site.role


def _depths(sites: list[Site]) -> dict[str, float]:
    """How deep in its stack each attention layer stands, from 0, the first, to 1, the last. Layers whose names differ
    by numbers alone are of one stack."""
    stacks: dict[str, list[str]] = {}
    for site in sites:
        if site.kind == "attention":
            stacks.setdefault(re.sub(r"\d+", "#", site.name), []).append(site.name)
    places = ((n, len(names) - 1, name) for names in stacks.values() for n, name in enumerate(names))
    return {name: n / last if last else 1.0 for n, last, name in places}


def _attention_sites(outline: Outline, libraries: list[Library]) -> list[Site]:
    found: dict[str, Site] = {}
    for library in libraries:
        known = set(found)
        for site in library.sites(outline):
            if not known & around([site.name]):
                found[site.name] = site
    return [*found.values(), *_sites_in_code(outline, libraries, set(found))]


def _sites_in_code(outline: Outline, libraries: list[Library], known: set[str]) -> Iterator[Site]:
    """Modules that look like attention, and compute softmax where it cannot be replaced."""
    suspects = {
        cls
        for cls in outline.types
        if LIKE_ATTENTION.search(cls.__name__) and package(cls) not in ("torch", "multimax")
    }
    outer = around(known)
    for name, module in outline.modules.items():
        cls = type(module)
        if cls in suspects and name not in outer and not known & around([name]) and computes_softmax(cls):
            reasons = [library.why_not_in_code(cls) for library in libraries]
            usual = f"{cls.__name__} computes softmax in its own code; call multimax.multimax_attention in it"
            yield Site(name, module, "attention", "", None, next(filter(None, reasons), usual))


def _output_sites(outline: Outline, libraries: list[Library], output: str | None) -> list[Site]:
    if output is not None:
        if output not in outline.modules:
            raise ValueError(f"multimax: expected output to be the full name of a layer, got {output!r}")
        names = [output]
    else:
        names = []
        for library in libraries:
            names = names or library.output_names(outline)
        if not names:
            raise ValueError(
                f"multimax: expected an output layer in {type(outline.model).__name__}, got none that could be found; "
                'give the full name of its last linear layer as output="..."'
            )
    found = []
    for name in names:
        module = outline.modules[name]
        reason = heads.why_not(module)
        parts = name.split(".")
        for n in range(len(parts)):  # the modules around it, from the outside, and its name in each
            outer, inner = outline.modules[".".join(parts[:n])], ".".join(parts[n:])
            for library in libraries:
                reason = reason or library.why_not_output(outer, inner)
        found.append(Site(name, module, "output", HEADS, None, reason))
    return found


def _chosen(
    sites: list[Site], layers: Collection[str] | None, filter_fn: Callable[[nn.Module, str], bool] | None
) -> tuple[list[Site], list[Site]]:
    """The sites that were asked for, and the others."""
    if filter_fn is not None and not callable(filter_fn):
        raise TypeError(f"multimax: expected filter_fn to be a function of (module, name), got {filter_fn!r}")
    if layers is not None:
        if isinstance(layers, Collection) and not layers:
            raise ValueError("multimax: expected layers to name at least one layer, got none")
        if isinstance(layers, str) or not isinstance(layers, Collection) or not all(isinstance(n, str) for n in layers):
            raise TypeError(f"multimax: expected layers to be several full names of layers, got {layers!r}")
        for name in layers:
            if not any(within(site.name, name) for site in sites):
                names = ", ".join(repr(site.name) for site in sites)
                raise ValueError(f"multimax: expected layers out of, or around, {names}, got {name!r}")
    chosen: list[Site] = []
    others: list[Site] = []
    for site in sites:
        take = layers is None or any(within(site.name, name) for name in layers)
        take = take and (filter_fn is None or bool(filter_fn(site.module, site.name)))
        (chosen if take else others).append(site)
    if sites and not chosen:
        raise ValueError(
            "multimax: expected filter_fn(module, name) to be true for at least one of "
            f"{', '.join(repr(site.name) for site in sites)}, got none"
        )
    return chosen, others


def _dispatched(site: Site) -> bool:
    """Whether a module has a forward of its own, which would go on calling that of the class before, or weights that
    are elsewhere."""
    if not converter(site.converter).keeps_class and has_other_forward(site.module):
        return True
    parameter = next(site.module.parameters(), None)
    offloaded = parameter is not None and parameter.is_meta
    return offloaded and any(has_other_forward(module) for module in site.module.modules())


def _why_not(site: Site, recipe: Recipe) -> str | None:
    """Why this function cannot be used in this site."""
    if site.why_not:
        return site.why_not
    if _dispatched(site):
        return (
            "its forward is accelerate's, or another that was put on the object; convert the model first, then "
            "dispatch or offload it (accelerate.hooks.remove_hook_from_submodules takes accelerate's back)"
        )
    if site.kind == "output":
        return recipe.why_not_output()
    if site.only and recipe.name not in site.only:
        return f"it takes {', '.join(site.only)} only"
    needed = recipe.heads
    if site.heads is None and (recipe.per_head or needed is not None):
        return "its number of heads is not known"
    if needed is not None and needed != site.heads:
        return f"it has {site.heads} heads, and the parameters are for {needed}"
    return None


def _device_and_dtype(module: nn.Module, model: nn.Module) -> tuple[torch.device, torch.dtype]:
    """Where a layer's new parameters belong. In half precision they would hardly move, so they are float32."""
    for owner in (module, model):
        parameter = next((p for p in owner.parameters() if p.is_floating_point()), None)
        if parameter is not None:
            return parameter.device, torch.float64 if parameter.dtype == torch.float64 else torch.float32
    return torch.device("cpu"), torch.get_default_dtype()


def convert_(
    model: nn.Module,
    *,
    where: Collection[str] = ("attention",),
    reweight: str | nn.Module | Mapping[str, str | nn.Module] = "multimax",
    order: int = 2,
    per_head: bool = False,
    init: str | tuple[Tensor, Tensor] = "identity",
    layers: Collection[str] | None = None,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
    output: str | None = None,
    strict: bool = True,
    probe: Mapping[str, Any] | Tensor | None = None,
) -> Report:
    r"""Replaces softmax in a model with MultiMax, or with another reweighting function, in place.

    .. math:: \operatorname{softmax}(x) \to \operatorname{softmax}(\sigma(x))

    Works on models of torch.nn, transformers and timm, and on any that are built from their attention modules: see
    docs/convert.md for what is known to work. With ``init="identity"`` the converted model computes what it did before;
    training then moves the new parameters, eight scalars per layer. Convert before the model is compiled, wrapped for
    distributed training, or given to an optimizer.

    The first forward raises if it did not reach every converted layer, so no layer silently keeps softmax. ``probe``
    checks this right away.

    Args:
        model: changed in place; its modules, weights and hooks stay the same objects.
        where: "attention", "output", or both. In the output layer the logits are modulated: the model's loss,
            sampling and search then use MultiMax. "encoder", "decoder" and "cross" instead of "attention" are parts of
            it, in models with an encoder and a decoder: self-attention of either, and attention from one to the other.
        reweight: a name of :mod:`multimax.reweighting`, or one of its modules (``reweighting.TopK(8)``); every layer
            gets a copy. A mapping names one function for attention and one for the output:
            ``{"attention": "entmax15", "output": "multimax"}``.
        order: order of sigma, see :class:`MultiMax`.
        per_head: one set of parameters per head of attention, not one for all.
        init: initial parameters, see :class:`MultiMax`. With the name of a model in ``multimax.presets`` every
            attention layer starts from what the layer at its relative depth has learned there, and the output layer,
            of which the paper prints nothing, from softmax.
        layers: full names of the layers to convert, or of modules around them; all unless given.
        filter_fn: called as ``filter_fn(module, name)``, true for the layers to convert.
        output: full name of the output layer, an ``nn.Linear``; found automatically in models of transformers and timm.
        strict: raise if a layer cannot be converted. If false, such layers keep softmax, and the report lists them.
        probe: an input, or a mapping of keyword arguments, for a forward without gradients that checks that all
            converted layers are reached. If they are not, the model is left as it was.

    Returns:
        What was converted and what was left, layer by layer. On an error the model is unchanged.

    Example:
        >>> import torch, multimax
        >>> model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2)
        >>> x, before = torch.randn(2, 10, 32), model.eval()
        >>> expected = model(x)
        >>> report = multimax.convert_(model)
        >>> report.parameters, [layer.name for layer in report]
        (16, ['layers.0.self_attn', 'layers.1.self_attn'])
        >>> torch.allclose(model(x), expected, atol=1e-6)
        True
    """
    checks.module(model)
    outline = Outline(model)
    _check_not_wrapped(outline)
    where = _checked_where(where)
    if output is not None and "output" not in where:
        raise ValueError(f"multimax: expected output={output!r} with 'output' in where, got where={where!r}")
    if probe is not None:
        verification.check_probe(probe)
    recipes = _recipes(where, reweight, order, per_head, init)
    _check_not_converted(outline)
    libraries = in_use(outline)
    sites = _sites(outline, libraries, where, output)
    if not sites:
        what = "softmax attention" if "attention" in where else f"attention of the kind {' or '.join(where)}"
        raise ValueError(
            f"multimax: expected {what} in {type(model).__name__}, got none that could be found: {KNOWN} are known"
        )
    chosen, others = _chosen(sites, layers, filter_fn)
    _check_not_shared(outline, chosen)
    reasons = {site.name: reason for site in chosen if (reason := _why_not(site, recipes[_part(site, where)]))}
    if reasons and (strict or len(reasons) == len(chosen)):
        words = "; ".join(f"{name!r}: {reason}" for name, reason in reasons.items())
        remedy = "; strict=False leaves these with softmax" if len(reasons) < len(chosen) else ""
        raise ValueError(f"multimax: expected layers that can be converted, got {words}{remedy}")
    chosen = [site for site in chosen if site.name not in reasons]
    depths = _depths(sites)
    functions = [recipes[_part(site, where)].make(site.heads, depths.get(site.name)) for site in chosen]
    left = [Layer(s.name, s.kind, class_name(s.module), why_left="not asked for") for s in others]
    left += [Layer(s.name, s.kind, class_name(s.module), why_left=reasons[s.name]) for s in sites if s.name in reasons]
    return Report(_apply(outline, libraries, chosen, functions, probe=probe), tuple(left))


def _recipes(
    where: tuple[str, ...],
    reweight: str | nn.Module | Mapping[str, str | nn.Module],
    order: int,
    per_head: bool,
    init: str | tuple[Tensor, Tensor],
) -> dict[str, Recipe]:
    """For each kind of layer. The options apply to functions given by the name "multimax"."""
    if not isinstance(reweight, Mapping):
        return dict.fromkeys(where, Recipe(reweight, order, per_head, init))
    if set(reweight) != set(where):
        raise ValueError(
            f"multimax: expected reweight for {' and '.join(map(repr, where))}, as where says, got it for "
            f"{' and '.join(map(repr, reweight)) or 'none'}"
        )
    in_attention = {kind: function for kind, function in reweight.items() if kind != "output"}
    if per_head and any(function != "multimax" for function in in_attention.values() or ["none"]):
        others = ", ".join(repr(function) for function in in_attention.values() or ["none"])
        raise ValueError(
            f"multimax: expected per_head with 'multimax' in attention, got it with {others}; give a module with the "
            "heads it has"
        )
    if "multimax" not in reweight.values():
        return {kind: Recipe(wanted, order, per_head, init) for kind, wanted in reweight.items()}
    return {
        kind: Recipe(wanted, order, per_head and kind != "output", init) if wanted == "multimax" else Recipe(wanted)
        for kind, wanted in reweight.items()
    }


def _apply(
    outline: Outline, libraries: list[Library], sites: list[Site], functions: list[nn.Module], *, probe: Any = None
) -> tuple[Layer, ...]:
    """Carries out the plan, all of it or nothing."""
    model = outline.model
    model.__dict__[ROOT] = True
    try:
        converted = [_attach(outline, site, function) for site, function in zip(sites, functions, strict=True)]
        for library in libraries:
            library.finish(outline, converted)
        allow_softmax(model)
        heads.watch_heads(model, converted)
        adapters.watch_adapters(model)
        verification.expect(outline, libraries, converted)
        if probe is not None:
            verification.probe(model, probe)
    except BaseException:
        _revert_root(model, "")
        raise
    return tuple(
        Layer(layer.name, layer.mark.kind, layer.mark.was, str(function), sum(p.numel() for p in function.parameters()))
        for layer, function in zip(converted, functions, strict=True)
    )


def convert_as_described(outline: Outline, described: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> None:
    """Converts the layers that a configuration names: for each kind, what :func:`recipe.describe` said by name."""
    wanted = {name: description for kind in KINDS for name, description in described[kind].items()}
    libraries = in_use(outline)
    sites = {site.name: site for site in _attention_sites(outline, libraries)}
    for name in described["output"]:
        sites[name] = Site(name, outline.modules[name], "output", HEADS)
    missing = [name for name in wanted if name not in sites]
    if missing:
        raise ValueError(
            f"multimax: expected {', '.join(map(repr, missing))} in {type(outline.model).__name__}, as the "
            "configuration says, got no such layer that can be converted; load it as the class it was saved from"
        )
    reasons = {name: sites[name].why_not or heads.why_not(sites[name].module) for name in described["output"]}
    reasons |= {name: sites[name].why_not for name in described["attention"]}
    for name, reason in reasons.items():
        if reason:
            raise ValueError(f"multimax: expected a layer that can be converted, got {name!r}: {reason}")
    functions = [from_description(description) for description in wanted.values()]
    _apply(outline, libraries, [sites[name] for name in wanted], functions)


def _checked_where(where: object) -> tuple[str, ...]:
    kinds = (where,) if isinstance(where, str) else where
    known = (*KINDS, *ROLES)
    if isinstance(kinds, Collection) and not kinds:
        raise ValueError(f"multimax: expected where to be some of {', '.join(map(repr, known))}, got none")
    if not isinstance(kinds, Collection):
        raise TypeError(f"multimax: expected where to be some of {', '.join(map(repr, known))}, got {where!r}")
    for kind in kinds:
        checks.choice("where", kind, known)
    if "attention" in kinds and set(kinds) & set(ROLES):
        raise ValueError(f"multimax: expected where to name all attention or parts of it, got both in {where!r}")
    return tuple(kinds)


def _attach(outline: Outline, site: Site, function: nn.Module) -> Converted:
    device, dtype = _device_and_dtype(site.module, outline.model)
    if any(parameter.is_meta for parameter in function.parameters()):  # its values, like the model's, are still to come
        device = torch.device("meta")
    function.to(device=device, dtype=dtype).train(site.module.training)
    mark = Mark(site.converter, site.kind, class_name(site.module))
    set_mark(site.module, mark)  # first: it undoes what fails halfway
    module = converter(site.converter).attach(outline.model, site, function, mark)
    if module is not site.module:
        set_mark(site.module, None)
        set_mark(module, mark)
        outline.modules[site.name] = module
    return Converted(site.name, module, mark)


def revert_(model: nn.Module) -> Report:
    """Undoes :func:`convert_`: softmax again in every layer that it converted, in place.

    Args:
        model: a converted model, or one that contains converted modules.

    Returns:
        The layers that have softmax again.

    Example:
        >>> import torch, multimax
        >>> model = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        >>> report = multimax.convert_(model)
        >>> len(multimax.revert_(model))
        1
        >>> type(model.self_attn)
        <class 'torch.nn.modules.activation.MultiheadAttention'>
    """
    checks.module(model)
    outline = Outline(model)
    roots = [(name, module) for name, module in outline.modules.items() if module.__dict__.get(ROOT)]
    if not roots and marked_in(outline):
        raise ValueError(
            "multimax: expected the whole model that was converted, got a part of it; revert the whole, and convert it "
            "again with layers= or filter_fn="
        )
    if not roots:
        raise ValueError("multimax: expected a converted model, got one without converted layers")
    for name, module, mark in marked_in(outline):
        if not converter(mark.converter).keeps_class and has_other_forward(module):
            raise ValueError(
                f"multimax: expected {name!r} with the forward of its class, got one of its own; take accelerate's "
                "hooks back first, with accelerate.hooks.remove_hook_from_submodules(model)"
            )
    return Report(tuple(layer for name, root in roots for layer in _revert_root(root, name)), done="reverted")


def _revert_root(model: nn.Module, prefix: str) -> list[Layer]:
    """Reverts the module that convert_ was given."""
    outline = Outline(model)
    verification.forget(outline)
    forbid_softmax(model)
    heads.forget_heads(model)
    adapters.forget_adapters(model)
    layers = []
    for name, module, mark in marked_in(outline):
        function = inner(module)  # none, if it was attached only halfway
        now = mark.was if function is None else name_of(function)
        converter(mark.converter).detach(model, name, module)
        set_mark(module, None)
        layers.append(Layer(f"{prefix}.{name}".strip("."), mark.kind, now, mark.was))
    del model.__dict__[ROOT]
    for library in in_use(outline):
        library.finish(outline, [])
    return layers
