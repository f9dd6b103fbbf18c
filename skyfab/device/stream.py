"""The stream of a device: sends instructions in batches, and receives replies and errors.

Instructions are collected and sent when there are enough of them, when a reply is needed, or a few milliseconds later.
Fewer are enough if the host has nothing to do.
The program is not held up by the host, except where it needs a value, or is too far ahead.
"""

from __future__ import annotations

import copy
import os
import pickle
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from skyfab._util.signals import SIGNAL_GUARD, GuardedFuture
from skyfab.device.batches import Batch, Entry, Then, current, observers, report_skipped
from skyfab.device.call_site import CallSite, describe, find_call_site
from skyfab.device.storages import RemoteStorage, forget
from skyfab.errors import DeviceError, SkyfabError, UsageError, WorkerDied
from skyfab.host.device import wire
from skyfab.protocol import codec

if TYPE_CHECKING:
    import torch

    from skyfab.device.host_link import HostLink

ACCELERATE: Final = "ACCELERATE_TORCH_DEVICE"
"""The variable that names the device of Accelerate and of transformers' Trainer: they find a few types only."""
BATCH: Final = 128
"""Instructions in a batch."""
FEW: Final = 16
"""Instructions in the first batch after a wait, when the host has nothing to do; the next ones have twice as many
each, up to `BATCH`."""
_MOST_AHEAD: Final = 32
"""Batches that have no reply yet. A program that is further ahead waits."""
_MOST_BYTES: Final = 256 * 1024 * 1024
"""Bytes of uploads that have no reply yet."""


class DeviceStream:
    """The stream of instructions to one device. Any thread may emit."""

    def __init__(self, index: int, device: str, link: HostLink) -> None:
        self.index = index
        """The device's index in torch."""
        self.device = device
        """The device's name on its host."""
        self.link = link
        self.freed: list[int] = []
        """Ids that are no longer used."""
        self.stale: list[tuple[int, int]] = []
        """Threads, with ids that only the instruction that the thread is building may use."""
        self.dead: list[RemoteStorage] = []
        """Storages that are gone. The garbage collector appends to it."""
        self.limit = BATCH
        """How many instructions are sent at once; 0 while there is an error to raise."""
        self.buffer: list[Entry] = []
        self.broken: set[int] = set()
        """Channels from other devices that have failed."""
        self._lock = threading.RLock()
        self._replying = threading.Lock()
        """Held only briefly, and never while waiting: protects what is noted about replies."""
        self._stale: list[tuple[int, int]] = []
        """Those of `stale` that were there when the last batch was sent."""
        self._ahead: deque[Batch] = deque()
        self._bytes = 0
        self._error: DeviceError | None = None
        """What the next use of the device raises, on any thread."""
        self._skipped: list[Entry] = []
        """Instructions that the host has not executed because of it, according to its replies so far."""
        self._lost: Exception | None = None
        """Why the device can no longer be used."""
        self._uploads: list[memoryview] = []
        self._size = 0

    @property
    def torch_device(self) -> torch.device:
        import torch

        return torch.device("sky", self.index)

    @property
    def is_lost(self) -> bool:
        """Whether the device can no longer be used."""
        return self._lost is not None

    # ---- sending

    def emit(self, instruction: Sequence[Any], *, recorded: bool = False) -> None:
        """Adds an instruction. Raises the error of an earlier one.

        `recorded`: a change in place that autograd records. If it is not executed, what it would have changed is lost:
        its gradients would be wrong.
        """
        buffer = self.buffer
        if not buffer:
            SIGNAL_GUARD.wrap()  # not only when it is sent, which another thread may do
        buffer.append((instruction, find_call_site(), current.thread, recorded))
        if len(buffer) >= self.limit:
            self.flush()

    def upload(self, instruction: Sequence[Any], data: memoryview, *, recorded: bool = False) -> None:
        """Adds an instruction whose last item is the number of a buffer. The memory must not change from then on."""
        with SIGNAL_GUARD, self._lock:
            self.buffer.append(((*instruction, len(self._uploads)), find_call_site(), current.thread, recorded))
            self._uploads.append(data)
            self._size += len(data)
        if self._size > 1 << 20 or len(self.buffer) >= self.limit:
            self.flush()

    def flush(self) -> Batch | None:
        """Sends what has been emitted. Waits if too much is under way; raises the error of an earlier instruction."""
        SIGNAL_GUARD.wrap()
        self._wait_for_room()
        with SIGNAL_GUARD, self._lock:
            self._raise()
            return self._send()

    def flush_if_idle(self) -> None:
        """As `try_flush`, if the host has nothing else to do: after an instruction that takes long."""
        if not self._ahead:
            self.try_flush()

    def try_flush(self) -> bool:
        """Sends what has been emitted, unless another thread is sending. Returns whether there was something."""
        if not (self.buffer or self.freed or self.dead) or self._error is not None or self._lost is not None:
            return False
        with SIGNAL_GUARD:
            if self._lock.acquire(blocking=False):
                try:
                    if len(self._ahead) < _MOST_AHEAD and self._error is None:
                        self._send()
                except SkyfabError:
                    pass  # `_lost` has it
                finally:
                    self._lock.release()
        return True

    def ask(self, instruction: Sequence[Any], *uploads: memoryview) -> Batch:
        """Sends an instruction that replies, and waits for the reply. Raises the error of an earlier one."""
        return self.receive(self.start(instruction, *uploads))

    def start(self, instruction: Sequence[Any], *uploads: memoryview, then: Then | None = None) -> Batch:
        """Sends an instruction that replies. Raises the error of an earlier one.

        If nothing waits for the reply, `then` is called with it, or the error, on the thread that reads.
        """
        SIGNAL_GUARD.wrap()
        if then is not None:
            self._wait_for_room()
        with SIGNAL_GUARD, self._lock:
            self._raise()
            if uploads:
                first = len(self._uploads)
                instruction = [*instruction, *range(first, first + len(uploads))]
                self._uploads += uploads
            self.buffer.append((instruction, find_call_site(), current.thread, False))
            batch = self._send(then)
            assert batch is not None
            return batch

    def receive(self, batch: Batch) -> Batch:
        """Waits for the reply."""
        self.wait(batch, find_call_site())
        self.check()
        return batch

    def send_between(self, send: Callable[[], None]) -> None:
        """Sends what has been emitted, then something else to the same worker. Raises the error of an earlier one."""
        self._wait_for_room()
        with SIGNAL_GUARD, self._lock:
            self._raise()
            self._send()
            send()

    @property
    def earlier_error(self) -> Exception | None:
        """What the next use of the device raises."""
        return self._lost or self._error

    def consume(self, error: BaseException | None) -> None:
        """A future has raised this error: if it is the one that the next use would raise, that use does not."""
        if error is not None:
            with SIGNAL_GUARD, self._lock:
                if error is self._error:
                    self._resume()

    def check(self) -> None:
        """Raises the error of an earlier instruction, if there is one."""
        with SIGNAL_GUARD, self._lock:
            self._raise()

    def emit_always(self, instruction: Sequence[Any]) -> None:
        """Adds an instruction that the host executes after an error too. Raises no error of an earlier one."""
        if self._lost is None:
            self.buffer.append((instruction, None, current.thread, False))

    def wait(self, batch: Batch, site: CallSite) -> None:
        """Waits for the reply to a batch, for a line of the program."""
        begin = time.perf_counter()
        if not batch.is_there:
            self.link.receive(batch)
        with SIGNAL_GUARD, self._replying:
            if not self._ahead:
                self.limit = min(self.limit, FEW)
        for observer in observers:
            observer.waited(site, time.perf_counter() - begin)

    def _wait_for_room(self) -> None:
        """Waits while too much is under way. Without the lock: callbacks on the thread that reads need it meanwhile."""
        while not self._has_room() and self.link.may_wait():
            with self._replying:
                oldest = self._ahead[0] if self._ahead else None
            if oldest is not None:
                self.wait(oldest, find_call_site())

    def _has_room(self) -> bool:
        """Also where there is an error to raise."""
        is_full = len(self._ahead) >= _MOST_AHEAD or self._bytes > _MOST_BYTES
        return not is_full or self.earlier_error is not None

    def _send(self, then: Then | None = None) -> Batch | None:
        freed = self.take_freed()  # before the buffer: what uses them is already in it
        stale = self.stale[:]
        del self.stale[: len(stale)]
        entries = self.buffer[:]
        del self.buffer[: len(entries)]  # other threads append meanwhile
        freed += self._take_stale(entries)
        self._stale += stale
        uploads, self._uploads = self._uploads, []
        size, self._size = self._size, 0
        instructions: list[Sequence[Any]] = [entry[0] for entry in entries]
        if freed:
            instructions.append((wire.FREE, *freed))
        if not instructions:
            return None
        batch = Batch(self, entries, size)
        batch.then = then
        with self._replying:
            self._ahead.append(batch)
            self._bytes += size
            self.limit = min(2 * self.limit, BATCH)
        try:
            self.link.send(self._payload(instructions, uploads), batch)
        except BaseException as error:  # also what a handler of signals raises: nothing is missing without a word
            found = error if isinstance(error, SkyfabError) else self.worker_died("sending was interrupted", entries)
            self._lose(found)
            raise
        return batch

    def _payload(self, instructions: Sequence[Any], uploads: Sequence[memoryview]) -> codec.Payload:
        large: list[pickle.PickleBuffer] = []
        carried = [bytearray(part) if len(part) < codec.IN_BAND else pickle.PickleBuffer(part) for part in uploads]
        data = pickle.dumps((self.device, instructions, *carried, None), 5, buffer_callback=large.append)
        buffers = [part.raw() for part in large]
        for observer in observers:
            observer.sent(instructions, len(data) + sum(map(len, buffers)))
        return codec.Payload(data, buffers)

    def take_freed(self) -> list[int]:
        """The ids that are no longer used, since this was called last."""
        with SIGNAL_GUARD, self._lock:
            dead, freed = self.dead[:], self.freed[:]
            del self.dead[: len(dead)], self.freed[: len(freed)]  # other threads append meanwhile
            return freed + forget(dead)

    def _take_stale(self, entries: Sequence[Entry]) -> list[int]:
        """The ids of `_stale` whose threads have emitted what they were building: it is not a view, nor a plan."""
        if not self._stale:
            return []
        over = {thread for instruction, _, thread, _ in entries if instruction[0] not in (wire.VIEW, wire.PLAN)}
        found = [ident for thread, ident in self._stale if thread in over]
        self._stale = [one for one in self._stale if one[0] not in over]
        return found

    # ---- replies

    def replied(self, batch: Batch, error: Exception | None) -> None:
        """A batch was answered, or never will be. Called by the thread that reads."""
        with self._replying:
            if batch in self._ahead:
                self._ahead.remove(batch)
            self._bytes -= batch.size
            if error is not None:
                if self._lost is None and self._error is None:
                    self._lost = error
            elif isinstance(batch.document, dict) and "error" in batch.document:
                batch.error = batch.explain()
                if self._error is None:
                    self._error, self._skipped = batch.error, [*batch.entries[batch.failed_at :]]
            elif self._error is not None:
                batch.error = self._error
                self._skipped += batch.entries
            if self.earlier_error is not None:
                self.limit = 0
        batch.entries = ()
        if batch.then is not None:
            batch.then(batch, self._lost or batch.error)

    def worker_died(self, why: str, entries: Sequence[Entry]) -> Exception:
        """The error for a device whose process has ended, while or after it executed these instructions."""
        lines = list(dict.fromkeys(filter(None, (describe(site) for _, site, *_ in (*entries[:1], *entries[-1:])))))
        after = f" after it was sent {' to '.join(lines)}" if lines else ""
        return WorkerDied(
            f"the worker of {self.device} ended{after}; its tensors are lost: {why}",
            host=self.link.name,
            hint="open the device again: compute.device(…)",
        )

    def end(self, why: str) -> None:
        """The device's process has ended."""
        self._lose(self.worker_died(why, ()))

    def _lose(self, why: Exception) -> None:
        """The device can no longer be used."""
        with SIGNAL_GUARD, self._replying:
            self._lost = self._lost or why
            self.limit = 0
            for batch in self._ahead:
                batch.give_up()

    def _raise(self) -> None:
        """Raises a copy of what there is to raise: what is kept must not keep the frames that it was raised in.

        The device can be used again afterwards, unless it is lost.
        """
        if self._lost is not None:
            raise copy.copy(self._lost)
        if self._error is not None:
            error = self._error
            self._resume()
            raise copy.copy(error)

    def _resume(self) -> None:
        """The error is raised on this thread: the host executes what follows.

        It must not use what instructions of other threads would have changed in place, nor such changes that autograd
        has recorded. This thread's other changes have not happened, as if it had stopped before them.
        """
        assert self._error is not None
        entries = self.buffer[:]  # other threads append meanwhile
        with self._replying:
            skipped = [*self._skipped, *(entry for batch in self._ahead for entry in batch.entries), *entries]
            for batch in self._ahead:
                batch.error = self._error
            me = current.thread
            changes = [instruction for instruction, _, thread, recorded in skipped if recorded or thread != me]
            remembered = [entry for entry in entries if entry[0][0] in wire.REMEMBERED]
            resume: Entry = ((wire.RESUME, self._error.message, changes), None, me, False)
            self.buffer[: len(entries)] = [*remembered, resume]
            self._error, self._skipped, self._uploads, self._size = None, [], [], 0
            self.limit = BATCH if self._lost is None else 0
        report_skipped(skipped)

    def leave_to_parent(self) -> None:
        """This process was forked: the device belongs to the parent."""
        self._lock, self._replying = threading.RLock(), threading.Lock()
        self._lose(UsageError("a forked process cannot use the remote devices of its parent"))

    def memory(self) -> dict[str, int]:
        """Bytes of memory on the device: ``allocated`` by this program's tensors, ``free`` and ``total``."""
        self.flush()
        self.start([wire.SYNC])  # what is no longer used is freed at the end of a batch, stale ids at that of the next
        batch = self.ask([wire.SYNC])
        batch.value()
        found = {name: batch.document.get(name) for name in ("allocated", "free", "total", "tensors")}
        return {name: value for name, value in found.items() if isinstance(value, int)}

    def close(self) -> None:
        """The pool closes: the device can no longer be used."""
        with self._lock:
            self._lose(UsageError("the pool of this device is closed; its tensors are lost", host=self.link.name))
        if os.environ.get(ACCELERATE) == f"sky:{self.index}":
            del os.environ[ACCELERATE]


class DeviceFuture(GuardedFuture):
    """A future of a device. If it has raised an error of the device, no later use of the device does."""

    def __init__(self, stream: DeviceStream) -> None:
        super().__init__()
        self._stream = stream

    def exception(self, timeout: float | None = None) -> BaseException | None:
        error = super().exception(timeout)
        self._stream.consume(error)
        return error

    def result(self, timeout: float | None = None) -> Any:
        self.exception(timeout)
        return super().result()


streams: Final[list[DeviceStream]] = []
"""The devices of this process, by their index in torch."""


def open_streams() -> list[DeviceStream]:
    """The streams of all devices that can be used."""
    return [stream for stream in streams if not stream.is_lost]
