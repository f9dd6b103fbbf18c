"""execnet: gateways over ssh, and a loop on each host that answers what is sent through a channel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import execnet

from benchmarks.peers import session, work
from benchmarks.peers.site import Site

_COMMAND = """
import subprocess
channel.send(subprocess.run(["hostname"], stdout=subprocess.PIPE, check=True).stdout.decode())
"""
_SERVE = """
import socket
for task, value in channel:
    if task == "add_one":
        channel.send(value + 1)
    elif task == "square":
        channel.send(value * value)
    elif task == "hostname":
        channel.send(socket.gethostname())
    else:
        import numpy
        array = numpy.frombuffer(b"".join(channel.receive() for _ in range(value)), dtype=numpy.int64)
        data = memoryview(array[::-1].copy()).cast("B")
        for start in range(0, len(data), 1 << 20):
            channel.send(bytes(data[start : start + (1 << 20)]))
"""
_PIECE = 1 << 20
"""Bytes of an array that are sent together: a message of hundreds of megabytes takes minutes."""


@contextmanager
def _gateways(site: Site, addresses: Sequence[str]) -> Iterator[list[Any]]:
    group = execnet.Group()
    try:
        specs = [f"ssh={address}//ssh_config={site.config}//python={site.python}" for address in addresses]
        yield [group.makegateway(spec) for spec in specs]
    finally:
        group.terminate(timeout=5)


def command(site: Site, count: int) -> None:
    with _gateways(site, site.first(count)) as gateways:
        channels = [gateway.remote_exec(_COMMAND) for gateway in gateways]
        print("".join(channel.receive() for channel in channels), end="")


def send(site: Site, name: str, target: str, count: int) -> None:
    """Its own rsync, which sends the content of a folder."""
    with _gateways(site, site.first(count)) as gateways:
        rsync = execnet.RSync(str(Path(site.folder) / name), verbose=False)
        for gateway in gateways:
            rsync.add_target(gateway, target)
        rsync.send()


@contextmanager
def warm(site: Site) -> Iterator[session.Warm]:
    with _gateways(site, site.first(work.HOSTS)) as gateways:
        channels = [gateway.remote_exec(_SERVE) for gateway in gateways]

        def ask(task: str, value: Any) -> Any:
            channels[0].send((task, value))
            return channels[0].receive()

        def everywhere() -> list[str]:
            for channel in channels:
                channel.send(("hostname", None))
            return [channel.receive() for channel in channels]

        def squares(numbers: range) -> list[int]:
            """In turns, all of them sent before the first answer is read."""
            turns = [channels[number % len(channels)] for number in numbers]
            for channel, number in zip(turns, numbers, strict=True):
                channel.send(("square", number))
            return [channel.receive() for channel in turns]

        def reverse(array: Any) -> Any:
            """It sends bytes, not arrays."""
            import numpy

            data = memoryview(array).cast("B")
            starts = range(0, len(data), _PIECE)
            channels[0].send(("reverse", len(starts)))
            for start in starts:
                channels[0].send(bytes(data[start : start + _PIECE]))
            return numpy.frombuffer(b"".join(channels[0].receive() for _ in starts), dtype=numpy.int64)

        yield session.warm(
            site, call=lambda number: ask("add_one", number), everywhere=everywhere, squares=squares, reverse=reverse
        )


if __name__ == "__main__":
    session.main(
        {
            "command": lambda site: command(site, 1),
            "commands": lambda site: command(site, work.MANY),
            "file": lambda site: send(site, "alone", site.target, work.HOSTS),
            "folder": lambda site: send(site, "small", f"{site.target}/small", 1),
        },
        warm,
    )
