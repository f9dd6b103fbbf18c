"""Solo calls as the scheduler has them: `Task` is a call with its future, `Slot` is a worker with the calls it has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from skyfab.calls.pack import PackedCall, PackedFunction
from skyfab.pool.feeds import converse
from skyfab.pool.futures import CallFuture
from skyfab.pool.node import Node, WorkerSpec
from skyfab.pool.streams import Conversation
from skyfab.protocol import codec, messages

PREFETCH: Final = 0.010
"""Seconds of work that a slot may prefetch."""
_SMALL: Final = 64 * 1024
"""Calls with larger arguments (bytes) are not prefetched."""


class Task:
    """One solo call, and its future. It is the `Caller` of its node."""

    _scheduler: Any
    """The `Scheduler`, from `enter` on."""

    def __init__(self, call: PackedCall, *, on: Node | None = None) -> None:
        self.call = call
        self.retries = call.retries
        """How often it may still be moved from a lost host to another one."""
        self.on = on
        """The only node on which it may run; None for any."""
        self.each = False
        """Its arguments are a group of tuples; the result is a list: the seconds that it took, and the results."""
        self.conversation: Conversation | None = None
        """The exchanges with it while it runs, if there are any; from `enter` on."""
        self.future = CallFuture()
        self.future.label = call.label
        self.ended: Callable[[BaseException | None], None] | None = None
        self.slot: Slot | None = None
        self.returned = 0
        """How often it was returned without having begun."""
        self.stream = 0
        self.started = 0.0

    def processes(self) -> list[tuple[Node, str, int | None]]:
        """Node, worker and rank (None) where it runs; empty if it is on no slot."""
        return [] if self.slot is None else [(self.slot.node, self.slot.worker, None)]

    def enter(self, scheduler: Any, *, untrusted: bool) -> None:
        self._scheduler = scheduler
        self.future.on_cancel = lambda: scheduler.cancel(self)
        if self.call.converses:
            [self.conversation] = converse(self.call, [self.future], untrusted=untrusted)
            self.conversation.stop = self.future.cancel

    def is_wanted(self) -> bool:
        return not self.future.cancelled()

    def sent(self, stream: int) -> None:
        self._scheduler.sent(self, stream)

    def answered(self, message: messages.Message, buffers: list[memoryview]) -> None:
        self._scheduler.answered(self, message, buffers)

    def failed(self, error: Exception) -> None:
        self._scheduler.failed(self, error)


RESERVED: Final = Task(
    PackedCall(function=PackedFunction("", codec.Payload(b"")), arguments=codec.Payload(b""), label="")
)
"""Placeholder in a slot for a call of the fast path. It counts as a long call: nothing is placed behind it."""


class Slot:
    """One worker for solo calls on one node."""

    def __init__(self, node: Node, worker: str, spec: WorkerSpec) -> None:
        self.node = node
        self.worker = worker
        self.spec = spec
        """The worker spec for the next call."""
        self.given = spec
        """The worker spec of the calls that it has."""
        self.tasks: list[Task] = []
        """Calls without a reply yet; the first one runs."""
        self.answered = 0.0
        """Time of the last reply."""
        self.gpus: tuple[int, ...] = ()
        """The GPUs that it sees; without any, all of its host."""
        self.wanted = 0.0
        """How many GPUs it has for itself, or which share of one."""
        self.is_leaving = False
        """Its process was asked to exit, and may still use its GPUs."""

    @property
    def is_kept(self) -> bool:
        """Its process is kept for a next call."""
        return not self.tasks and not self.is_leaving

    def is_stuck(self, now: float) -> bool:
        """Its running call takes long: nothing should wait behind it."""
        if not self.tasks:
            return False
        return self.tasks[0] is RESERVED or now - max(self.answered, self.tasks[0].started) > PREFETCH

    def may_prefetch(self, task: Task, now: float) -> bool:
        """Whether a call may wait behind the running one: it is small, in the same process, and that is not stuck."""
        small = task.call.arguments.size < _SMALL and not task.call.converses
        return small and self.given is self.spec and not self.is_stuck(now)
