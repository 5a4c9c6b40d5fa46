"""The command `multimax explore`: one page in the browser, to see what MultiMax does by moving it.

The page, page.html, is one file that computes everything itself, in JavaScript. The layers' parameters stand in it as
JSON, so that it works as it lies in the package; whenever it is served or saved, :func:`page` puts in those of
:mod:`multimax.presets` anew. After a change there, ``multimax explore --save src/multimax/explorer/page.html``.
"""

import argparse
import json
import sys
import threading
import webbrowser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from multimax.experiments.commands import Refused
from multimax.ops import checks
from multimax.ops.presets import presets

FILE = Path(__file__).with_name("page.html")
HOST = "127.0.0.1"  # nobody else needs to see it
PORT = 8317  # always the same, so that a saved link still leads there tomorrow
TITLES = {"deit_small": "DeiT-small", "wikitext103_lm": "WikiText-103 LM"}
START, END = '<script type="application/json" id="presets">\n', "\n</script>"
TEXT = """\
Opens an interactive page: sliders for the parameters of MultiMax and for an input, the layers of the paper, sigma, the
weights beside those of softmax, sparsemax, entmax-1.5 and Ev-SoftMax, the simplex, and the paper's M and S.

examples:
  multimax explore                          serve it on this machine, until Ctrl-C
  multimax explore --save explorer.html     one file, to keep or to send; it works without a network
"""


def page() -> str:
    """The page, with the parameters of :data:`multimax.presets` in it.

    Example:
        >>> from multimax import explorer
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


class _Handler(BaseHTTPRequestHandler):
    """Gives the page and nothing else."""

    content: bytes

    def do_GET(self) -> None:
        """The page under its own address, an error under all others."""
        if self.path.partition("?")[0] != "/":
            self.send_error(404, "multimax: there is only one page, at /")
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(self.content)))
        self.end_headers()
        self.wfile.write(self.content)

    def log_message(self, format: str, *args: Any) -> None:
        """No line for each request."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_port = False  # some versions of Python would let two servers have one port

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that closes the connection early is no error; all else is told as ever."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


def server(port: int = PORT) -> ThreadingHTTPServer:
    """A server of the page for this machine alone, ready for ``serve_forever``.

    Args:
        port: where; 0 takes any that is free.

    Example:
        >>> from multimax import explorer
        >>> with explorer.server(port=0) as server:
        ...     server.server_address[0]
        '127.0.0.1'
    """
    checks.integer("port", port)
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


def explore(options: argparse.Namespace) -> None:
    """Serves the page, or saves it."""
    if options.save is not None:
        try:
            options.save.write_text(page(), encoding="utf-8")
        except OSError as error:
            raise Refused(
                f"multimax: expected a file that can be written, got {options.save}: {error.strerror}"
            ) from error
        print(f"{options.save}: open it in a browser")
        return
    try:
        own = server(options.port)
    except (OSError, ValueError) as error:
        raise Refused(str(error)) from error
    with own:
        address = f"http://{HOST}:{own.server_address[1]}/"
        print(f"MultiMax explorer: {address} (Ctrl-C ends it)", flush=True)
        if options.browser:
            # beside the server: a browser in the terminal keeps its caller waiting
            threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()
        try:
            own.serve_forever()
        except KeyboardInterrupt:
            print(file=sys.stderr)  # the terminal shows ^C; what comes next starts a line


def add_command(commands: Any) -> None:
    """Adds it to the command line's parser."""
    command = commands.add_parser(
        "explore",
        help="move parameters and inputs in the browser, and see the weights",
        description=TEXT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("--port", type=int, default=PORT, help=f"{PORT} unless given; 0 takes any that is free")
    command.add_argument("--no-browser", dest="browser", action="store_false", help="only say the address")
    command.add_argument("--save", type=Path, metavar="FILE.html", help="write the page to a file, and do not serve it")
    command.set_defaults(function=explore)
