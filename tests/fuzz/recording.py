"""The corpus: conversations with a real agent as they went over the wire, less what differs from time to time.

``python tests/fuzz/recording.py`` holds them anew and writes ``corpus/NAME.client`` (what this machine said) and
``corpus/NAME.host``. Names, numbers and paths of the machine are replaced; acknowledgements and signs of life, which
come when they like, are left out.
"""

from __future__ import annotations

import itertools
import json
import secrets
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from skyfab.errors import HostError
from skyfab.inventory.host import Host
from skyfab.protocol import codec, messages
from skyfab.protocol.blobs import name_of
from skyfab.protocol.frames import ACK, DATA, HEAD, HEADER, HELLO, PING, PONG, Buffer
from skyfab.protocol.messages import Message
from skyfab.protocol.mux import SMALL
from skyfab.session.bootstrap import Bootstrap
from skyfab.session.bundle import bundle
from skyfab.session.lines import Lines
from skyfab.session.reader import SharedReader
from skyfab.session.replies import Reply
from skyfab.session.session import Session
from skyfab.session.timing import Timing
from skyfab.ssh.base import Stream
from skyfab.ssh.local import Local

CORPUS = Path(__file__).parent / "corpus"
SIDES = ("client", "host")
_LARGE = SMALL + 1000
_CHUNK = 8192
_PLACE = {
    "agent_hello": {
        "python": "3.11",
        "addresses": [["eth0", "10.0.0.11/24"], ["eth0", "fd00::11/64"]],
        "network": "0a1b net:[4026531840]",
        "hostname": "node1",
        "address": "192.0.2.11",
        "gpus": 0,
        "platform": "Linux",
        "pid": 4242,
        "executable": "/usr/bin/python3",
    },
    "raised": {"traceback": "Traceback (most recent call last):\n"},
}
"""What a host says of itself, by message, and what is kept in its place."""
_PACKAGE = """
import os, sys
os.mkdir("package")
open("package/__init__.py", "w").close()
sys.path.append(os.getcwd())
import package
"""


class Frame(NamedTuple):
    """A frame as its header has it. The header may lie: `length` is None where it tells the truth."""

    kind: int
    head: int
    stream: int
    payload: bytes
    length: int | None = None

    def encode(self) -> bytes:
        length = len(self.payload) if self.length is None else self.length
        return HEADER.pack(self.kind, self.head, self.stream, length) + self.payload


def frames(data: bytes) -> list[Frame]:
    """The frames of one direction of a conversation."""
    found, at = [], 0
    while at < len(data):
        kind, head, stream, length = HEADER.unpack_from(data, at)
        at += HEADER.size
        found.append(Frame(kind, head, stream, data[at : at + length]))
        at += length
    return found


def corpus() -> dict[str, dict[str, list[Frame]]]:
    """The stored conversations, each by its side."""
    names = sorted({path.stem for path in CORPUS.iterdir()})
    return {name: {side: frames((CORPUS / f"{name}.{side}").read_bytes()) for side in SIDES} for name in names}


# ---- holding a conversation


class Tap:
    """A transport to an agent on this machine that writes down what passes after the greeting."""

    def __init__(self, host: Host) -> None:
        self._local = Local(host)
        self.said: dict[str, bytearray] = {side: bytearray() for side in SIDES}
        self._begun = False

    def open(self, command: str, stopped: Callable[[], bool] = lambda: False) -> Stream:
        stream = self._local.open(command)
        recv_into, send = stream.recv_into, stream.send

        def hear(view: memoryview) -> int | None:
            got = recv_into(view)
            if self._begun:
                self.said["host"] += view[: got or 0]
            return got

        def tell(buffers: Sequence[bytes | memoryview]) -> int:
            sent = send(buffers)
            if self._begun:
                self.said["client"] += b"".join(buffers)[:sent]
            return sent

        stream.recv_into, stream.send = hear, tell  # type: ignore[assignment]
        return stream

    servers = ()

    def joined(self) -> None:
        self._begun = True

    def close(self) -> None:
        self._local.close()


class Ear:
    """A listener that hears of exits only."""

    def __init__(self) -> None:
        self.exits: list[str] = []

    def on_output(self, worker: str, lines: Lines) -> None: ...
    def on_import(self, worker: str, module: str) -> None: ...
    def on_exit(self, worker: str, generation: int) -> None:
        self.exits.append(worker)

    def on_lost(self, error: HostError) -> None: ...
    def on_disconnect(self, reason: str) -> None: ...
    def on_reconnect(self, seconds: float) -> None: ...
    def others_respond(self) -> bool:
        return False


class Talk:
    """One conversation that is being held."""

    def __init__(self, session: Session, ear: Ear) -> None:
        self.session = self._session = session
        self._ear = ear
        self.send = session.send

    def ask(self, message: Message, parts: Sequence[Buffer] = ()) -> Message:
        reply = Reply()
        self.send(message, parts, answer=reply.answered, failure=reply.failed)
        return reply.wait()[0]

    def function(self, function: Callable[..., Any]) -> str:
        """Teaches a function that every Python has; returns its digest."""
        content = codec.dumps((function, False, {}, ())).data
        digest = name_of(content)
        self.send(messages.Function(digest=digest, parts=[len(content)]), [content])
        return digest

    def call(self, digest: str, *arguments: object) -> Message:
        content = bytes(codec.dumps((*arguments, None)).data)
        return self.ask(messages.Call(worker="0", function=digest, parts=[len(content)]), [content])

    def spawn(self) -> None:
        self.send(messages.Spawn(worker="0", generation=1, env={}, info={"rank": 0, "world_size": 1, "peers": []}))

    def release(self) -> None:
        self.send(messages.StopWorker(worker="0"))
        assert self._session.wait(lambda: bool(self._ear.exits), 20)


def calls(talk: Talk) -> None:
    """Small things: questions, content, a seat, calls that return, raise and write, and the end of the seat."""
    source = b"answer = 42\n"
    name = name_of(source)
    talk.ask(messages.Has(names=[name]))
    talk.ask(messages.Blob(name=name, parts=[len(source)]), [source])
    talk.ask(messages.Tree(digest=name_of(b"tree"), files=[["0/module.py", name]]))
    talk.spawn()
    length = talk.function(len)
    talk.call(length, "four")
    talk.call(length, 3)
    talk.call(talk.function(print), "a line")
    talk.call(talk.function(exec), _PACKAGE)
    talk.send(messages.Cancel(streams=[99]))
    talk.send(messages.Cancel(streams=[97, 99], begun=False))
    talk.send(messages.Forget(digests=[length]))
    talk.call(talk.function(abs), -1)  # after that nothing waits for the seat, and it may end by itself
    talk.ask(messages.DumpStacks(worker="nobody"))
    talk.release()


def bulk(talk: Talk) -> None:
    """Large things: a blob, an argument and a result that come in pieces."""
    content = bytes(_LARGE)
    talk.ask(messages.Blob(name=name_of(content), parts=[len(content)], keep=True), [content])
    talk.spawn()
    talk.call(talk.function(len), content)
    talk.call(talk.function(bytes), _LARGE)
    talk.release()


CONVERSATIONS: dict[str, Callable[[Talk], None]] = {"calls": calls, "bulk": bulk}


def record(conversation: Callable[[Talk], None], cache: Path) -> dict[str, bytes]:
    """Holds a conversation with an agent whose cache is an empty folder; what each side said, cleaned."""
    host = Host(name="node1", cache=str(cache))
    tap, ear = Tap(host), Ear()
    launch = Bootstrap(host=host, session=secrets.token_hex(8), bundle=bundle(), python=sys.executable)
    session = Session(launch, lambda: tap, ear, SharedReader(), Timing(lease=30))
    try:
        session.open()
        conversation(Talk(session, ear))
    finally:
        session.close()
    return {side: b"".join(_cleaned(frames(bytes(said)))) for side, said in tap.said.items()}


def _cleaned(said: list[Frame]) -> list[bytes]:
    """Data is cut anew: how much of it goes at once is a matter of the moment."""
    kept = [_neutral(frame) for frame in said if frame.kind not in (ACK, PING, PONG)]
    found: list[Frame] = []
    for (kind, stream), run in itertools.groupby(kept, lambda frame: (frame.kind, frame.stream)):
        if kind == DATA:
            whole = b"".join(frame.payload for frame in run)
            found += [Frame(DATA, 0, stream, whole[at : at + _CHUNK]) for at in range(0, len(whole), _CHUNK)]
        else:
            found += run
    return [frame.encode() for frame in found]


def _neutral(frame: Frame) -> Frame:
    if frame.kind not in (HEAD, HELLO):
        return frame
    size = frame.head or len(frame.payload)
    document = json.loads(frame.payload[:size])
    document |= _PLACE.get(document["op"], {})
    head = json.dumps(document, separators=(",", ":")).encode()
    return frame._replace(head=len(head) if frame.head else 0, payload=head + frame.payload[size:])


def main() -> None:
    CORPUS.mkdir(exist_ok=True)
    for name, conversation in CONVERSATIONS.items():
        with tempfile.TemporaryDirectory() as folder:
            for side, said in record(conversation, Path(folder) / "cache").items():
                (CORPUS / f"{name}.{side}").write_bytes(said)


if __name__ == "__main__":
    main()
