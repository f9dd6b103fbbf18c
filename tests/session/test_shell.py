"""Scripts in a shell on a host, as this side sees them: what is sent, and what its replies mean. Without a host."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Sequence

import pytest

from skyfab.errors import HostLost, ProtocolError, Unreachable
from skyfab.inventory.host import Host
from skyfab.session.shell import START, Deadline, ScriptFailed, Shell
from skyfab.ui.prompt import TERMINAL

HOST = Host(name="node1", address="10.0.0.1")
MARKER = "=mark="


class Wire:
    """A stream whose other end is a socket of the test."""

    def __init__(self) -> None:
        self.here, self.there = socket.socketpair()
        self.here.setblocking(False)
        self.there.setblocking(False)
        self.drained = 0

    def says(self, text: str) -> None:
        self.there.sendall(text.encode())

    def heard(self) -> str:
        try:
            return self.there.recv(1 << 20).decode()
        except BlockingIOError:
            return ""

    def fileno(self) -> int:
        return self.here.fileno()

    def sink(self) -> int | None:
        return self.here.fileno()

    def stderr(self) -> int | None:
        return None

    def drain(self) -> bytes:
        self.drained += 1
        return b""

    def recv_into(self, view: memoryview) -> int | None:
        return self.here.recv_into(view)

    def send(self, buffers: Sequence[bytes]) -> int:
        return self.here.send(buffers[0])

    def explain(self) -> Exception:
        return HostLost("the stream ended", host="node1")

    def close(self) -> None:
        self.here.close()
        self.there.close()


@pytest.fixture
def wire() -> Iterator[Wire]:
    made = Wire()
    yield made
    made.close()


@pytest.fixture
def deadline() -> Deadline:
    return Deadline(HOST, time.monotonic() + 60, lambda: False)


@pytest.fixture
def shell(wire: Wire, deadline: Deadline) -> Shell:
    return Shell(wire, MARKER, deadline)


# ---- replies


def test_the_time_in_which_a_user_types_a_password_does_not_count(
    deadline: Deadline, monkeypatch: pytest.MonkeyPatch
) -> None:
    deadline.deadline = time.monotonic() - 1
    with pytest.raises(Unreachable):
        deadline.check()
    monkeypatch.setattr(type(TERMINAL), "spent", deadline.asked + 50)
    deadline.check()
    later = Deadline(HOST, time.monotonic() - 1, lambda: False)
    with pytest.raises(Unreachable):
        later.check()


def test_a_pool_that_is_closed_ends_the_wait(wire: Wire) -> None:
    shell = Shell(wire, MARKER, Deadline(HOST, time.monotonic() + 60, lambda: True))
    with pytest.raises(HostLost, match="the pool was closed"):
        shell.answer()


# ---- sending


def test_more_than_the_wire_takes_at_a_time(wire: Wire, shell: Shell, deadline: Deadline) -> None:
    deadline.deadline = time.monotonic() + 5
    data, got = bytes(range(256)) * 8192, bytearray()
    drain = wire.drain

    def take() -> bytes:
        got.extend(wire.there.recv(1 << 20))
        return drain()

    wire.drain = take  # type: ignore[method-assign]
    assert shell.send(data)
    while len(got) < len(data):
        got += wire.there.recv(1 << 20)
    assert got == data
    assert deadline.deadline > time.monotonic() + START - 5, "a host that takes more is alive"


# ---- scripts


def test_a_script_has_no_input_and_its_output_is_returned(wire: Wire, shell: Shell, deadline: Deadline) -> None:
    wire.says("one\n\ntwo=mark=done 0\n")
    assert shell.run("uname -m") == "one\n\ntwo"
    size, _, script = wire.heard().partition("\n")
    assert int(size) == len(script)
    assert script.startswith("( uname -m\n) 2>&1 </dev/null;")
    assert "exit" not in script
    assert deadline.deadline == float("inf"), "a script may take as long as it likes"


@pytest.mark.parametrize(("said", "status"), [("3", 3), ("255", 255), ("nonsense", 1), ("9" * 9, 1), ("", 1)])
def test_a_script_that_fails(wire: Wire, shell: Shell, said: str, status: int) -> None:
    wire.says(f"no such file\n=mark=done {said}\n")
    with pytest.raises(ScriptFailed, match="no such file") as caught:
        shell.run("false")
    assert (caught.value.status, caught.value.output) == (status, "no such file")


def test_the_first_script_is_sent_before_the_greeting_is_read(wire: Wire, shell: Shell) -> None:
    seen: list[str] = []

    def greeting() -> None:
        seen.append(wire.heard())
        wire.says("=mark=done 0\n=mark=done 0\n")

    shell.greeting = greeting
    shell.run("true")
    assert len(seen) == 1
    assert "( true" in seen[0]
    wire.says("=mark=done 0\n")
    shell.run("true")
    assert len(seen) == 1


def test_of_much_output_the_beginning_is_kept(wire: Wire, shell: Shell) -> None:
    line = b"x" * 65535 + b"\n"
    rest: list[bytes] = [line] * 200 + [b"=mark=done 0\n"]

    def much(view: memoryview) -> int:
        piece = rest.pop(0)
        view[: len(piece)] = piece
        return len(piece)

    wire.recv_into = much  # type: ignore[method-assign]
    text = shell.run("cat")
    assert text == "\n".join(["x" * 65535] * 128), "8 MiB"


def test_a_script_that_prints_for_ever(wire: Wire, shell: Shell) -> None:
    """256 MiB are read."""
    count = 0

    def endless(view: memoryview) -> int:
        nonlocal count
        count += 1
        view[-1:] = b"\n"
        return len(view)

    wire.recv_into = endless  # type: ignore[method-assign]
    with pytest.raises(ProtocolError, match="printed more than"):
        shell.run("yes")
    assert count == 4097
