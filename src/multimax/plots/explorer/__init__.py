"""The explorer: a page in the browser that shows what MultiMax does as you move its parameters, by `multimax explore`.

The page is one file that computes everything itself, in JavaScript: :func:`page` puts it together from page.html,
style.css, the files of script/, one for each subject, and the layers of :data:`multimax.presets`.
"""

import base64
import hashlib
import html
import importlib.metadata
import json
import re
import sys
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from multimax.ops import checks
from multimax.ops.presets import presets

FOLDER = Path(__file__).parent
# in this order: each uses only what stands before it until the last one starts the page
SCRIPTS = (
    "numbers",
    "state",
    "tables",
    "files",
    "elements",
    "table",
    "sigma",
    "simplex",
    "trade_off",
    "layers",
    "pictures",
    "page",
)
HOST = "127.0.0.1"  # nobody else needs to see it
PORT = 8317  # always the same, so that a saved link still works tomorrow
TITLES = {"deit_small": "DeiT-small", "wikitext103_lm": "WikiText-103 LM"}
PAPER = "https://arxiv.org/abs/2406.01189"
PREVIEW = "figures/explorer.png"  # of the documentation, made by tools/explorer_preview.py; 1200 to 630
DESCRIPTION = (
    "Move the parameters of MultiMax and the scores, and see sigma, the weights, sparsity and multi-modality beside "
    "those of softmax, sparsemax, entmax and Ev-SoftMax. With the layers of the paper, or of your own model."
)
ICON = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 32 32"><rect width="32" height="32" rx="7" fill="#D55E00"/>'
    '<path d="M4 29C9 29 9 13 13 13s6-2 8-2 4-3 7-6" fill="none" stroke="#fff" stroke-width="3.4" '
    'stroke-linecap="round"/></svg>'
)


def _address(name: str) -> str | None:
    """An address of the project, as pyproject.toml names it: "Repository" or "Documentation"."""
    try:
        listed = importlib.metadata.metadata("multimax").get_all("Project-URL") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    addresses = dict(entry.split(", ", 1) for entry in listed)
    return addresses.get(name)


def _checked(name: str, address: str | None) -> str | None:
    if address is not None and not re.fullmatch(r"https?://[^\s\"'<>]+", address):
        raise ValueError(f"multimax: expected {name} to be an address such as https://example.org/, got {address!r}")
    return address


def _about(site: str | None) -> str:
    """What search engines, and programs that show a link, tell of the page."""
    properties = {"og:type": "website", "og:title": "MultiMax explorer", "og:description": DESCRIPTION}
    lines = [f'<meta name="description" content="{html.escape(DESCRIPTION)}">']
    if site is not None:
        site = site.rstrip("/") + "/"
        properties |= {"og:url": f"{site}explorer.html", "og:image": site + PREVIEW}
        properties |= {"og:image:alt": "The explorer: sigma of a layer, the simplex, sparsity and multi-modality"}
        lines.append(f'<link rel="canonical" href="{html.escape(site)}explorer.html">')
        lines.append('<meta name="twitter:card" content="summary_large_image">')
    lines += [f'<meta property="{name}" content="{html.escape(text)}">' for name, text in properties.items()]
    return "\n".join(lines)


def _links(repository: str | None, site: str | None) -> str:
    addresses = {"Paper": PAPER, "Documentation": site, "Repository": repository}
    return "\n      ".join(
        f'<a href="{html.escape(address)}" rel="noopener">{name}</a>' for name, address in addresses.items() if address
    )


def _tables() -> str:
    tables = []
    for name, layers in presets.items():
        rows = ",\n".join(f"  {json.dumps(layer)}" for layer in layers)
        tables.append(f'{json.dumps(name)}: {{"title": {json.dumps(TITLES[name])}, "layers": [\n{rows}\n]}}')
    return "{" + ",\n".join(tables) + "}"


def page(*, repository: str | None = None, site: str | None = None) -> str:
    """The page, as one file.

    Args:
        repository: the address that it links to; that of the package's metadata unless given, and no link without one.
        site: the address of the folder on the web that it is put in, as explorer.html, beside the documentation; that
            of the package's metadata unless given. Links copied from a page on a disk lead there, and the preview
            picture is named with it.

    Example:
        >>> from multimax.plots import explorer
        >>> explorer.page().splitlines()[0]
        '<!doctype html>'
    """
    repository = _checked("repository", _address("Repository") if repository is None else repository)
    site = _checked("site", _address("Documentation") if site is None else site)
    parts = ((FOLDER / "script" / f"{name}.js").read_text(encoding="utf-8") for name in SCRIPTS)
    script = '\n"use strict";\n\n' + "\n".join(parts)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    filled = {
        "policy": f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'",
        "icon": "data:image/svg+xml," + urllib.parse.quote(ICON),
        "about": _about(site),
        "style": (FOLDER / "style.css").read_text(encoding="utf-8").rstrip(),
        "links": _links(repository, site),
        "presets": _tables(),
        "script": script,
    }
    text = (FOLDER / "page.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda name: filled[name[1]], text)


def _is_local(host: str | None) -> bool:
    """Whether a request is for this machine itself. A page elsewhere may give its own name this machine's address, and
    would then read what is served here. The port may be another's, of a tunnel."""
    name = (host or HOST).rpartition(":")[0] if re.search(r":\d*$", host or "") else (host or HOST)
    return name.lower() in (HOST, "localhost")


class _Handler(BaseHTTPRequestHandler):
    """Serves the page and nothing else."""

    content: bytes

    def do_GET(self) -> None:
        """The page at its address, an error at all others, and for those who came by another name of this machine."""
        if not _is_local(self.headers.get("Host")):
            self.send_error(403, f"multimax: only for this machine itself, as {HOST} or localhost")
            return
        if self.path.partition("?")[0] != "/":
            self.send_error(404, "multimax: there is only one page, at /")
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(self.content)))
        self.end_headers()
        self.wfile.write(self.content)

    def log_message(self, format: str, *args: Any) -> None:
        """Logs no requests."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_port = False  # some versions of Python would let two servers share one port

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that closes the connection early is not an error; everything else is reported as usual."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


def server(port: int = PORT) -> ThreadingHTTPServer:
    """A server of the page, for this machine only, ready for ``serve_forever``.

    Args:
        port: 0 takes any free port.

    Example:
        >>> from multimax.plots import explorer
        >>> with explorer.server(port=0) as server:
        ...     server.server_address[0]
        '127.0.0.1'
    """
    port = checks.integer("port", port)
    if not 0 <= port <= 65535:
        raise ValueError(f"multimax: expected a port from 0 to 65535, got {port}")
    handler = type("Handler", (_Handler,), {"content": page().encode()})
    try:
        return _Server((HOST, port), handler)
    except OSError as error:
        raise OSError(
            f"multimax: expected a free port, got {port} ({error.strerror}); "
            "choose another with --port, or any free one with --port 0"
        ) from error
