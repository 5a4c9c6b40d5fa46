"""The documents: every link leads somewhere, every public name has an entry, every page is in the navigation."""

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

import package_page
import site_notebook as notebook
from places import ROOT

DOCS = ROOT / "docs"
NOTEBOOK = DOCS / "start.ipynb"
FILES = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")),
    *sorted(DOCS.rglob("*.md")),
    NOTEBOOK,
]
MODULES = ("", ".reweighting", ".metrics", ".plots", ".training", ".oversmoothing", ".convert", ".nn")
# pages of the site that are made from other files, by tools/site_hooks.py
MADE = {"index.md", "start.md", "changelog.md", "contributing.md"}


def text_of(path: Path) -> str:
    """What readers see as text: without code."""
    if path.suffix == ".ipynb":
        text = "\n\n".join("".join(cell["source"]) for cell in notebook.read(path) if cell["cell_type"] == "markdown")
    else:
        text = path.read_text(encoding="utf-8")
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(path: Path) -> set[str]:
    """Of a page's headings, as GitHub makes them; the site does the same."""
    found: list[str] = []
    for heading in re.findall(r"^#+ (.+)$", text_of(path), re.MULTILINE):
        shown = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        slug = re.sub(r"[^\w\- ]", "", shown.strip().lower()).replace(" ", "-")
        found.append(slug if slug not in found else f"{slug}-{found.count(slug)}")
    return set(found)


def links(path: Path) -> Iterator[str]:
    text = re.sub(r"`[^`\n]*`", "", text_of(path))
    yield from re.findall(r"\]\(([^)\s]+)\)", text)
    yield from re.findall(r'(?:src|srcset|href)="([^"]+)"', text)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(path: Path) -> None:
    for link in links(path):
        if re.match(r"(https?|mailto):", link):
            continue
        place, _, anchor = link.partition("#")
        target = (path.parent / place).resolve() if place else path
        assert target.exists(), f"{link}: no such file"
        assert target.is_relative_to(ROOT), f"{link}: leads out of the repository"
        assert not anchor or anchor in anchors(target), f"{link}: no such heading"


def named(full_name: str) -> object:
    module, _, name = full_name.rpartition(".")
    return getattr(importlib.import_module(module), name)


def entries() -> dict[str, object]:
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted((DOCS / "api").glob("*.md")))
    names = re.findall(r"^::: (\S+)$", text, re.MULTILINE)
    assert len(names) == len(set(names)), "an entry is there twice"
    files = [name for name in names if (ROOT / "src" / name.replace(".", "/")).with_suffix(".py").exists()]
    assert not files, "the site would show these files: name what is in them, as in multimax.metrics.collect.collect"
    return {name: named(name) for name in names}


@pytest.mark.parametrize("module", [f"multimax{name}" for name in MODULES])
def test_every_public_name_has_an_entry(module: str) -> None:
    documented = entries()
    objects = {id(value) for value in documented.values()}
    public = importlib.import_module(module).__all__
    assert public
    for name in public:
        value = named(f"{module}.{name}")
        if inspect.ismodule(value):  # whose names have entries of their own
            assert f"{module}.{name}" in {f"multimax{other}" for other in MODULES}
        else:
            assert f"{module}.{name}" in documented or id(value) in objects, f"{name} has no entry in docs/api"


def test_the_notebook_prints_what_it_shows() -> None:
    cells = notebook.read(NOTEBOOK)
    assert notebook.run(cells) == [notebook.printed(cell) for cell in cells], "run python tools/site_notebook.py"


def test_every_page_is_in_the_navigation() -> None:
    class Loader(yaml.SafeLoader):
        """mkdocs.yml has values from the environment."""

    Loader.add_constructor("!ENV", lambda loader, node: None)
    settings = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader)

    def pages(entry: object) -> Iterator[str]:
        if isinstance(entry, str):
            yield entry
        for part in entry.values() if isinstance(entry, dict) else entry if isinstance(entry, list) else ():
            yield from pages(part)

    listed = list(pages(settings["nav"]))
    assert len(listed) == len(set(listed))
    assert set(listed) == {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")} | MADE


def test_the_package_page_has_no_relative_links() -> None:
    text = package_page.absolute((ROOT / "README.md").read_text(encoding="utf-8"), "https://host/a/b", "v1")
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    assert all(target.startswith("https://") for target in targets)
    assert "](https://host/a/b/raw/v1/docs/figures/readme.svg)" in text
    assert "](https://host/a/b/blob/v1/docs/install.md)" in text
    assert "](https://proceedings.mlr.press/v235/zhou24g.html)" in text
    project = package_page.addressed((ROOT / "pyproject.toml").read_text(), "https://host/a/b", "https://site/b/")
    for line in (
        'Repository = "https://host/a/b"',
        'Issues = "https://host/a/b/issues"',
        'Documentation = "https://site/b/"',
        'Changelog = "https://site/b/changelog/"',
    ):
        assert f"\n{line}\n" in project
    assert "example.org" not in project
    assert "Repository" not in (ROOT / "pyproject.toml").read_text()  # no address that leads nowhere
    page = package_page.installed_by_name((ROOT / "README.md").read_text(encoding="utf-8"))
    assert "    pip install multimax\n" in page
    assert "--no-build-isolation" not in page


def test_the_readme_is_short_and_begins_with_what_it_is() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 170
    assert any("pip install" in line for line in lines[:12])
