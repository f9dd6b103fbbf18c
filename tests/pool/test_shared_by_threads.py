"""Iterators, actors and executors that several threads, arguments or processes use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import skyfab as sky


@pytest.fixture(scope="module")
def compute() -> Iterator[sky.Compute]:
    with sky.Compute("local", slots=2, ui="none") as made:
        yield made


@sky.function
def count(number: int) -> Iterator[int]:
    yield from range(number)


class Diary:
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str, gate: str = "") -> int:
        if gate:
            with Path(gate).open() as file:  # waits for a writer
                file.read()
        self.notes.append(text)
        return os.getpid()

    def all(self) -> list[str]:
        return self.notes

    def numbers(self, number: int) -> Iterator[int]:
        yield from range(number)


@pytest.mark.parametrize("kind", ["function", "method"])
def test_several_threads_read_an_iterator(compute: sky.Compute, kind: str) -> None:
    with compute.actor(Diary) as diary:
        values: Any = count(5000) >> compute if kind == "function" else diary.numbers(5000)
        with ThreadPoolExecutor(4) as threads:
            parts = list(threads.map(list, [values] * 4))
    assert sorted(value for part in parts for value in part) == list(range(5000))


def test_calls_of_an_actor_that_were_cancelled_are_not_executed(compute: sky.Compute, tmp_path: Any) -> None:
    """Those that its process has already received cannot be cancelled."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    with compute.actor(Diary) as diary:
        first = diary.note.submit("first", str(gate))
        futures = {f"{number}": diary.note.submit(f"{number}") for number in range(500)}
        cancelled = {name for name, future in futures.items() if future.cancel()}
        gate.write_text("")
        first.result(60)
        assert {*diary.all()} == {"first", *futures} - cancelled
        assert 0 < len(cancelled) < len(futures)
        assert all(future.cancelled() == (name in cancelled) for name, future in futures.items())
