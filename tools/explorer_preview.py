"""Takes the explorer's preview picture, which programs show beside a link to it, and the documents too.

    python tools/explorer_preview.py

Needs playwright and a browser of the machine's own: apt-get install chromium.
"""

import argparse
import os
import shutil
import tempfile
from pathlib import Path

from multimax.plots import explorer

OUT = Path(__file__).parents[1] / "docs" / explorer.PREVIEW
WIDTH, HEIGHT, SCALE = 1640, 861, 1.5  # the shape of previews, 1200 to 630
LAYOUT = """
.formula, .tools, .save, figcaption, .choice, .head p, #falls, .wide, footer { display: none !important; }
.side section:last-child .legend { display: none; }
.lead { max-width: none; }
main, header { max-width: none; }
"""


def take(out: Path) -> None:
    """Opens the page in a browser and takes the picture of its figures."""
    from playwright.sync_api import sync_playwright

    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        raise SystemExit("expected a browser on this machine, got none; apt-get install chromium")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        file = Path(folder) / "explorer.html"
        file.write_text(explorer.page(), encoding="utf-8")
        # as root Chromium does not start with its sandbox; it only opens our page
        alone = ["--no-sandbox"] if os.geteuid() == 0 else []
        opened = playwright.chromium.launch(executable_path=browser, args=alone)
        size = {"width": WIDTH, "height": HEIGHT}
        page = opened.new_page(viewport=size, device_scale_factor=SCALE, color_scheme="light")
        page.goto(file.as_uri())
        page.add_style_tag(content=LAYOUT)
        page.evaluate("renderFigures()")  # in their new widths
        page.screenshot(path=out)
        opened.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT, help=f"{OUT.name} of the documents unless given")
    take(parser.parse_args().out)
