"""A session: one agent on one host, as this machine talks to it.

One stream, many exchanges: requests and their answers, what processes write, and what happens to them. When the stream
breaks or falls silent it is replaced by another, to the same agent, and nothing is lost or said twice.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from skyfab.errors import HostLost, HostUnfit, ProtocolError
from skyfab.inbox import Listener
from skyfab.inventory import Host
from skyfab.launch import Launch, cannot_run, check_agent
from skyfab.protocol import messages
from skyfab.protocol.frames import BYE, Buffer, frame
from skyfab.protocol.messages import AgentHello, Message
from skyfab.tether import Tether
from skyfab.transport.base import Stream, Transport
from skyfab.transport.logins import LOGINS, ServerBusy, retry

CONNECT: Final = 30.0
"""Seconds from the first byte to the agent's hello."""
GOODBYE: Final = 5.0
"""Seconds that a host has to end its processes when the pool closes."""


class Session:
    """The conversation with one host's agent: `send`, `begin`, `await_reply`, `wait` and `poke` are its tether's.

    Thread-safe.
    """

    def __init__(
        self,
        host: Host,
        reach: Callable[[], Transport],
        launch: Launch,
        listener: Listener,
        *,
        lease: float,
        silence: float = 10.0,
    ) -> None:
        """`lease` is how long the two sides may be apart; after `silence` a host is lost when others answer."""
        self.host = host
        self._reach = reach
        self._launch = launch
        self._tether = Tether(host, listener, lease=lease, silence=silence, reach=reach, join=self._rejoin)
        self._gate = threading.Lock()
        # The tether's own: a call has no time for another step.
        self.send = self._tether.send
        self.begin = self._tether.begin
        self.await_reply = self._tether.await_reply
        self.wait = self._tether.wait
        self.poke = self._tether.poke

    @property
    def agent(self) -> AgentHello | None:
        """What the host said of itself, once it is open."""
        return self._tether.agent

    @property
    def has_ended(self) -> bool:
        """Nothing more will come of it."""
        return self._tether.ended is not None

    @property
    def heard(self) -> float:
        """When the host last said something; it says something every few seconds."""
        return self._tether.heard

    @property
    def moved(self) -> tuple[int, int]:
        """Bytes sent and received so far."""
        return self._tether.moved

    # ---- opening and closing

    def open(self) -> AgentHello:
        """Connects and waits for the agent's hello. Raises a HostError."""
        with self._gate:
            try:
                agent = self._introduce(retry(self._join, self._is_leaving))
            except BaseException:
                self._tether.close(GOODBYE)
                raise
            self._tether.start(f"skyfab-{self.host.name}")
            return agent

    def _join(self) -> float:
        """Starts the link on the host; from then on the stream speaks frames. Returns until when it may say hello."""
        transport = self._reach()
        stream: Stream | None = None
        try:
            with LOGINS.turn(transport.servers, self._is_leaving) as turn:
                deadline = time.monotonic() + CONNECT
                stream = transport.open(self._launch.command())
                self._launch.join(stream, deadline=deadline, stopped=self._is_leaving, arrived=turn.over)
            transport.joined()
        except BaseException as error:
            if isinstance(error, ServerBusy):
                LOGINS.turned_away(transport.servers)
            if stream is not None:
                stream.close()
            transport.close()
            raise
        self._tether.begin_with(stream, transport)
        return max(deadline, time.monotonic() + CONNECT)  # an environment may have been made meanwhile

    def _is_leaving(self) -> bool:
        return self._tether.is_leaving

    def _rejoin(self, transport: Transport, deadline: float, stopped: Callable[[], bool]) -> Stream:
        """Another stream to the same agent. Raises a HostError."""
        assert self.agent is not None
        launch = replace(self._launch, python=self.agent.executable, prepare=None)
        stream = transport.open(launch.command("resume"))
        try:
            launch.join(stream, deadline=deadline, stopped=stopped)
        except BaseException:
            stream.close()
            raise
        transport.joined()
        return stream

    def _introduce(self, deadline: float) -> AgentHello:
        while self.agent is None and self._tether.ended is None and time.monotonic() < deadline:
            self._tether.pump(0.5)
        if self._tether.ended is not None and self.agent is None:
            failed = self._tether.ended
            if isinstance(failed, ProtocolError):  # whatever it is that speaks there
                failed = HostLost("", host=self.host.name)
            raise cannot_run(failed, self.host)
        if self._tether.ended is not None:
            raise self._tether.ended
        if self.agent is None:
            raise HostUnfit("its agent does not answer", host=self.host.name)
        check_agent(self.agent, self.host)
        if self._tether.is_leaving:
            raise HostLost("the pool was closed", host=self.host.name)
        return self.agent

    def close(self) -> None:
        """Says goodbye: the agent ends its ranks and itself. Waits for that, but not for long.

        While another thread opens the session, that fails first.
        """
        self._tether.leave()
        with self._gate:
            self._tether.close(GOODBYE)

    def abandon(self) -> None:
        """Waits until the agent has heard everything, and leaves it to itself. Raises HostLost."""
        self._tether.abandon()
        self.close()

    def end_agent(self, stopped: Callable[[], bool]) -> None:
        """Ends an agent that was given up, if it is there, unless that is `stopped`. Raises a HostError."""
        transport = self._reach()
        try:
            stream = self._rejoin(transport, time.monotonic() + CONNECT, stopped)
            try:
                stream.send([frame(BYE)])
            finally:
                stream.close()
        finally:
            transport.close()

    def ask(self, message: Message, parts: Sequence[Buffer] = ()) -> Message:
        """Sends a message and waits for its answer. Raises what the host says went wrong."""
        found: list[Message] = []
        failed: list[Exception] = []
        self.send(message, parts, answer=lambda reply, _: found.append(reply), failure=failed.append)
        self.wait(lambda: bool(found or failed))
        if failed:
            raise failed[0]
        if isinstance(found[0], messages.Failed):
            raise HostUnfit(found[0].text, host=self.host.name, hint=found[0].hint)
        return found[0]
