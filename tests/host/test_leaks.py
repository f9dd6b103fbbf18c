"""What an agent keeps of a large message when that is over: nothing."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from stand_in import Agent, Process

from skyfab.host.agent.uploads import Uploads
from skyfab.host.agent.worker_handle import Running, WorkerHandle
from skyfab.protocol import messages
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
def uploads(agent: Agent, mux: Mux) -> Uploads:
    made = Uploads(mux)
    agent.abandon = made.abandon  # type: ignore[method-assign]
    return made


def send_all(buffers: Sequence[Buffer]) -> int:
    return sum(map(len, buffers))


def kept(mux: Mux, uploads: Uploads) -> list[object]:
    mux.flush(send_all)
    return [mux._used, mux._send_queue.streams, uploads._uploads, uploads._missing]


NOTHING: list[object] = [{}, {}, {}, {}]


def call(worker: WorkerHandle, uploads: Uploads, stream: int, *pieces: int) -> None:
    """A large call, of whose data so much is there."""
    worker.give(Running(stream, None), messages.Call.head(worker="seat", function="f", parts=(SIZE,)), None)
    uploads.expect(stream, (SIZE,), worker)
    for size in pieces:
        uploads.data(stream, memoryview(bytearray(size)))
    worker.flush()


def test_nothing_is_kept_of_a_large_result(
    agent: Agent, worker: WorkerHandle, process: Process, mux: Mux, uploads: Uploads
) -> None:
    worker.give(Running(1, None), b"{}", b"")
    process.say(frame(HEAD, 1, messages.Result.head(parts=(60_000,))))
    process.say(frame(DATA, 1, bytes(30_000)))
    for _ in range(4):
        worker.output.read()
    process.say(frame(DATA, 1, bytes(30_000)))
    for _ in range(4):
        worker.output.read()
    assert not worker.calls
    assert kept(mux, uploads) == NOTHING


@pytest.mark.parametrize("behind", [False, True], ids=["the call that ran", "one behind it"])
def test_nothing_is_kept_of_a_call_whose_process_ended_while_its_data_came(
    agent: Agent, worker: WorkerHandle, process: Process, mux: Mux, uploads: Uploads, behind: bool
) -> None:
    """Its client hears of that and sends no more."""
    if behind:
        worker.give(Running(3, None), b"{}", b"")
    call(worker, uploads, 1, SIZE // 2)
    worker.ended(-9, "killed")
    assert kept(mux, uploads) == NOTHING
    uploads.data(1, memoryview(bytearray(1000)))  # this was under way
    assert kept(mux, uploads) == NOTHING
