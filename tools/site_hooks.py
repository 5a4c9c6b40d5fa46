"""What the site has beyond docs/*.md: hooks of mkdocs.

Pages of README, CHANGELOG and CONTRIBUTING, which stay where GitHub looks for them, and of the notebook; links that
lead out of docs/; formulas as MathML, so that nothing has to be fetched or run to see them; the explorer. And what a
site without errors must not have: pages that need a network, and links of the finished pages that lead nowhere.
"""

import html
import io
import os
import re
import sys
from collections.abc import Iterable
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from fontTools.ttLib import TTFont
from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Link, Navigation
from mkdocs.structure.pages import Page
from mkdocs.structure.toc import AnchorLink
from pymdownx.slugs import slugify

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(Path(__file__).parent))

import site_notebook  # noqa: E402

FROM_ROOT = {"index.md": "README.md", "changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}
NOTEBOOK = "start.ipynb"
PREVIEW = re.compile(r"!\[[^\]]*\]\(figures/explorer\.png\)")
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
INLINE = re.compile(r"\\\((.+?)\\\)")
FORMULA = re.compile(r'<(span|div) class="arithmatex">(.*?)</\1>', re.DOTALL)
# what a browser would fetch from elsewhere: scripts, pictures, styles; links for readers are fine
FETCHED = re.compile(r'<(?:script|img|iframe|source)\b[^>]*\bsrc="(?:https?:)?//|<link\b[^>]*stylesheet[^>]*"https?://')

# browsers set formulas well only in a font that is made for them, and Linux has none by default; ziamath brings one
FONT = "STIXTwoMath-Regular"
STYLE = f"""\
@font-face {{
  font-family: "Formulas";
  src: local("STIX Two Math"), url("{FONT}.woff2") format("woff2");
}}
math {{ font-family: "Formulas", "Cambria Math", math; font-size: 1.05em; }}
p:has(> math) {{ overflow-x: auto; overflow-y: hidden; }}
math[display="block"] {{ overflow-x: auto; overflow-y: hidden; padding: 0.3em 0; }}
/* a figure as narrow as a telephone could not be read: there it is moved sideways */
@media screen and (max-width: 700px) {{
  .md-typeset p:has(> img:only-child), .md-typeset p:has(> a:only-child > img) {{ overflow-x: auto; }}
  .md-typeset p > img:only-child, .md-typeset p > a:only-child > img {{ max-width: 720px; }}
}}
"""


def _font() -> bytes:
    folder = Path(find_spec("ziamath").origin).parent  # not imported: it would warn
    font, compressed = TTFont(folder / "fonts" / f"{FONT}.ttf"), io.BytesIO()
    font.flavor = "woff2"
    font.save(compressed)
    return compressed.getvalue()


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Anchors as on GitHub."""
    config.mdx_configs.setdefault("toc", {})["slugify"] = slugify(case="lower")
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The pages that are not in docs/, and the explorer."""
    from multimax.plots import explorer

    for page, source in FROM_ROOT.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    text = site_notebook.as_markdown(site_notebook.read(ROOT / "docs" / NOTEBOOK))
    files.append(File.generated(config, "start.md", content=text))
    files.append(File.generated(config, f"assets/{FONT}.woff2", content=_font()))
    files.append(File.generated(config, "assets/formulas.css", content=STYLE))
    addresses = {"site": config.site_url or None, "repository": config.repo_url or None}
    files.append(File.generated(config, "explorer.html", content=explorer.page(**addresses)))
    return files


def on_nav(nav: Navigation, **_: Any) -> Navigation:
    """With the explorer, which is no page of the site's own."""
    nav.items.append(Link("Explorer", "explorer.html"))
    return nav


def _relinked(where: str, repository: str, match: re.Match[str]) -> str:
    """A link of the repository as one of the site."""
    picture, text, target = match.groups()
    if re.match(r"[a-z]+:|#", target):
        return match[0]
    path, hash_, anchor = target.partition("#")
    source = FROM_ROOT.get(where)
    folder = Path(".") if source else Path("docs") / Path(where).parent
    path = os.path.normpath(folder / path)
    pages = {of: page for page, of in FROM_ROOT.items()} | {f"docs/{NOTEBOOK}": "start.md"}
    if path in pages and (where, path) != ("start.md", f"docs/{NOTEBOOK}"):
        path = f"docs/{pages[path]}"
    elif not path.startswith("docs/") or (ROOT / path).is_dir():
        return f"[{text}]({repository}/blob/main/{path})" if repository else text
    return f"{picture}[{text}]({os.path.relpath(path, Path('docs') / Path(where).parent)}{hash_}{anchor})"


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, **_: Any) -> str:
    """Links to files that the site has under another name, or that only the repository has."""
    repository = (config.repo_url or "").rstrip("/")
    markdown = LINK.sub(lambda match: _relinked(page.file.src_uri, repository, match), markdown)
    if page.file.src_uri == "explorer.md":  # the explorer itself is on the site alone
        linked = r"[Open the explorer](explorer.html){ .md-button .md-button--primary }\n\n[\g<0>](explorer.html)"
        markdown, count = PREVIEW.subn(linked, markdown)
        if count != 1:
            raise PluginError(f"{page.file.src_uri}: expected its preview once, got it {count} times")
    return markdown


def _mathml(match: re.Match[str]) -> str:
    formula = html.unescape(match[2]).strip()
    display = "block" if formula.startswith("\\[") else "inline"
    return convert(formula[2:-2].strip(), display=display)


def _set_titles(entries: Iterable[AnchorLink]) -> None:
    for entry in entries:
        entry.title = INLINE.sub(lambda match: convert(html.unescape(match[1])), entry.title)
        _set_titles(entry.children)


def on_page_content(content: str, page: Page, **_: Any) -> str:
    """Formulas as MathML, also in the table of contents."""
    _set_titles(page.toc)
    return FORMULA.sub(_mathml, content)


def on_post_page(output: str, page: Page, **_: Any) -> str:
    """Refuses a page that needs a network."""
    if found := FETCHED.search(output):
        raise PluginError(f"{page.file.src_uri}: fetches from elsewhere: {found[0]}...")
    return output


class _Page(HTMLParser):
    """A page's anchors, and where its links lead."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Gathers both."""
        for name, value in attrs:
            if name in ("id", "name"):
                self.anchors.add(value or "")
            elif name in ("href", "src"):
                self.links.append(value or "")


def on_post_build(config: MkDocsConfig) -> None:
    """Refuses a site with a link to what is not there: mkdocs itself checks neither docstrings nor written HTML."""
    site = Path(config.site_dir).resolve()
    pages = {path: _Page(path) for path in sorted(site.rglob("*.html"))}
    broken = []
    for path, page in pages.items():
        for link in page.links if path.name != "404.html" else ():  # that one's begin at the server's root
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            anchors = pages[target].anchors if target in pages else set()
            if not target.exists() or (parts.fragment and unquote(parts.fragment) not in anchors):
                broken.append(f"{path.relative_to(site)}: {link}")
    if broken:
        raise PluginError("links that lead nowhere:\n" + "\n".join(broken))
