"""The interface of transports: run one command on a host, and exchange bytes with its stdin and stdout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from skyfab.errors import HostLost, HostUnfit
from skyfab.inventory.host import Host
from skyfab.protocol import NO_AGENT
from skyfab.protocol.frames import Buffer
from skyfab.ssh.container import refused
from skyfab.ssh.tunnel import Tunnel


class AgentGone(HostLost):
    """The host was reached, and the pool's agent no longer runs on it."""


def ended(host: Host, code: int, errors: str) -> HostLost | HostUnfit:
    """Why a command on a host ended after the login: its exit code, and what it wrote to stderr."""
    last = errors.strip().rpartition("\n")[2]
    kind = AgentGone if code == NO_AGENT else HostLost
    return refused(host, code, last) or kind(f"the connection ended{': ' + last if last else ''}", host=host.name)


class Stream(Protocol):
    """The stdin and stdout of a command on a host. Only `close` blocks."""

    is_used: bool
    """A connection uses it. If the program exits without closing that, the host can tell by the input, which ends."""

    def fileno(self) -> int:
        """Readable for `poll` when there is data to receive."""

    def sink(self) -> int | None:
        """Writable for `poll` when data can be sent; None if that can only be tried."""

    def stderr(self) -> int | None:
        """Readable for `poll` when the command's stderr has data. Undrained, it would block the command eventually.

        None at end of file, and where `recv_into` drains it.
        """

    def drain(self) -> bytes:
        """Reads what is available on stderr. The last 64 kB are kept, for `explain`."""

    def recv_into(self, view: memoryview) -> int | None:
        """Receives some bytes; 0 at end of file. None, or BlockingIOError, if no data is available."""

    def send(self, buffers: Sequence[Buffer]) -> int:
        """Sends some bytes and returns how many. Raises BlockingIOError if none can be sent now."""

    def explain(self) -> Exception:
        """Why the stream has ended, as the error to raise. Call it only after the end."""

    def close(self) -> None:
        """Closes the connection of the command and waits for its processes on this machine."""


class Transport(Protocol):
    """A way to reach one host."""

    @property
    def servers(self) -> Sequence[str]:
        """The SSH servers on the path, each as address and port: the number of parallel logins at each is limited."""

    def open(self, command: str, stopped: Callable[[], bool] = lambda: False) -> Stream:
        """Runs `command` through the host's login shell. While the user is asked for a password, `stopped` ends that.

        Returns at once or after connecting; failures are raised here as a HostError, or returned by `Stream.explain`
        once the stream has ended.
        """

    def forward(self, port: int, to: tuple[str, int], stopped: Callable[[], bool] = lambda: False) -> Tunnel:
        """Makes the address `to`, as the host reaches it, a port of 127.0.0.1. Blocks until that listens.

        Raises a HostError, or UsageError if something else uses the port.
        """

    def joined(self) -> None:
        """The command has replied: releases what was needed only for the login."""

    def close(self) -> None:
        """Closes the connection to the host."""
