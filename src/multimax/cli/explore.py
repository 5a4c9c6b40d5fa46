"""`multimax explore`: the explorer, served or saved."""

import argparse
import sys
import threading
import webbrowser
from pathlib import Path
from typing import Any

from multimax.cli import layout
from multimax.cli.errors import Refused
from multimax.plots import explorer

TEXT = """\
Opens an interactive page: drag the knots and slopes of sigma, or the weights
on the simplex, play the layers of the paper, open those of a model of your
own, and see the weights beside those of softmax, sparsemax, entmax and
Ev-SoftMax, and the paper's M and S.

examples:
  multimax explore                        serve it on this machine, until Ctrl-C
  multimax explore --save explorer.html   one file, to keep or to send, offline
"""


def add(commands: Any) -> None:
    """Adds the subcommand."""
    command = layout.command(
        commands, "explore", "move parameters and inputs in the browser, and see the weights", TEXT
    )
    port = explorer.PORT
    command.add_argument("--port", type=int, default=port, help=f"{port} unless given; 0 takes any free port")
    command.add_argument("--no-browser", dest="browser", action="store_false", help="only print the address")
    command.add_argument(
        "--save", type=Path, metavar="FILE.html", help="write the page to a file instead of serving it"
    )
    command.add_argument("--site", metavar="URL", help="with --save: the folder on the web that the file is put in")
    command.add_argument("--repository", metavar="URL", help="with --save: what the page links to as its repository")
    command.set_defaults(function=explore)


def explore(options: argparse.Namespace) -> None:
    """Serves the page, or saves it."""
    if options.save is None and (options.site or options.repository):
        raise Refused("multimax: expected --site and --repository with --save FILE.html, got them without")
    if options.save is not None:
        try:
            text = explorer.page(repository=options.repository, site=options.site)
            options.save.write_text(text, encoding="utf-8")
        except ValueError as error:
            raise Refused(str(error)) from error
        except OSError as error:
            raise Refused(
                f"multimax: expected a file that can be written, got {options.save}: {error.strerror}"
            ) from error
        print(f"{options.save}: open it in a browser")
        return
    try:
        server = explorer.server(options.port)
    except (OSError, ValueError) as error:
        raise Refused(str(error)) from error
    with server:
        address = f"http://{explorer.HOST}:{server.server_port}/"
        print(f"MultiMax explorer: {address} (Ctrl-C ends it)", flush=True)
        if options.browser:
            # in its own thread: a browser in the terminal keeps its caller waiting
            threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print(file=sys.stderr)  # the terminal shows ^C; start a new line after it
