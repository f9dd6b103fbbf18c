"""The seats of a host: which processes there are, and what waits to be passed on to or from them."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time

from skyfab.agent.logs import LogPipe
from skyfab.agent.poller import READ, WRITE
from skyfab.agent.worker_handle import Seat
from skyfab.agent.zygote import Zygote
from skyfab.context import STACKS
from skyfab.errors import ProtocolError
from skyfab.protocol import messages

TYPE_CHECKING = False  # a cold host has no time for `typing`
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any, Final

    from skyfab.agent.poller import Watch
    from skyfab.agent.run_folder import Record
    from skyfab.protocol.mux import Mux


_FAMILIAR: Final = 1024
_STACKS: Final = 64 * 1024
_GRACE: Final = 2.0
_FAREWELL: Final = 1.0
"""Seconds that processes have to leave when the pool closes."""


class Seats:
    """All rank processes of a pool on this host."""

    def __init__(
        self,
        mux: Mux,
        watch: Watch,
        zygote: Zygote,
        *,
        logs: str,
        describe_end: Callable[[int], str],
        flush: Callable[[], None],
        relay: Callable[[memoryview], bool],
        abandon: Callable[[int], None],
    ) -> None:
        self.mux: Mux | Record = mux
        self._record: Record | None = None
        self.flush = flush
        self.relay = relay
        self.abandon = abandon
        self.dirty: set[Seat] = set()
        self.stuck: set[Seat] = set()
        self.timed: set[Seat] = set()
        self.busy = False
        """There is more to pass on than one round could."""
        self.behind: set[LogPipe] = set()
        self._watch = watch
        self._zygote = zygote
        self._logs = logs
        self._describe_end = describe_end
        self._seats: dict[str, Seat] = {}
        self.not_started: dict[str, tuple[int, str]] = {}
        """Seats whose process could not be started: the rank that it would have been, and why."""
        self.familiar: dict[bytes, Seat] = {}
        """Heads of small calls that have been made before, and the seats that know what they ask for."""
        self._started = 0
        self._next_stream = 2
        watch.add(zygote.fileno(), READ, self._heed_zygote)

    def get(self, name: str) -> Seat | None:
        return self._seats.get(name)

    def __iter__(self) -> Iterator[Seat]:
        return iter(list(self._seats.values()))

    def spawn(self, name: str, generation: int, request: dict[str, Any], listener: int = -1) -> None:
        """Starts a process in a seat, in place of the one that is there; it inherits `listener`, if that is one."""
        if not name.replace(".", "").replace("-", "").isalnum():  # it names files
            raise ProtocolError(f"not the name of a seat: {name!r:.80}")
        old = self._seats.get(name)
        if old is not None:
            old.kill()
            self._bury(old, -signal.SIGKILL)
        self.not_started.pop(name, None)
        os.makedirs(self._logs, mode=0o700, exist_ok=True)
        with contextlib.suppress(OSError):
            os.unlink(f"stacks/{name}")  # it says that signals are understood
        rank = int(request["info"].get("rank", 0))
        self._started += 1
        with contextlib.ExitStack() as theirs, contextlib.ExitStack() as ours:  # what is the process's, and what stays
            logs = [self._log(name, rank, fd, theirs, ours) for fd in (1, 2)]
            seat = Seat(self, self._started, name, generation, logs, rank)
            ours.callback(seat.close)
            for fd in seat.rank_ends:
                theirs.callback(os.close, fd)
            fds = [*seat.rank_ends, *(log.sink for log in logs), *([listener] if listener >= 0 else [])]
            self._zygote.spawn({"id": seat.number, "seat": name, **request}, fds)
            ours.pop_all()
        self._seats[name] = seat
        for log in logs:
            self._hear(log)
        self.readable(seat, True)

    def fail(self, name: str, generation: int, rank: int, error: Exception) -> None:
        """A process could not be started: its calls, which are on their way, are told why."""
        text = _not_started(error)
        self.not_started[name] = (rank, text)
        self.mux.send(0, messages.Exited(seat=name, generation=generation, text=text).encode())

    def _log(self, seat: str, rank: int, fd: int, theirs: contextlib.ExitStack, ours: contextlib.ExitStack) -> LogPipe:
        stream = self._next_stream
        self._next_stream += 2
        name = seat if self._record is None else str(rank)
        path = os.path.join(self._logs, f"{name}.{'out' if fd == 1 else 'err'}")
        log = LogPipe(self.mux, stream, path, seat=seat, fd=fd)
        theirs.callback(os.close, log.sink)
        ours.callback(log.close)
        return log

    def keep_in(self, record: Record) -> None:
        """From now on everything goes to a run's record, what is under way included."""
        self.mux = self._record = record
        self._logs = record.logs
        record.on_failure = self._end_soon
        self.forget()
        for seat in self:
            if seat.is_solo:  # it runs something else, whose answer nobody will ever want
                seat.kill()
                continue
            for call in seat.calls:
                record.expect(call.stream, seat.rank)
            for log, end in zip(seat.logs, ("out", "err"), strict=True):
                log.move(os.path.join(self._logs, f"{seat.rank}.{end}"), record)

    def _end_soon(self) -> None:
        """A rank of the run has failed: the others here do not wait for it for ever."""
        for seat in self:
            seat.end_soon(_GRACE)

    def recognise(self, head: bytes, seat: Seat) -> None:
        """Calls like this one may take the short way from now on."""
        if len(self.familiar) >= _FAMILIAR:
            self.familiar.clear()
        self.familiar[head] = seat

    def forget(self) -> None:
        """Seats have changed, or what they know."""
        self.familiar.clear()

    # ---- what a seat asks for

    def release(self, name: str) -> None:
        """Ends the process in a seat."""
        seat = self._seats.get(name)
        if seat is not None and not seat.dismiss():
            seat.kill()

    def look(self, name: str) -> str:
        """What a process has said of its stacks; then it is asked again: see `rank`."""
        seat = self._seats.get(name)
        if seat is None:
            return ""
        try:
            with open(f"stacks/{name}", "rb+") as file:
                about = file.readline()
                text = file.read(_STACKS)
                file.truncate(len(about))
        except OSError:
            return ""
        if about:  # else it would not understand the signal yet
            self._zygote.kill(seat.number, STACKS, alone=True)
        return text.decode(errors="replace")

    def now(self) -> float:
        return time.monotonic()

    def kill(self, seat: Seat, number: int = signal.SIGKILL) -> None:
        self._zygote.kill(seat.number, number)

    def writable(self, seat: Seat, wanted: bool) -> None:
        if wanted:
            self._watch.add(seat.sink, WRITE, seat.flush)
        else:
            self._watch.drop(seat.sink)
        seat.waits_to_write = wanted

    def readable(self, seat: Seat, wanted: bool) -> None:
        if wanted:
            self._watch.add(seat.source, READ, seat.voice.read)
        else:
            self._watch.drop(seat.source)

    def drain(self, log: LogPipe) -> None:
        """Takes what a process has written."""
        if not log.drain() or log.stopped:
            self._watch.drop(log.source)
        if log.waiting:
            self.behind.add(log)

    def _hear(self, log: LogPipe) -> None:
        self._watch.add(log.source, READ, lambda: self.drain(log))

    # ---- every round

    def pass_on(self) -> None:
        """Passes on what this round of events has brought, and what had to wait for room."""
        while self.dirty:
            self.dirty.pop().flush()
        self.busy = False
        if not self.behind and not self.stuck:
            return
        for log in list(self.behind):
            stopped = log.stopped
            self.busy |= log.catch_up()
            if stopped and not log.stopped and not log.hung_up:
                self._hear(log)
            if not log.waiting:
                self.behind.discard(log)
                if log.hung_up:
                    log.close()
        for seat in list(self.stuck):
            self.busy |= seat.voice.resume()

    def next_deadline(self, until: float) -> float:
        """Ends calls that are past their time; says when to look again, `until` at the latest."""
        for seat in list(self.timed):
            until = min(until, seat.check_time(self.now()) or until)
        return until

    # ---- endings

    def _heed_zygote(self) -> None:
        try:
            notices = self._zygote.notices()
        except EOFError:
            print("the zygote died: starting another", file=sys.stderr)
            self._watch.drop(self._zygote.fileno())
            for seat in self:  # Linux has ended the ranks; what they had started is still there
                if seat.group:
                    with contextlib.suppress(OSError):
                        os.killpg(seat.group, signal.SIGKILL)
                self._bury(seat, -signal.SIGKILL)
            self._zygote.close()
            self._zygote = Zygote()
            self._watch.add(self._zygote.fileno(), READ, self._heed_zygote)
            return
        for what, number, value in notices:
            for seat in self:
                if seat.number != number:
                    continue
                if what == "started":
                    seat.group = value
                elif what == "failed":
                    self._bury(seat, None, _not_started(value))
                else:
                    self._bury(seat, value)

    def _bury(self, seat: Seat, exitcode: int | None, text: str = "") -> None:
        """The seat's process is gone, or has never been there."""
        seat.ended(exitcode, text if exitcode is None else self._describe_end(exitcode))
        if self._seats.get(seat.name) is seat:
            del self._seats[seat.name]
        self._retire(seat)

    def _retire(self, seat: Seat) -> None:
        self.readable(seat, False)
        self.writable(seat, False)
        for log in seat.logs:
            log.drain()
            self._watch.drop(log.source)
            log.hang_up()
            self.behind.add(log)  # what it has written is passed on to the end
        self.forget()
        for group in (self.dirty, self.stuck, self.timed):
            group.discard(seat)
        seat.close()

    def close(self) -> None:
        """Ends every process; those that have nothing to do may do so by themselves."""
        leaving = {seat.number for seat in self if seat.dismiss()}
        deadline = self.now() + _FAREWELL
        with contextlib.suppress(EOFError):
            while leaving and (left := deadline - self.now()) > 0:
                select.select([self._zygote], [], [], left)
                leaving -= {number for what, number, _ in self._zygote.notices() if what == "ended"}
        self._zygote.close()


def _not_started(why: object) -> str:
    return f"its process could not be started: {why}"
