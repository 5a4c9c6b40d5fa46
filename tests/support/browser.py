"""A real browser, as installed on the machine, for tests of pages."""

import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Watched:
    """A page that keeps what it should not do."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.said: list[str] = []
        self.requests: list[str] = []
        self.failed: list[str] = []
        page.on("console", lambda message: self.said.append(message.text))
        page.on("pageerror", lambda error: self.said.append(str(error)))
        page.context.on("request", lambda request: self.requests.append(request.url))
        page.context.on("requestfailed", lambda request: self.failed.append(request.url))

    def open(self, address: str) -> Any:
        self.page.goto("about:blank")  # else only the hash would change
        self.page.goto(address)
        return self.page


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="no playwright; pip install playwright")
    if CHROMIUM is None:
        pytest.skip("no browser on this machine; apt-get install chromium")
    # as root, which continuous integration is, Chromium does not start with its sandbox; it only opens our page
    alone = ["--no-sandbox"] if os.geteuid() == 0 else []
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM, args=alone)
        yield opened
        opened.close()
