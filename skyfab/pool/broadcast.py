"""Broadcasts: one call on every rank of a gang, and the queue that runs the broadcasts of a pool one at a time."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final

from skyfab.calls.pack import PackedFunction
from skyfab.calls.results import not_unpickled, unpack_result
from skyfab.errors import (
    BroadcastError,
    CallCancelled,
    HostLost,
    ProtocolError,
    RemoteTraceback,
    SkyfabError,
    broadcast_error,
)
from skyfab.plugins.base import Elastic
from skyfab.pool.futures import CallFuture
from skyfab.pool.gang import Gang, Member
from skyfab.pool.node import Node
from skyfab.protocol import codec, messages
from skyfab.session.sigint import SIGINT_GUARD

GRACE: Final = 2.0
"""Seconds until the other ranks are stopped after one has failed: they may be blocked in a collective with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Broadcast:
    """What to run on every rank, and how."""

    function: PackedFunction
    arguments: codec.Payload
    label: str
    timeout: float | None = None
    min_hosts: int | None = None
    """The number of members that is enough. Others, except the first, may be lost; their result is None."""
    untrusted: bool = False
    """Hosts are not trusted: results may only be plain data."""


class GangCall:
    """One broadcast, from its submission until every rank has replied. Its result is a list in rank order."""

    def __init__(self, broadcast: Broadcast, ended: Callable[[GangCall], None] = lambda call: None) -> None:
        """`ended` is called once every rank has replied, before the future is resolved."""
        self.broadcast = broadcast
        self.future = CallFuture()
        self.future.label = broadcast.label
        self.gang: Gang | None = None
        """The gang that runs it, once it has begun."""
        self._ended = ended
        self._told: Callable[[BaseException | None], None] = lambda error: None
        self._spare = 0
        """Members that may still be lost."""
        self._results: list[Any] = []
        self._streams: dict[int, int] = {}
        """The stream number of the call on each rank that it was sent to."""
        self._open: set[int] = set()
        self._stopping = False
        self._failures: list[Exception] = []
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None

    # ---- beginning

    def begin(self, gang: Gang, told: Callable[[BaseException | None], None]) -> None:
        """Sends it to every rank. `told` is called with the error, or None, before the future is resolved."""
        size = len(gang.members)
        self._told = told
        self._spare = 0 if self.broadcast.min_hosts is None else size - self.broadcast.min_hosts
        self._results = [None] * size
        self._open = set(range(size))
        self.future.node = gang.members[0].node
        self.gang = gang
        self.future.on_cancel = self.stop
        for member in gang.members:
            self._start(member, shared=size > 1)

    def _start(self, member: Member, *, shared: bool) -> None:
        broadcast = self.broadcast
        try:
            member.node.call(
                member.worker,
                member.plan,
                broadcast.function,
                broadcast.arguments,
                timeout=broadcast.timeout,
                caller=_RankCall(self, member),
                shared=shared,
            )
        except SkyfabError as error:
            self.note(member, error, failed=True)

    @property
    def is_sent(self) -> bool:
        """It was sent to every rank."""
        return self.gang is not None and len(self._streams) == len(self.gang.members)

    @property
    def is_wanted(self) -> bool:
        return not self._stopping and not self.future.cancelled()

    def places(self) -> list[tuple[Node, str, int | None]]:
        """Node, worker and rank of each of its processes, once it has begun."""
        return [] if self.gang is None else [(member.node, member.worker, member.rank) for member in self.gang.members]

    def sent(self, member: Member, stream: int) -> None:
        with self._lock:
            self._streams[member.rank] = stream
        if not self.is_wanted:  # it was cancelled while it was being sent
            self.stop()

    # ---- ending

    def note(self, member: Member, value: Any, *, failed: bool) -> None:
        """Records a rank's result or, if it `failed`, its error."""
        assert self.gang is not None
        with self._lock:
            if member.rank not in self._open:
                return
            self._open.discard(member.rank)
            if isinstance(value, HostLost) and self._spare > 0 and member.rank:
                self._spare -= 1
                self.gang.broken = True
                value, failed = None, False
            self._results[member.rank] = value
            first = failed and not self._failures
            if failed:
                self._failures.append(value)
                self.gang.broken = self.gang.broken or isinstance(value, HostLost)
            done = not self._open
            if first and not done:
                self._timer = threading.Timer(GRACE, self.stop)
                self._timer.daemon = True
                self._timer.start()
        if done:
            self._finish()

    def abandon(self, error: Exception) -> None:
        """Fails the future with `error` while the ranks continue. Nothing is stopped."""
        with self._lock:
            self._open.clear()
        self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Ends it without a result."""
        self._ended(self)
        self._told(error)
        self.future.settle(None, error)
        self.future.on_cancel = None

    def stop(self) -> None:
        """Cancels it on the ranks that have not replied. Must not stop any other call there."""
        assert self.gang is not None
        self._stopping = True
        self.gang.broken = True
        with self._lock:
            running = [
                (member.node, self._streams[member.rank])
                for member in self.gang.members
                if member.rank in self._open and member.rank in self._streams
            ]
        for node, stream in running:
            try:
                node.cancel(stream)
            except SkyfabError:
                pass  # the host is lost: its failure will be reported separately

    def _finish(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if not self._failures:
            self._ended(self)
            self._told(None)
            self.future.settle(self._results)
            self.future.on_cancel = None
            return
        _fold(self._failures)
        self.fail(broadcast_error(self.broadcast.label, self._failures, self._results))


class _RankCall:
    """One rank's part of a broadcast: the `Caller` of its node."""

    __slots__ = ("_call", "_member")

    def __init__(self, call: GangCall, member: Member) -> None:
        self._call = call
        self._member = member

    def is_wanted(self) -> bool:
        return self._call.is_wanted

    def sent(self, stream: int) -> None:
        self._call.sent(self._member, stream)

    def answered(self, message: messages.Message, buffers: list[memoryview]) -> None:
        call, member = self._call, self._member
        assert call.gang is not None
        if isinstance(message, messages.Ended) and message.why not in ("unpicklable", "exit"):
            call.gang.broken = True
        label, untrusted = call.broadcast.label, call.broadcast.untrusted
        try:
            value = unpack_result(
                message, buffers, host=member.node.name, rank=member.rank, label=label, untrusted=untrusted
            )
        except Exception as error:
            call.note(member, error.with_traceback(None), failed=True)  # Python prints the frames of each in a group
        except BaseException as error:  # raised by unpickling the result, or by a signal handler of the program
            call.note(member, not_unpickled(error, host=member.node.name, rank=member.rank, label=label), failed=True)
            raise
        else:
            call.note(member, value, failed=False)

    def failed(self, error: Exception) -> None:
        self._call.note(self._member, error, failed=True)


def _fold(failures: Sequence[Exception]) -> None:
    """Deduplicates tracebacks: the same one on several ranks is shown in full once, later ones refer to it."""
    seen: dict[tuple[type, str], RemoteTraceback] = {}
    for failure in failures:
        cause = failure.__cause__
        if isinstance(cause, RemoteTraceback):
            first = seen.setdefault((type(failure), cause.text), cause)
            if first is not cause:
                text = f"[the traceback is that of {first.place}]"
                failure.__cause__ = RemoteTraceback(text, cause.host, cause.rank)


Start = Callable[[GangCall], None]


class BroadcastQueue:
    """Runs the broadcasts of a pool one at a time, in the order in which they were submitted. Thread-safe.

    Invariants: at most one is active; while one waits, another is active; a closed queue is empty.

    So every rank gets them in the same order, whatever threads submit them and however large they are. And when one is
    cancelled, or fails and its processes exit, the next has not begun on any rank and gets a new gang.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[tuple[GangCall, Start]] = deque()
        self._active: GangCall | None = None
        self._closed = False

    def open(self) -> None:
        self._closed = False

    def add(self, broadcast: Broadcast, start: Start) -> GangCall:
        """Runs it when all before it have ended. `start` begins it on a gang: it may block for a while, and raise."""
        call = GangCall(broadcast, self._ended)
        call.future.on_cancel = lambda: self._withdraw(call)
        with SIGINT_GUARD:
            with self._lock:
                closed, idle = self._closed, self._active is None
                if idle and not closed:
                    self._active = call
                elif not closed:
                    self._waiting.append((call, start))
        if closed:
            call.fail(_too_late(call))
        elif idle:
            self._begin(call, start)
        return call

    @property
    def is_idle(self) -> bool:
        """No rank runs a broadcast. One that was cancelled ends when its ranks have."""
        return self._active is None

    @property
    def at_work(self) -> GangCall | None:
        """The broadcast that is running now, if it was sent to every rank and has not failed or been cancelled."""
        call = self._active
        runs = call is not None and call.is_sent and call.is_wanted and call.gang is not None and not call.gang.broken
        return call if runs else None

    def close(self) -> None:
        """The pool closes: fails all broadcasts that have not begun."""
        with self._lock:
            self._closed = True
            waiting, self._waiting = self._waiting, deque()
        for call, _ in waiting:
            call.fail(_too_late(call))

    def _begin(self, call: GangCall, start: Start) -> None:
        try:
            if call.future.done():
                self._ended(call)
            else:
                start(call)
        except Exception as error:
            call.fail(error)
        except BaseException as error:  # Ctrl-C, while waiting for a gang or after the call has begun
            if call.gang is None:
                call.fail(error)
            call.future.cancel()
            raise

    def _withdraw(self, call: GangCall) -> None:
        """Removes a call that was cancelled while queued. If it is just beginning, `_begin` or the call notices."""
        with self._lock:
            self._waiting = deque(entry for entry in self._waiting if entry[0] is not call)

    def _ended(self, call: GangCall) -> None:
        """Begins the next one, on a new thread: a new gang waits for replies, and this thread may be the reader."""
        with self._lock:
            if self._active is not call:
                return
            self._active = None
            if not self._waiting:
                return
            following, start = self._waiting.popleft()
            self._active = following
        threading.Thread(target=self._begin, args=(following, start), daemon=True).start()


def _too_late(call: GangCall) -> CallCancelled:
    return CallCancelled(f"{call.broadcast.label} had not begun when the pool was closed")


def retry(
    start: Callable[[int], CallFuture],
    again: Callable[[BaseException, int], bool],
    finish: Callable[[Any], Any] = lambda result: result,
) -> CallFuture:
    """Starts a call, and restarts it after a failure while `again` returns True.

    `start` and `again` are passed the number of earlier attempts.
    """
    outer = CallFuture()

    def attempt(number: int) -> None:
        try:
            inner = start(number)
        except BaseException as error:
            outer.settle(None, error)
            return
        outer.node, outer.pool, outer.on_cancel = inner.node, inner.pool, inner.cancel
        if outer.cancelled():  # in the meantime: the new attempt does not know yet
            inner.cancel()
        Future.add_done_callback(inner, lambda _: done(inner, number))

    def done(inner: CallFuture, number: int) -> None:
        if inner.cancelled():
            outer.cancel()
            return
        error = inner.exception()
        if error is None:
            try:
                found = finish(inner.result())
            except Exception as trouble:
                outer.settle(None, ProtocolError(f"no results that could be: {trouble}"))
            else:
                outer.settle(found)
        elif isinstance(error, CallCancelled):  # it was detached, or the pool is closed
            outer.settle(None, error)
        elif not outer.done() and again(error, number):  # on a new thread: this one may be the reader
            threading.Thread(target=attempt, args=(number + 1,), daemon=True).start()
        else:
            outer.settle(None, error)

    attempt(0)
    return outer


def may_go_on(error: BaseException, number: int, elastic: Elastic, retries: int) -> bool:
    """Whether to restart an elastic call that failed: retries are left, or the cause is a lost host."""
    if number < retries:
        return True
    lost = isinstance(error, BroadcastError) and any(isinstance(one, HostLost) for one in error.exceptions)
    return lost and number < retries + elastic.max_restarts
