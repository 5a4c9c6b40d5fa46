"""The explorer: a page in the browser that shows what MultiMax does as you move its parameters, by `multimax explore`.

The page, page.html, is one file that computes everything itself, in JavaScript. It contains the layers' parameters as
JSON, so the file in the package works as it is; whenever it is served or saved, :func:`page` fills in those of
:data:`multimax.presets`. After a change there, ``multimax explore --save src/multimax/plots/explorer/page.html``.
"""

import json
import re
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from multimax.ops import checks
from multimax.ops.presets import presets

FILE = Path(__file__).with_name("page.html")
HOST = "127.0.0.1"  # nobody else needs to see it
PORT = 8317  # always the same, so that a saved link still works tomorrow
TITLES = {"deit_small": "DeiT-small", "wikitext103_lm": "WikiText-103 LM"}
START, END = '<script type="application/json" id="presets">\n', "\n</script>"


def page() -> str:
    """The page, with the parameters of :data:`multimax.presets` in it.

    Example:
        >>> from multimax.plots import explorer
        >>> explorer.page().splitlines()[0]
        '<!doctype html>'
    """
    before, start, rest = FILE.read_text(encoding="utf-8").partition(START)
    _, end, after = rest.partition(END)
    tables = []
    for name, layers in presets.items():
        rows = ",\n".join(f"  {json.dumps(layer)}" for layer in layers)
        tables.append(f'{json.dumps(name)}: {{"title": {json.dumps(TITLES[name])}, "layers": [\n{rows}\n]}}')
    return before + start + "{" + ",\n".join(tables) + "}" + end + after


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
