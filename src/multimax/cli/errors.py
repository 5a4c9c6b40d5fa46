"""Errors that are the user's to mend, and how others become such."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager

PACKAGES = ("transformers", "accelerate", "safetensors", "tokenizers", "sacrebleu", "sklearn", "scipy", "PIL", "tqdm")


class Refused(Exception):
    """An error that is the user's to mend: shown without a traceback."""


@contextmanager
def refusing() -> Iterator[None]:
    """Turns errors with words for the user into :class:`Refused`, with the same words."""
    try:
        yield
    except BrokenPipeError:  # of the one who reads what is printed
        raise
    except (ValueError, TypeError, OSError, RuntimeError, ImportError) as error:
        if str(error).startswith("multimax:"):
            raise Refused(str(error)) from error
        if isinstance(error, OSError):
            raise Refused(f"multimax: expected files that can be read and written, got: {error}") from error
        raise


def need_packages() -> None:
    """Refuses where a package of the experiments is missing."""
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
