"""`skyfab forward`, as it is typed."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

PROGRAM = [sys.executable, "-m", "skyfab"]


class Hello(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"hello")

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def port() -> Iterator[int]:
    """A web server of this machine."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Hello) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


@pytest.mark.programs
def test_ports_are_there_until_ctrl_c(port: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        nothing = free.getsockname()[1]
    words = [*PROGRAM, "forward", f"{port},{nothing}", "--host=local"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        lines = [process.stdout.readline().split() for _ in range(2)]
        assert [line[1:] for line in lines] == [["→", f"local:{port}"], ["→", f"local:{nothing}"]]
        assert urllib.request.urlopen(lines[0][0], timeout=170).read() == b"hello"
        with pytest.raises(OSError, match=r"reset|closed|refused"):
            urllib.request.urlopen(lines[1][0], timeout=170)
        assert process.stderr.readline() == f"local: nothing listens on port {nothing} yet\n"
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=170)
        assert (process.returncode, rest, errors) == (130, "", "")
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(lines[0][0], timeout=170)
