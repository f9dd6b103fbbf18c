"""Nodes and sessions that only note what they are asked for: stand-ins for hosts in tests of a pool's parts."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import skyfab as sky
from skyfab.calls.pack import PackedCall, PackedFunction
from skyfab.protocol import codec, messages
from skyfab.session.lines import Lines
from skyfab.session.timing import Timing


class Listener:
    """Notes what a session reports."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []
        self.exits: list[str] = []
        self.told: list[str] = []
        self.others = False

    def on_output(self, worker: str, lines: Lines) -> None:
        self.lines += lines

    def on_import(self, worker: str, module: str) -> None: ...
    def on_exit(self, worker: str, text: str) -> None:
        self.exits.append(worker)

    def on_lost(self, error: Exception) -> None:
        self.told.append(f"lost: {error}")

    def on_disconnect(self, reason: str) -> None:
        self.told.append(f"apart: {reason}")

    def on_reconnect(self, seconds: float) -> None:
        self.told.append(f"together after {seconds:.0f}")

    def others_respond(self) -> bool:
        return self.others


class FakeSession:
    """Notes what is sent. The test answers requests, or `wait` does, all of them with Done."""

    def __init__(self, error: BaseException | None = None) -> None:
        """`error` is what opening it raises."""
        self.error = error
        self.opens: Callable[[], None] = lambda: None
        self.sent: list[Any] = []
        self.data: list[list[bytes]] = []
        self.options: list[dict[str, Any]] = []
        self.answers: list[Any] = []
        self.failures: list[Any] = []
        self.asked: list[Any] = []
        self.missing: list[str] = []
        """Names of the blobs that the host does not have."""
        self.has_ended = self.closed = self.was_stopped = self.is_gone = False
        self.responds = True
        self.connection = SimpleNamespace(agent=SimpleNamespace(gpus=2), timing=Timing(lease=60, heartbeat_timeout=10))
        self.end_agent: Callable[..., None] = lambda stopped: None

    def open(self) -> Any:
        self.opens()
        if self.error is not None:
            raise self.error
        return SimpleNamespace(python="3.12.1")

    def close(self) -> None:
        self.closed = True

    @property
    def ops(self) -> list[str]:
        """What was sent since the last look."""
        seen, self.sent = self.sent, []
        return [messages.decode(each).op if isinstance(each, bytes) else each.op for each in seen]

    def send(self, message: Any, parts: Any = (), *, answer: Any = None, failure: Any = None, **options: Any) -> int:
        if self.is_gone:
            raise sky.HostLost("gone", host="node1")
        self.sent.append(message)
        self.data.append([bytes(part) for part in parts])
        self.options.append(options)
        self.answers.append(answer)
        self.failures.append(failure)
        return 2 * len(self.sent) - 1

    def ask(self, message: Any) -> Any:
        self.asked.append(message)
        return messages.Missing(names=self.missing) if isinstance(message, messages.Has) else messages.Done()

    def read_until_there(self, reply: Any) -> None:
        reply.block()

    def wait(self, done: Any) -> bool:
        for answer in self.answers:
            answer(messages.Done(), [])
        assert done()
        return True


class FakeStore:
    """What a host has been sent."""

    def __init__(self) -> None:
        self.trees: set[str] = set()
        self.on_sync: Callable[[], None] = lambda: None

    def knows(self, tree: Any) -> bool:
        return tree.digest in self.trees

    def sync(self, tree: Any) -> bool:
        if tree.digest in self.trees:
            return True
        self.on_sync()
        self.trees.add(tree.digest)
        return True


class FakeNode:
    """A host that takes calls; the test answers them."""

    def __init__(self, index: int = 1, error: BaseException | None = None, *, gpus: Any = "auto") -> None:
        """`error` is what opening its session raises."""
        self.index, self.name = index, f"node{index}"
        self.host = sky.Host(name=self.name, gpus=gpus)
        self.agent = SimpleNamespace(hostname=f"box{index}")
        self.gpus = (0, 1)
        self.session = FakeSession(error)
        self.lost: Exception | None = None
        self.is_left = False
        self.is_gone = False
        self.callers: list[Any] = []
        self.specs: list[Any] = []
        self.options: list[dict[str, Any]] = []
        self.cancelled: list[int] = []
        self.unassigned: list[int] = []
        self.released: list[str] = []
        self.members: dict[str, Any] = {}
        self.store = FakeStore()

    def _check(self) -> None:
        if self.is_gone:
            raise sky.HostLost("gone", host=self.name)

    def call(self, worker: str, spec: Any, call: Any, *, caller: Any, **rest: Any) -> None:
        self._check()
        self.callers.append(caller)
        self.specs.append(spec)
        self.options.append(rest)

    def cancel(self, *streams: int, begun: bool = True) -> None:
        self._check()
        (self.cancelled if begun else self.unassigned).extend(streams)

    def release(self, worker: str) -> bool:
        self._check()
        self.released.append(worker)
        return True

    def note_lost(self, error: Exception) -> None:
        if self.lost is None and self.session.has_ended:
            self.lost = error

    def lose(self) -> None:
        self.is_gone = self.session.has_ended = True

    def reset(self, session: FakeSession) -> None:
        self.session = session

    def close(self) -> None:
        self.session.close()


def packed(size: int = 0, label: str = "f", **options: Any) -> PackedCall:
    """A call whose arguments have that size in bytes."""
    function = PackedFunction("digest", codec.Payload(b""))
    return PackedCall(function=function, arguments=codec.Payload(bytes(size)), label=label, **options)


def result(value: object) -> tuple[messages.Message, list[memoryview]]:
    """A host's reply to a call that returned `value`."""
    payload = codec.dumps(value)
    return messages.Result(parts=[len(payload.data)]), [memoryview(payload.data)]


def raised(error: Exception, traceback: str = "") -> tuple[messages.Message, list[memoryview]]:
    """A host's reply to a call that raised `error`."""
    payload = codec.dumps(error)
    kind = type(error).__name__
    message = messages.Raised(kind=kind, text=str(error), traceback=traceback, parts=[len(payload.data)])
    return message, [memoryview(payload.data)]


class EndsTheProgram:
    """Raises SystemExit when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return sys.exit, (3,)
