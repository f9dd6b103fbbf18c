"""The scheduler for solo calls, which run on one worker each: a queue, and the slots of all hosts.

Each slot of a host is one worker. A slot gets its next call when it is free. If calls take less time than the round
trip to the host, it gets a few in advance (prefetch).

A small call that finds an idle worker takes the fast path: the caller's own thread sends one frame, waits for the reply
and unpickles it; no queue, no future.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from skyfab._util.signals import SIGNAL_GUARD
from skyfab.calls.pack import PackedCall
from skyfab.calls.results import deliver, unpack_group, unpack_result
from skyfab.errors import CallCancelled, HostLost, SkyfabError
from skyfab.pool.gpus import Gpus
from skyfab.pool.node import Node, WorkerSpec
from skyfab.pool.streams import end_all
from skyfab.pool.task import PREFETCH, RESERVED, Slot, Task
from skyfab.protocol import messages
from skyfab.protocol.mux import SMALL
from skyfab.session.reader import refuse_to_wait
from skyfab.session.replies import Reply

NOT_TAKEN: Final = object()
"""The call was not made on the fast path: it must be queued."""
_MOST: Final = 32
_MOST_RETURNS: Final = 100
"""How often a call may be returned without having begun. After that, its worker is taken to be unable to start."""
_SPARE: Final = 8
"""Idle workers of generators that are kept on a host."""


class Scheduler:
    """Assigns solo calls to slots, the least loaded first."""

    def __init__(
        self,
        started: Callable[[str, str], Callable[[BaseException | None], None]],
        *,
        slots: int | None = None,
        untrusted: bool = False,
    ) -> None:
        """`started` is called with a call's label and host when it starts; it returns a function to call at its end.

        `slots` is the number of slots of each host, else the inventory says it.
        """
        self._per_host = slots
        self._slots: list[Slot] = []
        self._own_slots: list[Slot] = []
        """Those of generators: each has one for itself, as it may wait for a program that makes other calls."""
        self._streams = itertools.count()
        self._spec_of: Callable[[Node, str], WorkerSpec]
        self._advancing: set[int] = set()
        """Threads that are inside `advance`."""
        self._waiting: deque[Task] = deque()
        self._waiting_for_gpus: deque[Task] = deque()
        self.gpus = Gpus()
        self._lock = self.gpus.lock
        self._mean = 1.0
        self._looking = False
        self._started = started
        self.untrusted = untrusted
        """Hosts are not trusted: results may only be plain data."""

    def open(self, nodes: Sequence[Node], spec_of: Callable[[Node, str], WorkerSpec]) -> None:
        """Makes the slots of all nodes, the first of each before the second of any."""
        counts = [self._per_host or node.host.slots for node in nodes]
        numbered = (
            (number, node)
            for number in range(max(counts))
            for node, count in zip(nodes, counts, strict=True)
            if number < count
        )
        self._own_slots = []
        self._slots = [Slot(node, f"solo.{number}", spec_of(node, "")) for number, node in numbered]
        self._spec_of = spec_of
        self.gpus.open(nodes, spec_of)

    def slots_for(self, gpus: float) -> int:
        """How many solo calls that need `gpus` run at a time on all hosts. Raises UsageError if none can."""
        return self.gpus.slots_for(gpus) if gpus else len(self._slots)

    def use_tree(self, tree: str) -> None:
        """The project changed: later calls need workers that import the new code."""
        for slot in (*self._slots, *self._own_slots):
            slot.spec = self._spec_of(slot.node, tree)
        self.gpus.tree = tree

    # ---- the fast path

    def run(self, call: PackedCall) -> Any:
        """Runs a small call on an idle slot: its result, or NOT_TAKEN. Raises what the call raises."""
        arguments = call.arguments
        if call.stall is not None or call.retries or call.gpus:
            return NOT_TAKEN
        if arguments.buffers or len(arguments.data) > SMALL or call.function.payload.buffers:
            return NOT_TAKEN
        refuse_to_wait()
        with SIGNAL_GUARD:  # only the wait for the reply can be interrupted, so a reserved slot is always released
            slot = self._reserve()
            if slot is None:
                return NOT_TAKEN
            host = slot.node.name
            reply = Reply(functools.partial(self._release, slot))
            ended: Callable[[BaseException | None], None] | None = None
            try:
                ended = self._started(call.label, host)
                slot.node.call(slot.worker, slot.spec, call, caller=reply)
                slot.node.session.read_until_there(reply)
                message, buffers = reply.wait()
                if isinstance(message, messages.Ended) and message.why == "unstarted":
                    # The queue starts it again, with a start and an end of its own.
                    ended(CallCancelled("its worker exited before the call started"))
                    return NOT_TAKEN
                label, untrusted = call.label, self.untrusted
                result = unpack_result(message, buffers, host=host, rank=None, label=label, untrusted=untrusted)
            except BaseException as error:
                if not reply.stream:  # it was not sent
                    self._release(slot)
                elif not reply.is_there:
                    with contextlib.suppress(SkyfabError):  # the host is lost: there is nothing to cancel
                        slot.node.cancel(reply.stream)
                if isinstance(error, KeyboardInterrupt):
                    vars(error)["stopped"] = f"stopped on {host}"
                if ended is not None:
                    ended(CallCancelled("interrupted") if isinstance(error, KeyboardInterrupt) else error)
                raise
            ended(None)
            return result

    def _reserve(self) -> Slot | None:
        """An idle slot; None if there is none or calls are queued. It must be released."""
        with self._lock:
            if not self._waiting:
                slot = self._idle_slot()
                if slot is not None:
                    slot.tasks.append(RESERVED)
                return slot
        return None

    def _idle_slot(self) -> Slot | None:
        """The first slot without calls. It is what every call looks for: one pass over the slots of 1,000 hosts."""
        return next((slot for slot in self._slots if not slot.tasks and slot.node.lost is None), None)

    def _least(self, on: Node | None) -> Slot | None:
        """The slot with the fewest calls, of all nodes or one; None if it is lost."""
        fitting = (slot for slot in self._slots if on in (None, slot.node) and slot.node.lost is None)
        return min(fitting, key=lambda slot: len(slot.tasks), default=None)

    def _release(self, slot: Slot) -> None:
        with self._lock:
            slot.tasks.remove(RESERVED)
        if self._waiting:
            self.advance()
        if len(self._slots) > 1:
            self._help()

    # ---- the queue

    def add(self, task: Task) -> None:
        """Runs the task as soon as a slot is free. Raises UsageError if no host has enough GPUs for it."""
        gpus = task.call.gpus
        with SIGNAL_GUARD:
            if gpus:
                self.gpus.check(gpus, task.on, task.call.label)
            task.enter(self, untrusted=self.untrusted)
            with self._lock:
                slot = self._own_slot(task) if task.call.yields and not gpus else None
                if slot is None:
                    self._queue_of(task).append(task)
                else:
                    self._assign(task, slot)
            if slot is None:
                self.advance()
            else:
                self._give(task, slot)

    def advance(self) -> None:
        """Assigns waiting calls to slots that have room; fails those for which no host is left.

        Calls may fail or be returned meanwhile, which calls this again: that returns at once, and the loop continues.
        """
        me = threading.get_ident()
        if me in self._advancing:
            return
        self._advancing.add(me)
        try:
            while (step := self._next_step()) is not None:
                step()
        finally:
            self._advancing.discard(me)

    def _next_step(self) -> Callable[[], None] | None:
        """What to do without the lock: make a call on a slot that is reserved for it now, or fail calls."""
        with self._lock:
            step = self._place() if self._waiting else None
            return self._place_on_gpus() if step is None and self._waiting_for_gpus else step

    def _place_on_gpus(self) -> Callable[[], None] | None:
        found = self.gpus.place(self._waiting_for_gpus)
        if found is None:
            return None
        if isinstance(found, list):
            return functools.partial(self.gpus.release, found)
        task, slot = found
        self._waiting_for_gpus.remove(task)
        if slot is None:
            return functools.partial(self._strand, [task])
        self._assign(task, slot)
        return functools.partial(self._give, task, slot)

    def _queue_of(self, task: Task) -> deque[Task]:
        return self._waiting_for_gpus if task.call.gpus else self._waiting

    def _place(self) -> Callable[[], None] | None:
        idle = self._idle_slot()
        if idle is None and all(slot.node.lost is not None for slot in self._slots):
            stranded, self._waiting = self._waiting, deque()
            return functools.partial(self._strand, stranded)
        now = time.monotonic()
        prefetch = max(1, min(_MOST, int(PREFETCH / max(self._mean, 1e-6))))
        for position, task in enumerate(self._waiting):
            if task.on is None and idle is None and prefetch == 1 and not task.call.yields:
                return None  # everything is busy
            slot = self._own_slot(task) if task.call.yields else (task.on is None and idle) or self._least(task.on)
            if slot is None:
                del self._waiting[position]
                return functools.partial(self._strand, [task])
            if not slot.tasks or (len(slot.tasks) < prefetch and slot.may_prefetch(task, now)):
                del self._waiting[position]
                self._assign(task, slot)
                return functools.partial(self._give, task, slot)
            if task.on is None:
                return None  # everything is busy
        return None

    def _assign(self, task: Task, slot: Slot) -> None:
        slot.tasks.append(task)
        slot.given = slot.spec
        task.slot, task.stream = slot, 0  # the stream number on another host is void

    def _own_slot(self, task: Task) -> Slot | None:
        """An idle slot for a generator, on the node that runs the fewest; a new one if there is none."""
        nodes = {slot.node for slot in self._slots if slot.node.lost is None and task.on in (None, slot.node)}
        if not nodes:
            return None
        busy = Counter(slot.node for slot in self._own_slots if slot.tasks) if len(nodes) > 1 else {}
        node = min(nodes, key=lambda node: (busy.get(node, 0), node.index))
        for slot in self._own_slots:
            if slot.node is node and not slot.tasks:
                return slot
        made = Slot(node, f"stream.{next(self._streams)}", self._spec_of(node, task.call.tree))
        self._own_slots.append(made)
        return made

    def _is_surplus(self, slot: Slot) -> bool:
        """Whether a generator's slot is no longer needed, because enough others are idle. Then it is forgotten."""
        if sum(one.node is slot.node and not one.tasks for one in self._own_slots) <= _SPARE:
            return False
        self._own_slots.remove(slot)
        return True

    def _strand(self, tasks: Iterable[Task]) -> None:
        """Fails calls that no host can take."""
        for task in tasks:
            lost = task.on.lost if task.on is not None else None
            which = f" with {task.call.gpus} GPUs" if task.call.gpus else ""
            self._finish(task, None, copy.copy(lost) or HostLost(f"every host of the pool{which} is lost"))

    def _give(self, task: Task, slot: Slot) -> None:
        task.started = time.monotonic()
        task.future.node = slot.node
        task.ended = self._started(task.call.label, slot.node.name)
        try:
            begin = None if task.conversation is None else task.conversation.begin
            slot.node.call(slot.worker, slot.spec, task.call, caller=task, each=task.each, begin=begin)
        except SkyfabError as error:
            self.failed(task, error)

    # ---- callbacks of a task's node

    def sent(self, task: Task, stream: int) -> None:
        with self._lock:
            task.stream = stream
        if task.future.cancelled():  # while it was being sent
            self.cancel(task)

    def answered(self, task: Task, message: messages.Message, buffers: list[memoryview]) -> None:
        slot = task.slot
        assert slot is not None
        why = message.why if isinstance(message, messages.Ended) else ""
        with self._lock:
            slot.tasks.remove(task)
            again = why in ("unstarted", "unassigned", "unstored") and not task.future.done()
            if again:
                task.returned += why != "unassigned"
                again = task.returned < _MOST_RETURNS
            if again:
                task.slot, task.stream = None, 0
                self._queue_of(task).appendleft(task)
            elif why != "unassigned" and not task.call.yields and not slot.gpus:
                self._measure(task, slot)
            surplus = task.call.yields and not slot.gpus and self._is_surplus(slot)
        if surplus:
            with contextlib.suppress(SkyfabError):  # the host is lost
                slot.node.release(slot.worker)
        if self._waiting or self._waiting_for_gpus:
            self.advance()
        if len(self._slots) > 1:
            self._help()
        if again:
            return
        if task.call.yields and isinstance(message, messages.Result):  # its values came before
            self._finish(task)
            return
        done, label = functools.partial(self._finish, task), task.call.label
        unpack = unpack_group if task.each else unpack_result
        about = {"host": slot.node.name, "rank": None, "label": label, "untrusted": self.untrusted}
        deliver(done, message, buffers, unpack=unpack, **about)

    def _measure(self, task: Task, slot: Slot) -> None:
        now = time.monotonic()
        elapsed = now - max(task.started, slot.answered)
        slot.answered = now
        self._mean += (elapsed - self._mean) * (0.5 if self._mean == 1.0 else 0.2)

    def _help(self) -> None:
        """A slot is idle: soon takes back calls that were prefetched by slots that are stuck behind a long call."""
        if self._looking:
            return
        if any(not slot.tasks for slot in self._slots) and any(len(slot.tasks) > 1 for slot in self._slots):
            self._looking = True
            timer = threading.Timer(2 * PREFETCH, self._take_back)
            timer.daemon = True
            try:
                timer.start()
            except RuntimeError:  # this machine has no thread for it: the next reply looks again
                self._looking = False

    def _take_back(self) -> None:
        self._looking = False
        now = time.monotonic()
        with self._lock:
            idle = {slot.node for slot in self._slots if not slot.tasks and slot.node.lost is None}
            useful = {None, *idle} if idle else idle
            prefetch = [  # the last first, as each returns to the front of the queue
                (slot.node, [task.stream for task in slot.tasks[:0:-1] if task.stream and task.on in useful])
                for slot in self._slots
                if slot.is_stuck(now)
            ]
        for node, streams in prefetch:
            try:
                if streams:
                    node.cancel(*streams, begun=False)
            except SkyfabError:
                pass  # the host is lost: its failure will be reported separately
        self._help()

    def failed(self, task: Task, error: Exception) -> None:
        slot = task.slot
        assert slot is not None
        if isinstance(error, HostLost):
            slot.node.note_lost(error)
        again = isinstance(error, HostLost) and task.retries > 0 and task.on is None and not task.future.done()
        with self._lock:
            slot.tasks.remove(task)
            if again:
                task.retries -= 1
                task.slot, task.stream = None, 0
                self._queue_of(task).appendleft(task)
        if again and task.ended is not None:
            task.ended(error)
        elif not again:
            self._finish(task, None, error)
        self.advance()

    def ended(self, node: Node, worker: str | None = None) -> None:
        """A worker of a host has exited, of any kind, or the host is lost."""
        self.gpus.ended(node, worker)
        self.advance()

    def _finish(self, task: Task, result: Any = None, error: BaseException | None = None) -> None:
        if task.ended is not None:
            task.ended(error)  # before threads that wait for the future continue
        if task.conversation is None:
            task.future.settle(result, error)
        else:
            task.conversation.end(result, error)
        task.future.on_cancel = None  # it references the task, and so its arguments

    def cancel(self, task: Task) -> None:
        """Stops a call, queued or running. One that is not sent yet never will be: its `is_wanted` is False."""
        with self._lock:
            if task in (queue := self._queue_of(task)):
                queue.remove(task)
                return
            slot, stream = task.slot, task.stream
        if slot is not None and stream:
            try:
                slot.node.cancel(stream)
            except SkyfabError:
                pass  # the host is lost, and the call with it

    def fail_all(self) -> None:
        """The pool closes: fails all calls that have not begun, and ends generators."""
        with self._lock:
            waiting = [*self._waiting, *self._waiting_for_gpus]
            self._waiting.clear()
            self._waiting_for_gpus.clear()
            running = [task.conversation for slot in (*self._own_slots, *self.gpus.slots) for task in slot.tasks]
        end_all([conversation for conversation in running if conversation is not None])
        for task in waiting:
            self._finish(task, None, CallCancelled(f"{task.call.label} had not started when the pool was closed"))
