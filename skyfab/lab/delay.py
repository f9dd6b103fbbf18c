"""Latency for a lab host: a program that holds back what a network device sends.

It is run by its path, in the network namespace of the device, and makes a tap device. `network.divert` has everything
that the device sends go to the tap. The program writes it back to the tap when its time has come, and from there it is
sent. Frames come as they are, not yet cut into packets, so that little work is done for each byte.
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import sys
import time
from collections import deque
from contextlib import suppress
from pathlib import Path

TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0
TAP, NO_PACKET_INFO, VNET_HEADER = 0x0002, 0x1000, 0x4000
CHECKSUM, TSO4, TSO6, TSO_ECN = 0x01, 0x02, 0x04, 0x08
FRAME = 1 << 17
"""More than the largest frame with its header."""


def main(tap: str, seconds: str) -> None:
    device, delay = _open(tap), float(seconds)
    os.write(1, b"up\n")
    held: deque[tuple[float, bytes]] = deque()
    while True:
        readable, _, _ = select.select([device], [], [], max(0.0, held[0][0] - time.monotonic()) if held else None)
        with suppress(BlockingIOError):
            while readable:
                held.append((time.monotonic() + delay, os.read(device, FRAME)))
        while held and held[0][0] <= time.monotonic():
            with suppress(OSError):  # the device is down: lost
                os.write(device, held.popleft()[1])


def _open(name: str) -> int:
    """Makes the tap device, which is gone when this process ends. It says nothing of its own to the network."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", name.encode(), TAP | NO_PACKET_INFO | VNET_HEADER))
    fcntl.ioctl(device, TUNSETOFFLOAD, CHECKSUM | TSO4 | TSO6 | TSO_ECN)
    with suppress(OSError):  # a kernel without IPv6
        Path(f"/proc/sys/net/ipv6/conf/{name}/disable_ipv6").write_text("1")
    return device


if __name__ == "__main__":
    main(*sys.argv[1:])
