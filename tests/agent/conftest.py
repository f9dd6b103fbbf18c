"""A seat, without a process or a connection."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from stand_in import Agent, Process

from skyfab.agent.worker_handle import Seat


@pytest.fixture
def agent() -> Agent:
    return Agent()


@pytest.fixture
def seat(agent: Agent) -> Iterator[Seat]:
    made = Seat(agent, 1, "seat", 1, logs=())
    yield made
    made.close()


@pytest.fixture
def process(seat: Seat) -> Iterator[Process]:
    made = Process(seat)
    yield made
    made.close()
