"""A seat, without a process or a connection."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from stand_in import Agent, Process

from skyfab.host.agent.worker_handle import WorkerHandle


@pytest.fixture
def agent() -> Iterator[Agent]:
    made = Agent()
    yield made
    made.poller._poll.close()


@pytest.fixture
def worker(agent: Agent) -> Iterator[WorkerHandle]:
    made = WorkerHandle(agent, 1, "seat", 1, logs=())
    yield made
    made.close()


@pytest.fixture
def process(worker: WorkerHandle) -> Iterator[Process]:
    made = Process(worker)
    yield made
    made.close()
