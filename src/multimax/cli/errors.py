"""Errors that the user can fix, and how other errors become such."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager

PACKAGES = ("transformers", "accelerate", "safetensors", "tokenizers", "sacrebleu", "sklearn", "scipy", "PIL", "tqdm")


class Refused(Exception):
    """An error that the user can fix: shown without a traceback."""


@contextmanager
def refusing() -> Iterator[None]:
    """Turns errors that are written for the user into :class:`Refused`, with the same message."""
    try:
        yield
    except BrokenPipeError:  # the reader of what is printed has gone
        raise
    except (ValueError, TypeError, OSError, RuntimeError, ImportError) as error:
        if str(error).startswith("multimax:"):
            raise Refused(str(error)) from error
        if isinstance(error, OSError):
            raise Refused(f"multimax: expected files that can be read and written, got: {error}") from error
        raise


def need_packages() -> None:
    """Refuses if a package that the experiments need is missing."""
    missing = []
    for name in PACKAGES:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            missing.append(name)
    if missing:
        raise Refused(
            f"multimax: expected the packages of the experiments, got no {', '.join(missing)}; "
            'pip install "multimax[experiments]"'
        )
