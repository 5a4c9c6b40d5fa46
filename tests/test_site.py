"""What `make docs` refuses: a site that needs a network, and one whose links lead nowhere."""

import types
from pathlib import Path

import pytest

pytest.importorskip("mkdocs", reason="no mkdocs; make docs installs it")

from mkdocs.exceptions import PluginError

import site_hooks

PAGES = {
    "index.html": '<a href="faq/#sigma-falls">questions</a> <img src="figures/a.svg"> <a href="https://example.org/x">',
    "faq/index.html": '<h2 id="sigma-falls">Sigma falls</h2> <a href="..">home</a> <a href="#sigma-falls">here</a>',
    "figures/a.svg": "<svg/>",
    "404.html": '<a href="/faq/">from the root of a server</a>',
}


def site(folder: Path, pages: dict[str, str]) -> types.SimpleNamespace:
    for name, text in pages.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return types.SimpleNamespace(site_dir=str(folder))


def test_links_that_lead_somewhere(tmp_path: Path) -> None:
    site_hooks.on_post_build(site(tmp_path, PAGES))


@pytest.mark.parametrize(
    ("page", "old", "new"),
    [
        ("index.html", "faq/#", "fa/#"),
        ("index.html", "#sigma-falls", "#sigma-fails"),
        ("index.html", "a.svg", "b.svg"),
        ("faq/index.html", '"#sigma-falls"', '"#sigma"'),
    ],
)
def test_links_that_lead_nowhere(tmp_path: Path, page: str, old: str, new: str) -> None:
    changed = PAGES | {page: PAGES[page].replace(old, new)}
    with pytest.raises(PluginError, match=f"links that lead nowhere:\n{page}: ") as error:
        site_hooks.on_post_build(site(tmp_path, changed))
    assert str(error.value).count("\n") == 1


@pytest.mark.parametrize(
    "text",
    [
        '<script src="https://example.org/a.js"></script>',
        '<img alt="" src="//example.org/a.png">',
        '<link rel="stylesheet" href="https://example.org/a.css">',
    ],
)
def test_pages_that_need_a_network(text: str) -> None:
    page = types.SimpleNamespace(file=types.SimpleNamespace(src_uri="page.md"))
    with pytest.raises(PluginError, match=r"page\.md: fetches from elsewhere"):
        site_hooks.on_post_page(text, page)
    link = '<a href="https://example.org/">for readers</a>'
    assert site_hooks.on_post_page(link, page) == link


def test_formulas_become_mathml() -> None:
    content = '<p>With <span class="arithmatex">\\(t_b &lt; 1\\)</span></p>'
    shown = site_hooks.on_page_content(content, types.SimpleNamespace(toc=[]))
    assert "<math" in shown
    assert "arithmatex" not in shown


def test_the_explorer_is_linked_from_its_page() -> None:
    text = (site_hooks.ROOT / "docs" / "explorer.md").read_text(encoding="utf-8")
    page = types.SimpleNamespace(file=types.SimpleNamespace(src_uri="explorer.md"))
    config = types.SimpleNamespace(repo_url=None)
    assert site_hooks.on_page_markdown(text, page, config).count("](explorer.html)") == 2
    with pytest.raises(PluginError, match="expected its preview once, got it 0 times"):
        site_hooks.on_page_markdown("nothing", page, config)
