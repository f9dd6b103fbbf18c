"""The queue that runs the broadcasts of a pool one at a time, and again after a failure."""

from __future__ import annotations

import contextlib
import copy
import itertools
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Final, Literal

from skyfab._util.signals import SIGNAL_GUARD, is_from_handler
from skyfab.calls.pack import PackedCall
from skyfab.errors import (
    BroadcastError,
    CallCancelled,
    HostLost,
    UsageError,
)
from skyfab.pool.broadcast import Broadcast, Gang, GangSpec
from skyfab.pool.futures import CallFuture
from skyfab.pool.images import HostImages
from skyfab.pool.node import Node
from skyfab.pool.recovery import wait_for_lost
from skyfab.pool.relay import Relay
from skyfab.pool.rendezvous import RendezvousFinder, strongest_need
from skyfab.pool.stall import watch
from skyfab.pool.streams import end_all
from skyfab.session.timing import Timing
from skyfab.ui.events import Events, Notice

_PATIENCE: Final = 5.0
"""Seconds that a broadcast waits for a generator before a notice says so."""


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
        self.relay: Relay | None = None
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
                raise copy.copy(node.lost)
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
        if call.converses and self._elastic is not None:
            raise UsageError(f"elastic gangs cannot run {call.label}: it is a generator, or an argument is a stream")
        broadcast = self._attempt(call, nodes)
        future = broadcast.future
        future.pool, future.waiting = pool, self._events.waiting
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
        if self.relay is not None and (call.arguments.buffers or call.function.payload.buffers):
            self.relay.share(call, nodes)
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
                active = self._active
            if closed:
                broadcast.end(None, _too_late(broadcast))
            elif idle:
                self._begin(broadcast)
            elif active is not None and active.call.yields:
                self._explain_later(broadcast, active)

    def _explain_later(self, broadcast: Broadcast, active: Broadcast) -> None:
        """Says after a while that a broadcast waits for a generator, whose values nobody may read."""

        def explain() -> None:
            if broadcast in self._waiting and self._active is active:
                hint = "read its iterators to the end, or close them"
                text = f"{broadcast.call.label} waits for {active.call.label}: {hint}"
                self._events.emit(Notice(host=active.nodes[0].name, text=text))

        timer = threading.Timer(_PATIENCE, explain)
        timer.daemon = True
        for future in (broadcast.future, active.future):
            Future.add_done_callback(future, lambda _: timer.cancel())
        with contextlib.suppress(RuntimeError):  # this machine has no thread for it
            timer.start()

    @property
    def is_idle(self) -> bool:
        """No rank runs a broadcast. One that was cancelled ends when its ranks have."""
        return self._active is None

    @property
    def at_work(self) -> Broadcast | None:
        """The broadcast that is running now, if it was sent to every rank and no host was lost, nor is it stopped."""
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
            try:
                threading.Thread(target=self._begin, args=(following,), daemon=True).start()
            except RuntimeError as error:  # this machine lacks threads
                with self._lock:
                    failed, self._waiting, self._active = [following, *self._waiting], deque(), None
                for one in failed:
                    one.end(None, error)
        return again


def _too_late(broadcast: Broadcast) -> CallCancelled:
    return CallCancelled(f"{broadcast.call.label} had not started when the pool was closed")
