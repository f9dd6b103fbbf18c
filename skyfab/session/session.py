"""A session: this program's connection to the agent on one host, from login to shutdown.

One stream carries many requests and replies, the output of processes, and notices of their exits. When the stream
breaks or heartbeats are missed, it is replaced by another to the same agent; no message is lost or delivered twice.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from skyfab._util.signals import SIGNAL_GUARD
from skyfab.errors import HostLost, HostUnfit, ProtocolError
from skyfab.protocol import messages
from skyfab.protocol.frames import BYE, frame
from skyfab.protocol.messages import AgentHello, Message
from skyfab.session.bootstrap import CONNECT, Bootstrap, cannot_run, check_agent, log_in
from skyfab.session.connection import Connection
from skyfab.session.reader import SharedReader, refuse_to_wait
from skyfab.session.replies import Listener, Reply
from skyfab.session.timing import Timing
from skyfab.ssh.base import Stream, Transport
from skyfab.ssh.logins import retry
from skyfab.ui.prompt import TERMINAL

_LOG: Final = logging.getLogger("skyfab")
GOODBYE: Final = 5.0
"""Seconds that a host has to terminate its processes when the pool closes."""


class Session:
    """A session with one host's agent: `send` and `wait` are its connection's. Thread-safe."""

    def __init__(
        self,
        launch: Bootstrap,
        reach: Callable[[], Transport],
        listener: Listener,
        reader: SharedReader,
        timing: Timing,
    ) -> None:
        self.host = launch.host
        self.transport = reach
        self._bootstrap = launch
        self.connection = Connection(self.host, listener, reader, self, timing)
        self.was_stopped = False
        """Whether opening failed because the session was closed meanwhile."""
        self._gate = threading.Lock()
        # Methods of others: another call level would cost time in every call.
        self.read_until_there = reader.read_until_there
        self.send = self.connection.send
        self.wait = self.connection.wait

    @property
    def agent(self) -> AgentHello | None:
        """The agent's description of itself; None until the session is open."""
        return self.connection.agent

    @property
    def has_ended(self) -> bool:
        """Whether nothing more will be received."""
        return self.connection.ended is not None

    @property
    def responds(self) -> bool:
        """Whether data was received from the host recently."""
        return self.connection.responds

    @property
    def moved(self) -> tuple[int, int]:
        """Bytes sent and received so far."""
        return self.connection.moved

    # ---- opening and closing

    def open(self) -> AgentHello:
        """Connects and waits for the agent's hello. Raises a HostError."""
        with self._gate:
            try:
                return self._introduce(retry(self._join, self._is_leaving))
            except BaseException:
                self.was_stopped = self._is_leaving()
                self.connection.close(GOODBYE)
                raise

    def _join(self) -> float:
        """Starts the link on the host; then the stream carries frames. Returns the deadline for the agent's hello."""
        transport = self.transport()
        stream, deadline = log_in(self._bootstrap, transport, "start", self._is_leaving)
        self.connection.begin((stream, transport))
        return deadline

    def _is_leaving(self) -> bool:
        return self.connection.is_leaving

    def rejoin(self, transport: Transport, deadline: float, stopped: Callable[[], bool]) -> Stream:
        """Opens another stream to the same agent. Raises a HostError."""
        assert self.agent is not None
        launch = replace(self._bootstrap, python=self.agent.executable, prepare=None)
        asked = TERMINAL.spent
        stream = transport.open(launch.command("resume"), stopped)
        try:
            launch.join(stream, deadline=deadline + TERMINAL.spent - asked, stopped=stopped)
        except BaseException:
            stream.close()
            raise
        transport.joined()
        return stream

    def _introduce(self, deadline: float) -> AgentHello:
        connection = self.connection
        connection.wait(lambda: self.agent is not None or connection.is_leaving, deadline - time.monotonic())
        if connection.is_leaving:
            raise HostLost("the pool was closed", host=self.host.name)
        if connection.ended is not None:
            if self.agent is not None:
                raise connection.ended
            connection.explain()
            failed: Exception = connection.ended
            if isinstance(failed, ProtocolError):  # what responded there is not skyfab
                failed = HostLost("", host=self.host.name)
            raise cannot_run(failed, self.host)
        if self.agent is None:
            raise HostUnfit("its agent does not respond", host=self.host.name)
        _LOG.debug("%s: its agent responds, with Python %s", self.host.name, self.agent.python)
        if self._bootstrap.python != "any":
            check_agent(self.agent, self.host)
        return self.agent

    def close(self) -> None:
        """Sends a goodbye: the agent terminates its workers and itself. Waits for that up to `GOODBYE` seconds.

        If another thread is opening the session, that fails first.
        """
        self.connection.leave()
        with self._gate:
            self.connection.close(GOODBYE)

    def abandon(self) -> None:
        """Disconnects from the agent and lets it run. Call `connection.settle` before, for it to have everything."""
        self.connection.detach()
        self.close()

    def end_agent(self, stopped: Callable[[], bool]) -> None:
        """Terminates an agent that was given up, if it still runs; `stopped` cancels that. Raises a HostError."""
        transport = self.transport()
        try:
            stream = self.rejoin(transport, time.monotonic() + CONNECT, stopped)
            try:
                stream.send([frame(BYE)])
            finally:
                stream.close()
        finally:
            transport.close()

    def ask(self, message: Message) -> Message:
        """Sends a message and waits for its reply. Raises the error that the host reports."""
        refuse_to_wait()
        reply = Reply()
        SIGNAL_GUARD.wrap()
        with SIGNAL_GUARD:
            self.send(message, answer=reply.answered, failure=reply.failed)
            self.read_until_there(reply)
            found, _ = reply.wait()
        if isinstance(found, messages.Failed):
            raise HostUnfit(found.text, host=self.host.name, hint=found.hint)
        return found
