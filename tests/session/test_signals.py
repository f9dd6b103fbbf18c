"""Signal handlers of the program while a pool is open: they run when nothing is half done, and may use the pool."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

import pytest

import skyfab as sky
from skyfab.session.signals import HandlerRan, SignalGuard

Handler = Callable[[int, FrameType | None], object]


@pytest.fixture
def guard() -> Iterator[SignalGuard]:
    before = signal.getsignal(signal.SIGUSR1), signal.getsignal(signal.SIGINT)
    guard = SignalGuard()
    guard.watch()
    yield guard
    signal.signal(signal.SIGUSR1, before[0])
    guard.leave()
    assert signal.getsignal(signal.SIGINT) == before[1]


def note(found: list[str], word: str) -> Handler:
    return lambda *_: found.append(word)


def test_handlers_wait_for_the_end_of_the_block_or_for_a_wait(guard: SignalGuard) -> None:
    found: list[str] = []
    signal.signal(signal.SIGUSR1, note(found, "ran"))
    guard.wrap()
    with guard:
        with guard:
            signal.raise_signal(signal.SIGUSR1)
            signal.raise_signal(signal.SIGUSR1)
        assert found == []
        assert guard.allow(lambda: "waited") == "waited"
        assert found == ["ran"]
        signal.raise_signal(signal.SIGUSR1)
        assert found == ["ran"]
    assert found == ["ran", "ran"]
    signal.raise_signal(signal.SIGUSR1)
    assert found == ["ran", "ran", "ran"]


def test_what_a_handler_that_raises_leaves_is_delivered_later(guard: SignalGuard) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    found: list[str] = []
    signal.signal(signal.SIGUSR1, fail)
    before = signal.signal(signal.SIGUSR2, note(found, "ran"))
    guard.wrap()
    try:
        with pytest.raises(ZeroDivisionError), guard:  # noqa: PT012
            signal.raise_signal(signal.SIGUSR1)
            signal.raise_signal(signal.SIGUSR2)
        with guard:
            pass
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert found == ["ran"]


def test_a_program_may_replace_a_handler_and_restore_it(guard: SignalGuard) -> None:
    found: list[str] = []
    signal.signal(signal.SIGUSR1, note(found, "first"))
    guard.wrap()
    first = signal.signal(signal.SIGUSR1, note(found, "second"))
    guard.wrap()
    signal.raise_signal(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, first)
    guard.wrap()
    signal.raise_signal(signal.SIGUSR1)
    assert found == ["second", "first"]


def test_the_programs_handlers_are_restored() -> None:
    def mine(*_: object) -> None: ...

    before = signal.signal(signal.SIGUSR1, mine)
    guard = SignalGuard()
    try:
        guard.wrap()
        assert signal.getsignal(signal.SIGUSR1) is mine, "no pool is open"
        guard.watch()
        guard.watch()
        guard.leave()
        assert signal.getsignal(signal.SIGUSR1) is not mine
        guard.leave()
        assert signal.getsignal(signal.SIGUSR1) is mine
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_lock_is_released_for_a_handler_that_may_need_it(guard: SignalGuard) -> None:
    lock, found = threading.Lock(), list[bool]()
    signal.signal(signal.SIGUSR1, lambda *_: found.append(lock.locked()))
    guard.wrap()
    with guard, lock:
        pass
    lock.acquire()
    with guard:
        guard.lend(lock)
        with pytest.raises(HandlerRan):
            guard.allow(lambda: signal.raise_signal(signal.SIGUSR1))
        guard.release(lock)
        assert (found, lock.locked()) == ([False], False)
        lock.acquire()
        guard.lend(lock)
        guard.release(lock)
        assert not lock.locked()


# ---- with pools


class Stop(Exception):
    pass


@sky.function
def add(a: int, b: int) -> int:
    return a + b


def stop() -> None:
    raise Stop


HANDLERS: dict[str, Callable[[sky.Compute], object]] = {
    "raises": lambda pool: stop(),
    "calls": lambda pool: add(1, 1) >> pool,
    "submits": lambda pool: add(1, 1) > pool,
    "broadcasts": lambda pool: add(1, 1) @ pool,
}


@pytest.mark.parametrize("number", [signal.SIGALRM, signal.SIGINT], ids=["SIGALRM", "SIGINT"])
@pytest.mark.parametrize("how", HANDLERS)
def test_a_handler_may_raise_and_use_the_pool(open_pool: Callable[..., sky.Compute], how: str, number: int) -> None:
    """Also one that was installed after the pool was opened, and at any moment of a call."""
    pool = open_pool()
    caught, until = 0, time.monotonic() + 2
    ready, stopped = threading.Event(), threading.Event()

    def handle(*_: object) -> None:
        HANDLERS[how](pool)
        ready.set()

    def send() -> None:
        while not stopped.wait(0.003):
            if ready.is_set():  # else handlers of handlers would call each other without end, or one raise too soon
                ready.clear()
                signal.pthread_kill(threading.main_thread().ident or 0, number)

    sender = threading.Thread(target=send)
    before = signal.signal(number, handle)
    sender.start()
    try:
        while sender.is_alive():
            try:
                ready.set()
                while time.monotonic() < until:
                    assert add(2, 3) >> pool == 5
                stopped.set()
                sender.join()
            except Stop:
                caught += 1
    finally:
        signal.signal(number, signal.SIG_IGN)
        stopped.set()
        sender.join()
        signal.signal(number, before)
    assert caught or how != "raises"
    assert [(add(n, 1) > pool).result(60) for n in range(20)] == list(range(1, 21))
    assert all(not slot.tasks for slot in pool._scheduler._slots)


def test_a_handler_may_make_several_calls_while_the_main_thread_waits(open_pool: Callable[..., sky.Compute]) -> None:
    pool, ran = open_pool(), list[int]()

    def handle(*_: object) -> None:
        ran.extend(add(n, 1) >> pool for n in range(5))

    def done() -> bool:
        if len(ran) < 500:
            signal.raise_signal(signal.SIGALRM)
        return len(ran) >= 500

    before = signal.signal(signal.SIGALRM, handle)
    try:
        assert pool.hosts[0].session.wait(done, 60)
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("number", [signal.SIGALRM, signal.SIGINT], ids=["SIGALRM", "SIGINT"])
def test_a_handler_may_close_the_pool(open_pool: Callable[..., sky.Compute], number: int) -> None:
    pool = open_pool()
    before = signal.signal(number, lambda *_: pool.close())
    timer = threading.Timer(0.3, signal.pthread_kill, (threading.main_thread().ident, number))
    try:
        timer.start()
        with pytest.raises(sky.SkyfabError, match="pool"):  # noqa: PT012
            for n in range(10**9):
                assert add(n, 1) >> pool == n + 1
    finally:
        timer.join()
        signal.signal(number, before)
