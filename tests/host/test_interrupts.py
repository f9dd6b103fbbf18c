"""SIGINT in a worker, by which the client closes a generator, while the handler of an earlier one still runs."""

from __future__ import annotations

import os
import signal
import threading
from types import SimpleNamespace

from skyfab.host.agent.exchanges import Exchanges
from skyfab.protocol import codec


def test_a_signal_while_the_handler_reads_is_handled_by_it() -> None:
    """What it reads is in order: a second handler must not read in the middle of a message."""
    source, sink = os.pipe()
    inside: list[int] = []
    deepest: list[int] = []

    def read() -> bool:
        inside.append(1)
        deepest.append(len(inside))
        data = os.read(source, 1)
        if data == b"a":
            os.write(sink, b"b")
            signal.raise_signal(signal.SIGINT)
        inside.pop()
        return True

    exchanges = Exchanges(SimpleNamespace(source=source, encoding=codec, read=read, check_process=lambda: None))
    interrupted: list[int] = []
    exchanges.conversations[1] = SimpleNamespace(  # type: ignore[assignment]
        runs_here=True, interrupt=lambda: interrupted.append(threading.get_ident())
    )
    before = signal.signal(signal.SIGINT, lambda number, frame: exchanges.interrupted())
    try:
        os.write(sink, b"a")
        signal.raise_signal(signal.SIGINT)
        assert deepest == [1, 1]
        assert interrupted == [threading.get_ident()]
        os.write(sink, b"c")
        signal.raise_signal(signal.SIGINT)  # a later one is handled again
        assert deepest == [1, 1, 1]
        assert len(interrupted) == 2
    finally:
        signal.signal(signal.SIGINT, before)
        os.close(source)
        os.close(sink)
