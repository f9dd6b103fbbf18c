"""Broadcasts: one call on every rank of a gang, and the queue that runs the broadcasts of a pool one at a time."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Final, Literal

from skyfab.calls.pack import PackedCall
from skyfab.calls.results import in_order, not_unpickled, unpack_result
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
from skyfab.pool.gang import Gang, GangCache, GangSpec, Member, remaining
from skyfab.pool.images import HostImages
from skyfab.pool.node import Node
from skyfab.pool.rendezvous import RendezvousFinder
from skyfab.pool.stall import watch
from skyfab.protocol import messages
from skyfab.session.sigint import SIGINT_GUARD
from skyfab.ui.events import Events

GRACE: Final = 2.0
"""Seconds until the other ranks are stopped after one has failed: they may be blocked in a collective with it."""


class Broadcast:
    """One call on every rank, from its submission until all have replied. Its result is a list in rank order."""

    def __init__(
        self,
        call: PackedCall,
        ended: Callable[[Broadcast], None] = lambda broadcast: None,
        *,
        min_hosts: int | None = None,
        untrusted: bool = False,
    ) -> None:
        """`ended` is called once every rank has replied, before the future is resolved.

        `min_hosts` is the number of members that is enough. Others, except the first, may be lost; their result is
        None. With `untrusted`, results may only be plain data.
        """
        self.call = call
        self.untrusted = untrusted
        self.future = CallFuture()
        self.future.label = call.label
        self._min_hosts = min_hosts
        self.gang: Gang | None = None
        """The gang that runs it, once it has begun."""
        self._ended = ended
        self._on_end: Callable[[BaseException | None], None] = lambda error: None
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

    def begin(self, gang: Gang, on_end: Callable[[BaseException | None], None]) -> None:
        """Sends it to every rank. `on_end` is called with the error, or None, before the future is resolved."""
        size = len(gang.members)
        self._on_end = on_end
        self._spare = 0 if self._min_hosts is None else size - self._min_hosts
        self._results = [None] * size
        self._open = set(range(size))
        self.future.node = gang.members[0].node
        self.gang = gang
        self.future.on_cancel = self.stop
        for member in gang.members:
            self._start(member, shared=size > 1)

    def _start(self, member: Member, *, shared: bool) -> None:
        store: Literal["all", "repeated"] = "all" if shared else "repeated"
        try:
            member.node.call(member.worker, member.spec, self.call, caller=_RankCall(self, member), store=store)
        except SkyfabError as error:
            self.note(member, error, failed=True)

    @property
    def is_sent(self) -> bool:
        """It was sent to every rank."""
        return self.gang is not None and len(self._streams) == len(self.gang.members)

    @property
    def is_wanted(self) -> bool:
        return not self._stopping and not self.future.cancelled()

    def processes(self) -> list[tuple[Node, str, int | None]]:
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
        self._on_end(error)
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
            self._on_end(None)
            self.future.settle(self._results)
            self.future.on_cancel = None
            return
        _fold(self._failures)
        self.fail(broadcast_error(self.call.label, self._failures, self._results))


class _RankCall:
    """One rank's part of a broadcast: the `Caller` of its node."""

    __slots__ = ("_broadcast", "_member")

    def __init__(self, broadcast: Broadcast, member: Member) -> None:
        self._broadcast = broadcast
        self._member = member

    def is_wanted(self) -> bool:
        return self._broadcast.is_wanted

    def sent(self, stream: int) -> None:
        self._broadcast.sent(self._member, stream)

    def answered(self, message: messages.Message, buffers: list[memoryview]) -> None:
        broadcast, member = self._broadcast, self._member
        assert broadcast.gang is not None
        if isinstance(message, messages.Ended) and message.why not in ("unpicklable", "exit"):
            broadcast.gang.broken = True
        label, untrusted = broadcast.call.label, broadcast.untrusted
        try:
            value = unpack_result(
                message, buffers, host=member.node.name, rank=member.rank, label=label, untrusted=untrusted
            )
        except Exception as error:  # without its frames: Python prints those of each error in a group
            broadcast.note(member, error.with_traceback(None), failed=True)
        except BaseException as error:  # raised by unpickling the result, or by a signal handler of the program
            lost = not_unpickled(error, host=member.node.name, rank=member.rank, label=label)
            broadcast.note(member, lost, failed=True)
            raise
        else:
            broadcast.note(member, value, failed=False)

    def failed(self, error: Exception) -> None:
        self._broadcast.note(self._member, error, failed=True)


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


Start = Callable[[], None]


class Broadcasts:
    """Runs the broadcasts of a pool one at a time, in the order in which they were submitted. Thread-safe.

    Invariants: at most one is active; while one waits, another is active; a closed queue is empty.

    So every rank gets them in the same order, whatever threads submit them and however large they are. And when one is
    cancelled, or fails and its processes exit, the next has not begun on any rank and gets a new gang.
    """

    def __init__(
        self, images: HostImages, ranks: int | Literal["auto"], job: str, events: Events, *, untrusted: bool
    ) -> None:
        """`ranks` is the number on each host, `job` the prefix of its job ids."""
        self._images = images
        self._ranks = ranks
        self._elastic = next((plugin.elastic for plugin in images.plugins if plugin.elastic), None)
        self._events = events
        self._untrusted = untrusted
        self._gangs = self.new_cache(job)
        self._lock = threading.Lock()
        self._waiting: deque[tuple[Broadcast, Start]] = deque()
        self._active: Broadcast | None = None
        self._closed = False

    # ---- on which ranks, and how often

    def ranks_on(self, node: Node) -> int:
        return self._ranks if self._ranks != "auto" else max(1, len(node.gpus))

    def available(self, nodes: Sequence[Node]) -> Sequence[Node]:
        """Those that a broadcast runs on now. Raises HostLost if they are too few for an elastic gang."""
        return nodes if self._elastic is None else remaining(nodes, self._elastic)

    def spec(self, nodes: Sequence[Node], tree: str, attempt: int = 0) -> GangSpec:
        return GangSpec(
            nodes=tuple(nodes),
            ranks=tuple(map(self.ranks_on, nodes)),
            tree=tree,
            attempt=attempt,
            elastic_agents=self._elastic is not None,
            plain=self._untrusted,
        )

    def new_cache(self, job: str) -> GangCache:
        """A cache of gangs, whose job ids begin with `job`."""
        return GangCache(self._images.variables, job, RendezvousFinder.of(self._images.plugins, self._events))

    def submit(self, call: PackedCall, nodes: Sequence[Node], *, pool: object) -> CallFuture:
        """Runs a call on the ranks of the available nodes, again after a failure if it may be retried."""
        elastic, retries = self._elastic, call.retries
        jobs: list[str] = []

        def start(attempt: int) -> CallFuture:
            min_hosts = None if elastic is None else elastic.min_hosts
            broadcast = Broadcast(call, self._ended, min_hosts=min_hosts, untrusted=self._untrusted)
            self.add(broadcast, lambda: self._begin_on(broadcast, nodes, attempt, jobs))
            broadcast.future.pool = pool
            if call.stall is not None:
                watch(broadcast.future, broadcast.processes, call.stall, call.label, self._events)
            return broadcast.future

        if elastic is not None:
            return retry(start, lambda error, number: may_go_on(error, number, elastic, retries), in_order)
        return retry(start, lambda _, number: number < retries) if retries else start(0)

    def _begin_on(self, broadcast: Broadcast, nodes: Sequence[Node], attempt: int, jobs: list[str]) -> None:
        """Sends a broadcast to the ranks of the available hosts. Raises their errors.

        `jobs` keeps the job's name across attempts, so that a retry finds what an earlier attempt saved under it.
        """
        call = broadcast.call
        nodes = self.available(nodes)
        spec = self.spec(nodes, call.tree, attempt)
        gang = self._gangs.current(spec, job=jobs[0] if jobs else None)
        jobs.append(gang.job)
        with SIGINT_GUARD:
            broadcast.begin(gang, self._events.call(call.label, *(node.name for node in nodes), ranks=spec.ranks))

    # ---- the queue

    def open(self) -> None:
        self._closed = False

    def add(self, broadcast: Broadcast, start: Start) -> None:
        """Runs it when all before it have ended. `start` begins it on a gang: it may block for a while, and raise."""
        broadcast.future.on_cancel = lambda: self._withdraw(broadcast)
        with SIGINT_GUARD:
            with self._lock:
                closed, idle = self._closed, self._active is None
                if idle and not closed:
                    self._active = broadcast
                elif not closed:
                    self._waiting.append((broadcast, start))
        if closed:
            broadcast.fail(_too_late(broadcast))
        elif idle:
            self._begin(broadcast, start)

    @property
    def is_idle(self) -> bool:
        """No rank runs a broadcast. One that was cancelled ends when its ranks have."""
        return self._active is None

    @property
    def at_work(self) -> Broadcast | None:
        """The broadcast that is running now, if it was sent to every rank and has not failed or been cancelled."""
        active = self._active
        if active is None or active.gang is None or active.gang.broken:
            return None
        return active if active.is_sent and active.is_wanted else None

    def close(self) -> None:
        """The pool closes: fails all broadcasts that have not begun."""
        with self._lock:
            self._closed = True
            waiting, self._waiting = self._waiting, deque()
        for broadcast, _ in waiting:
            broadcast.fail(_too_late(broadcast))

    def _begin(self, broadcast: Broadcast, start: Start) -> None:
        try:
            if broadcast.future.done():
                self._ended(broadcast)
            else:
                start()
        except Exception as error:
            broadcast.fail(error)
        except BaseException as error:  # Ctrl-C, while waiting for a gang or after the call has begun
            if broadcast.gang is None:
                broadcast.fail(error)
            broadcast.future.cancel()
            raise

    def _withdraw(self, broadcast: Broadcast) -> None:
        """Removes one that was cancelled while queued. If it is just beginning, `_begin` or the broadcast notices."""
        with self._lock:
            self._waiting = deque(entry for entry in self._waiting if entry[0] is not broadcast)

    def _ended(self, broadcast: Broadcast) -> None:
        """Begins the next one, on a new thread: a new gang waits for replies, and this thread may be the reader."""
        with self._lock:
            if self._active is not broadcast:
                return
            self._active = None
            if not self._waiting:
                return
            following, start = self._waiting.popleft()
            self._active = following
        threading.Thread(target=self._begin, args=(following, start), daemon=True).start()


def _too_late(broadcast: Broadcast) -> CallCancelled:
    return CallCancelled(f"{broadcast.call.label} had not begun when the pool was closed")


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
                outer.settle(None, ProtocolError(f"invalid results: {trouble}"))
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
