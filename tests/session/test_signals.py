"""Signal handlers of the program while a pool is open: they run when nothing is half done, and may use the pool."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, as_completed, wait
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from stage.spot import until

import skyfab as sky
from skyfab._util.signals import SIGNAL_GUARD, SignalCame, SignalGuard, without_signals
from skyfab.session.fanout import for_each_host

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


def test_a_signal_ends_a_poll_and_is_handled_in_the_next_wait(guard: SignalGuard) -> None:
    """The thread that polls holds a lock, which the handler may need."""
    lock, found = threading.Lock(), list[bool]()
    signal.signal(signal.SIGUSR1, lambda *_: found.append(lock.locked()))
    guard.wrap()
    with guard:
        with lock:
            with pytest.raises(SignalCame):
                guard.poll(lambda: signal.raise_signal(signal.SIGUSR1))
            with pytest.raises(SignalCame):  # it has not run yet
                guard.poll(lambda: None)
        guard.allow(lambda: None)
        assert found == [False]
        assert guard.poll(lambda: "read") == "read"


def test_what_a_handler_raises_is_not_lost_in_a_finalizer(guard: SignalGuard) -> None:
    found: list[str] = []

    class Dropped:
        @without_signals
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGUSR1)
            found.append("finalized")

    signal.signal(signal.SIGUSR1, lambda *_: stop())
    guard.wrap()
    dropped = Dropped()
    with pytest.raises(Stop):  # noqa: PT012
        del dropped
        time.sleep(10)
    assert found == ["finalized"]


def test_what_a_handler_raises_is_not_lost_when_an_item_of_a_weak_collection_is_dropped(guard: SignalGuard) -> None:
    class Item:
        pass

    def profile(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code is weak._remove.__code__:
            found.append("removed")
            signal.raise_signal(signal.SIGUSR1)

    found: list[str] = []
    signal.signal(signal.SIGUSR1, lambda *_: stop())
    guard.wrap()
    weak: Any = weakref.WeakSet()
    item = Item()
    weak.add(item)
    sys.setprofile(profile)
    try:
        with pytest.raises(Stop):  # noqa: PT012
            del item
            sys.setprofile(None)
            time.sleep(10)
    finally:
        sys.setprofile(None)
    assert (found, len(weak)) == (["removed"], 0)


def test_a_child_that_a_thread_has_forked_runs_its_handlers() -> None:
    """Its only thread is the main one, and outside the block in which that of the parent waits."""
    codes: list[int] = []

    def fork() -> None:
        pid = os.fork()
        if not pid:
            try:
                signal.raise_signal(signal.SIGUSR1)
            finally:
                os._exit(1)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

    before = signal.signal(signal.SIGUSR1, lambda *_: os._exit(7))
    SIGNAL_GUARD.watch()
    try:
        thread = threading.Thread(target=fork)
        with SIGNAL_GUARD:
            thread.start()
            SIGNAL_GUARD.poll(thread.join)
    finally:
        SIGNAL_GUARD.leave()
        signal.signal(signal.SIGUSR1, before)
    assert codes == [7]


def test_a_handler_that_raises_while_a_pool_is_opened_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    watch, users = SIGNAL_GUARD.watch, SIGNAL_GUARD._users

    def interrupted() -> None:
        watch()
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(SIGNAL_GUARD, "watch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        sky.Compute("local", ui="none").open()
    assert SIGNAL_GUARD._users == users


def on_another_thread(number: int) -> None:
    """Has another thread receive a signal, which may happen to any thread that starts a program meanwhile."""
    thread = threading.Thread(target=lambda: signal.pthread_kill(threading.get_ident(), number))
    thread.start()


def test_a_signal_that_another_thread_received_is_handled_in_a_wait(guard: SignalGuard) -> None:
    found: list[str] = []
    signal.signal(signal.SIGUSR1, note(found, "ran"))
    guard.wrap()
    lock = threading.Lock()
    lock.acquire()
    later = threading.Timer(0.1, on_another_thread, [signal.SIGUSR1])
    later.start()
    with guard:
        assert not guard.acquire(lock, 1)
        assert found == ["ran"]
    later.join()


def test_ctrl_c_that_another_thread_received_ends_an_action_for_hosts() -> None:
    later, go = threading.Timer(0.1, on_another_thread, [signal.SIGINT]), threading.Event()
    later.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            for_each_host(lambda _: go.wait(30), [1, 2])
    finally:
        go.set()
        later.join()


# ---- with pools


class Stop(Exception):
    pass


@sky.function
def add(a: int, b: int) -> int:
    return a + b


def stop() -> None:
    raise Stop


@pytest.fixture(scope="module")
def compute() -> Iterator[sky.Compute]:
    """For tests that leave it as it was."""
    with sky.Compute("local", ui="none") as pool:
        yield pool


HANDLERS: dict[str, Callable[[sky.Compute], object]] = {
    "raises": lambda pool: stop(),
    "calls": lambda pool: add(1, 1) >> pool,
    "broadcasts": lambda pool: add(1, 1) @ pool,
}


@pytest.mark.parametrize(
    ("how", "number"),
    [("raises", signal.SIGALRM), ("raises", signal.SIGINT), ("calls", signal.SIGALRM), ("broadcasts", signal.SIGALRM)],
)
def test_a_handler_may_raise_and_use_the_pool(compute: sky.Compute, how: str, number: int) -> None:
    """Also one that was installed after the pool was opened, and at any moment of a call."""
    caught, until = 0, time.monotonic() + 0.7
    ready, stopped = threading.Event(), threading.Event()

    def handle(*_: object) -> None:
        HANDLERS[how](compute)
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
                    assert add(2, 3) >> compute == 5
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
    assert [(add(n, 1) > compute).result(60) for n in range(20)] == list(range(1, 21))
    assert all(not slot.tasks for slot in compute._scheduler._slots)


def test_a_handler_may_close_the_pool(open_pool: Callable[..., sky.Compute]) -> None:
    pool = open_pool()
    before = signal.signal(signal.SIGINT, lambda *_: pool.close())
    timer = threading.Timer(0.3, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
    try:
        timer.start()
        with pytest.raises(sky.SkyfabError, match="pool"):  # noqa: PT012
            for n in range(10**9):
                assert add(n, 1) >> pool == n + 1
    finally:
        timer.join()
        signal.signal(signal.SIGINT, before)


# ---- nothing is lost, and nothing hangs


@sky.function
def sleep(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


@sky.function(retries=1)
def queued(seconds: float) -> float:
    """As `sleep`, but never on the fast path."""
    time.sleep(seconds)
    return seconds


@pytest.fixture
def raising() -> Iterator[None]:
    """SIGUSR1 raises Stop."""
    before = signal.signal(signal.SIGUSR1, lambda *_: stop())
    yield
    signal.signal(signal.SIGUSR1, before)


class Interrupting:
    """A lock. A signal comes as soon as the main thread has it."""

    def __init__(self, lock: Any) -> None:
        self._lock = lock
        self.is_armed = True

    def acquire(self, *arguments: Any) -> bool:
        found: bool = self._lock.acquire(*arguments)
        if self.is_armed and threading.current_thread() is threading.main_thread():
            self.is_armed = False
            signal.raise_signal(signal.SIGUSR1)
        return found

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


WAITS: dict[str, Callable[[Future[Any]], object]] = {
    "result": lambda future: future.result(),
    "as_completed": lambda future: list(as_completed([future])),
    "wait": lambda future: wait([future]),
}


@pytest.mark.usefixtures("raising")
@pytest.mark.parametrize("how", WAITS)
def test_a_future_stays_usable_whenever_a_handler_raises(compute: sky.Compute, how: str) -> None:
    """The thread that resolves it takes the same lock."""
    future: Any = sleep(0.3) > compute
    future._condition._lock = Interrupting(future._condition._lock)
    with pytest.raises(Stop):
        WAITS[how](future)
    found: list[float] = []
    other = threading.Thread(target=lambda: found.append(sleep(0) >> compute), daemon=True)
    other.start()
    other.join(30)
    assert found == [0]
    assert future.result(30) == 0.3


@pytest.mark.parametrize("how", ["as_completed", "result"])
def test_a_condition_is_released_for_a_handler(compute: sky.Compute, how: str) -> None:
    """A handler that uses the future while the main thread waits for it finds it unlocked."""
    found = list[str]()
    future: Any = sleep(1) > compute

    def handle(*_: object) -> None:
        thread = threading.Thread(target=lambda: found.append(repr(future.done())), daemon=True)
        thread.start()
        thread.join(10)

    before = signal.signal(signal.SIGALRM, handle)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        WAITS[how](future)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert found == ["False"]
    assert future.result(0) == 1


class Raises:
    """Pickling it, or unpickling it, is interrupted by a signal."""

    def __init__(self, *, late: bool) -> None:
        self.late = late

    def __reduce__(self) -> tuple[Any, ...]:
        if not self.late:
            signal.raise_signal(signal.SIGUSR1)
        return interrupt, (os.getpid(),)


def interrupt(sender: int) -> str:
    if sender != os.getpid():  # it was a result
        signal.raise_signal(signal.SIGUSR1)
    return "made"


def make() -> Raises:
    return Raises(late=True)


@pytest.mark.usefixtures("raising")
def test_an_exception_of_a_handler_is_not_one_of_pickling(compute: sky.Compute) -> None:
    early = Raises(late=False)
    identity = sky.function(lambda value: value)
    uses = sky.function(lambda: early)
    for attempt in (
        lambda: identity(early) >> compute,
        lambda: identity(early) > compute,
        lambda: identity(early) @ compute,
        lambda: compute.map(identity, [early]),
        lambda: uses() >> compute,
        lambda: compute.put(early),
        lambda: sky.function(make)() >> compute,
    ):
        with pytest.raises(Stop):
            attempt()
    assert add(1, 1) >> compute == 2


@pytest.fixture(scope="module")
def shown() -> Iterator[sky.Compute]:
    """A pool that shows what it does."""
    with sky.Compute(sky.Host(name="here", transport="local", slots=2), ui="plain") as pool:
        assert sleep(0) @ pool == [0], "its threads are there"
        yield pool


class Interrupted(Exception):
    pass


KINDS: dict[str, Callable[[sky.Compute, Path], object]] = {
    "fast": lambda pool, _: sleep(60) >> pool,
    "queued": lambda pool, _: queued(60) >> pool,
    "broadcast": lambda pool, _: sleep(60) @ pool,
    "result": lambda pool, _: (sleep(0.01) > pool).result(),
    "gather": lambda pool, _: sky.gather(sleep(60), sleep(60), sleep(60)) >> pool,
    "stream": lambda pool, _: list(sky.gather(sleep(60), sleep(60), stream=True) >> pool),
    "as_completed": lambda pool, _: list(as_completed([sleep(0.01) > pool for _ in range(5)])),
    "map": lambda pool, _: pool.map(sleep, [60] * 20),
    "upload": lambda pool, folder: pool.upload(folder / "large", to=folder / "there"),
    "open and close": lambda pool, _: sky.Compute("local", ui="none").open().close(),
}


@pytest.mark.parametrize(
    ("kind", "ctrl_c"),
    [
        *(pytest.param(kind, True, id=f"{kind}-ctrl-c") for kind in KINDS),
        *(pytest.param(kind, False, id=f"{kind}-exception") for kind in ("fast", "map")),
    ],
)
def test_every_kind_of_wait_can_be_interrupted(shown: sky.Compute, tmp_path: Path, kind: str, ctrl_c: bool) -> None:
    """What was waited for is stopped, and the pool is as before."""
    pool, expected = shown, KeyboardInterrupt if ctrl_c else Interrupted
    (tmp_path / "large").write_bytes(os.urandom(1 << 20))

    def handle(*_: object) -> None:
        raise expected

    before = signal.signal(signal.SIGINT, handle)
    try:
        for delay in (0.02, 0.2):
            timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT))
            with pytest.raises(expected):  # noqa: PT012
                timer.start()
                while True:
                    KINDS[kind](pool, tmp_path)
    finally:
        signal.signal(signal.SIGINT, before)
    began = time.monotonic()
    assert pool.map(sleep, [0.0] * 4) == [0.0] * 4
    assert sleep(0) @ pool == [0]
    assert time.monotonic() - began < 30, "it waited for what was interrupted"


def alarms(pool: sky.Compute, signals: int, actions: Sequence[Callable[[], object]]) -> None:
    """Alarms at random moments of calls, beside 8 threads of calls. None of them fails or hangs."""
    seed = random.randrange(10**9)
    print(f"seed {seed}")
    chance, over, trouble, made = random.Random(seed), threading.Event(), list[str](), [0] * 8
    count, may_raise = 0, False

    def handle(*_: object) -> None:
        nonlocal count, may_raise
        count += 1
        signal.setitimer(signal.ITIMER_REAL, chance.uniform(0.0005, 0.02))
        kind = chance.choice(["raises", "returns", "calls"])
        if kind == "raises" and may_raise:
            may_raise = False
            raise Stop
        if kind == "calls":
            add(1, 1) >> pool

    def innocent(place: int) -> None:
        while not over.is_set():
            try:
                assert add(place, 1) >> pool == place + 1
                made[place] += 1
            except BaseException as error:
                trouble.append(repr(error))

    threads = [threading.Thread(target=innocent, args=(place,), daemon=True) for place in range(8)]
    before = signal.signal(signal.SIGALRM, handle)
    for thread in threads:
        thread.start()
    timer = signal.setitimer(signal.ITIMER_REAL, 0.01)
    try:
        while count < signals:
            try:
                may_raise = True
                chance.choice(actions)()
                may_raise = False
            except Stop:
                pass
            except BaseException as error:
                trouble.append(f"main: {error!r}")
    finally:
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        signal.setitimer(signal.ITIMER_REAL, 0)
        over.set()
        for thread in threads:
            thread.join(60)
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, *timer)  # the time limit of a test is a timer as well
    assert not trouble
    assert not [thread for thread in threads if thread.is_alive()]
    assert all(made)
    assert all(node.lost is None for node in pool.hosts)
    assert [(add(n, 1) > pool).result(60) for n in range(20)] == list(range(1, 21))
    until(lambda: all(not slot.tasks for slot in pool._scheduler._slots))  # those of calls that were stopped, soon


def actions_on(pool: sky.Compute, folder: Path) -> Sequence[Callable[[], object]]:
    def check(found: object, expected: object) -> None:
        assert found == expected

    def upload() -> None:
        pool.upload(folder / "small", to=folder / "there")

    def download() -> None:
        pool.download(folder / "small", to=folder / "back")

    (folder / "small").write_bytes(b"content")
    return (
        lambda: check(add(2, 3) >> pool, 5),
        lambda: check(queued(0.001) >> pool, 0.001),
        lambda: check(add(2, 3) @ pool, [5] * pool.world_size),
        lambda: check((add(2, 3) > pool).result(), 5),
        lambda: check(pool.map(add, range(9), range(9)), [*range(0, 18, 2)]),
        lambda: check(sky.gather(add(1, 1), add(2, 2)) >> pool, (2, 4)),
        lambda: check(sorted(sky.gather(add(1, 1), add(2, 2), stream=True, ordered=False) >> pool), [2, 4]),
        lambda: check({future.result() for future in as_completed([add(n, 1) > pool for n in range(3)])}, {1, 2, 3}),
        lambda: check(len(wait([add(n, 1) > pool for n in range(3)]).done), 3),
        upload,
        download,
    )


def test_alarms_at_random_moments(open_pool: Callable[..., sky.Compute], tmp_path: Path) -> None:
    pool = open_pool(slots=3)
    alarms(pool, 150, actions_on(pool, tmp_path))


@pytest.mark.soak
def test_ten_thousand_alarms(open_pool: Callable[..., sky.Compute], tmp_path: Path) -> None:
    pool = open_pool(count=2, slots=2, ui="plain")
    alarms(pool, 10_000, actions_on(pool, tmp_path))


@pytest.mark.soak
@pytest.mark.torch
def test_ten_thousand_alarms_with_a_device(open_pool: Callable[..., sky.Compute], tmp_path: Path) -> None:
    import torch

    pool = open_pool(slots=2)
    device = pool.device("cpu")
    ones = torch.ones(8, device=device)
    total = sky.function(lambda tensor: float(tensor.sum()))

    def compute() -> None:
        assert float((ones + 1).sum()) == 16

    def fetch() -> None:
        assert sky.fetch(ones * 3).result().tolist() == [3.0] * 8

    def call() -> None:
        assert total(ones * 2) >> pool == 16

    alarms(pool, 10_000, (*actions_on(pool, tmp_path), compute, fetch, call, compute, fetch, call))
    assert float(ones.sum()) == 8
