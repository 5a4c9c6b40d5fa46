"""Makes README.md fit for the package's page, where nothing relative works and nobody has a clone, and names the
project's addresses.

    python tools/package_page.py https://github.com/OWNER/NAME https://OWNER.github.io/NAME/ --ref v0.1.0

Changes README.md and pyproject.toml in place: for the workflow that builds the wheels, not to be committed.
"""

import argparse
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAPER = re.compile(r"^Paper = .*$", re.MULTILINE)
FROM_SOURCE = """\
    pip install --no-build-isolation .

With torch 2.10 or later in the environment and a C++ compiler; or from a wheel, which needs no compiler:
"""
FROM_INDEX = """\
    pip install multimax

With torch 2.10 or later. On Linux the package brings its kernels; where they are missing it uses plain PyTorch:
"""


def absolute(text: str, repository: str, ref: str) -> str:
    """A document with addresses for its links to files, and with those of the files themselves for its pictures."""

    def address(match: re.Match[str]) -> str:
        picture, words, target = match.groups()
        if re.match(r"[a-z]+:|#", target):
            return match[0]
        return f"{picture}[{words}]({repository.rstrip('/')}/{'raw' if picture else 'blob'}/{ref}/{target})"

    return re.sub(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)", address, text)


def installed_by_name(text: str) -> str:
    """The README with the command for who has found the package on an index, and has no clone."""
    if text.count(FROM_SOURCE) != 1:
        raise SystemExit("package_page: expected the README to say once how the package is installed from source")
    return text.replace(FROM_SOURCE, FROM_INDEX)


def addressed(text: str, repository: str, site: str) -> str:
    """pyproject.toml with the addresses of repository and site beside the paper's."""
    addresses = {
        "Repository": repository,
        "Issues": f"{repository.rstrip('/')}/issues",
        "Documentation": site,
        "Changelog": f"{site.rstrip('/')}/changelog/",
    }
    lines = "\n".join(f'{name} = "{address}"' for name, address in addresses.items())
    found, count = PAPER.subn(lambda paper: f"{paper[0]}\n{lines}", text)
    if count != 1:
        raise SystemExit("package_page: expected one address of the paper in pyproject.toml")
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("repository")
    parser.add_argument("site")
    parser.add_argument("--ref", default="main", help="the tag or branch that links lead to; main unless given")
    options = parser.parse_args()
    readme, project = ROOT / "README.md", ROOT / "pyproject.toml"
    new = addressed(project.read_text(encoding="utf-8"), options.repository, options.site)
    project.write_text(new, encoding="utf-8")
    text = installed_by_name(readme.read_text(encoding="utf-8"))
    readme.write_text(absolute(text, options.repository, options.ref), encoding="utf-8")
