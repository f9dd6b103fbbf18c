"""A web server of several ranks: skyfab serve pages --hosts=node1,node2 --sync --ready=8000 -- python3 rank_server.py

Rank 0 answers requests, and asks the other ranks, which are connected to it at {head}:{port}, for their part of each
answer; a model that is spread over hosts does the same. Without skyfab serve it is a server of one rank.
"""

import os
import socket
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
PLACE = os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", "0"))


def part() -> str:
    """This rank's part of an answer."""
    return f"rank {RANK} on {socket.gethostname()}, process {os.getpid()}"


def follow() -> None:
    """Answers rank 0 until it goes."""
    while True:
        try:
            connection = socket.create_connection(PLACE, timeout=1)
            break
        except OSError:
            pass  # rank 0 does not listen yet
    connection.settimeout(None)
    while connection.recv(1):
        connection.sendall(part().encode() + b"\n")


def lead(port: int) -> None:
    with socket.create_server(PLACE) as listener:
        others = [listener.accept()[0].makefile("rwb", buffering=0) for _ in range(WORLD - 1)]
    lock = threading.Lock()

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            with lock:
                for other in others:
                    other.write(b"?")
                parts = [part(), *(other.readline().decode().strip() for other in others)]
            self.send_response(200)
            self.end_headers()
            self.wfile.write("\n".join(parts).encode())

    print("all ranks are here", flush=True)
    HTTPServer(("127.0.0.1", port), Page).serve_forever()


if __name__ == "__main__":
    lead(int(sys.argv[1]) if len(sys.argv) > 1 else 8000) if RANK == 0 else follow()
