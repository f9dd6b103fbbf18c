"""The rank channel over real sockets: requests, pushes, peers that are not ranks, ranks that go, the loss of rank 0."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from stage.spot import until

from skyfab.host import rank_channel
from skyfab.host.rank_channel import MOST, Channel, ChannelLost, Head

SECRET = os.urandom(32)


class Star:
    """Rank 0's end, and how to connect ranks to it."""

    def __init__(self, handle: Callable[[int, dict[str, Any]], dict[str, Any]] | None = None) -> None:
        self.gone: list[int] = []
        listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(listener.getsockname()[1])
        self.head = Head(
            listener, SECRET, handle or (lambda rank, message: {"rank": rank, **message}), self.gone.append
        )
        self._stack = contextlib.ExitStack()

    def rank(self, number: int, *, secret: bytes = SECRET, timeout: float = 10.0) -> Channel:
        channel = Channel.connect("127.0.0.1", self.port, secret, number, timeout=timeout)
        self._stack.callback(channel.close)
        return channel

    def stranger(self) -> socket.socket:
        return self._stack.enter_context(socket.create_connection(("127.0.0.1", self.port), 10))

    def close(self) -> None:
        self._stack.close()
        self.head.close()


@pytest.fixture
def star() -> Iterator[Star]:
    one = Star()
    yield one
    one.close()


def is_dropped(stranger: socket.socket) -> bool:
    """Reads until the other end has closed the connection."""
    with contextlib.suppress(ConnectionError):
        while stranger.recv(1024):
            pass
    return True


def test_requests_of_ranks_are_answered_and_pushes_arrive(star: Star) -> None:
    ranks = [star.rank(number) for number in range(4)]
    assert [rank.request({"op": "hello"}) for rank in ranks] == [{"rank": n, "op": "hello"} for n in range(4)]
    assert star.head.ranks == {0, 1, 2, 3}
    star.head.push({"start": 1})
    star.head.push({"stop": 2}, 3)
    assert [rank.receive(10) for rank in ranks] == [{"start": 1}] * 4
    assert ranks[3].receive(10) == {"stop": 2}
    assert ranks[0].receive(0.05) is None
    star.head.push({"nobody": 0}, 9)


def test_a_request_that_waits_delays_no_other_rank() -> None:
    waiting, go = threading.Event(), threading.Event()

    def handle(rank: int, message: dict[str, Any]) -> dict[str, Any]:
        if rank == 1:
            waiting.set()
            go.wait(10)
        return {"for": rank}

    star = Star(handle)
    try:
        slow = star.rank(1)
        found: list[dict[str, Any]] = []
        thread = threading.Thread(target=lambda: found.append(slow.request({})))
        thread.start()
        assert waiting.wait(10)
        assert star.rank(2).request({}) == {"for": 2}
        go.set()
        thread.join(10)
        assert found == [{"for": 1}]
    finally:
        star.close()


def test_a_wrong_secret_is_refused_by_both_ends(star: Star) -> None:
    with pytest.raises(ChannelLost, match="rank 1 cannot reach rank 0 at 127"):
        star.rank(1, secret=os.urandom(32), timeout=0.5)
    assert not star.head.ranks
    assert not star.gone  # it was never a rank
    listener = socket.create_server(("127.0.0.1", 0))

    def pretend() -> None:
        """Says what a head would say, but cannot sign it."""
        with contextlib.suppress(OSError):
            peer, _ = listener.accept()
            with peer:
                peer.sendall(b"00" * 32 + b"\n" + b"00" * 32 + b' {"welcome": 1}\n')
                is_dropped(peer)

    thread = threading.Thread(target=pretend)
    thread.start()
    with listener, pytest.raises(ChannelLost, match="something other than messages"):
        Channel.connect("127.0.0.1", listener.getsockname()[1], SECRET, 1, timeout=0)
    thread.join(10)


@pytest.mark.parametrize(
    "rubbish",
    [
        b"GET / HTTP/1.1\r\n\r\n" + b"x" * 200 + b"\n\n",
        os.urandom(4096),
        b"\n\n\n",
        b"00" * 32 + b"\n" + b"0" * (3 * MOST),
        b"00" * 32 + b'\n{"rank": 0}\n',
        b"00" * 32 + b"\n" + b"00" * 32 + b' {"rank": 0}\n',
    ],
)
def test_rubbish_harms_nobody(star: Star, rubbish: bytes) -> None:
    rank = star.rank(1)
    stranger = star.stranger()
    with contextlib.suppress(OSError):  # dropped before all of it was sent
        stranger.sendall(rubbish)
        stranger.shutdown(socket.SHUT_WR)
    assert is_dropped(stranger)
    assert rank.request({"still": "there"}) == {"rank": 1, "still": "there"}
    assert star.head.ranks == {1}


def test_peers_that_say_nothing_are_dropped(star: Star, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_channel, "_GREETING", 0.2)
    stranger = star.stranger()
    assert is_dropped(stranger)


def test_many_peers_that_say_nothing_keep_no_rank_out(star: Star) -> None:
    """The oldest ones are dropped, although their time is not over."""
    strangers = [star.stranger() for _ in range(rank_channel._MOST_UNPROVEN + 20)]
    assert star.rank(5).request({}) == {"rank": 5}
    assert is_dropped(strangers[0])
    assert threading.active_count() < rank_channel._MOST_UNPROVEN + 20


@pytest.mark.parametrize("word", ["twice", "original"])
def test_a_line_that_is_repeated_or_changed_ends_the_connection(star: Star, word: str) -> None:
    """Somebody in between sees all lines, but can make none."""
    listener = socket.create_server(("127.0.0.1", 0))
    sent: list[bytes] = []

    def relay() -> None:
        peer, _ = listener.accept()
        upstream = socket.create_connection(("127.0.0.1", star.port))
        back = threading.Thread(target=_copy, args=(upstream, peer))
        back.start()
        with contextlib.suppress(OSError), peer, upstream, peer.makefile("rb") as lines:
            for line in lines:
                sent.append(line)
                with contextlib.suppress(OSError):  # the head has ended the connection
                    upstream.sendall(line.replace(b"original", b"modified") if b"original" in line else line)
                    if b"twice" in line:
                        upstream.sendall(line)
            back.join()

    between = threading.Thread(target=relay)
    between.start()
    with listener:
        rank = Channel.connect("127.0.0.1", listener.getsockname()[1], SECRET, 1, timeout=5)
        assert rank.request({"op": "once"}) == {"rank": 1, "op": "once"}
        with contextlib.suppress(ChannelLost):  # the reply to the original of a repeated line may arrive
            assert rank.request({"op": word}) == {"rank": 1, "op": word}
        with pytest.raises(ChannelLost):
            rank.request({"op": "more"})
        rank.close()
        until(lambda: star.gone == [1])
        between.join(10)
    assert SECRET not in b"".join(sent)
    assert SECRET.hex().encode() not in b"".join(sent)


def _copy(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(4096):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_RDWR)


def test_rank_0_notices_a_rank_that_goes(star: Star) -> None:
    ranks = [star.rank(number) for number in range(3)]
    ranks[1].close()
    until(lambda: star.gone == [1])
    assert star.head.ranks == {0, 2}
    star.head.push({"after": "that"})
    assert ranks[2].receive(10) == {"after": "that"}
    again = star.rank(1)
    assert again.request({}) == {"rank": 1}


def test_a_rank_that_is_there_is_not_replaced(star: Star) -> None:
    first = star.rank(1)
    with pytest.raises(ChannelLost):
        star.rank(1, timeout=0.1)
    assert first.request({"op": "hello"}) == {"rank": 1, "op": "hello"}
    assert not star.gone


def test_the_loss_of_rank_0_is_noticed_by_all(star: Star) -> None:
    ranks = [star.rank(number) for number in range(3)]
    waiting: list[str] = []

    def wait(rank: Channel) -> None:
        try:
            rank.receive()
        except ChannelLost as error:
            waiting.append(str(error))

    threads = [threading.Thread(target=wait, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    star.head.close()
    for thread in threads:
        thread.join(10)
    assert waiting == ["rank 0 is gone"] * 3
    for rank in ranks:
        with pytest.raises(ChannelLost, match="rank 0 is gone"):
            rank.request({"op": "next"})
    assert not star.gone  # it ended them itself


def test_a_rank_may_come_before_rank_0_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    found: list[Channel] = []
    thread = threading.Thread(target=lambda: found.append(Channel.connect("127.0.0.1", port, SECRET, 2, timeout=20)))
    thread.start()
    time.sleep(0.3)
    head = Head(socket.create_server(("127.0.0.1", port)), SECRET, lambda rank, message: json.loads('{"late": true}'))
    thread.join(20)
    assert found[0].request({}) == {"late": True}
    found[0].close()
    head.close()
