"""Futures of calls: cancelling one stops the call."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from concurrent.futures._base import CANCELLED, PENDING, RUNNING
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, TypeVar

from skyfab._util.html import ShownAsTable
from skyfab._util.signals import SIGNAL_GUARD, GuardedFuture
from skyfab.errors import UsageError
from skyfab.pool.node import Node
from skyfab.session.reader import refuse_to_wait
from skyfab.ui.events import Waiting, emitting

R = TypeVar("R")

_NOTHING: Final[AbstractContextManager[None]] = nullcontext()


def refuse_to_block() -> None:
    """Raises UsageError on a thread that must not wait for a call: one that runs an event subscriber, or the reader."""
    if threading.get_ident() in emitting:
        raise UsageError(
            "a subscriber of events cannot wait for a call: the thread that it runs on may be needed for that",
            hint="start a thread for it, or use compute.submit(call) and its add_done_callback",
        )
    refuse_to_wait()


class CallFuture(GuardedFuture, ShownAsTable):
    """The future of a call. Cancelling it stops the call on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.node: Node | None = None
        self.label = ""
        self.pool: object = None
        """The pool that runs it: a reference, so that it is not garbage-collected while a caller waits."""
        self.waiting: AbstractContextManager[None] = _NOTHING
        """The pool's context for waits of the main thread."""
        self._process = os.getpid()
        self.on_cancel: Callable[[], object] | None = None

    @property
    def state(self) -> str:
        """What came of it, or where it is."""
        if self.cancelled():
            return "cancelled"
        if not self.done():
            return "waiting" if self.node is None else "running"
        error = self.exception(0)
        return "done" if error is None else f"raised {type(error).__name__}"

    def __repr__(self) -> str:
        return f"<Future of {self.label}: {self.state}>" if self.label else f"<Future: {self.state}>"

    def _table(self) -> tuple[Sequence[str], Sequence[Sequence[object]]]:
        return ("call", "host", "state"), [(self.label, self.node.name if self.node else "–", self.state)]

    def result(self, timeout: float | None = None) -> Any:
        with SIGNAL_GUARD, self._waiting():
            return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        with SIGNAL_GUARD, self._waiting():
            return super().exception(timeout)

    def _waiting(self) -> AbstractContextManager[None]:
        """In it, a terminal shows what the main thread waits for. Raises UsageError if this thread cannot wait."""
        SIGNAL_GUARD.wrap()
        if self.done():
            return _NOTHING
        if self._process != os.getpid():
            raise UsageError("this call belongs to another process, and only that process can wait for it")
        refuse_to_block()
        # Other threads may wait while the main thread prints, which would get into the lines that are shown.
        return self.waiting if threading.get_ident() == SIGNAL_GUARD.main else _NOTHING

    def add_done_callback(self, fn: Callable[[Future[Any]], object]) -> None:
        """Calls `fn` on a new thread, so that it may make calls and wait for them, which the reader thread may not."""
        with SIGNAL_GUARD:  # a thread whose start is interrupted may never run
            super().add_done_callback(lambda future: threading.Thread(target=fn, args=(future,), daemon=True).start())

    def cancel(self) -> bool:
        """Works while the call is queued and while it runs. Idempotent."""
        SIGNAL_GUARD.wrap()
        with SIGNAL_GUARD:
            if not super().cancel():
                return False
            with self._condition:
                first = self._state == CANCELLED
                if first:
                    self.set_running_or_notify_cancel()
            on_cancel = self.on_cancel
            if first and on_cancel is not None:
                on_cancel()
        return True

    def start(self) -> bool:
        """From now on it cannot be cancelled. Returns False if it was."""
        with self._condition:
            if self._state == PENDING:
                self._state = RUNNING
            return self._state == RUNNING

    def settle(self, result: Any = None, error: BaseException | None = None) -> None:
        """Resolves the future, unless it was cancelled in the meantime."""
        try:
            if error is None:
                self.set_result(result)
            else:
                self.set_exception(error)
        except InvalidStateError:
            if not self.cancelled():
                raise


def wait_for(future: Future[R], nodes: Sequence[Node], waiting: Waiting) -> R:
    """The result. An exception of a signal handler stops the call; that of Ctrl-C says on which hosts."""
    try:
        with SIGNAL_GUARD, waiting:
            return future.result()
    except BaseException as error:
        note_stopped(error, future, nodes)
        raise


def note_stopped(error: BaseException, future: Future[Any], nodes: Sequence[Node]) -> None:
    """Stops a call, unless it has ended. The message of Ctrl-C then says on which hosts."""
    future.cancel()
    if isinstance(error, KeyboardInterrupt):
        vars(error)["stopped"] = f"stopped on {', '.join(node.name for node in nodes)}"
