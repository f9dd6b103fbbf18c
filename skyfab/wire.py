"""The wire: the stream to a host that is there now, and what wakes whoever waits for it. Streams come and go."""

from __future__ import annotations

import contextlib
import os
import select
import threading

from skyfab.transport.base import Stream, Transport


class Wire:
    """At most one stream, with the transport that it came from. `source` is its descriptor, or -1."""

    def __init__(self) -> None:
        self.stream: Stream | None = None
        self.source = -1
        self.waker = -1
        """Readable when somebody has poked."""
        self.stderr: int | None = None
        """Readable when `drain` has something to do."""
        self._transport: Transport | None = None
        self._poker = -1
        self._poll = select.poll()

    def take(self, stream: Stream, transport: Transport) -> None:
        """From now on this is the stream; the one before is let go."""
        if self.stream is not None:
            self.let_go()
        if self.waker < 0:
            self.waker, self._poker = os.pipe()
            for fd in (self.waker, self._poker):
                os.set_blocking(fd, False)
            self._poll.register(self.waker, select.POLLIN)
        self.stream, self._transport = stream, transport
        self.source = stream.fileno()
        self._poll.register(self.source, select.POLLIN)
        self.stderr = stream.stderr()
        if self.stderr is not None:
            self._poll.register(self.stderr, select.POLLIN)

    def let_go(self) -> None:
        """There is no stream now. What is left of it is closed elsewhere: that may take a while."""
        stream, transport = self.stream, self._transport
        if stream is None or transport is None:
            return
        for fd in (self.source, stream.sink(), self.stderr):
            if fd is not None:
                self.forget(fd)
        self.stream = self._transport = self.stderr = None
        self.source = -1
        threading.Thread(target=close, args=(stream, transport), daemon=True).start()

    def wait(self, seconds: float, writing: bool) -> list[tuple[int, int]]:
        """The descriptors that are ready: `source`, `waker`, `stderr`, or another where there is room to write."""
        if writing and self.stream is not None:
            sink = self.stream.sink()
            if sink is None:
                seconds = 0.002  # nothing tells when there is room: try again soon
            else:
                self._poll.register(sink, select.POLLOUT)
        return self._poll.poll(seconds * 1000)

    def forget(self, fd: int) -> None:
        with contextlib.suppress(KeyError):
            self._poll.unregister(fd)

    def drain(self) -> None:
        """Reads what the stream's command has written to stderr."""
        assert self.stream is not None and self.stderr is not None
        self.stream.drain()
        if self.stream.stderr() is None:  # at its end it would be ready for ever
            self.forget(self.stderr)
            self.stderr = None

    def poke(self) -> None:
        """Makes whoever waits look again."""
        if self._poker >= 0:
            with contextlib.suppress(OSError):
                os.write(self._poker, b"!")

    def close(self) -> None:
        """Ends the stream, and waits for what belongs to it on this machine."""
        if self.stream is not None and self._transport is not None:
            close(self.stream, self._transport)
        self.stream = self._transport = self.stderr = None
        fds, self.waker, self._poker = (self.waker, self._poker), -1, -1
        for fd in fds:
            if fd >= 0:
                os.close(fd)


def close(stream: Stream, transport: Transport) -> None:
    """Lets go of both."""
    stream.close()
    transport.close()
