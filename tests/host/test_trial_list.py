"""Rank 0's list of a sweep: every trial is given once, however replies are lost and ranks come and go."""

from __future__ import annotations

import random
from typing import Any

import pytest

from skyfab.host.sweep import TrialList


class Listed:
    """A list of trials with four ranks, and what it notes."""

    def __init__(self, count: int, *, keep_going: bool = False, slots: tuple[int, ...] = (2, 2, 2, 2)) -> None:
        self.notes: list[dict[str, Any]] = []
        self.list = TrialList(range(1, count + 1), slots, self.notes.append, keep_going=keep_going)

    def ask(
        self, rank: int, ended: dict[str, Any] | None = None, has: tuple[int, ...] = (), *, waits: str = ""
    ) -> int | None:
        found: int | None = self.list.handle(rank, {"ended": ended, "has": list(has), "waits": waits})["trial"]
        return found


def end(trial: int, state: str = "done") -> dict[str, Any]:
    return {"trial": trial, "state": state}


def test_trials_are_given_in_order_and_noted_before() -> None:
    trials = Listed(3)
    assert [trials.ask(0), trials.ask(1), trials.ask(0, has=(1,))] == [1, 2, 3]
    assert trials.notes == [
        {"trial": number, "state": "given", "rank": rank} for number, rank in ((1, 0), (2, 1), (3, 0))
    ]
    assert trials.ask(1, end(2)) is None
    assert trials.notes[-1] == end(2)
    assert trials.list.expected == {0, 2, 3}


def test_after_a_failure_no_trial_begins_unless_asked_to_keep_going() -> None:
    trials = Listed(3)
    assert [trials.ask(0), trials.ask(1)] == [1, 2]
    assert trials.ask(0, end(1, "failed")) is None
    assert trials.ask(1, end(2)) is None
    assert trials.list.states == ["failed", "done"]
    going = Listed(3, keep_going=True)
    assert going.ask(0) == 1
    assert going.ask(0, end(1, "failed")) == 2


def test_a_slot_that_waits_takes_no_trial_and_hears_whether_there_are_more() -> None:
    trials = Listed(2)
    assert trials.ask(0) == 1
    assert trials.ask(1, waits="1st") == 0
    assert trials.ask(0, end(1), waits="1st") == 0
    assert trials.list.states == ["done"]
    assert trials.ask(0) == 2
    assert trials.ask(1, waits="1st") is None
    assert 1 not in trials.list.expected


def test_a_host_without_slots_is_not_waited_for() -> None:
    assert Listed(1, slots=(0, 1)).list.expected == {1}


@pytest.mark.parametrize("seed", range(6))
def test_each_trial_begins_once_whatever_is_lost(seed: int) -> None:
    """Ranks with two slots each; any request or reply may be lost, and a rank may die with what it has."""
    chance = random.Random(seed)
    trials = Listed(60, keep_going=True)
    begun: list[int] = []
    running: dict[int, dict[int, None]] = {rank: {} for rank in range(4)}
    ended: dict[int, dict[str, Any] | None] = dict.fromkeys(range(4))
    """What each rank has to report, and says again until there is a reply."""
    finished: dict[int, int] = dict.fromkeys(range(4), 0)
    while alive := [rank for rank in running if finished[rank] < 2]:
        rank = chance.choice(alive)
        if len(running) > 1 and chance.random() < 0.01:
            trials.list.gone(rank)
            del running[rank]
            continue
        if chance.random() < 0.2:
            continue  # the request is lost
        if ended[rank] is None and len(running[rank]) == 2 - finished[rank]:
            trial = chance.choice(list(running[rank]))
            del running[rank][trial]
            ended[rank] = end(trial, chance.choice(["done", "failed"]))
        number = trials.ask(rank, ended[rank], tuple(running[rank]))
        if chance.random() < 0.2:
            continue  # the reply is lost
        ended[rank] = None
        if number is None:
            finished[rank] += 1
        else:
            begun.append(number)
            running[rank][number] = None
    assert len(begun) == len(set(begun))
    lost = {note["trial"] for note in trials.notes if note["state"] == "lost"}
    assert set(begun) | lost == set(range(1, 61))
