"""Pipes to which large buffers are lent instead of being copied."""

from __future__ import annotations

import functools
import os
import socket
import threading
from types import SimpleNamespace

import pytest

from skyfab.protocol.pipes import Lender, widen

SIZE = 1 << 20


def lender(fd: int) -> Lender:
    return Lender(SimpleNamespace(send=functools.partial(os.writev, fd)), lambda: fd)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_everything_arrives_in_order(kind: type) -> None:
    source, sink = os.pipe()
    widen(sink)
    os.set_blocking(sink, False)
    content = os.urandom(3 * SIZE + 5)
    received = bytearray()

    def read() -> None:
        while piece := os.read(source, 50_000):
            received.extend(piece)

    reader = threading.Thread(target=read)
    reader.start()
    kept = [b"head", kind(content), b"tail", kind(content)]  # until all of it is received
    send, rest = lender(sink), [*kept]
    while rest:
        try:
            taken = send(rest)
        except BlockingIOError:
            continue
        while rest and taken >= len(rest[0]):
            taken -= len(rest.pop(0))
        if rest:
            rest[0] = memoryview(rest[0])[taken:]
    os.close(sink)
    reader.join()
    os.close(source)
    assert bytes(received) == b"head" + content + b"tail" + content


def test_a_full_pipe_says_so() -> None:
    source, sink = os.pipe()
    os.set_blocking(sink, False)
    content = bytes(SIZE)
    assert 0 < lender(sink)([content]) < SIZE
    with pytest.raises(BlockingIOError):
        lender(sink)([content])
    for fd in (source, sink):
        os.close(fd)


def test_a_closed_pipe_is_an_error() -> None:
    source, sink = os.pipe()
    os.close(source)
    with pytest.raises(BrokenPipeError):
        lender(sink)([bytes(SIZE)])
    os.close(sink)


def test_what_is_not_a_pipe_gets_a_copy() -> None:
    near, far = socket.socketpair()
    with near, far:
        near.setblocking(False)
        send = lender(near.fileno())
        taken = send([bytes(SIZE), b"more"])
        assert taken > 0
        while taken:
            taken -= len(far.recv(taken))
        assert send([bytes(SIZE)]) > 0
    assert (
        Lender(SimpleNamespace(send=lambda buffers: sum(map(len, buffers))), lambda: None)([bytes(SIZE), b"1"])
        == SIZE + 1
    )
