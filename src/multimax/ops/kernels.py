"""The compiled library: loading it, why it cannot be used, and the instruction set that it uses."""

import os
from pathlib import Path

import torch

from multimax.ops import checks

BUILD_COMMAND = "pip install --no-build-isolation ."
ISAS = ("baseline", "avx2", "avx512", "avx512_bf16")
ISA_VARIABLE = "MULTIMAX_ISA"
# With both variables set, operators on CPU tensors belong to Triton's interpreter, for this whole process.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and os.environ.get("MULTIMAX_IMPL") == "triton"


class Unavailable(str):
    """A reason that a user should hear of even where another implementation can run: something can be done about it."""


def _load() -> str | None:
    """Loads the library. Returns why it cannot be used, or None."""
    if INTERPRETED:
        return "TRITON_INTERPRET and MULTIMAX_IMPL=triton give CPU tensors to Triton's interpreter"
    path = Path(__file__).with_name("_kernels.abi3.so")
    if not path.exists():
        return f"the CPU kernels were not built; with torch installed, build them with `{BUILD_COMMAND}`"
    try:
        torch.ops.load_library(path)
    except OSError as error:
        why = error.__cause__ or error  # torch wraps the system's message
        return (
            f"the CPU kernels were built but could not be loaded with torch {torch.__version__} ({why}); "
            f"build them again with `{BUILD_COMMAND}`"
        )
    if torch.ops.multimax.use_isa(-1) < 0:
        return f"the CPU kernels were built for another machine's instructions; build them again with `{BUILD_COMMAND}`"
    return None


def use_isa(name: str | None = None) -> str:
    """The instruction set that the CPU kernels use, after changing it if a name is given."""
    if name is None:
        return ISAS[torch.ops.multimax.use_isa(-1)]
    checks.instruction_set(name, ISAS)
    try:
        return ISAS[torch.ops.multimax.use_isa(ISAS.index(name))]
    except RuntimeError:
        raise RuntimeError(f"multimax: this machine or this build has no {name} kernels") from None


def why_not(device: torch.device, unable: str | None = None) -> str | None:
    """Why the kernels cannot run a call on that device; ``unable`` is the reason for this call in particular."""
    if torch.autograd.forward_ad._current_level >= 0:  # torch.func.jvp opens such a level too
        return "it has no forward-mode derivatives; use 'auto'"
    if device.type != "cpu":
        return f"the input is on {device}; use 'auto' or 'reference'"
    return unable or unavailable


_reason = _load()
# nobody has to hear of what they asked for
unavailable = _reason if _reason is None or INTERPRETED else Unavailable(_reason)

if unavailable is None and os.environ.get(ISA_VARIABLE):
    use_isa(os.environ[ISA_VARIABLE])
