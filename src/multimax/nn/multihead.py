"""torch's multi-head attention with another reweighting function instead of softmax."""

from functools import partial

import torch
from torch import Tensor, nn

from multimax.nn import nested
from multimax.nn.fast_path import OffFastPath, keep_off
from multimax.ops import checks
from multimax.reweighting import attention, module
from multimax.reweighting.high_pass import AttnScale
from multimax.reweighting.layer import MultiMax, state_as_softmax
from multimax.reweighting.registry import Reweighter, in_use

ADDED = ("multimax", "reweight", "attn_scale")  # the parts that torch's module does not have


class MultiheadAttention(OffFastPath):
    r"""``torch.nn.MultiheadAttention`` with MultiMax, or another reweighting function, instead of softmax.

    .. math:: \operatorname{head}_h = \phi(Q_h K_h^\top / \sqrt{d})\, V_h

    Signature, defaults, behaviour and state_dict keys are torch's, with two more keys: ``multimax.coefs`` and
    ``multimax.knots``. A state_dict of torch's module loads, and then gives torch's results: zero coefs is softmax. A
    query for which no key is left gets zeros, where torch has NaN.

    The parameters of another function, if it has any, are under ``reweight.``, and AttnScale's under ``attn_scale.``;
    loading a state_dict of torch's module leaves both at their initial values.

    It can be used in ``nn.TransformerEncoderLayer``, ``nn.TransformerDecoderLayer`` and ``nn.Transformer``, in training
    and in evaluation. Their fast path for evaluation, which reads the weights and calls no attention module, is not
    taken by a layer with this module: a forward hook of its own sees to that, and where somebody removes it, the fast
    path raises an error. Nested tensors, which ``nn.TransformerEncoder`` makes of padded batches in evaluation, are
    padded here and made anew.

    Args:
        embed_dim: as in torch, like everything that is not listed here.
        num_heads: likewise.
        order: order of sigma, see :class:`MultiMax`.
        terms: terms of sigma, see :class:`MultiMax`.
        per_head: separate parameters for each head, not one set for all.
        init: initial parameters, see :class:`MultiMax`.
        monotone: keep sigma non-decreasing, see :class:`MultiMax`.
        reweight: the function: "multimax", another name of :mod:`multimax.reweighting` with its default options, or a
            module of it, such as ``reweighting.TopK(8)``. The five options above are for MultiMax.
        attn_scale: scale the high-pass part of each head's weights by a trained factor, see
            :class:`multimax.oversmoothing.AttnScale`. The weights are then computed in blocks, not fused.

    Shape:
        As in torch.

    Example:
        >>> import torch, multimax
        >>> attention = multimax.MultiheadAttention(64, 4, batch_first=True)
        >>> x = torch.randn(2, 10, 64)
        >>> out, weights = attention(x, x, x)
        >>> out.shape, weights.shape
        (torch.Size([2, 10, 64]), torch.Size([2, 10, 10]))
    """

    softmax_if_missing = True
    any_module = False  # whether the function is a module of the user's

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        order: int = 2,
        terms: str = "both",
        per_head: bool = False,
        init: str | tuple[Tensor, Tensor] = "paper",
        monotone: bool = False,
        reweight: str | nn.Module = "multimax",
        attn_scale: bool = False,
    ) -> None:
        super().__init__(
            embed_dim,
            num_heads,
            dropout,
            bias,
            add_bias_kv,
            add_zero_attn,
            kdim,
            vdim,
            batch_first,
            device=device,
            dtype=dtype,
        )
        checks.flag("per_head", per_head)
        checks.flag("attn_scale", attn_scale)
        keep_off(self)
        if isinstance(reweight, str) and reweight == "multimax":
            self.multimax = MultiMax(
                order,
                terms=terms,
                heads=num_heads if per_head else None,
                init=init,
                monotone=monotone,
                device=device,
                dtype=dtype,
            )
        else:
            defaults = (order, terms, per_head, init, monotone) == (2, "both", False, "paper", False)
            checks.reweight_module(reweight, defaults)
            self.any_module = not isinstance(reweight, str | Reweighter)
            self.reweight = (module(reweight) if isinstance(reweight, str) else reweight).to(device=device, dtype=dtype)
        self.attn_scale = AttnScale(num_heads).to(device=device, dtype=dtype) if attn_scale else None

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args: object) -> None:
        """A state_dict of torch's module has no parameters of the function: then MultiMax becomes softmax, and
        everything else stays as it is."""
        state = self.state_dict()
        added = {name: t.detach().clone() for name, t in state.items() if name.split(".")[0] in ADDED}
        if "multimax" in self._modules:
            added |= {f"multimax.{name}": t for name, t in state_as_softmax(self.multimax).items()}
        whole = all(f"{prefix}{name}" in state_dict for name in state if name not in added)  # a part says nothing else
        known = tuple(f"{prefix}{child}." for child in ADDED)  # whatever wraps the function there
        if self.softmax_if_missing and whole and not any(key.startswith(known) for key in state_dict):
            state_dict.update({f"{prefix}{name}": t for name, t in added.items()})
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _batch_first(self, x: Tensor) -> Tensor:
        """(B, L, E), from a layout that torch's module takes."""
        if x.dim() == 2:
            return x[None]
        return x if self.batch_first else x.transpose(0, 1)

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """Query, key and value, (B, L, E) each, by their projections."""
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        if self.in_proj_weight is None:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        elif query is key is value:
            packed: tuple[Tensor, ...] = nn.functional.linear(query, self.in_proj_weight, self.in_proj_bias).chunk(
                3, -1
            )
            return packed
        else:
            weights = self.in_proj_weight.chunk(3)
        triples = zip((query, key, value), weights, biases, strict=True)
        return tuple(nn.functional.linear(t, weight, bias) for t, weight, bias in triples)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As in torch; masks in torch's sense here: True, or -inf, where a key takes *no* part.

        With ``need_weights`` the weights are computed as a matrix; without, as in
        :func:`multimax.reweighting.attention`.
        """
        checks.causal_hint(is_causal, attn_mask)
        if query.is_nested or key.is_nested or value.is_nested:
            checks.nested_inputs(query, key, value, self.batch_first, attn_mask is None and key_padding_mask is None)
            dense, padding = nested.padded(query)
            found = self.forward(dense, dense, dense, padding, need_weights, None, average_attn_weights)
            return nested.packed(found[0], padding), found[1]
        checks.module_inputs(query, key, value, 0 if self.batch_first else 1)
        batched = query.dim() == 3
        q = self._batch_first(query)
        k = q if key is query else self._batch_first(key)  # tensors that are the same stay the same
        v = q if value is query else k if value is key else self._batch_first(value)
        heads, queries, keys = self.num_heads, q.shape[1], k.shape[1]
        if attn_mask is not None:
            checks.module_mask("attn_mask", attn_mask, (queries, keys), (len(q) * heads, queries, keys))
        if key_padding_mask is not None:
            checks.module_mask("key_padding_mask", key_padding_mask, (len(q), keys) if batched else (keys,))
        q, k, v = self._project(q, k, v)  # (B, L, E)
        b = q.shape[0]
        extra = 0
        if self.bias_k is not None and self.bias_v is not None:
            k = torch.cat([k, self.bias_k.expand(b, 1, -1)], 1)
            v = torch.cat([v, self.bias_v.expand(b, 1, -1)], 1)
            extra += 1
        if self.add_zero_attn:
            k, v = (torch.cat([t, t.new_zeros(b, 1, t.shape[-1])], 1) for t in (k, v))
            extra += 1
        q, k, v = (t.unflatten(-1, (heads, self.head_dim)).transpose(1, 2) for t in (q, k, v))  # (B, H, L, D)
        causal = is_causal and key_padding_mask is None and not need_weights and not extra
        mask = None if causal else self._mask(attn_mask, key_padding_mask, q, keys, extra)
        dropout_p = self.dropout if self.training else 0.0
        function: nn.Module = self.reweight if hasattr(self, "reweight") else self.multimax
        compute = partial(
            attention,
            q,
            k,
            v,
            reweight=function if self.any_module else in_use(function),
            attn_mask=mask,
            dropout_p=dropout_p,
            is_causal=causal,
            attn_scale=None if self.attn_scale is None else self.attn_scale(None),
        )
        weights: Tensor | None = None
        if need_weights:
            out, weights = compute(return_weights=True)
        else:
            out = compute()
        out = self.out_proj(out.transpose(1, 2).flatten(2))  # (B, Lq, E)
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        if not batched:
            return out[0], None if weights is None else weights[0]
        return (out if self.batch_first else out.transpose(0, 1)), weights

    def _mask(
        self, attn_mask: Tensor | None, key_padding_mask: Tensor | None, q: Tensor, keys: int, extra: int
    ) -> Tensor | None:
        """Both masks, for q of (B, H, Lq, D), as one that broadcasts to (B, H, Lq, Lk): boolean in SDPA's sense, or
        numbers."""
        b, heads = q.shape[:2]
        masks = []
        if attn_mask is not None:
            masks.append(attn_mask if attn_mask.dim() == 2 else attn_mask.unflatten(0, (b, heads)))
        if key_padding_mask is not None:
            masks.append(key_padding_mask.reshape(b, 1, 1, keys))
        if not masks:
            return None
        if extra:  # what torch adds to the keys is never masked
            masks = [nn.functional.pad(mask, (0, extra)) for mask in masks]
        if all(mask.dtype == torch.bool for mask in masks):
            return ~(masks[0] if len(masks) == 1 else masks[0] | masks[1])
        zero = torch.zeros((), dtype=q.dtype, device=q.device)
        numbers = [torch.where(m, -torch.inf, zero) if m.dtype == torch.bool else m.to(q.dtype) for m in masks]
        return numbers[0] if len(numbers) == 1 else numbers[0] + numbers[1]
