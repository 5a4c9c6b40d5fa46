"""`multimax explore`."""

import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from multimax import cli
from multimax.cli import explore
from multimax.plots import explorer


def test_command_until_interrupted():
    # in a shell's background tests ignore Ctrl-C, and so would what they start
    listen = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    run = "import sys; from multimax import cli; sys.exit(cli.main(sys.argv[1:]))"
    command = [sys.executable, "-c", f"{listen}; {run}", "explore", "--port", "0", "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            line = process.stdout.readline()
            address = re.fullmatch(r"MultiMax explorer: (http://127\.0\.0\.1:\d+/) \(Ctrl-C ends it\)\n", line)[1]
            with urllib.request.urlopen(address) as answer:
                assert answer.status == 200
            process.send_signal(signal.SIGINT)
            rest, errors = process.communicate(timeout=60)
        finally:
            process.kill()  # else a failure would wait for it
    assert (process.returncode, rest, errors.strip()) == (0, "", "")


def test_command_opens_the_browser(monkeypatch: pytest.MonkeyPatch):
    opened, done = [], threading.Event()

    def open_page(address: str) -> None:
        opened.append(address)
        done.set()

    def stop(self: Any) -> None:
        done.wait(10)
        raise KeyboardInterrupt

    monkeypatch.setattr(explore.webbrowser, "open", open_page)
    monkeypatch.setattr(explorer._Server, "serve_forever", stop)
    assert cli.main(["explore", "--port", "0"]) == 0
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", opened[0])
    opened.clear()
    done.set()
    assert cli.main(["explore", "--port", "0", "--no-browser"]) == 0
    assert not opened


def test_command_saves_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["explore", "--save", str(tmp_path / "own.html")]) == 0
    assert (tmp_path / "own.html").read_text(encoding="utf-8") == explorer.page()
    assert "own.html: open it in a browser" in capsys.readouterr().out


def test_command_fills_in_addresses(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    addresses = ["--site", "https://example.org/docs/", "--repository", "https://example.org/code"]
    assert cli.main(["explore", "--save", str(tmp_path / "own.html"), *addresses]) == 0
    text = (tmp_path / "own.html").read_text(encoding="utf-8")
    assert text == explorer.page(site="https://example.org/docs/", repository="https://example.org/code")
    assert 'content="https://example.org/docs/figures/explorer.png"' in text
    capsys.readouterr()
    assert cli.main(["explore", *addresses]) == 1
    assert "multimax: expected --site and --repository with --save FILE.html" in capsys.readouterr().err
    assert cli.main(["explore", "--save", str(tmp_path / "own.html"), "--site", "example.org"]) == 1
    assert "multimax: expected site to be an address such as https://" in capsys.readouterr().err


def test_command_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert cli.main(["explore", "--no-browser", "--port", str(port)]) == 1
    assert f"multimax: expected a free port, got {port} (Address already in use); choose" in capsys.readouterr().err
    assert cli.main(["explore", "--port", "65536"]) == 1
    assert "multimax: expected a port from 0 to 65535, got 65536" in capsys.readouterr().err
    with pytest.raises(TypeError, match="multimax: expected port to be an int, got str"):
        explorer.server("8317")
    assert cli.main(["explore", "--save", str(tmp_path)]) == 1
    assert f"expected a file that can be written, got {tmp_path}: Is a directory" in capsys.readouterr().err
