"""What a transport is: a way to run one command on a host and to hold both ends of its pipes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from skyfab.protocol.frames import Buffer


class Stream(Protocol):
    """The stdin and stdout of a command on a host. Nothing here blocks but `close`."""

    def fileno(self) -> int:
        """Readable for `poll` when there is something to receive."""

    def sink(self) -> int | None:
        """Writable for `poll` when there is room to send; None where only trying tells."""

    def stderr(self) -> int | None:
        """Readable for `poll` when the command's stderr is to be drained, without which it stops at some point.

        None at its end, and where `recv_into` drains it.
        """

    def drain(self) -> None:
        """Reads what has come on stderr. The last 64 kB are kept, for `explain`."""

    def recv_into(self, view: memoryview) -> int | None:
        """Receives some bytes; 0 at the end. None, or BlockingIOError, when there is nothing yet."""

    def send(self, buffers: Sequence[Buffer]) -> int:
        """Sends some bytes and says how many. Raises BlockingIOError when there is no room."""

    def explain(self) -> Exception:
        """Why the stream has ended, as the error to raise. Call it after the end only."""

    def close(self) -> None:
        """Ends the command's connection and waits for what belongs to it on this machine."""


class Transport(Protocol):
    """A way to reach one host."""

    @property
    def servers(self) -> Sequence[str]:
        """The SSH servers on the way, each as address and port: they bear so many logins at a time."""

    def open(self, command: str) -> Stream:
        """Runs `command` through the host's login shell.

        Returns at once or after connecting; what goes wrong is raised here as a HostError, or
        told by `Stream.explain` once the stream has ended.
        """

    def joined(self) -> None:
        """The command has answered: what was needed only to get in can go."""

    def close(self) -> None:
        """Lets go of the host."""
