"""Whether torch's bfloat16 products work on this machine.

Some virtual machines announce AMX but cannot use it: oneDNN takes its AMX path, and torch's bfloat16 products (matmul,
scaled_dot_product_attention) die with SIGILL and take the whole process with them. So a child process tries one. This
file needs only the standard library: it can also be loaded by its path, before torch is imported.
"""

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Literal, NamedTuple

VARIABLE, LIMIT = "ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16"  # everything oneDNN has below AMX
COMMAND_VARIABLE = "MULTIMAX_PROBE_COMMAND"  # a command to run instead, such as one that dies
# large enough for oneDNN to choose AMX
PRODUCT = "import torch; torch.randn(2048, 512).bfloat16() @ torch.randn(512, 512).bfloat16()"
SECONDS = 120


class Products(NamedTuple):
    """What :func:`bfloat16_products` found.

    Args:
        outcome: "work"; "die", with SIGILL; or "fail" for any other reason.
        error: what the child printed if it failed.
    """

    outcome: Literal["work", "die", "fail"]
    error: str = ""

    @property
    def remedy(self) -> dict[str, str]:
        """The environment variables to set before torch's first product; none unless products die."""
        return {VARIABLE: LIMIT} if self.outcome == "die" else {}

    def __str__(self) -> str:
        """The words that follow "bf16 products:"."""
        if self.outcome == "die":
            return f"die with SIGILL; set {VARIABLE}={LIMIT}"
        return f"fail: {self.error}" if self.outcome == "fail" else "work"


def bfloat16_products(command: Sequence[str] | None = None) -> Products:
    """Tries one in a child process, which takes as long as importing torch.

    Args:
        command: of the child; unless given, the words of the environment variable ``MULTIMAX_PROBE_COMMAND``, or else
            a product in this Python.

    Example:
        >>> from multimax.ops.probe import bfloat16_products
        >>> died = bfloat16_products(["sh", "-c", "kill -ILL $$"])
        >>> print(f"bf16 products: {died}")
        bf16 products: die with SIGILL; set ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16
        >>> died.remedy
        {'ONEDNN_MAX_CPU_ISA': 'AVX512_CORE_FP16'}
    """
    if command is None:
        command = shlex.split(os.environ.get(COMMAND_VARIABLE, "")) or (sys.executable, "-c", PRODUCT)
    try:
        child = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Products("fail", str(error))
    if child.returncode == -signal.SIGILL:
        return Products("die")
    if child.returncode:
        lines = child.stderr.strip().splitlines()
        return Products("fail", lines[-1].strip() if lines else f"exit code {child.returncode}")
    return Products("work")
