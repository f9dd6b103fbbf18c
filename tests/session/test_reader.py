"""The reader's invariants, with connections that are pipes."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest
from stage.spot import until
from stage.threads import at_once, begin

import skyfab as sky
from skyfab._util.signals import SIGNAL_GUARD
from skyfab.protocol import messages
from skyfab.session.reader import SharedReader
from skyfab.session.replies import Reply


class Pipe:
    """A connection that notes what it reads, and who read it."""

    def __init__(self, reader: SharedReader, interval: float = 60.0) -> None:
        self.interval = interval
        self.read: list[bytes] = []
        self.threads: list[str] = []
        self.ticks = self.wakes = 0
        self.errors: list[BaseException] = []
        self.defect: Exception | None = None
        self.then: Callable[[], None] = lambda: None
        self.woken: Callable[[], None] = lambda: None
        self.source, self._sink = os.pipe()
        os.set_blocking(self.source, False)
        self._reader = reader
        reader.add(self)
        reader.watch(self.source, self)

    def say(self, data: bytes = b"x") -> None:
        os.write(self._sink, data)

    def end(self) -> None:
        self._reader.unwatch(self.source)
        self._reader.discard(self)
        os.close(self.source)
        os.close(self._sink)

    def on_ready(self, fd: int) -> Sequence[Callable[[], None]]:
        assert fd == self.source
        data = os.read(fd, 4096)
        if self.defect is not None:
            raise self.defect
        self.threads.append(threading.current_thread().name)
        return [lambda: self.read.append(data), self.then]

    def on_wake(self) -> Sequence[Callable[[], None]]:
        self.wakes += 1
        return [self.woken]

    def on_tick(self, now: float) -> Sequence[Callable[[], None]]:
        self.ticks += 1
        return ()

    def on_error(self, error: BaseException) -> Sequence[Callable[[], None]]:
        self.errors.append(error)
        self._reader.unwatch(self.source)
        return ()


@pytest.fixture
def reader() -> Iterator[SharedReader]:
    reader = SharedReader()
    yield reader
    for connection in list(reader._connections):
        connection.end()  # type: ignore[attr-defined]
    reader.join(10)
    assert reader._thread is None
    assert reader._selector is None


def test_one_thread_reads_all_connections(reader: SharedReader) -> None:
    pipes = [Pipe(reader) for _ in range(64)]
    for pipe in pipes:
        pipe.say()
    assert reader.wait(lambda: all(pipe.read for pipe in pipes), 10)
    assert {name for pipe in pipes for name in pipe.threads} == {"skyfab-reader"}
    assert len([thread for thread in threading.enumerate() if thread.name == "skyfab-reader"]) == 1


def test_all_who_wait_see_what_was_read(reader: SharedReader) -> None:
    pipe = Pipe(reader)
    waiting = [begin(lambda: reader.wait(lambda: bool(pipe.read), 20)) for _ in range(8)]
    time.sleep(0.1)
    pipe.say()
    assert [future.result(20) for future in waiting] == [True] * 8


def test_who_waits_is_not_woken_for_what_others_wait_for(reader: SharedReader) -> None:
    """Else each of 1,000 replies would wake each of the threads that wait for the others."""
    one, other = Pipe(reader), Pipe(reader)
    asked = 0

    def done() -> bool:
        nonlocal asked
        asked += 1
        return bool(other.read)

    waiting = begin(lambda: reader.wait(done, 20, other))
    until(lambda: bool(reader._waits))
    for number in range(200):
        one.say()
        until(lambda number=number: len(one.read) > number)  # type: ignore[misc]
    other.say()
    assert waiting.result(20)
    assert asked < 100, "it looks every 50 ms, whatever others receive"


def test_a_new_connection_sends_no_heartbeats_of_the_others(reader: SharedReader) -> None:
    """Else a pool of 1,000 hosts would send half a million while it is opened."""
    first = Pipe(reader)
    first.say()
    assert reader.wait(lambda: bool(first.read), 10)
    before = first.ticks
    for _ in range(20):
        pipe = Pipe(reader)
        pipe.say()
        assert reader.wait(lambda pipe=pipe: bool(pipe.read), 10)  # type: ignore[misc]
    assert first.ticks == before


def test_without_connections_a_wait_ends(reader: SharedReader) -> None:
    assert reader.wait(lambda: False) is False
    pipe = Pipe(reader)
    threading.Timer(0.2, pipe.end).start()
    assert reader.wait(lambda: False) is False


def test_connections_that_come_as_the_last_one_goes_are_read(reader: SharedReader) -> None:
    for _ in range(300):
        pipe = Pipe(reader)
        pipe.end()
        other = Pipe(reader)
        other.say()
        assert reader.wait(lambda: bool(other.read), 10)  # noqa: B023
        other.end()


def test_a_connection_that_raises_is_told_and_the_others_go_on(reader: SharedReader) -> None:
    bad, good = Pipe(reader), Pipe(reader)
    bad.defect = RuntimeError("a defect")
    bad.say()
    until(lambda: bool(bad.errors))
    good.say()
    until(lambda: bool(good.read))
    assert bad.errors == [bad.defect]


def test_ticks_come_while_data_does(reader: SharedReader) -> None:
    pipe = Pipe(reader, interval=0.02)
    ends = time.monotonic() + 60
    while pipe.ticks < 6:
        assert time.monotonic() < ends
        pipe.say()
        time.sleep(0.001)


def test_wake_is_heard_once_each(reader: SharedReader) -> None:
    one, other = Pipe(reader), Pipe(reader)
    reader.wake(one)
    until(lambda: one.wakes == 1)
    reader.retry_soon(one)
    until(lambda: one.wakes == 2)
    reader.wake(one)
    until(lambda: one.wakes == 3)
    assert other.wakes == 0


def test_an_action_cannot_wait(reader: SharedReader) -> None:
    pipe = Pipe(reader)
    told: list[Exception] = []

    def wait() -> None:
        try:
            reader.wait(lambda: True)
        except sky.UsageError as error:
            told.append(error)

    pipe.then = wait
    pipe.say()
    until(lambda: bool(told))


def test_a_signal_handler_that_was_set_after_the_pool_was_opened_does_not_run_inside(reader: SharedReader) -> None:
    found: list[int] = []

    def done() -> bool:
        signal.raise_signal(signal.SIGUSR1)
        return not found

    SIGNAL_GUARD.watch()
    before = signal.signal(signal.SIGUSR1, lambda number, _: found.append(number))
    try:
        assert reader.wait(done)
        assert found == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)
        SIGNAL_GUARD.leave()


def test_a_forked_child_does_not_wait_for_the_parents_threads(reader: SharedReader) -> None:
    locked, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        with reader._lock:
            locked.set()
            go_on.wait(60)

    Pipe(reader)
    holding = begin(hold)
    locked.wait(60)
    child = os.fork()
    if not child:
        signal.alarm(20)
        reader.poke()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    go_on.set()
    holding.result(60)


# ---- callers that read


def a_reply(pipe: Pipe) -> Reply:
    """It is there when the connection has read something."""
    reply = Reply()
    pipe.then = lambda: reply.answered(messages.Done(), [])
    return reply


def answered(reader: SharedReader, pipe: Pipe) -> str:
    """The thread that has read the reply to a request."""
    reply = a_reply(pipe)
    threading.Timer(0.001, pipe.say).start()
    reader.read_until_there(reply)
    assert reply.is_there
    return pipe.threads[-1]


def test_callers_that_come_one_after_another_read_their_replies_themselves(
    reader: SharedReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skyfab.session.reader._REST", 1.0)
    pipe = Pipe(reader)
    caller = threading.Thread(target=lambda: [answered(reader, pipe) for _ in range(20)], name="caller")
    caller.start()
    caller.join(20)
    assert pipe.threads.count("caller") >= 10, "all but the first ones, if the machine does not stall"
    pipe.then = lambda: None
    pipe.say()
    until(lambda: len(pipe.threads) == 21, "the thread reads again when no caller does")
    assert pipe.threads[-1] == "skyfab-reader"


def test_callers_do_not_delay_a_thread_that_waits(reader: SharedReader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skyfab.session.reader._REST", 5.0)
    one, other = Pipe(reader), Pipe(reader)
    waiting = begin(lambda: reader.wait(lambda: bool(other.read), 4))
    until(lambda: bool(reader._waits))
    answered(reader, one)
    other.say()
    assert waiting.result(20)


def test_a_caller_that_leaves_keeps_nobody_waiting(reader: SharedReader) -> None:
    pipes = [Pipe(reader) for _ in range(8)]
    at_once(lambda pipe: [answered(reader, pipe) for _ in range(50)], pipes, 20)
    assert [len(pipe.threads) for pipe in pipes] == [50] * 8
