"""SendQueue: streams take turns, none sends more than its credit, and an ended one is forgotten."""

from __future__ import annotations

from array import array

import pytest

from skyfab.protocol import send_queue
from skyfab.protocol.frames import DATA, HEADER
from skyfab.protocol.send_queue import SendQueue


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> SendQueue:
    """A queue in which each stream has credit for 10 bytes."""
    monkeypatch.setattr(send_queue, "CREDIT_WINDOW", 10)
    return SendQueue()


def sent(queue: SendQueue, limit: int = 100) -> list[tuple[int, bytes]]:
    """All chunks that may be sent now, each with its stream; their headers are right."""
    found = []
    while (piece := queue.next(limit)) is not None:
        kind, head, stream, length = HEADER.unpack(piece[0])
        assert (kind, head, length) == (DATA, 0, len(piece[1]))
        found.append((stream, bytes(piece[1])))
    return found


def test_streams_take_turns_chunk_by_chunk(queue: SendQueue) -> None:
    queue.add(1, b"abcd")
    queue.add(3, b"ABC")
    assert sent(queue, limit=2) == [(1, b"ab"), (3, b"AB"), (1, b"cd"), (3, b"C")]


def test_what_is_added_to_a_waiting_stream_follows_without_a_second_turn(queue: SendQueue) -> None:
    queue.add(1, b"ab")
    queue.add(1, b"cd")
    queue.add(3, b"AB")
    assert list(queue.turns) == [1, 3]
    assert sent(queue) == [(1, b"ab"), (3, b"AB"), (1, b"cd")]
    assert not queue.turns


def test_data_is_counted_in_bytes_and_not_copied(queue: SendQueue) -> None:
    numbers = array("I", [1, 2])
    queue.add(1, memoryview(numbers))
    assert queue.queued(1) == 8
    piece = queue.next(100)
    assert piece is not None
    assert piece[1].obj is numbers
    assert len(piece[1]) == 8


def test_a_stream_sends_as_much_as_it_has_credit_for(queue: SendQueue) -> None:
    queue.add(1, bytes(15))
    queue.add(3, b"AB")
    assert queue.is_ready
    assert sent(queue) == [(1, bytes(10)), (3, b"AB")]
    assert not queue.is_ready, "the rest has no credit"
    queue.grant(1, 4)
    assert queue.is_ready
    assert sent(queue) == [(1, bytes(4))]
    queue.grant(1, 4)
    assert sent(queue) == [(1, bytes(1))]


def test_credit_for_a_stream_that_has_sent_nothing_is_ignored(queue: SendQueue) -> None:
    queue.grant(1, 100)
    queue.add(1, bytes(15))
    assert sent(queue) == [(1, bytes(10))]


def test_a_forgotten_stream_is_passed_over(queue: SendQueue) -> None:
    queue.add(1, b"ab")
    queue.add(3, b"AB")
    queue.forget(1)
    queue.forget(1)
    assert queue.is_ready
    assert sent(queue) == [(3, b"AB")]


def test_a_number_that_is_used_again_after_forget_sends_its_new_data_once(queue: SendQueue) -> None:
    queue.add(1, b"old")
    queue.forget(1)
    queue.add(1, b"new")
    assert sent(queue) == [(1, b"new")]


def test_a_finished_stream_sends_the_rest_and_its_number_has_full_credit_again(queue: SendQueue) -> None:
    queue.add(1, bytes(8))
    queue.finish(1)
    assert sent(queue, limit=5) == [(1, bytes(5)), (1, bytes(3))]
    queue.add(1, bytes(10))
    assert sent(queue) == [(1, bytes(10))]


def test_a_stream_that_is_finished_when_all_is_sent_is_forgotten_at_once(queue: SendQueue) -> None:
    queue.add(1, bytes(8))
    sent(queue)
    queue.finish(1)
    queue.finish(3)
    queue.add(1, bytes(10))
    assert sent(queue) == [(1, bytes(10))]


def test_the_end_is_an_empty_chunk_behind_all_data_and_waits_for_credit(queue: SendQueue) -> None:
    queue.add(1, b"0123456789ab")
    queue.mark_end(1)
    queue.finish(1)
    queue.mark_end(3)
    queue.finish(3)
    assert sent(queue) == [(1, b"0123456789"), (3, b"")]
    queue.grant(1, 10)
    assert sent(queue) == [(1, b"ab"), (1, b"")]
    assert not queue.is_ready
