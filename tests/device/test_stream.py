"""What a device's stream sends and when, and which use of the device raises an error: without a host."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from stage.device_node import Node
from stage.spot import until

import skyfab as sky
from skyfab.device import stream as streams
from skyfab.device.batches import Batch, observers
from skyfab.device.flusher import flusher
from skyfab.device.storages import RemoteStorage, by_address
from skyfab.device.stream import BATCH, FEW, DeviceFuture, DeviceStream
from skyfab.errors import HostLost
from skyfab.host.device import wire
from skyfab.protocol import messages

OPERATION = 7
"""The number of a plan: an operator that is executed, or skipped after an error."""
FAILURE = {"error": {"op": "aten::add", "kind": "IndexError", "text": "too large", "inputs": ["float32[3]"], "at": 0}}


@pytest.fixture
def node() -> Node:
    return Node()


@pytest.fixture
def stream(node: Node) -> DeviceStream:
    return DeviceStream(3, "cuda:1", node)


def emit(stream: DeviceStream, *operands: Any, recorded: bool = False) -> None:
    """Emits an operation, as a kernel does: the line of the program is the caller's."""
    stream.emit([OPERATION, *operands], recorded=recorded)


def test_a_long_instruction_is_sent_to_a_host_that_has_nothing_to_do(stream: DeviceStream, node: Node) -> None:
    emit(stream, 1)
    stream.flush_if_idle()
    assert len(node.sent) == 1
    emit(stream, 2)
    stream.flush_if_idle()
    assert len(node.sent) == 1  # it still works on the first
    node.reply()
    stream.flush_if_idle()
    assert [len(batch) for batch in node.sent] == [1, 1]


def fail(stream: DeviceStream, node: Node) -> None:
    """An operation that has failed on the host."""
    emit(stream, "bad")
    stream.flush()
    node.reply(FAILURE)


# ---- sending


def test_instructions_are_sent_together_in_order(stream: DeviceStream, node: Node) -> None:
    for number in range(BATCH - 1):
        emit(stream, number)
    assert node.sent == []
    emit(stream, BATCH - 1)
    assert node.sent == [[[OPERATION, number] for number in range(BATCH)]]
    assert (node.devices, stream.index) == (["cuda:1"], 3), "its name on the host, and its number here"
    assert stream.flush() is None
    assert len(node.sent) == 1, "nothing is sent twice"


def test_after_a_wait_a_host_with_nothing_to_do_is_sent_few_instructions(stream: DeviceStream, node: Node) -> None:
    stream.ask([wire.SYNC])
    for number in range(10 * BATCH):
        emit(stream, number)
    assert [len(batch) for batch in node.sent[1:6]] == [FEW, 32, 64, BATCH, BATCH]
    waited = stream.start([wire.SYNC])
    stream.start([wire.SYNC])
    while not waited.is_there:
        node.reply()
    stream.receive(waited)
    before = len(node.sent)
    for number in range(BATCH - 1):
        emit(stream, number)
    assert len(node.sent) == before, "it has something to do"
    emit(stream)
    assert len(node.sent) == before + 1


def test_an_error_is_raised_immediately_after_a_wait_too(stream: DeviceStream, node: Node) -> None:
    stream.ask([wire.SYNC])
    fail(stream, node)
    with pytest.raises(sky.DeviceError):
        emit(stream)
    emit(stream, "after")
    assert len(node.sent) == 2, "instructions are collected again"


def test_small_uploads_wait_for_more_and_large_ones_do_not(stream: DeviceStream, node: Node) -> None:
    stream.upload([wire.UPLOAD, 5], memoryview(b"x" * 6000))
    stream.upload([wire.UPLOAD, 6], memoryview(b"y" * 7))
    assert node.sent == []
    stream.upload([wire.UPLOAD, 8], memoryview(bytes((1 << 20) - 6007)))
    assert node.sent == [], "a MiB in all"
    stream.upload([wire.UPLOAD, 9], memoryview(b"z"))
    assert node.sent == [[[wire.UPLOAD, 5, 0], [wire.UPLOAD, 6, 1], [wire.UPLOAD, 8, 2], [wire.UPLOAD, 9, 3]]]
    assert node.buffers == [[b"x" * 8, b"y" * 7, bytes(8), b"z"]]
    stream.upload([wire.UPLOAD, 10], memoryview(b"next"))
    assert len(node.sent) == 1, "what was sent is no longer counted"
    stream.flush()
    assert (node.sent[1], node.buffers[1]) == ([[wire.UPLOAD, 10, 0]], [b"next"])


def test_uploads_fill_a_batch_as_other_instructions_do(stream: DeviceStream, node: Node) -> None:
    for number in range(BATCH):
        stream.upload([wire.UPLOAD, number], memoryview(b""))
    assert len(node.sent) == 1


def test_a_program_that_is_32_batches_ahead_waits_for_one_reply(stream: DeviceStream, node: Node) -> None:
    for number in range(32):
        emit(stream, number)
        stream.flush()
    assert node.waits == 0
    emit(stream, 32)
    assert stream.try_flush()
    assert len(node.sent) == 32, "what is flushed by itself waits for nothing"
    stream.flush()
    assert (node.waits, len(node.open)) == (1, 32)
    node.reply()
    emit(stream, 33)
    stream.flush()
    assert node.waits == 1


def test_a_program_that_uploads_faster_than_the_network_waits(stream: DeviceStream, node: Node) -> None:
    with mmap.mmap(-1, 128 << 20) as data:
        for number in range(2):
            stream.upload([wire.UPLOAD, number], memoryview(data))
        stream.upload([wire.UPLOAD, 2], memoryview(b"."))
        stream.flush()
        assert node.waits == 0, "256 MiB may be under way"
        emit(stream)
        stream.flush()
        assert (node.waits, len(node.open)) == (1, 3)
        while node.open:
            node.reply()
        stream._uploads.clear()
        node.batches.clear()


def test_a_callback_uses_the_device_while_the_program_waits_for_room(stream: DeviceStream, node: Node) -> None:
    def callback(batch: Batch, error: Exception | None) -> None:
        node.is_reading = True
        for number in range(BATCH):
            emit(stream, number)
        stream.upload([wire.UPLOAD, 5], memoryview(b"data"))
        stream.start([wire.SYNC], then=lambda batch, error: None)
        stream.check()
        node.is_reading = False

    def receive(batch: Batch) -> None:
        reader = threading.Thread(target=node.reply, daemon=True)
        reader.start()
        reader.join(10)
        assert not reader.is_alive(), "the callback waits for the program, which waits for the callback"

    node.receive = receive  # type: ignore[method-assign]
    stream.start([wire.SYNC], then=callback)
    for _ in range(31):
        stream.start([wire.SYNC])
    emit(stream, "later")
    stream.flush()
    found = [one for batch in node.sent[32:] for one in batch]
    assert [one[0] for one in found].count(OPERATION) == BATCH + 1
    assert [wire.SYNC] in found


def test_asking_sends_what_was_emitted_before_and_waits_for_the_reply(stream: DeviceStream, node: Node) -> None:
    emit(stream, 1)
    stream.upload([wire.UPLOAD, 5], memoryview(b"first"))
    batch = stream.start([wire.STATE, 0], memoryview(b"second"), memoryview(b"third"))
    assert node.sent == [[[OPERATION, 1], [wire.UPLOAD, 5, 0], [wire.STATE, 0, 1, 2]]]
    assert node.buffers == [[b"first", b"second", b"third"]]
    assert not batch.is_there
    node.reply({"value": 4}, b"bytes")
    assert stream.receive(batch) is batch
    assert (batch.value(), [bytes(part) for part in batch.buffers]) == (4, [b"bytes"])
    assert stream.ask([wire.SYNC]).is_there


def test_what_nobody_waits_for_is_called_with_the_reply(stream: DeviceStream, node: Node) -> None:
    found: list[Any] = []
    stream.start([wire.SYNC], then=lambda batch, error: found.append((batch.value(), error)))
    node.reply({"value": 1})
    assert found == [(1, None)]
    stream.start([wire.SYNC], then=lambda batch, error: found.append(error))
    node.reply(FAILURE)
    with pytest.raises(sky.DeviceError) as caught:
        stream.check()
    assert str(found[1]) == str(caught.value)
    for _ in range(33):
        stream.start([wire.SYNC], then=lambda batch, error: None)
    assert node.waits == 1, "it may be 32 batches ahead, too"


def test_something_else_is_sent_after_what_was_emitted(stream: DeviceStream, node: Node) -> None:
    seen: list[int] = []
    emit(stream)
    stream.send_between(lambda: seen.append(len(node.sent)))
    assert seen == [1]


def test_ids_are_freed_after_the_instructions_that_use_them(stream: DeviceStream, node: Node) -> None:
    class Tensor:
        pass

    tensor = Tensor()
    storage = RemoteStorage(tensor, stream.dead.append)
    storage.address, storage.id, storage.views = id(storage), 40, {"a": (None, 40), "b": (None, 41)}
    by_address[storage.address] = storage
    stream.freed.append(50)
    emit(stream, 40)
    del tensor
    assert stream.try_flush()
    assert node.sent == [[[OPERATION, 40], [wire.FREE, 50, 40, 41]]]
    assert storage.address not in by_address
    assert not stream.try_flush(), "nothing is left"
    stream.freed.append(51)
    assert stream.try_flush()
    assert node.sent[1] == [[wire.FREE, 51]]


def test_a_thread_that_sends_is_not_disturbed(stream: DeviceStream, node: Node) -> None:
    emit(stream)
    with stream._lock:
        other = threading.Thread(target=stream.try_flush)
        other.start()
        other.join()
        assert node.sent == []
    assert stream.try_flush()
    assert len(node.sent) == 1


@pytest.mark.usefixtures("no_devices")
def test_batches_are_sent_by_themselves(stream: DeviceStream, node: Node) -> None:
    """And the thread that does so ends with the last device, and begins again with the next one."""
    for number in range(2):
        one = DeviceStream(number, "cpu", node)
        streams.streams.append(one)
        try:
            flusher.start()
            emit(one, number)
            until(lambda: [[OPERATION, number]] in node.sent)  # noqa: B023
            (thread,) = (thread for thread in threading.enumerate() if thread.name == "skyfab-device")
            assert thread.daemon, "a program that ends does not wait for it"
            emit(one, "later")
            until(lambda: not one.buffer)  # noqa: B023
        finally:
            one.close()
            streams.streams.remove(one)
        until(lambda: all(thread.name != "skyfab-device" for thread in threading.enumerate()))


# ---- who is told


class Observer:
    def __init__(self) -> None:
        self.bytes = 0
        self.waited_at: list[Any] = []

    def sent(self, instructions: Sequence[Any], size: int) -> None:
        self.bytes += size

    def received(self, size: int) -> None:
        pass

    def waited(self, site: Any, seconds: float) -> None:
        assert 0 <= seconds < 100
        self.waited_at.append(site)


@pytest.fixture
def observer() -> Iterator[Observer]:
    found = Observer()
    observers.append(found)
    yield found
    observers.remove(found)


def test_a_profile_knows_what_was_sent_and_where_the_program_waited(
    stream: DeviceStream, node: Node, observer: Observer
) -> None:
    stream.upload([wire.UPLOAD, 1], memoryview(bytes(100_000)))
    stream.flush()
    assert 100_000 < observer.bytes < 101_000
    assert observer.waited_at == []

    def ask() -> None:
        stream.receive(stream.start([wire.SYNC]))

    ask()
    assert len(observer.waited_at) == 1


# ---- errors


def test_an_error_names_the_operator_its_inputs_and_the_line(
    stream: DeviceStream, node: Node, line: Callable[[], int]
) -> None:
    emit(stream, "good")
    emit(stream, "bad")
    at = line() - 1
    emit(stream, "skipped")
    stream.flush()
    error = {"op": "aten::add", "kind": "IndexError", "text": "too large", "inputs": ["float32[3]", "2"], "at": 1}
    node.reply({"error": error})
    assert str(stream.earlier_error).startswith(f"node1: add(float32[3], 2) at {__file__}:{at} failed: IndexError: too")
    with pytest.raises(sky.DeviceError, match="IndexError") as caught:
        emit(stream)
    assert caught.value.host == "node1"
    assert stream.earlier_error is None
    emit(stream)


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("nonsense", "an operation failed; the host sent no reason"),
        ({}, "an operation() failed: error: "),
        ({"op": "aten::mm", "at": 5, "inputs": 4}, "mm() failed: error: "),
        ({"op": "f", "at": -1}, "f() failed: error: "),
        ({"op": "f", "text": "out of memory", "free": 2**29, "total": 2**31}, "memory (0.5 GiB free of 2.0)"),
        ({"op": "f", "text": "out of memory", "free": 2**29}, "out of memory"),
        ({"op": "f", "text": "out of memory", "free": "x", "total": 2**31}, "out of memory"),
        ({"op": "f", "text": "memory", "free": 10**400, "total": 1}, "division result too large for a float"),
        ({"op": "f", "text": "other", "free": 2**29, "total": 2**31}, "f() failed: error: other"),
    ],
)
def test_any_reason_is_a_message(stream: DeviceStream, node: Node, said: Any, shown: str) -> None:
    emit(stream)
    stream.flush()
    node.reply({"error": said})
    assert node.batches[-1].is_there
    with pytest.raises(sky.DeviceError) as caught:
        stream.check()
    assert str(caught.value).endswith(shown)


def test_a_channel_that_failed_is_not_used_again(stream: DeviceStream, node: Node) -> None:
    for channel in (4, "x"):
        emit(stream)
        stream.flush()
        node.reply({"error": {"op": "receive", "channel": channel}})
        with pytest.raises(sky.DeviceError):
            stream.check()
    assert stream.broken == {4}


def test_an_error_is_raised_once_by_the_next_use(stream: DeviceStream, node: Node) -> None:
    fail(stream, node)
    assert not stream.try_flush(), "nothing is sent by itself after an error"
    with pytest.raises(sky.DeviceError):
        emit(stream)
    emit(stream, "after")
    assert len(node.sent) == 1, "batches are collected again"
    stream.flush()
    assert node.sent[1][-1] == [OPERATION, "after"]


@pytest.mark.parametrize(
    "use",
    [
        lambda stream: stream.flush(),
        lambda stream: stream.check(),
        lambda stream: stream.ask([wire.SYNC]),
        lambda stream: stream.upload([wire.UPLOAD, 1], memoryview(b"")),
        lambda stream: stream.send_between(lambda: pytest.fail("it was sent")),
    ],
)
def test_every_use_raises_it(stream: DeviceStream, node: Node, use: Callable[[DeviceStream], object]) -> None:
    fail(stream, node)
    with pytest.raises(sky.DeviceError, match="IndexError"):
        use(stream)
    stream.check()


def test_the_host_learns_which_changes_did_not_happen(stream: DeviceStream, node: Node) -> None:
    """Those of other threads, and those that autograd has recorded: in the batch that failed, later ones, and here."""

    def other() -> None:
        for _ in range(3):
            emit(stream, "other")
            stream.flush()

    emit(stream, "executed", recorded=True)
    emit(stream, "bad")
    emit(stream, "mine")
    emit(stream, "recorded 1", recorded=True)
    stream.start([wire.SYNC])
    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    emit(stream, "recorded 2", recorded=True)
    emit(stream, "mine too")
    stream.emit([wire.VIEW, 9])
    stream.upload([wire.UPLOAD, 1], memoryview(b"dropped"))
    node.reply({"error": {**FAILURE["error"], "at": 1}})
    node.reply()  # a later batch, which was not executed
    with pytest.raises(sky.DeviceError):
        stream.check()
    stream.upload([wire.UPLOAD, 2], memoryview(b"kept"))
    stream.flush()
    view, resume, upload = node.sent[-1]
    assert view == [wire.VIEW, 9], "the host knows the same ids"
    assert resume[:1] == [wire.RESUME]
    assert resume[1].startswith("add(float32[3])")
    others = [[OPERATION, "other"]] * 3
    assert resume[2] == [[OPERATION, "recorded 1"], *others, [OPERATION, "recorded 2"]]
    assert (upload, node.buffers[-1]) == ([wire.UPLOAD, 2, 0], [b"kept"])


def test_who_waits_for_a_skipped_instruction_has_the_error_that_was_raised(stream: DeviceStream, node: Node) -> None:
    emit(stream, "bad")
    stream.flush()
    skipped, under_way = stream.start([wire.SYNC]), stream.start([wire.SYNC])
    node.reply(FAILURE)
    node.reply()
    with pytest.raises(sky.DeviceError) as caught:
        stream.check()
    node.reply()
    for batch in (skipped, under_way):
        with pytest.raises(sky.DeviceError) as again:
            batch.value()
        assert str(again.value) == str(caught.value)


def test_a_second_error_before_the_first_was_raised(stream: DeviceStream, node: Node) -> None:
    for name in ("first", "second"):
        stream.start([OPERATION, name])
    first, second = node.batches
    node.reply({"error": {"op": "first"}})
    node.reply({"error": {"op": "second"}})
    with pytest.raises(sky.DeviceError, match="first"):
        stream.check()
    stream.check()
    assert "first" in str(first.error)
    assert "second" in str(second.error)


def test_replies_in_another_order(stream: DeviceStream, node: Node) -> None:
    for number in range(2):
        emit(stream, number)
        stream.flush()
    node.open.reverse()
    node.reply(FAILURE)
    node.reply()
    with pytest.raises(sky.DeviceError):
        stream.check()
    for number in range(31):
        emit(stream, number)
        stream.flush()
    assert node.waits == 0, "none of them is counted any longer"


def test_an_error_that_a_future_has_raised_is_not_raised_again(stream: DeviceStream, node: Node) -> None:
    futures = [DeviceFuture(stream) for _ in range(3)]
    fail(stream, node)
    futures[0].set_exception(ValueError("of the program"))
    with pytest.raises(ValueError, match="program"):
        futures[0].result(1)
    error = stream.earlier_error
    assert error is not None
    futures[1].set_exception(error)
    assert futures[1].exception(1) is error
    with pytest.raises(sky.DeviceError):
        futures[1].result(1)
    assert stream.earlier_error is None
    emit(stream)
    futures[2].set_result(5)
    assert futures[2].exception(1) is None
    assert futures[2].result(1) == 5


def test_an_error_that_the_result_of_a_future_has_raised_is_not_raised_again(stream: DeviceStream, node: Node) -> None:
    future = DeviceFuture(stream)
    fail(stream, node)
    error = stream.earlier_error
    assert error is not None
    future.set_exception(error)
    with pytest.raises(sky.DeviceError):
        future.result(1)
    stream.check()


def test_what_is_executed_after_an_error_too_raises_none(stream: DeviceStream, node: Node) -> None:
    fail(stream, node)
    stream.emit_always([wire.FORGET])
    with pytest.raises(sky.DeviceError):
        stream.check()
    stream.flush()
    assert [wire.FORGET] in node.sent[-1]
    stream.close()
    stream.emit_always([wire.FORGET])
    assert stream.buffer == [], "nobody would ever send it"


def test_a_state_of_random_numbers_that_is_none(stream: DeviceStream, node: Node) -> None:
    pytest.importorskip("torch")
    from skyfab.device import torch_sky

    for reply in ({"nonsense": 1}, None):
        node.receive = lambda batch, reply=reply: node.reply(reply, b"12345678")  # type: ignore[method-assign]
        with pytest.raises((sky.ProtocolError, sky.DeviceError), match=r"invalid reply of a device|not executed"):
            torch_sky.random_state(stream, 0)
    node.receive = lambda batch: node.reply({"value": None}, b"12345678")  # type: ignore[method-assign]
    assert torch_sky.random_state(stream, 0).tolist() == list(b"12345678")


# ---- generators


def generator(stream: DeviceStream, node: Node) -> Iterator[Any]:
    """An iterator over the values of a generator on the host."""
    pytest.importorskip("torch")
    from skyfab.device import remote_functions

    def receive(batch: Batch) -> None:
        while not batch.is_there:
            node.reply({"value": {"iterator": None}})

    node.receive = receive  # type: ignore[method-assign]
    found = remote_functions.run(stream, len, (), {})
    del node.receive
    return found  # type: ignore[no-any-return]


def values(*numbers: int) -> dict[str, Any]:
    return {"value": {"list": [{"plain": number} for number in numbers]}}


def test_values_are_asked_for_before_they_are_needed(stream: DeviceStream, node: Node) -> None:
    found = generator(stream, node)
    node.receive = lambda batch: node.reply(values(1, 2))  # type: ignore[method-assign]
    assert next(found) == 1
    assert [instruction[0] for batch in node.sent[1:] for instruction in batch] == [wire.NEXT] * 4
    assert (next(found), len(node.sent)) == (2, 5), "the second came with the first"


@pytest.mark.parametrize("ends", ["lost", "ended"])
def test_a_device_that_ends_while_a_value_is_waited_for(stream: DeviceStream, node: Node, ends: str) -> None:
    def end(batch: Batch) -> None:
        if ends == "lost":
            node.open[0].failed(HostLost("cut", host="node1"))
        else:
            stream.end("killed")
        assert batch.is_there

    found = generator(stream, node)
    node.receive = end  # type: ignore[method-assign]
    with pytest.raises(HostLost if ends == "lost" else sky.WorkerDied, match=r"cut|killed"):
        next(found)


# ---- the end


def test_a_host_that_is_lost_while_sending(stream: DeviceStream, node: Node) -> None:
    emit(stream)
    node.is_gone = True
    with pytest.raises(HostLost, match="no route"):
        stream.flush()
    for _ in range(2):
        with pytest.raises(HostLost, match="no route"):
            emit(stream)
    assert stream.is_lost
    assert not stream.try_flush()


def test_what_cannot_be_sent_is_not_lost_without_a_word(stream: DeviceStream, node: Node) -> None:
    emit(stream, threading.Lock())
    with pytest.raises(TypeError, match="pickle"):
        stream.flush()
    with pytest.raises(sky.WorkerDied, match="sending was interrupted"):
        emit(stream)


@pytest.mark.usefixtures("no_devices")
def test_the_thread_that_sends_survives_what_cannot_be_sent(node: Node) -> None:
    first, second = (DeviceStream(number, "cpu", node) for number in range(2))
    streams.streams += [first, second]
    try:
        flusher.start()
        emit(first, threading.Lock())
        until(lambda: first.is_lost)
        emit(second)
        until(lambda: not second.buffer)
    finally:
        for one in (first, second):
            one.close()
            streams.streams.remove(one)


def test_a_host_that_is_lost_while_nothing_waits(stream: DeviceStream, node: Node) -> None:
    assert not stream.is_lost
    emit(stream)
    node.is_gone = True
    assert stream.try_flush()
    with pytest.raises(HostLost, match="no route"):
        stream.check()


def test_a_worker_that_ended_names_the_first_and_the_last_line(
    stream: DeviceStream, node: Node, line: Callable[[], int]
) -> None:
    first = line() + 1
    emit(stream)
    emit(stream)
    emit(stream)
    stream.flush()
    node.open[0].answered(messages.Ended(why="died", text="killed by SIGKILL"), [])
    assert str(stream.earlier_error).startswith(
        f"node1: the worker of cuda:1 ended after it was sent {__file__}:{first} to {__file__}:{first + 2}; "
        "its tensors are lost: killed by SIGKILL"
    )
    stream.end("later")
    with pytest.raises(sky.WorkerDied, match="SIGKILL") as caught:
        stream.check()
    assert caught.value.hint is not None
    assert "open the device again" in caught.value.hint


def test_a_worker_that_ended_without_work(stream: DeviceStream) -> None:
    stream.end("closed")
    with pytest.raises(sky.WorkerDied, match="the worker of cuda:1 ended; its tensors are lost: closed"):
        emit(stream)


def test_a_host_that_is_lost_after_an_error(stream: DeviceStream, node: Node) -> None:
    """The error comes first: it is why the program's values are wrong."""
    emit(stream)
    stream.flush()
    emit(stream)
    stream.flush()
    node.reply(FAILURE)
    node.open[0].failed(HostLost("cut"))
    with pytest.raises(sky.DeviceError, match="IndexError"):
        stream.check()


def test_waiting_ends_when_the_device_is_lost(stream: DeviceStream, node: Node) -> None:
    batch = stream.start([wire.SYNC])
    stream.end("killed")
    with pytest.raises(sky.WorkerDied, match="killed"):
        stream.receive(batch)


def test_a_closed_pool(stream: DeviceStream, node: Node) -> None:
    emit(stream)
    stream.close()
    with pytest.raises(sky.UsageError, match="the pool of this device is closed"):
        emit(stream)
    assert node.sent == []
    assert stream.is_lost


def test_a_forked_process_does_not_use_the_device(stream: DeviceStream, node: Node) -> None:
    streams.streams.append(stream)
    emit(stream)
    stream._lock.acquire()  # by another thread of the parent, for all that the child knows
    try:
        child = os.fork()
        if not child:
            status = 1
            try:
                thread = threading.Thread(target=stream.close)
                thread.start()
                thread.join(10)
                with pytest.raises(sky.UsageError, match="a forked process"):
                    stream.check()
                streams.streams.append(DeviceStream(4, "cpu", node))  # one of its own
                flusher.start()
                emit(streams.streams[-1], "of the child")
                until(lambda: node.sent == [[[OPERATION, "of the child"]]], timeout=20)
                status = 0 if not thread.is_alive() else 2
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
    finally:
        stream._lock.release()
        streams.streams.remove(stream)
    stream.flush()
    assert len(node.sent) == 1, "the parent does"
