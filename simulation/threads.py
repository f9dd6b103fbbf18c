"""Threads that take turns under a simulated clock: one runs at a time, and the seed gives the order.

Each simulated thread is a thread of the system that waits for its turn, because the code that is simulated is written
with threads. A thread ends its turn only where it would wait: for a lock, for time to pass, for data. Then the next one
that is ready runs; if none is, the clock moves to the next event. So the same seed gives the same run.
"""

from __future__ import annotations

import heapq
import itertools
import random
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, Final

FOREVER: Final = float("inf")
_EPOCH: Final = 1000.0
"""Where the clock begins. Not at 0, which stands for "never" in some places."""
_STACK: Final = 512 * 1024
"""Bytes of stack of a thread: there may be thousands."""


class Stuck(AssertionError):
    """Something waits that never happens."""


class Over(BaseException):
    """Ends the threads that are left when a simulation has failed."""


class Loop:
    """The clock, the events that are due, and the threads that are ready."""

    def __init__(self, seed: int, *, switching: float = 0.0) -> None:
        """`switching` is the probability that a thread ends its turn where it takes a lock, as real threads may."""
        self.random = random.Random(seed)
        self.now = _EPOCH
        self.limit = FOREVER
        """When the simulation has to be over: what waits then is stuck."""
        self.current: Thread | None = None
        self.switching = switching
        self.is_over = False
        self.alive: dict[Thread, None] = {}
        self.most_alive = 0
        self.hosts_cpu = 0.0
        """Seconds of CPU time that events have taken: what simulated hosts do."""
        self.errors: list[BaseException] = []
        """What threads have raised."""
        self._numbers = itertools.count(1)
        self._order = itertools.count()
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._ready: list[Thread] = []
        self._main: Thread | None = None
        self._failed: BaseException | None = None

    def clock(self) -> float:
        return self.now

    def serial(self) -> int:
        """A number for a new object: sets of such objects then have the same order in every run."""
        return next(self._numbers)

    def after(self, seconds: float, callback: Callable[[], object]) -> None:
        """Calls a function later, which must not wait."""
        heapq.heappush(self._events, (self.now + seconds, next(self._order), callback))

    # ---- threads

    def run(self, program: Callable[[], Any]) -> Any:
        """Runs a program, on a thread of the simulation, until it ends. Raises what it raises, and Stuck."""
        done = threading.Lock()
        done.acquire()
        found: list[Any] = []

        def body() -> None:
            try:
                found.append(program())
            except BaseException as error:
                self._failed = self._failed or error
            finally:
                self.is_over = True
                done.release()

        before = threading.stack_size(_STACK)
        try:
            self._main = Thread(target=body, name="main", loop=self)
            self._main.start()
            self._pass_on(None)
            done.acquire()
            self._end_the_rest()
        finally:
            threading.stack_size(before)
        if self._failed is not None:
            raise self._failed
        return found[0]

    def _end_the_rest(self) -> None:
        for thread in list(self.alive):
            if thread is not self._main:
                thread.gate.release()
                thread.real.join(10)

    def wait(self, until: float = FOREVER) -> bool:
        """Ends this thread's turn until `wake`, or that time. Returns False if the time has come first."""
        me = self.current
        assert me is not None, "an event must not wait"
        if self.is_over:
            raise Over
        me.is_woken = False
        me.turn += 1
        if until < FOREVER:
            heapq.heappush(self._events, (until, next(self._order), _Alarm(self, me, me.turn)))
        me.is_waiting = True
        self._pass_on(me)
        return me.is_woken

    def wake(self, thread: Thread) -> None:
        """Makes a thread ready that waits."""
        if thread.is_waiting:
            thread.is_waiting = False
            thread.is_woken = True
            self._ready.append(thread)

    def ring(self, thread: Thread) -> None:
        if thread.is_waiting:
            thread.is_waiting = False
            self._ready.append(thread)

    def maybe_switch(self) -> None:
        """Ends the turn of a thread that goes on, now and then."""
        if self.switching and self.current is not None and self.random.random() < self.switching:
            self._ready.append(self.current)
            self._pass_on(self.current)

    def begin(self, thread: Thread) -> None:
        self.alive[thread] = None
        self.most_alive = max(self.most_alive, len(self.alive))
        self._ready.append(thread)

    def end(self, thread: Thread) -> None:
        """The last that a thread does."""
        del self.alive[thread]
        if not self.is_over:
            self._pass_on(None)

    def _pass_on(self, me: Thread | None) -> None:
        """Gives the turn to the next thread. Returns when it is this one's again; at once if this one has ended."""
        following = self._next()
        if following is me:
            self.current = me
            return
        self.current = following
        following.gate.release()
        if me is None:
            return
        me.gate.acquire()
        if self.is_over:
            raise Over
        if me is self._main and self._failed is not None:
            raise self._failed

    def _next(self) -> Thread:
        ready = self._ready
        while not ready:
            if not self._events or self._events[0][0] > self.limit:
                return self._fail()
            self.now, _, callback = heapq.heappop(self._events)
            self.current = None
            begin = time.thread_time()
            callback()
            self.hosts_cpu += time.thread_time() - begin
        at = self.random.randrange(len(ready)) if len(ready) > 1 else 0
        ready[at], ready[-1] = ready[-1], ready[at]
        return ready.pop()

    def stacks(self) -> str:
        """Where the first threads are."""
        return "\n\n".join(f"{thread.name}:\n{thread.stack()}" for thread in itertools.islice(self.alive, 8))

    def _fail(self) -> Thread:
        """Nothing can go on, or it takes too long: the program is told so."""
        assert self._main is not None
        self._failed = Stuck(f"{len(self.alive)} threads wait at {self.now - _EPOCH:.1f} s\n{self.stacks()}")
        self.limit = FOREVER
        self._main.is_waiting = False
        return self._main


class _Alarm:
    """Wakes a thread when its time has come, unless it has waited for something else since."""

    __slots__ = ("_loop", "_thread", "_turn")

    def __init__(self, loop: Loop, thread: Thread, turn: int) -> None:
        self._loop = loop
        self._thread = thread
        self._turn = turn

    def __call__(self) -> None:
        if self._thread.turn == self._turn:
            self._loop.ring(self._thread)


class Thread:
    """As `threading.Thread`."""

    def __init__(
        self,
        group: None = None,
        target: Callable[..., object] | None = None,
        name: str | None = None,
        args: Iterable[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        daemon: bool | None = None,
        loop: Loop,
    ) -> None:
        self._loop = loop
        self.ident = loop.serial()
        self.name = name or f"thread {self.ident}"
        self.daemon = daemon
        self.gate = threading.Lock()
        self.gate.acquire()
        self.is_waiting = self.is_woken = False
        self.turn = 0
        self._target, self._args, self._kwargs = target, tuple(args), dict(kwargs or {})
        self._over = Event(loop)
        self.real = threading.Thread(target=self._begin, name=self.name, daemon=True)

    def start(self) -> None:
        self.real.start()
        self._loop.begin(self)

    def _begin(self) -> None:
        self.gate.acquire()
        try:
            if not self._loop.is_over:
                self.run()
        except Over:
            pass
        except BaseException as error:
            self._loop.errors.append(error)
            if not self._loop.is_over:
                traceback.print_exc()
        self._target, self._args, self._kwargs = None, (), {}
        if not self._loop.is_over:
            self._over.set()
        self._loop.end(self)

    def run(self) -> None:
        if self._target is not None:
            self._target(*self._args, **self._kwargs)

    def join(self, timeout: float | None = None) -> None:
        self._over.wait(timeout)

    def is_alive(self) -> bool:
        return self in self._loop.alive

    def stack(self) -> str:
        frame = sys._current_frames().get(self.real.ident or 0)  # noqa: SLF001
        shown = [line for line in traceback.format_stack(frame) if __file__ not in line] if frame else []
        return "".join(shown[-6:]).rstrip()


class Timer(Thread):
    """As `threading.Timer`."""

    def __init__(self, interval: float, function: Callable[..., object], *, loop: Loop) -> None:
        super().__init__(target=function, name="timer", loop=loop)
        self._interval = interval
        self._cancelled = Event(loop)

    def cancel(self) -> None:
        self._cancelled.set()

    def run(self) -> None:
        if not self._cancelled.wait(self._interval):
            super().run()


class Lock:
    """As `threading.Lock`."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._serial = loop.serial()
        self._locked = False
        self._waiting: deque[Thread] = deque()

    def __hash__(self) -> int:
        return self._serial

    def locked(self) -> bool:
        return self._locked

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        loop = self._loop
        if loop.switching:
            loop.maybe_switch()
        if not self._locked:
            self._locked = True
            return True
        if not blocking:
            return False
        me = loop.current
        assert me is not None, "an event must not wait"
        until = FOREVER if timeout < 0 else loop.now + timeout
        while self._locked:
            self._waiting.append(me)
            if not loop.wait(until) and self._locked:
                if me in self._waiting:
                    self._waiting.remove(me)
                return False
        if me in self._waiting:
            self._waiting.remove(me)
        self._locked = True
        return True

    def release(self) -> None:
        if not self._locked:
            raise RuntimeError("release unlocked lock")
        self._locked = False
        if self._waiting:
            self._loop.wake(self._waiting.popleft())

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class RLock(Lock):
    """As `threading.RLock`."""

    def __init__(self, loop: Loop) -> None:
        super().__init__(loop)
        self._owner: Thread | None = None
        self._depth = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        me = self._loop.current
        if not self._depth or self._owner is not me:
            if not super().acquire(blocking, timeout):
                return False
            self._owner = me
        self._depth += 1
        return True

    def release(self) -> None:
        if not self._depth or self._owner is not self._loop.current:
            raise RuntimeError("cannot release un-acquired lock")
        self._depth -= 1
        if not self._depth:
            self._owner = None
            super().release()


class Event:
    """As `threading.Event`."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._is_set = False
        self._waiting: list[Thread] = []

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        while self._waiting:
            self._loop.wake(self._waiting.pop())

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        loop = self._loop
        until = FOREVER if timeout is None else loop.now + timeout
        while not self._is_set:
            me = loop.current
            assert me is not None, "an event must not wait"
            self._waiting.append(me)
            woken = loop.wait(until)
            if me in self._waiting:
                self._waiting.remove(me)
            if woken:
                return True  # also if it was cleared since
            break
        return self._is_set


class Condition:
    """As `threading.Condition`."""

    def __init__(self, lock: Lock | None = None, *, loop: Loop) -> None:
        self._loop = loop
        self._lock = lock or RLock(loop)
        self._waiting: list[Thread] = []
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        me = self._loop.current
        assert me is not None, "an event must not wait"
        self._waiting.append(me)
        self._lock.release()
        try:
            return self._loop.wait(FOREVER if timeout is None else self._loop.now + timeout)
        finally:
            if me in self._waiting:
                self._waiting.remove(me)
            self._lock.acquire()

    def wait_for(self, done: Callable[[], bool], timeout: float | None = None) -> bool:
        until = FOREVER if timeout is None else self._loop.now + timeout
        while not (found := done()) and self._loop.now < until:
            self.wait(None if until == FOREVER else until - self._loop.now)
        return found

    def notify(self, n: int = 1) -> None:
        for thread in self._waiting[:n]:
            self._waiting.remove(thread)
            self._loop.wake(thread)

    def notify_all(self) -> None:
        self.notify(len(self._waiting))


class Threading:
    """Stands for the module `threading`."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop

    def Lock(self) -> Lock:
        return Lock(self._loop)

    def RLock(self) -> RLock:
        return RLock(self._loop)

    def Event(self) -> Event:
        return Event(self._loop)

    def Condition(self, lock: Any = None) -> Condition:
        return Condition(lock, loop=self._loop)

    def Thread(self, *arguments: Any, **options: Any) -> Thread:
        return Thread(*arguments, **options, loop=self._loop)

    def Timer(self, interval: float, function: Callable[..., object]) -> Timer:
        return Timer(interval, function, loop=self._loop)

    def get_ident(self) -> int:
        return self._loop.current.ident if self._loop.current is not None else 0

    def current_thread(self) -> Any:
        return self._loop.current

    def __getattr__(self, name: str) -> Any:
        return getattr(threading, name)


class Time:
    """Stands for the module `time`."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self.monotonic = self.perf_counter = self.time = loop.clock

    def sleep(self, seconds: float) -> None:
        self._loop.wait(self._loop.now + seconds)

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)
