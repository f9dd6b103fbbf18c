"""Window: it doubles while acknowledgements come as fast as ever, and shrinks to what the path carries."""

from __future__ import annotations

import pytest

from skyfab.protocol.frames import CHUNK
from skyfab.protocol.mux import Window

KB = 1024


def grown(elapsed: float, times: int) -> tuple[Window, float]:
    """A window after `times` acknowledgements, each of a frame that was sent after the one before came."""
    window, now = Window(), 100.0
    for _ in range(times):
        now += elapsed
        window.observe(elapsed, now)
    return window, now


@pytest.mark.parametrize(("times", "size"), [(0, 64 * KB), (1, 128 * KB), (3, 512 * KB), (30, 32 * KB * KB)])
def test_it_doubles_with_each_round_trip_up_to_its_ceiling(times: int, size: int) -> None:
    assert grown(0.2, times)[0].size == size


def test_what_was_sent_before_a_change_says_nothing_about_it() -> None:
    window, now = grown(0.2, 1)
    window.observe(0.2, now + 0.1)
    assert window.size == 128 * KB
    window.observe(0.2, now + 0.2)
    assert window.size == 256 * KB


@pytest.mark.parametrize(
    ("queued", "size"), [(0.04, 2048 * KB), (0.06, 1024 * KB), (0.14, 1024 * KB), (0.3, int(1024 * KB * 0.3 / 0.5))]
)
def test_what_waits_along_the_path_decides(queued: float, size: int) -> None:
    window, now = grown(0.2, 4)
    elapsed = 0.2 + queued
    window.observe(elapsed, now + elapsed)
    assert window.size == pytest.approx(size, abs=1)


def test_it_shrinks_once_for_each_round_trip() -> None:
    window, now = grown(0.2, 6)
    window.observe(1.0, now + 1.0)
    size = window.size
    assert size < 4096 * KB
    window.observe(1.0, now + 1.1)
    assert window.size == size


def test_it_never_shrinks_below_its_floor() -> None:
    window, now = grown(0.001, 1)
    window.observe(60.0, now + 60)
    assert window.size == 64 * KB


def test_a_new_connection_starts_over() -> None:
    window, now = grown(0.01, 5)
    window.restart()
    assert window.size == 64 * KB
    window.observe(0.5, now)  # slow for the connection before, and all that is known of this one
    assert window.size == 128 * KB


@pytest.mark.parametrize(("times", "chunk"), [(0, 8 * KB), (1, 16 * KB), (5, 256 * KB), (9, 4 * CHUNK)])
def test_a_chunk_is_an_eighth_of_it_and_no_larger_than_chunks_are(times: int, chunk: int) -> None:
    assert grown(0.2, times)[0].chunk == chunk
