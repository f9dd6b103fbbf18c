"""A real agent and a client that says the wrong things: it drops that connection or answers Failed, and lives on.

The client here speaks frames by hand, over the local transport; nothing of the session is in between.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from stage.messages import filled

from skyfab.host.agent.link import SOCKET
from skyfab.inventory.host import Host
from skyfab.protocol import VERSION, messages
from skyfab.protocol.blobs import name_of
from skyfab.protocol.frames import ACK, BYE, COUNT, HEAD, HEADER, HELLO, PING, Reader, frame
from skyfab.protocol.messages import AgentHello, Message
from skyfab.session.bootstrap import Bootstrap
from skyfab.session.bundle import bundle
from skyfab.ssh.local import Local

NAME = name_of(b"content")
SECONDS = 20.0


class Client:
    """One pool's side, over as many connections as it takes."""

    def __init__(self, cache: Path) -> None:
        self.host = Host(name="local", cache=str(cache))
        self.launch = Bootstrap(host=self.host, session=os.urandom(8).hex(), bundle=bundle(), python=sys.executable)
        self.cache = cache
        self.received = 0
        self.sent = 0
        self.agent: AgentHello | None = None
        self.heads: list[tuple[int, Message]] = []
        self._started = False
        self._streams = iter(range(1, 10**9, 2))

    @contextlib.contextmanager
    def connected(self, *, hello: bool = True, local: bool = False) -> Iterator[Client]:
        self.stream = Local(self.host).open(self.launch.command("resume" if self._started else "start"))
        try:
            self.launch.join(self.stream, deadline=time.monotonic() + SECONDS)
            self._started = True
            self._reader = Reader(self)
            self.ended = False
            self.agent = None
            if hello:
                fields = {"protocol": VERSION, "received": self.received, "lease": 30.0, "local": local}
                self.write(frame(HELLO, 0, messages.ClientHello(**fields).encode()))
                self.read(lambda: self.agent is not None)
                assert self.agent is not None
            yield self
        finally:
            self.stream.close()

    def write(self, data: bytes) -> None:
        """Until it is taken, or the agent has hung up."""
        rest = memoryview(data)
        deadline = time.monotonic() + SECONDS
        while rest and not self.ended and time.monotonic() < deadline:
            try:
                rest = rest[self.stream.send([rest]) :]
            except BlockingIOError:
                self.read(lambda: True)
            except OSError:
                return

    def read(self, until: Any) -> None:
        """Takes what the agent says until that is so, or it has hung up."""
        deadline = time.monotonic() + SECONDS
        while not self.ended:
            try:
                self.ended = not self._reader.pump(self.stream.recv_into)
            except BlockingIOError:
                if until():
                    return
                assert time.monotonic() < deadline, "no answer"
                select.select([self.stream], [], [], 0.05)

    # ---- what the reader tells

    def place(self, stream: int, length: int) -> memoryview:
        return memoryview(bytearray(length))

    def arrived(self, kind: int, stream: int, payload: memoryview, head: int) -> None:
        if kind >= HEAD:
            self.received += 1
        if kind == HELLO:
            self.agent = messages.expect(AgentHello, bytes(payload))
        elif kind == HEAD:
            self.heads.append((stream, messages.decode(bytes(payload[:head] if head else payload))))

    # ---- speaking properly

    def say(self, message: Message | bytes, data: bytes = b"", *, large: bool = False) -> int:
        stream = next(self._streams)
        content = message if isinstance(message, bytes) else message.encode()
        self.write(frame(HEAD, stream, content + data, 0 if large else len(content)))
        return stream

    def answer(self, stream: int) -> Message | None:
        """What was said on that stream; None when the agent hung up instead."""
        found = lambda: [message for place, message in self.heads if place == stream]  # noqa: E731
        self.read(lambda: bool(found()))
        return found()[0] if found() else None

    def is_answered(self) -> None:
        """The agent is there, and in its right mind."""
        assert self.answer(self.say(messages.Has(names=[NAME]))) == messages.Missing(names=[NAME])


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    made = Client(tmp_path_factory.mktemp("cache"))
    with made.connected():
        made.is_answered()
        assert made.agent is not None
        pid = made.agent.pid
    yield made
    with made.connected():
        assert made.agent is not None
        assert made.agent.pid == pid, "it is still the same agent"
        made.write(frame(BYE))
        made.read(lambda: False)
    deadline = time.monotonic() + SECONDS
    while running(pid):
        assert time.monotonic() < deadline, "the agent stays after goodbye"
        time.sleep(0.01)
    assert not [path for path in (made.cache / "run").rglob("*") if not path.is_dir()], "nothing is left of the run"


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def spawn(worker: str, **changes: Any) -> bytes:
    return filled(messages.Spawn, worker=worker, **changes).encode()


def call(**changes: Any) -> bytes:
    return messages.Call(**{"worker": "no such seat", "function": NAME, "parts": [], **changes}).encode()


BAD_MESSAGES = {
    "a seat that is not there": call(),
    "a blob that is not there": call(parts=[[NAME, 5]]),
    "names that are none": messages.Has(names=["../../etc/passwd"]).encode(),
    "a blob with a bad name": messages.Blob(name="../x", parts=[]).encode(),
    "a tree outside": messages.Tree(digest=NAME, files=[["../x", NAME]]).encode(),
    "a tree with a NUL": messages.Tree(digest=NAME, files=[["a\0b", NAME]]).encode(),
    "a seat with a code tree that is not there": spawn("1", tree=NAME),
    "a seat with a path for a name": spawn("../../x"),
    "a seat with a bad environment": spawn("2", env={"A=B": "x\0y"}),
    "an answer": messages.Done().encode(),
}


@pytest.mark.slow
def test_bad_messages_are_answered_and_the_agent_goes_on(client: Client) -> None:
    """All in one conversation: where one of them ends the connection, another one is made."""
    for name, content in BAD_MESSAGES.items():
        with client.connected():
            client.say(content)
            if not client.ended:
                client.say(content)
        with client.connected():
            client.is_answered()
        assert {path.name for path in client.cache.iterdir()} <= {"blobs", "bundles", "logs", "run", "trees"}, name
        assert not list(client.cache.parent.glob("x*")), name


def test_the_other_processes_of_the_agent_survive_bad_seats(client: Client) -> None:
    """After all that, a proper seat still starts."""
    with client.connected():
        client.say(spawn("good", env={"A": "1"}, info={"rank": 0, "world_size": 1}))
        client.say(messages.StopWorker(worker="good"))
        client.read(lambda: any(isinstance(m, messages.Exited) and m.worker == "good" for _, m in client.heads))


BAD_BYTES = {
    "no frames": b"GET / HTTP/1.1\r\n\r\n" * 10,
    "an unknown kind": HEADER.pack(99, 0, 1, 0),
    "half a frame": HEADER.pack(HEAD, 0, 1, 100) + b"x",
    "an unknown message": frame(HEAD, 1, b'{"op":"x"}', 10),
    "an acknowledgement of what was not sent": frame(ACK, 0, COUNT.pack(2**62)),
    "hello again": frame(HELLO, 0, messages.ClientHello(protocol=VERSION, received=0, lease=1.0).encode()),
    "a hello of another version": frame(
        HELLO, 0, messages.ClientHello(protocol=VERSION + 1, received=0, lease=1.0).encode()
    ),
}


def test_bad_bytes_end_the_connection_and_not_the_agent(client: Client) -> None:
    for name, data in BAD_BYTES.items():
        print(name, flush=True)  # what the agent heard last, if it is gone
        for hello in (True, False):
            with client.connected(hello=hello):
                client.write(data)
                client.write(frame(PING))
    with client.connected():
        client.is_answered()


def test_a_link_that_comes_while_another_is_there_takes_over(client: Client) -> None:
    """A laptop that wakes up reconnects before the host has noticed that the old connection is dead."""
    second = Local(client.host).open(client.launch.command("resume"))
    try:
        client.launch.join(second, deadline=time.monotonic() + SECONDS)
        with client.connected():
            client.is_answered()
    finally:
        second.close()


# ---- links that are none


@contextlib.contextmanager
def connected_socket(client: Client) -> Iterator[socket.socket]:
    """A connection to the agent's own socket, as a link makes it."""
    (place,) = client.cache.glob(f"run/*/{client.launch.session}")
    folder = os.open(place, os.O_RDONLY)
    try:
        with socket.socket(socket.AF_UNIX) as link:
            link.connect(f"/proc/self/fd/{folder}/{SOCKET}")  # a path of any length
            yield link
    finally:
        os.close(folder)


def test_a_silent_link_does_not_delay_the_agent(client: Client) -> None:
    with client.connected(), contextlib.ExitStack() as silent:
        began = time.monotonic()
        for _ in range(6):
            silent.enter_context(connected_socket(client))
            client.is_answered()
        assert time.monotonic() - began < SECONDS, "the agent waits for each of them"


@pytest.mark.parametrize(
    ("said", "count"), [(b'{"connection": ""}', 0), (b"[1]", 2), (b"{}", 2), (b"no JSON", 1), (b"", 0)]
)
def test_a_link_with_something_else_is_sent_away(client: Client, said: bytes, count: int) -> None:
    with open(os.devnull, "rb") as nothing, connected_socket(client) as link:  # noqa: PTH123
        if said:
            socket.send_fds(link, [said], [nothing.fileno()] * count)
        else:
            link.shutdown(socket.SHUT_WR)
        link.settimeout(SECONDS)
        assert link.recv(1) == b""
    with client.connected():
        client.is_answered()
