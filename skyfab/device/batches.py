"""Batches: instructions that are sent together, and are kept until the host has replied."""

from __future__ import annotations

import contextlib
import copy
import itertools
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

from skyfab._util.signals import SIGNAL_GUARD
from skyfab.device.call_site import CallSite, describe
from skyfab.errors import DeviceError, ProtocolError, SkyfabError, UsageError
from skyfab.host.device import wire
from skyfab.protocol import messages

_new_thread: Final = itertools.count(1).__next__


class _Current(threading.local):
    """The thread that is running. Unlike Python's, its number is never used again."""

    def __init__(self) -> None:
        self.thread = _new_thread()
        if torch := sys.modules.get("torch"):
            torch.autograd.set_multithreading_enabled(False)  # else PyTorch has a thread of its own for backward()


current: Final = _Current()
Entry = tuple[Sequence[Any], CallSite, int, bool]
"""An instruction, the line that it comes from, the thread that has emitted it, and whether it is a change in place that
autograd has recorded."""


observers: Final[list[Any]] = []
"""The profiles (profile.py) that count what all streams do."""
on_error: Final[list[Callable[[Sequence[Sequence[Any]]], None]]] = []
"""Called with the instructions that hosts have not executed because of an error, when that is raised."""


def report_skipped(skipped: Sequence[Entry]) -> None:
    for call in on_error:
        call([entry[0] for entry in skipped])


class Batch:
    """Instructions that a `DeviceStream` has sent, until their reply. It is the `Caller` of its call."""

    def __init__(self, stream: Any, entries: Sequence[Entry], size: int) -> None:
        self._stream = stream
        self.entries = entries
        self.size = size
        self.is_there = False
        """It was received, or never will be."""
        self._arrived = threading.Lock()
        """Held until the reply is there."""
        self._arrived.acquire()
        self.document: Any = None
        self.error: Exception | None = None
        """What failed in it, or why it was not executed. It may have been raised already."""
        self.buffers: list[memoryview] = []
        self.then: Then | None = None

    def value(self) -> Any:
        """What the host replied. Raises ProtocolError, and DeviceError if the instruction failed or was skipped."""
        if self.error is not None:
            raise copy.copy(self.error)  # as DeviceStream does
        if self.document is None:
            raise DeviceError("not executed because of an earlier error")
        if not isinstance(self.document, dict) or "value" not in self.document:
            raise ProtocolError(f"invalid reply of a device: {self.document!r:.200}")
        return self.document["value"]

    @property
    def failed_at(self) -> int:
        """The index of the instruction that failed, as the host reports it."""
        found = self.document["error"]
        at = found.get("at") if isinstance(found, dict) else None
        return at if type(at) is int and at >= 0 else len(self.entries)

    def explain(self) -> DeviceError:
        """The error that the host reports."""
        found, host = self.document["error"], self._stream.link.name
        if not isinstance(found, dict):
            return DeviceError("an operation failed; the host sent no reason", host=host)
        if type(found.get("channel")) is int:
            self._stream.broken.add(found["channel"])
        line = describe(self.entries[self.failed_at][1]) if self.failed_at < len(self.entries) else None
        try:
            op = str(found.get("op", "")).removeprefix("aten::")
            inputs = found.get("inputs")
            shapes = ", ".join(map(str, inputs)) if isinstance(inputs, list) else ""
            text = f"{found.get('kind', 'error')}: {found.get('text', '')}"
            if "memory" in text and isinstance(found.get("free"), int) and isinstance(found.get("total"), int):
                text += f" ({found['free'] / 2**30:.1f} GiB free of {found['total'] / 2**30:.1f})"
            called = f"{op or 'an operation'}({shapes})" + (f" at {line}" if line else "")
            own = (
                "the device has the project as it was when compute.device(…) opened it: for a module of your own that "
                "was imported later, close the pool and open it again; for a package: Image(pip=[…])"
            )
            hint = own if found.get("kind") == "ModuleNotFoundError" else None
            return DeviceError.of(str(found.get("kind")), f"{called} failed: {text}", host=host, hint=hint)
        except Exception as error:  # the host may send anything
            what = f"an operation failed; the host sent an invalid reason: {type(error).__name__}: {error}"
            return DeviceError(what[:200], host=host)

    def is_wanted(self) -> bool:
        return True

    def sent(self, stream: int) -> None:
        pass

    def answered(self, message: messages.Message, buffers: list[memoryview]) -> None:
        error: Exception | None = None
        for observer in observers:
            observer.received(sum(map(len, buffers)))
        if isinstance(message, messages.Result) and buffers:
            try:
                self.document = wire.decode(buffers[0]) if len(buffers[0]) else None
                self.buffers = buffers[1:]
            except SkyfabError as broken:
                error = broken
        elif isinstance(message, messages.Raised) and message.unfit:
            error = UsageError(message.text)
        elif isinstance(message, messages.Raised):
            error = self._stream.worker_died(f"{message.kind}: {message.text}", self.entries)
        elif isinstance(message, messages.Ended):
            error = self._stream.worker_died(message.text or f"its process ended ({message.why})", self.entries)
        self.failed(error)

    def failed(self, error: Exception | None) -> None:
        try:
            self._stream.replied(self, error)
        finally:
            self.give_up()

    def give_up(self) -> None:
        """Ends the wait for the reply. Doing it again does nothing."""
        self.is_there = True
        with contextlib.suppress(RuntimeError):
            self._arrived.release()

    def block(self) -> None:
        """Waits for the reply, which another thread reads. Several threads may wait."""
        if not self.is_there:
            SIGNAL_GUARD.acquire(self._arrived)
            self.give_up()


Then = Callable[[Batch, Exception | None], None]
"""Is called with a batch and its error, or None, when the reply has come, on the thread that reads."""
