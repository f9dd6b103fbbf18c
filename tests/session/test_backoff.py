"""Backoff: waits grow up to the longest one, and vary by their jitter."""

from __future__ import annotations

from skyfab.session.timing import Backoff


def test_waits_grow_up_to_the_longest() -> None:
    waits = Backoff(1.0, 3.0)
    assert [waits.next() for _ in range(5)] == [1.0, 1.5, 2.25, 3.0, 3.0]
    waits = Backoff(1.0, 10.0, factor=2.0)
    assert [waits.next() for _ in range(3)] == [1.0, 2.0, 4.0]


def test_waits_vary_to_both_sides_within_their_jitter() -> None:
    found = [Backoff(10.0, 10.0, jitter=0.3).next() for _ in range(300)]
    assert 7.0 <= min(found) < 8.0
    assert 12.0 < max(found) <= 13.0
