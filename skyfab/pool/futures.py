"""The futures of calls. A thread that waits for one reads its host's stream; cancelling one stops the call there."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from concurrent.futures._base import CANCELLED
from typing import Any

from skyfab.errors import UsageError
from skyfab.pool.node import Node
from skyfab.session.reader import refuse_nested_wait
from skyfab.session.sigint import SIGINT_GUARD
from skyfab.ui.events import emitting


def refuse_to_block() -> None:
    """Raises UsageError on a thread that must not wait for a call: one that runs a subscriber of events, or reads."""
    if threading.get_ident() in emitting:
        raise UsageError(
            "a subscriber of events cannot wait for a call: the thread that it runs on may be needed for that",
            hint="start a thread for it, or use compute.submit(call) and its add_done_callback",
        )
    refuse_nested_wait()


class CallFuture(Future[Any]):
    """The future of a call. Who waits for it reads the host's stream meanwhile; cancelling it stops it on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.node: Node | None = None
        self.pool: object = None
        """What runs it, and is not dropped while this is waited for."""
        self._process = os.getpid()
        self.on_cancel: Callable[[], object] | None = None
        self._waiter: tuple[int, Node] | None = None
        """The thread that waits, and the node whose stream it reads meanwhile."""

    def result(self, timeout: float | None = None) -> Any:
        return super().result(self._read(timeout))

    def exception(self, timeout: float | None = None) -> BaseException | None:
        return super().exception(self._read(timeout))

    def _read(self, timeout: float | None) -> float | None:
        """Reads until it is done or time is up; returns the time that is left."""
        if self.done():
            return timeout
        if self._process != os.getpid():
            raise UsageError("this call was made by another process, and only that one can wait for it")
        refuse_to_block()
        deadline = None if timeout is None else time.monotonic() + timeout
        node = self.node
        if node is not None:
            self._waiter = (threading.get_ident(), node)
            node.session.read_until(self.done, timeout)
        return None if deadline is None else max(0.0, deadline - time.monotonic())

    def add_done_callback(self, fn: Callable[[Future[Any]], object]) -> None:
        """Calls `fn` on a thread of its own: it may make calls and wait for them, which who reads a stream may not."""
        super().add_done_callback(lambda future: threading.Thread(target=fn, args=(future,), daemon=True).start())

    def cancel(self) -> bool:
        """Works while the call is queued and while it runs; twice is the same as once."""
        with SIGINT_GUARD:
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

    def settle(self, result: Any = None, error: BaseException | None = None) -> None:
        """Resolves it, unless it was cancelled meanwhile."""
        try:
            if error is None:
                self.set_result(result)
            else:
                self.set_exception(error)
        except InvalidStateError:
            if not self.cancelled():
                raise
        if self._waiter is not None and self._waiter[0] != threading.get_ident():
            self._waiter[1].session.poke()  # it was resolved by a thread that does not read
