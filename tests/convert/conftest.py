"""What all tests of conversion share."""

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """No messages and bars of transformers, where a test has imported it: timm's tests must not."""
    transformers = sys.modules.get("transformers")
    if transformers is None:
        yield
        return
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    yield
    transformers.logging.set_verbosity(level)
