"""Gangs: the gang that a pool has now, which rank sits in which seat, and the broadcasts that wait for it."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from skyfab.errors import CallCancelled, ProtocolError
from skyfab.pool.futures import CallFuture
from skyfab.pool.gang import Broadcast, Gang, GangCall
from skyfab.pool.node import Node
from skyfab.pool.rendezvous import Meetings
from skyfab.session.sigint import INTERRUPTS

Start = Callable[[GangCall], None]


class Gangs:
    """Keeps one gang for as long as its processes live and the project's code stays the same."""

    def __init__(self, env: Callable[[Node], Mapping[str, str]], pool: str, meetings: Meetings) -> None:
        """`env` says what a node's processes find in their environment; `pool` is a name that no other pool has."""
        self._env = env
        self._pool = pool
        self._meetings = meetings
        self._gang: Gang | None = None
        self._numbers = itertools.count(1)
        self._ranks: dict[tuple[int, str], int] = {}
        self._new_ranks: dict[tuple[int, str], int] = {}
        self._lock = threading.Lock()

    def current(
        self,
        nodes: Sequence[Node],
        ranks: Sequence[int],
        tree: str,
        *,
        attempt: int = 0,
        job: str | None = None,
        conducted: bool = False,
    ) -> Gang:
        """The gang for a call, with so many ranks on each node. Raises what is wrong with a node that is lost.

        What is tried again gets a new one, with the `job` of the attempts before. Where it is `conducted`, each node
        has one process that starts the ranks.
        """
        with self._lock:
            gang = self._gang
            wanted = (tree, attempt, list(nodes))
            if gang is not None and not gang.broken and (gang.tree, gang.attempt, gang.nodes) == wanted:
                return gang
            if gang is not None:
                gang.release()  # nothing runs in it: a pool has one broadcast at a time
            for node in nodes:
                if node.lost is not None:
                    raise node.lost
            meeting = self._meetings.arrange(nodes)
            number = next(self._numbers)
            gang = Gang(
                nodes,
                ranks,
                name=f"gang{number}",
                job=job or f"{self._pool}-{number}",
                tree=tree,
                meeting=meeting,
                attempt=attempt,
                env=self._env,
                conducted=conducted,
            )
            self._gang = gang
            before, self._new_ranks = self._new_ranks, {}
            if not conducted:  # else a seat has several, and which ones may change
                self._new_ranks = {(member.node.index, member.seat): member.rank for member in gang.members}
            self._ranks = {**before, **self._new_ranks}  # the gang before may still have something to say
            return gang

    def rank_of(self, node: Node, seat: str) -> int | None:
        """The rank of the process in a seat; None for one that runs solo calls."""
        return self._ranks.get((node.index, seat))

    def vacated(self, node: Node, seat: str) -> None:
        """A seat's process has ended: if it was in the gang, the next call gets a new one."""
        gang = self._gang
        if gang is not None and any(member.node is node and member.seat == seat for member in gang.members):
            gang.broken = True


class BroadcastQueue:
    """Runs the broadcasts of a pool one after another, in the order in which they were asked for. Thread-safe.

    Invariants: at most one is active; where one waits, one is active; a queue that is closed has none that waits.

    So every rank sees them in one order, whatever threads and sizes; and when one is cancelled, or fails and takes its
    processes along, the next has begun nowhere and gets another gang.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[tuple[GangCall, Start]] = deque()
        self._active: GangCall | None = None
        self._closed = False

    def open(self) -> None:
        self._closed = False

    def add(self, broadcast: Broadcast, start: Start) -> GangCall:
        """Runs it when all before it are over. `start` begins it on a gang, which may take a while; it may raise."""
        call = GangCall(broadcast, self._ended)
        call.future.on_cancel = lambda: self._withdraw(call)
        with INTERRUPTS:
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
    def at_work(self) -> GangCall | None:
        """The broadcast that runs now."""
        call = self._active
        runs = call is not None and call.is_sent and call.is_wanted and call.gang is not None and not call.gang.broken
        return call if runs else None

    def close(self) -> None:
        """The pool closes: what has not begun never will."""
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
        except BaseException as error:  # Ctrl-C: in the wait for a gang, or once it runs
            if call.gang is None:
                call.fail(error)
            call.future.cancel()
            raise

    def _withdraw(self, call: GangCall) -> None:
        """Cancelled before it began. If it is about to begin, `_begin` or the call itself finds out."""
        with self._lock:
            self._waiting = deque(entry for entry in self._waiting if entry[0] is not call)

    def _ended(self, call: GangCall) -> None:
        """The next one begins, on a thread of its own: a new gang has to be asked for, and this one may read."""
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
    """Starts a call, and again where `again` says so of its failure; both are told how often it was started before."""
    outer = CallFuture()

    def attempt(number: int) -> None:
        try:
            inner = start(number)
        except BaseException as error:
            outer.settle(None, error)
            return
        outer.node, outer.pool, outer.on_cancel = inner.node, inner.pool, inner.cancel
        if outer.cancelled():  # meanwhile: nobody has told the new attempt
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
        elif isinstance(error, CallCancelled):  # it was handed over to its hosts, or the pool is closed
            outer.settle(None, error)
        elif not outer.done() and again(error, number):  # not on the thread that reads: a new gang must be asked for
            threading.Thread(target=attempt, args=(number + 1,), daemon=True).start()
        else:
            outer.settle(None, error)

    attempt(0)
    return outer
