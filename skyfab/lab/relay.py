"""Port forwarding for a lab host: a program that relays TCP connections; its stdin is a listening socket.

It is run by its path, in the network namespace of the host's NAT; the socket belongs to this machine's namespace.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from contextlib import suppress


def main(address: str, port: str) -> None:
    listener = socket.socket(fileno=0)
    os.write(1, b"up\n")
    while True:
        client, _ = listener.accept()
        threading.Thread(target=_relay, args=(client, (address, int(port))), daemon=True).start()


def _relay(client: socket.socket, target: tuple[str, int]) -> None:
    """Relays one connection; closes it at once if the host is down."""
    with client, suppress(OSError), socket.create_connection(target, timeout=10) as host:
        host.settimeout(None)
        for end in (client, host):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        back = threading.Thread(target=_copy, args=(host, client), daemon=True)
        back.start()
        _copy(client, host)
        back.join()


def _copy(source: socket.socket, sink: socket.socket) -> None:
    """Copies until end of file, which closes this direction only; after an error, closes both."""
    try:
        while data := source.recv(65_536):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)
    except OSError:
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


if __name__ == "__main__":
    main(*sys.argv[1:])
