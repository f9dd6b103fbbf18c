"""Broadcasts: one call on every rank of a gang, and the queue that runs the broadcasts of a pool one at a time."""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final, Literal

from skyfab._util.signals import SIGNAL_GUARD, is_from_handler
from skyfab.calls.pack import PackedCall
from skyfab.calls.results import deliver, in_order
from skyfab.errors import (
    BroadcastError,
    CallCancelled,
    HostLost,
    ProtocolError,
    RemoteTraceback,
    SkyfabError,
    UsageError,
    broadcast_error,
)
from skyfab.pool.feeds import converse
from skyfab.pool.futures import CallFuture
from skyfab.pool.gang import Gang, GangSpec, Member
from skyfab.pool.images import HostImages
from skyfab.pool.node import Node
from skyfab.pool.recovery import wait_for_lost
from skyfab.pool.rendezvous import RendezvousFinder, strongest_need
from skyfab.pool.stall import watch
from skyfab.pool.streams import Conversation, RemoteIterator, end_all
from skyfab.protocol import messages
from skyfab.session.timing import Timing
from skyfab.ui.events import Events

GRACE: Final = 2.0
"""Seconds until the other ranks are stopped after one has failed: they may be blocked in a collective with it."""


class Broadcast:
    """One attempt to run a call on every rank, from its submission until all have replied.

    The result of its future is a list in rank order. When a call is retried, the next attempt has the same future.
    """

    def __init__(
        self,
        call: PackedCall,
        nodes: Sequence[Node] = (),
        *,
        after: Broadcast | None = None,
        min_hosts: int | None = None,
        untrusted: bool = False,
        ended: Callable[[Broadcast, BaseException | None], bool] = lambda broadcast, error: False,
    ) -> None:
        """`after` is the attempt before it, which failed; `nodes` are those of the pool.

        `min_hosts` is the number of members that is enough. Others, except the first, may be lost; their result is
        None. With `untrusted`, results may only be plain data. `ended` is called with the error, or None, before the
        future is resolved, which it prevents by returning True.
        """
        self.call = call
        self.nodes = nodes
        self.attempt: int = 0 if after is None else after.attempt + 1
        self.job: str | None = None if after is None else after.job
        """The id that all attempts have in common, once the first has begun."""
        self.untrusted = untrusted
        self.future: CallFuture = CallFuture() if after is None else after.future
        self.future.label = call.label
        self.conversations: list[Conversation] = []
        """The exchanges with each rank, if the call has some."""
        self._iterators: Callable[[], CallFuture | None] = lambda: None
        """A weak reference to the future of the ranks' iterators: those that nobody has are closed."""
        self._min_hosts = min_hosts
        self.gang: Gang | None = None
        """The gang that runs it, once it has begun."""
        self._ended = ended
        self._on_end: Callable[[BaseException | None], None] | None = None
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

    def begin(self, gang: Gang, on_end: Callable[[BaseException | None], None] | None = None) -> None:
        """Sends it to every rank. `on_end` is called with the error, or None, before the future is resolved."""
        size = len(gang.members)
        self._on_end = on_end
        self._spare = 0 if self._min_hosts is None else size - self._min_hosts
        self._results = [None] * size
        self._open = set(range(size))
        self.future.node = gang.members[0].node
        self.gang = gang
        self.job = gang.job
        self.future.on_cancel = self.stop
        if self.call.talks:
            self.conversations = converse(self.call, size, untrusted=self.untrusted)
            for member, conversation in zip(gang.members, self.conversations, strict=True):
                conversation.stop = functools.partial(self._stop_rank, member)
        for member in gang.members:
            self._start(member, shared=size > 1)
        if (iterators := self._iterators()) is not None:
            iterators.settle([RemoteIterator(conversation) for conversation in self.conversations])

    def iterators(self) -> CallFuture:
        """The future of the iterators over the values of each rank, which is resolved when the call has begun."""
        future = CallFuture()
        future.label = self.call.label
        future.on_cancel = self.future.cancel
        self._iterators = weakref.ref(future)
        return future

    def _start(self, member: Member, *, shared: bool) -> None:
        store: Literal["all", "repeated"] = "all" if shared else "repeated"
        try:
            member.node.call(member.worker, member.spec, self.call, caller=_RankCall(self, member), store=store)
        except SkyfabError as error:
            self.note(member, None, error)

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
        if self.conversations:
            self.conversations[member.rank].begin(member.node, member.worker, stream)
        if not self.is_wanted:  # it was cancelled while it was being sent
            self.stop()

    # ---- ending

    def note(self, member: Member, value: Any, error: Exception | None = None) -> None:
        """Records a rank's result or its error."""
        assert self.gang is not None
        with self._lock:
            if member.rank not in self._open:
                return
            self._open.discard(member.rank)
            self.gang.broken = self.gang.broken or isinstance(error, HostLost)
            if isinstance(error, HostLost) and self._spare > 0 and member.rank:
                self._spare -= 1
                error = None
            self._results[member.rank] = value if error is None else error
            if error is not None:
                # Without its frames: Python prints those of each error in a group.
                self._failures.append(error.with_traceback(None))
            done = not self._open
            if error is not None and len(self._failures) == 1 and not done:
                self._timer = threading.Timer(GRACE, self.stop)
                self._timer.daemon = True
                self._timer.start()
        if self.conversations:
            self.conversations[member.rank].end(error)
        if done:
            self._finish()

    def abandon(self, error: Exception) -> None:
        """Fails the future with `error` while the ranks continue. Nothing is stopped."""
        with self._lock:
            self._open.clear()
        self.end(None, error)

    def end(self, result: Any, error: BaseException | None) -> None:
        """Resolves the future, unless there is another attempt."""
        if self._on_end is not None:
            self._on_end(error)
        if not self._ended(self, error):
            self.future.settle(result, error)
            self.future.on_cancel = None
            if (iterators := self._iterators()) is not None and not iterators.done():
                iterators.settle(None, error)

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

    def _stop_rank(self, member: Member) -> None:
        """Cancels it on one rank."""
        with suppress(SkyfabError):  # the host is lost: its failure will be reported separately
            member.node.cancel(self._streams[member.rank])

    def _finish(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._failures:
            _fold(self._failures)
            self.end(None, broadcast_error(self.call.label, self._failures, self._results))
        elif self._min_hosts is None:
            self.end(self._results, None)
        else:
            self._finish_elastic()

    def _finish_elastic(self) -> None:
        try:
            results = in_order(self._results)
        except Exception as error:  # what a host has sent
            self.end(None, ProtocolError(f"invalid results: {error}"))
        else:
            self.end(results, None)


class _RankCall:
    """One rank's part of a broadcast: the `Caller` of its node."""

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
        done = functools.partial(broadcast.note, member)
        deliver(done, message, buffers, host=member.node.name, rank=member.rank, label=label, untrusted=untrusted)

    def failed(self, error: Exception) -> None:
        self._broadcast.note(self._member, None, error)


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


class Broadcasts:
    """Runs the broadcasts of a pool one at a time, in the order in which they were submitted. Thread-safe.

    Invariants: at most one is active; while one waits, another is active; a closed queue is empty.

    So every rank gets them in the same order, whatever threads submit them and however large they are. And when one is
    cancelled, or fails and its processes exit, the next has not begun on any rank and gets a new gang. The gang is kept
    while its processes run and its spec, which includes the project's code, stays the same.
    """

    def __init__(
        self,
        images: HostImages,
        ranks: int | Literal["auto"],
        job: str,
        timing: Timing,
        events: Events,
        *,
        untrusted: bool,
    ) -> None:
        """`ranks` is the number on each host, `job` the prefix of its job ids."""
        self._images = images
        self._ranks = ranks
        self._elastic = next((plugin.elastic for plugin in images.plugins if plugin.elastic), None)
        self._patience = timing.lease if self._elastic is None else min(timing.lease, timing.heartbeat_timeout)
        """Seconds that another attempt waits for lost hosts. An elastic gang can continue without them."""
        self._events = events
        self._untrusted = untrusted
        self._job = job
        self._finder = RendezvousFinder(strongest_need(images.plugins), events)
        self._gang: Gang | None = None
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._waiting: deque[Broadcast] = deque()
        self._active: Broadcast | None = None
        self._closed = False

    # ---- on which ranks

    def ranks_on(self, node: Node) -> int:
        return self._ranks if self._ranks != "auto" else max(1, len(node.gpus))

    def available(self, nodes: Sequence[Node]) -> Sequence[Node]:
        """Those that a broadcast runs on now. Raises HostLost if they are too few for an elastic gang."""
        elastic = self._elastic
        if elastic is None:
            return nodes
        found = [node for node in nodes if node.lost is None]
        if len(found) < elastic.min_hosts:
            limits = elastic.min_hosts, elastic.max_hosts
            raise HostLost(f"{len(found)} of {len(nodes)} hosts are left, too few for elastic={limits}")
        return found[: elastic.max_hosts]

    def spec(self, nodes: Sequence[Node], tree: str, attempt: int = 0) -> GangSpec:
        return GangSpec(
            nodes=tuple(nodes),
            ranks=tuple(map(self.ranks_on, nodes)),
            tree=tree,
            attempt=attempt,
            elastic_agents=self._elastic is not None,
            plain=self._untrusted,
        )

    def new_gang(self, spec: GangSpec, job: str, number: int = 1) -> Gang:
        """Raises the error of a lost node, and PeersUnreachable."""
        for node in spec.nodes:
            if node.lost is not None:
                raise node.lost
        return Gang(spec, self._finder.arrange(spec.nodes), self._images.variables, name=f"gang{number}", job=job)

    def _gang_for(self, spec: GangSpec, job: str | None) -> Gang:
        """The gang for a broadcast. One that is retried gets a new gang, with the `job` of its earlier attempts."""
        before = self._gang
        if before is not None and not before.broken and before.spec == spec:
            return before
        if before is not None:
            before.release()  # nothing runs in it: only one broadcast is active
        number = next(self._numbers)
        self._gang = gang = self.new_gang(spec, job or f"{self._job}-{number}", number)
        known = [*(before.members if before is not None else ()), *gang.members]
        for node in {member.node for member in known}:  # output of the previous gang may still arrive
            node.members = {member.worker: member for member in known if member.node is node}
        return gang

    # ---- attempts

    def submit(self, call: PackedCall, nodes: Sequence[Node], *, pool: object = None) -> CallFuture:
        """Runs a call on the ranks of the available nodes, again after a failure if it may be retried."""
        if call.talks and self._elastic is not None:
            raise UsageError(f"{call.label} is a generator, or an argument is a stream: elastic gangs have neither")
        broadcast = self._attempt(call, nodes)
        future = broadcast.future
        future.pool = pool
        iterators = broadcast.iterators() if call.yields else None
        self._add(broadcast)
        if call.stall is not None:
            watch(future, lambda: self._processes(future), call.stall, call.label, self._events)
        return iterators or future

    def _attempt(self, call: PackedCall, nodes: Sequence[Node], after: Broadcast | None = None) -> Broadcast:
        enough = None if self._elastic is None else self._elastic.min_hosts
        made = Broadcast(call, nodes, after=after, min_hosts=enough, untrusted=self._untrusted, ended=self._ended)
        made.future.on_cancel = lambda: self._withdraw(made)
        return made

    def _processes(self, future: CallFuture) -> Sequence[tuple[Node, str, int | None]]:
        active = self._active
        return active.processes() if active is not None and active.future is future else ()

    def _start(self, broadcast: Broadcast) -> None:
        """Sends a broadcast to the ranks of the available hosts. May block for a while. Raises their errors."""
        call = broadcast.call
        nodes = self.available(broadcast.nodes)
        spec = self.spec(nodes, call.tree, broadcast.attempt)
        gang = self._gang_for(spec, broadcast.job)
        with SIGNAL_GUARD:
            broadcast.begin(gang, self._events.call(call.label, *(node.name for node in nodes), ranks=spec.ranks))

    def _may_retry(self, broadcast: Broadcast, error: BaseException | None) -> bool:
        """Whether to start a call again that failed: retries are left, or it is elastic and a host was lost."""
        if not isinstance(error, Exception) or isinstance(error, CallCancelled) or broadcast.future.done():
            return False  # a CallCancelled: it was detached, or the pool is closed
        number, retries = broadcast.attempt, broadcast.call.retries
        if number < retries or self._elastic is None:
            return number < retries
        lost = isinstance(error, BroadcastError) and any(isinstance(one, HostLost) for one in error.exceptions)
        return lost and number < retries + self._elastic.max_restarts

    # ---- the queue

    def open(self) -> None:
        self._closed = False

    def _add(self, broadcast: Broadcast) -> None:
        """Runs it when all before it have ended."""
        with SIGNAL_GUARD:  # one that is active always begins: others wait for its end
            with self._lock:
                closed, idle = self._closed, self._active is None
                if idle and not closed:
                    self._active = broadcast
                elif not closed:
                    self._waiting.append(broadcast)
            if closed:
                broadcast.end(None, _too_late(broadcast))
            elif idle:
                self._begin(broadcast)

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
            active = self._active
        if active is not None and active.call.yields:
            end_all(active.conversations)
        for broadcast in waiting:
            broadcast.end(None, _too_late(broadcast))

    def _begin(self, broadcast: Broadcast) -> None:
        try:
            if broadcast.attempt:
                wait_for_lost(
                    broadcast.nodes, self._patience, self._events, lambda: self._closed or broadcast.future.done()
                )
            if broadcast.future.done():
                self._ended(broadcast, None)
            else:
                self._start(broadcast)
        except BaseException as error:
            if isinstance(error, Exception) and not is_from_handler(error):
                broadcast.abandon(error)
                return
            # A signal handler's, as that of Ctrl-C, while waiting for a gang or after the call has begun.
            if broadcast.gang is None:
                broadcast.end(None, error)
            broadcast.future.cancel()
            raise

    def _withdraw(self, broadcast: Broadcast) -> None:
        """Removes one that was cancelled while queued. If it is just beginning, `_begin` or the broadcast notices."""
        with self._lock:
            self._waiting = deque(one for one in self._waiting if one is not broadcast)

    def _ended(self, broadcast: Broadcast, error: BaseException | None) -> bool:
        """Queues the next attempt, if there is one, and returns whether that is so. Begins the next broadcast.

        On a new thread: a new gang waits for replies, and this thread may be the reader.
        """
        with self._lock:
            if self._active is not broadcast:
                return False
            again = not self._closed and self._may_retry(broadcast, error)
            if again:
                self._waiting.append(self._attempt(broadcast.call, broadcast.nodes, broadcast))
            self._active = following = self._waiting.popleft() if self._waiting else None
        if following is not None:
            threading.Thread(target=self._begin, args=(following,), daemon=True).start()
        return again


def _too_late(broadcast: Broadcast) -> CallCancelled:
    return CallCancelled(f"{broadcast.call.label} had not started when the pool was closed")
