"""mitogen: a context on each host over ssh; functions are imported there from this program."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import mitogen.core
import mitogen.master
import mitogen.utils

from benchmarks.peers import session, work
from benchmarks.peers.site import Site

_PIECE = 1 << 20
"""Bytes of an array that are sent together: a message of hundreds of megabytes takes minutes."""


@contextmanager
def _contexts(site: Site, addresses: Sequence[str]) -> Iterator[list[Any]]:
    broker = mitogen.master.Broker()
    router = mitogen.master.Router(broker)
    options = {
        "python_path": site.python,
        "check_host_keys": "enforce",
        "compression": False,
        "ssh_args": ["-F", site.config],
    }

    def connect(address: str) -> Any:
        return router.ssh(hostname=address, username=site.user, identity_file=site.key, **options)

    try:
        with ThreadPoolExecutor(len(addresses)) as threads:
            yield list(threads.map(connect, addresses))
    finally:
        broker.shutdown()
        broker.join()


def command(site: Site, count: int) -> None:
    with _contexts(site, site.first(count)) as contexts:
        answers = [context.call_async(subprocess.check_output, ["hostname"]) for context in contexts]
        print("".join(answer.get().unpickle().decode() for answer in answers), end="")


_pieces: list[bytes] = []
"""On the host: what has arrived of an array, then what is to be fetched."""


def take(piece: bytes) -> None:
    _pieces.append(piece)


def reverse_pieces() -> None:
    import numpy

    array = numpy.frombuffer(b"".join(_pieces), dtype=numpy.int64)
    data = memoryview(array[::-1].copy()).cast("B")
    _pieces[:] = [bytes(data[start : start + (1 << 20)]) for start in range(0, len(data), 1 << 20)]


def give(place: int) -> Any:
    return mitogen.core.Blob(_pieces[place])


def forget() -> None:
    _pieces.clear()


@contextmanager
def warm(site: Site) -> Iterator[session.Warm]:
    with _contexts(site, site.first(work.HOSTS)) as contexts:

        def everywhere() -> list[str]:
            return [answer.get().unpickle() for answer in [each.call_async(work.hostname) for each in contexts]]

        def squares(numbers: range) -> list[int]:
            """In turns, all of them sent before the first answer is read."""
            turns = [contexts[number % len(contexts)] for number in numbers]
            answers = [each.call_async(work.square, number) for each, number in zip(turns, numbers, strict=True)]
            return [answer.get().unpickle() for answer in answers]

        def reverse(array: Any) -> Any:
            """It sends bytes, not arrays."""
            import numpy

            host, data = contexts[0], memoryview(array).cast("B")
            starts = range(0, len(data), _PIECE)
            sent = [host.call_async(take, mitogen.core.Blob(data[start : start + _PIECE])) for start in starts]
            for answer in sent:
                answer.get().unpickle()
            host.call(reverse_pieces)
            back = [host.call_async(give, place) for place in range(len(starts))]
            whole = b"".join(answer.get().unpickle() for answer in back)
            host.call(forget)
            return numpy.frombuffer(whole, dtype=numpy.int64)

        yield session.warm(
            site,
            call=lambda number: contexts[0].call(work.add_one, number),
            everywhere=everywhere,
            squares=squares,
            reverse=reverse,
        )


if __name__ == "__main__":
    os.environ.setdefault("MITOGEN_LOG_LEVEL", "ERROR")
    session.main({"command": lambda site: command(site, 1), "commands": lambda site: command(site, work.MANY)}, warm)
