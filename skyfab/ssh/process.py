"""A stream to a child process on this machine: ssh, or the command itself."""

from __future__ import annotations

import atexit
import contextlib
import functools
import io
import logging
import os
import select
import shlex
import signal
import subprocess
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from skyfab.protocol.pipes import widen

if TYPE_CHECKING:
    from skyfab.protocol.frames import RecvInto
    from skyfab.protocol.mux import Send

_LOG: Final = logging.getLogger("skyfab")
_KEPT: Final = 64 * 1024
"""The last bytes of stderr that are kept. A pipe holds no more, so that one read empties it."""


class ProcessStream:
    """The non-blocking pipes of a child process.

    The process has its own session: Ctrl-C reaches only this program, which shuts down the host in order.
    """

    def __init__(
        self, argv: Sequence[str], explain: Callable[[int, str], Exception], environ: Mapping[str, str] | None = None
    ) -> None:
        self.is_used = False
        self._explain = explain
        if _LOG.isEnabledFor(logging.DEBUG):
            _LOG.debug("%s", shlex.join(word if len(word) < 200 else f"{word[:40]}…" for word in argv))
        self._process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            env=environ,
        )
        _STREAMS.add(self)
        assert self._process.stdin and self._process.stdout and self._process.stderr
        self._in = self._process.stdout.fileno()
        self._out = self._process.stdin.fileno()
        self._err: int | None = self._process.stderr.fileno()
        self._said = b""
        os.set_blocking(self._err, False)
        for fd in (self._in, self._out):
            os.set_blocking(fd, False)
            widen(fd)
        # System calls without a Python function in between, for speed.
        self.recv_into: RecvInto = io.FileIO(self._in, closefd=False).readinto
        self.send: Send = functools.partial(os.writev, self._out)

    def fileno(self) -> int:
        return self._in

    def sink(self) -> int | None:
        return self._out

    def stderr(self) -> int | None:
        return self._err

    def drain(self) -> bytes:
        if self._err is None:
            return b""
        try:
            data = os.read(self._err, _KEPT)
        except BlockingIOError:
            return b""
        self._said = (self._said + data)[-_KEPT:]
        if not data:
            self._err = None
        return data

    def explain(self) -> Exception:
        until = time.monotonic() + 2
        poll = select.poll()
        if self._err is not None:
            poll.register(self._err, select.POLLIN)
        while (code := self._poll()) is None and time.monotonic() < until:
            if self._err is None:
                time.sleep(0.01)
            else:  # it exits only after all of its output has been read
                poll.poll(50)
                self.drain()
        self.drain()
        return self._explain(code or 0, self._said.decode(errors="replace"))

    @property
    def has_ended(self) -> bool:
        return self._poll() is not None

    def close(self) -> None:
        self._err, self.is_used = None, False
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            assert pipe
            with contextlib.suppress(OSError):
                pipe.close()
        if not self._ends_within(1):  # still connecting, or the host does not respond
            self.end(signal.SIGTERM)
            if not self._ends_within(2):
                self.end(signal.SIGKILL)
                self._process.wait()

    def _ends_within(self, seconds: float) -> bool:
        until, pause = time.monotonic() + seconds, 0.0005
        while self._poll() is None:
            if time.monotonic() > until:
                return False
            time.sleep(pause)
            pause = min(pause * 2, 0.05)
        return True

    def _poll(self) -> int | None:
        """The exit code of the process, if it has ended. Then the rest of its group is terminated.

        With jump hosts in ssh_config, ssh has child processes that may outlive it; where those name each other as
        jump hosts, each starts another one without an end. The group is signalled before the process is waited for:
        until then, its number belongs to no other.
        """
        if self._process.returncode is None:
            with contextlib.suppress(ChildProcessError):  # another thread has waited for it, or SIGCHLD is ignored
                if os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                    return None
                self._signal_group(signal.SIGTERM)
        return self._process.poll()

    def leave_to_parent(self) -> None:
        """In a forked child: closes the pipes, which would otherwise keep ssh running after the parent's end."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe
            pipe.close()
        self._process.returncode = 0  # the parent waits for it and terminates it

    def end(self, number: int) -> None:
        """Terminates the process group: with jump hosts, ssh has a child process of its own."""
        if self._poll() is None:
            self._signal_group(number)

    def _signal_group(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: EPERM where only a zombie is left
            os.killpg(self._process.pid, number)


_STREAMS: Final[weakref.WeakSet[ProcessStream]] = weakref.WeakSet()


def _leave_all_to_parent() -> None:
    for stream in list(_STREAMS):
        stream.leave_to_parent()
    _STREAMS.clear()


os.register_at_fork(after_in_child=_leave_all_to_parent)


def end_all() -> None:
    """Terminates all streams when this program exits: none must keep waiting for a host that does not respond."""
    for stream in list(_STREAMS):
        stream.end(signal.SIGTERM)


@atexit.register
def _end_unused() -> None:
    """The same, for those that no connection uses: they are being opened or closed."""
    for stream in list(_STREAMS):
        if not stream.is_used:
            stream.end(signal.SIGTERM)
