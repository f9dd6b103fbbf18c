"""streams.Mux over connections that break: everything arrives exactly once and in order, wherever the cut falls."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stage.wire_pair import Pair, content

from skyfab.protocol.mux import SMALL

Step = tuple[str, bool, int]

sizes = st.one_of(st.integers(0, 300), st.integers(0, 3 * SMALL), st.integers(0, 300_000))
steps = st.lists(
    st.tuples(
        st.sampled_from(["small", "large", "urgent", "log", *["flush"] * 2, *["read"] * 3, "cut", *["attach"] * 2]),
        st.booleans(),
        sizes,
    ),
    max_size=50,
)


def play(pair: Pair, steps: list[Step]) -> None:
    """Does what the steps say, then lets both sides find each other and finish."""
    for number, (what, first, size) in enumerate(steps):
        side = pair.a if first else pair.b
        if what == "small":
            side.say(1, content(number, size % (SMALL + 1)))
        elif what == "large":
            side.say(101 + 2 * number, content(number, size + SMALL))
        elif what == "urgent":
            side.say(101 + 2 * number, content(number, size), urgent=True)
        elif what == "log":
            if 7 not in side.sent_bodies:
                side.say(7, large=True)
            side.say_more(7, content(number, size))
        elif what == "flush":
            side.flush(size)
        elif what == "read":
            side.read(max(1, size))
        elif what == "cut":
            pair.cut(arrives_at_a=size if first else 0, arrives_at_b=0 if first else size)
        elif what == "attach" and not pair.on_newest(side):
            pair.attach(side)
        pair.now += 0.01
    for side in (pair.a, pair.b):
        if not pair.on_newest(side):
            pair.attach(side)
    pair.settle()


@settings(deadline=None, max_examples=100)
@given(steps)
def test_everything_arrives_once_and_in_order_whatever_is_cut_when(steps: list[Step]) -> None:
    """Cuts anywhere, in the middle of frames, before or after either side's hello, several in a row."""
    pair = Pair()
    play(pair, steps)
    pair.check()


@pytest.mark.parametrize("seed", range(4))
def test_a_long_conversation_with_many_random_cuts(seed: int) -> None:
    """Hundreds of steps with logs, calls and large results both ways, cut again and again."""
    chance = random.Random(seed)
    kinds = ["small"] * 6 + ["large", "log", "log"] + ["flush"] * 8 + ["read"] * 14 + ["cut"] + ["attach"] * 3
    steps = [(chance.choice(kinds), chance.random() < 0.5, int(300_000 ** chance.random())) for _ in range(400)]
    pair = Pair()
    play(pair, steps)
    pair.check()


def both_speak(pair: Pair) -> None:
    for side in (pair.a, pair.b):
        side.say(1, b"first")
        side.say(3, content(3, 2 * SMALL))
        side.say(5, content(5, 100))
        side.say(7, large=True)
        side.say_more(7, content(7, 1000))


def wire_length() -> int:
    pair = Pair()
    pair.settle()
    both_speak(pair)
    before = pair.a.mux.bytes_out
    pair.settle()
    return pair.a.mux.bytes_out - before


INTERESTING = sorted({*range(120), *range(0, wire_length(), 1499), *range(wire_length() - 40, wire_length() + 1)})


def test_a_cut_after_any_byte_of_a_conversation_both_ways_at_once() -> None:
    """The same conversation, cut after every interesting byte of it, in both directions."""
    for at in INTERESTING:
        pair = Pair()
        pair.settle()
        both_speak(pair)
        for side in (pair.a, pair.b):
            side.flush(at)
        pair.cut(arrives_at_a=at, arrives_at_b=at)
        for side in (pair.a, pair.b):
            while side.read():
                pass
        for side in (pair.b, pair.a):
            pair.attach(side)
        pair.settle()
        pair.check()


def test_a_cut_in_the_middle_of_a_large_message_goes_on_where_it_stopped() -> None:
    """After the reconnect at most a window is sent again, not the whole message."""
    pair = Pair()
    pair.a.say(1, content(1, 12_000_000))
    while len(pair.b.bodies.get(1, b"")) < 8_000_000:
        pair.a.flush(400_000)
        pair.b.read()
        pair.b.flush()
        pair.a.read()
        pair.now += 0.001
    before = pair.a.mux.bytes_out
    had = len(pair.b.bodies[1])
    pair.cut()
    for side in (pair.a, pair.b):
        pair.attach(side)
    pair.settle()
    pair.check()
    sent = pair.a.mux.bytes_out - before
    assert sent <= 12_000_000 - had + pair.a.mux.window.CEILING // 4


def test_reconnecting_with_nothing_to_say_sends_nothing_but_hello() -> None:
    pair = Pair()
    both_speak(pair)
    pair.settle()
    for side in (pair.a, pair.b):
        side.mux.ping()
    pair.settle()
    for _ in range(3):
        pair.cut()
        for side in (pair.a, pair.b):
            pair.attach(side)
        before = pair.a.mux.bytes_out
        pair.settle()
        assert pair.a.mux.bytes_out - before < 200
    pair.check()


def test_counts_go_on_over_connections() -> None:
    """`received` is what hello carries: sequenced frames over all connections, not heartbeats."""
    pair = Pair()
    for number in range(1, 4):
        pair.a.say(1, b"x")
        pair.a.mux.ping()
        pair.settle()
        assert pair.b.mux.received == number
        pair.cut()
        for side in (pair.a, pair.b):
            pair.attach(side)
    pair.settle()
    pair.check()
