"""The guard against what tests leave behind notices it."""

from __future__ import annotations

from stage import traces


def test_what_is_new_is_left() -> None:
    assert traces.left([lambda: {"child 1: a", "child 2: b"}], {"child 1: c"}, 0) == {"child 2: b"}


def test_what_has_taken_the_place_of_another_is_not() -> None:
    assert traces.left([lambda: {"child 2: a"}], {"child 1: a"}, 0) == set()
    assert traces.left([lambda: {"child 2: a", "child 3: a"}], {"child 1: a"}, 0) == {"child 2: a", "child 3: a"}
    assert traces.left([lambda: {"child 2: a"}, set], {"thread 1"}, 0) == {"child 2: a"}
