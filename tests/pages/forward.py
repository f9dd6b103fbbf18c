import http.server
import threading
import urllib.request
from pathlib import Path

import skyfab as sky


@sky.function
def serve_board():
    Path("page.html").write_text("a board")
    handler = http.server.SimpleHTTPRequestHandler
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server.server_port


def fetch(url):
    assert urllib.request.urlopen(f"{url}/page.html").read() == b"a board"
