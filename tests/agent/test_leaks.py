"""What an agent keeps of a large message when that is over: nothing."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from stand_in import Agent, Process

from skyfab.agent.uploads import Routes
from skyfab.agent.worker_handle import Running, Seat
from skyfab.protocol import messages
from skyfab.protocol.blobs import Assembly
from skyfab.protocol.frames import DATA, HEAD, Buffer, frame
from skyfab.protocol.mux import Mux

SIZE = 100_000


class Handler:
    """Nothing arrives here."""


@pytest.fixture
def mux(agent: Agent) -> Mux:
    made = Mux(Handler())  # type: ignore[arg-type]
    made.attach(b"")
    made.resume(0)
    agent.mux = made
    return made


@pytest.fixture
def routes(agent: Agent, mux: Mux) -> Routes:
    made = Routes(mux)
    agent.abandon = made.abandon  # type: ignore[method-assign]
    return made


def send_all(buffers: Sequence[Buffer]) -> int:
    return sum(map(len, buffers))


def kept(mux: Mux, routes: Routes) -> list[object]:
    mux.flush(send_all)
    return [mux._used, mux._bulk._streams, routes._routes, routes._missing]


NOTHING: list[object] = [{}, {}, {}, {}]


def call(seat: Seat, routes: Routes, stream: int, *pieces: int) -> None:
    """A large call, of whose data so much is there."""
    seat.give(Running(stream, None), messages.Call.head(seat="seat", function="f", parts=(SIZE,)), None)
    routes.expect(stream, (SIZE,), seat)
    for size in pieces:
        routes.data(stream, memoryview(bytearray(size)))
    seat.flush()


def test_nothing_is_kept_of_a_large_argument(
    agent: Agent, seat: Seat, process: Process, mux: Mux, routes: Routes
) -> None:
    call(seat, routes, 1, SIZE // 2, SIZE // 2)
    process.answer(1)
    seat.voice.read()
    assert not seat.calls
    assert kept(mux, routes) == NOTHING


def test_nothing_is_kept_of_a_large_result(
    agent: Agent, seat: Seat, process: Process, mux: Mux, routes: Routes
) -> None:
    seat.give(Running(1, None), b"{}", b"")
    process.say(frame(HEAD, 1, messages.result_head(60_000)))
    process.say(frame(DATA, 1, bytes(30_000)))
    for _ in range(4):
        seat.voice.read()
    process.say(frame(DATA, 1, bytes(30_000)))
    for _ in range(4):
        seat.voice.read()
    assert not seat.calls
    assert kept(mux, routes) == NOTHING


@pytest.mark.parametrize("behind", [False, True], ids=["the call that ran", "one behind it"])
def test_nothing_is_kept_of_a_call_whose_process_ended_while_its_data_came(
    agent: Agent, seat: Seat, process: Process, mux: Mux, routes: Routes, behind: bool
) -> None:
    """Its client hears of that and sends no more."""
    if behind:
        seat.give(Running(3, None), b"{}", b"")
    call(seat, routes, 1, SIZE // 2)
    seat.ended(-9, "killed")
    assert kept(mux, routes) == NOTHING
    routes.data(1, memoryview(bytearray(1000)))  # this was under way
    assert kept(mux, routes) == NOTHING


def test_nothing_is_kept_of_a_large_function(mux: Mux, routes: Routes) -> None:
    content = Assembly((SIZE,))
    routes.expect(1, (SIZE,), content)
    routes.place(1, SIZE)
    routes.data(1, memoryview(bytearray(SIZE)))
    assert kept(mux, routes) == NOTHING
