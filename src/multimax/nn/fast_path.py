"""torch's encoder layers have a fast path in evaluation that reads the weights of their attention and computes softmax
with them, without calling it. This keeps them off it."""

from torch import Tensor, nn

HOOK = "multimax"


def no_fast_path(module: nn.Module, args: object, output: object) -> None:
    """A forward hook that does nothing: a layer with a hook anywhere in it calls its modules."""


def keep_off(attention: nn.Module) -> None:
    """Puts the hook there.

    Its key is a name, not a number as ``register_forward_hook`` gives: numbers begin anew in each process, and there a
    user's first hook would take the place of one that was unpickled.
    """
    attention._forward_hooks[HOOK] = no_fast_path  # type: ignore[index]


def let_on(attention: nn.Module) -> None:
    """Takes it away."""
    attention._forward_hooks.pop(HOOK, None)  # type: ignore[call-overload]


class OffFastPath(nn.MultiheadAttention):
    """Attention that is called or complains, whatever else is said of it: ``_qkv_same_embed_dim``, which tells torch's
    layers whether they may take their fast path, remains true where it is."""

    def __setstate__(self, state: dict[str, object]) -> None:
        """Of copies and pickles: the hook is there again, if it was removed."""
        super().__setstate__(state)
        keep_off(self)

    def merge_masks(
        self, attn_mask: Tensor | None, key_padding_mask: Tensor | None, query: Tensor
    ) -> tuple[Tensor | None, int | None]:
        """The fast path's last step before softmax, and of no use elsewhere."""
        raise RuntimeError(
            f"multimax: expected a call of {type(self).__name__}, got torch's fast path, which computes softmax: "
            "forward hooks were removed; make the module anew, or call torch.backends.mha.set_fastpath_enabled(False)"
        )
