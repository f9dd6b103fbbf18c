"""The devices of a pool, on nodes that only record what they are asked for: their names, their worker, their calls."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from stage.fakes import FakeNode, packed, raised, result

import skyfab as sky
from skyfab.device import devices
from skyfab.device.stream import DeviceStream
from skyfab.pool.devices import DeviceCall, DeviceLink, Devices
from skyfab.pool.node import WorkerSpec
from skyfab.protocol import messages
from skyfab.ui.events import Event, Events, Notice


class Node(FakeNode):
    """Has a worker, until the test ends it."""

    generation = 0
    has_ended = False

    def call(self, worker: str, spec: Any, call: Any, *, caller: Any, **rest: Any) -> int:  # type: ignore[override]
        super().call(worker, spec, call, caller=caller, **rest)
        self.generation += 1
        return self.generation

    def has_worker(self, worker: str, generation: int) -> bool:
        return not self.has_ended and generation == self.generation


@pytest.fixture
def events() -> Events:
    return Events()


@pytest.fixture
def seen(events: Events) -> list[Event]:
    found: list[Event] = []
    events.subscribe(found.append)
    return found


@pytest.fixture
def pool(events: Events, monkeypatch: pytest.MonkeyPatch) -> Iterator[Devices]:
    """Devices are opened without asking their host, and without torch."""
    monkeypatch.setattr(devices, "open_device", lambda name, link: DeviceStream(90, name, link))
    made = Devices(lambda node, tree: WorkerSpec(tree=tree, env={}, info={}), (), events, untrusted=False)
    yield made
    made.close()


@pytest.fixture
def node() -> Any:
    return Node(1)


# ---- names


@pytest.mark.parametrize(
    ("kind", "gpus", "name"),
    [
        ("auto", (0, 1), "cuda:0"),
        ("auto", (), "cpu"),
        ("cuda", (0, 1), "cuda:0"),
        ("cuda:1", (0, 1), "cuda:1"),
        ("cpu", (0, 1), "cpu"),
        ("cpu:0", (), "cpu"),
    ],
)
def test_names_of_devices(pool: Devices, node: Any, kind: str, gpus: Any, name: str) -> None:
    node.gpus = gpus
    stream = pool.open(node, kind, "tree")
    assert stream.device == name
    assert pool.open(node, kind, "tree") is stream, "one host has one of each"
    assert isinstance(stream.link, DeviceLink)
    assert stream.link.worker == f"device.{name.replace(':', '.')}"
    assert stream.link.tree == "tree"


def test_what_is_not_a_device(pool: Devices, node: Any) -> None:
    for kind in ("tpu", "cuda:x", "cpu:1", "", "auto:1"):
        with pytest.raises(sky.UsageError, match="unknown device"):
            pool.open(node, kind, "")


@pytest.mark.parametrize(("gpus", "has"), [((0, 1), "2 GPUs"), ((0,), "1 GPU"), ((), "no GPU")])
def test_a_gpu_that_the_host_does_not_have(pool: Devices, node: Any, gpus: Any, has: str) -> None:
    node.gpus = gpus
    with pytest.raises(sky.HostUnfit, match=rf"no cuda:2: the host has {has}$|no cuda:2: the host has {has}\n"):
        pool.open(node, "cuda:2", "")


# ---- the worker


def test_a_worker_that_has_ended_is_an_error_and_then_another_one_is_started(pool: Devices, node: Any) -> None:
    stream = pool.open(node, "cpu", "")
    stream.emit([7])
    stream.flush()
    assert len(node.callers) == 1
    stream.emit([8])
    stream.flush()
    node.has_ended = True
    stream.emit([9])
    with pytest.raises(sky.WorkerDied, match="ended; its tensors are lost"):
        stream.flush()
    assert len(node.callers) == 2, "nothing was sent to another process"
    assert pool.open(node, "cpu", "") is not stream


def test_an_error_that_nothing_raised_is_reported_at_the_end(pool: Devices, node: Any, seen: list[Event]) -> None:
    stream = pool.open(node, "cpu", "")
    stream.emit([7])
    stream.flush()
    part = memoryview(json.dumps({"error": {"op": "add", "text": "too large"}}).encode())
    node.callers[0].answered(messages.Result(parts=[len(part)]), [part])
    pool.close()
    assert [event.host for event in seen if isinstance(event, Notice) and "too large" in event.text] == ["node1"]


# ---- calls


def started(pool: Devices, node: Any, events: Events, first: int = 0) -> tuple[DeviceStream, DeviceCall]:
    stream = pool.open(node, "cpu", "")
    assert isinstance(stream.link, DeviceLink)
    call = DeviceCall(stream, "f", first, {}, events, untrusted=False)
    stream.link.call(packed(label="f"), call)
    return stream, call


def test_a_call_returns_or_raises(pool: Devices, node: Any, events: Events) -> None:
    stream, call = started(pool, node, events)
    assert call.processes() == [(node, "device.cpu", None)]
    call.answered(*result((5, [])))
    assert call.future.result(0) == 5
    _, call = started(pool, node, events)
    call.answered(*raised(ValueError("no")))
    with pytest.raises(ValueError, match="no"):
        call.future.result(0)
    assert not stream.is_lost


@pytest.mark.parametrize(("why", "lost"), [("exit", False), ("unpicklable", False), ("died", True), ("timeout", True)])
def test_a_call_after_whose_end_the_worker_continues_or_not(
    pool: Devices, node: Any, events: Events, why: str, lost: bool
) -> None:
    stream, call = started(pool, node, events)
    call.answered(messages.Ended(why=why, text="of its own"), [])
    with pytest.raises(sky.SkyfabError):
        call.future.result(0)
    assert stream.is_lost is lost
    if lost:
        with pytest.raises(sky.WorkerDied, match="its tensors are lost: of its own"):
            stream.check()
