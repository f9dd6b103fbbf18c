"""A process in which CUDA no longer works is replaced; the call keeps its own exception.

There is no GPU here: ranks are given a torch that behaves as one does. With a GPU, see tests/gpu.
"""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import skyfab as sky
from skyfab.host.agent.cuda import is_unusable
from skyfab.ui.events import Event, Output


@pytest.fixture(scope="module")
def pool() -> Iterator[sky.Compute]:
    """Two ranks on this machine."""
    with sky.Compute("local", ranks=2, ui="none") as compute:
        yield compute


def test_gpus_have_the_numbers_of_nvidia_smi(pool: sky.Compute, open_pool: Callable[..., sky.Compute]) -> None:
    order = sky.function(os.getenv)("CUDA_DEVICE_ORDER")
    assert order >> pool == "PCI_BUS_ID"
    assert order >> open_pool(env={"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}) == "FASTEST_FIRST"


def fake_torch(*, initialized: bool = True, broken: str = "", memory: bool = False) -> types.ModuleType:
    """A torch with two devices, of which the second is unused; with `broken`, the first one raises that."""

    def check(device: int) -> None:
        asked.append(device)
        if broken:
            raise (AcceleratorError if "error" in broken else OutOfMemoryError)(broken)

    class AcceleratorError(RuntimeError):
        pass

    class OutOfMemoryError(RuntimeError):
        pass

    class Stream:
        def __init__(self, device: int) -> None:
            self.device = device

        def query(self) -> bool:
            check(self.device)
            return True

    asked: list[int] = []
    torch: Any = types.ModuleType("torch")
    torch.AcceleratorError, torch.OutOfMemoryError, torch.asked = AcceleratorError, OutOfMemoryError, asked
    torch.zeros = lambda *size, device: types.SimpleNamespace(item=lambda: 0.0)
    torch.cuda = types.SimpleNamespace(
        is_initialized=lambda: initialized,
        current_device=lambda: 0,
        device_count=lambda: 2,
        memory_reserved=lambda device: 0 if device else 1,
        current_stream=Stream,
    )
    return torch  # type: ignore[no-any-return]


ASSERT = "CUDA error: device-side assert triggered"


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    def load(**how: Any) -> Any:
        made = fake_torch(**how)
        monkeypatch.setitem(sys.modules, "torch", made)
        return made

    return load


def wrapped(error: Exception) -> Exception:
    """As functions do: ``raise … from …``."""
    outer = ValueError("the step failed")
    outer.__cause__ = error
    return outer


def test_a_device_that_fails_after_an_error_of_cudas_is_unusable(torch: Callable[..., Any]) -> None:
    made = torch(broken=ASSERT)
    assert is_unusable(made.AcceleratorError(ASSERT))
    assert is_unusable(RuntimeError(ASSERT))
    assert is_unusable(wrapped(RuntimeError(ASSERT)))
    assert set(made.asked) == {0}  # a look at the other one would occupy memory there


def test_other_errors_are_not_even_looked_at(torch: Callable[..., Any]) -> None:
    made = torch(broken=ASSERT)
    for error in (ValueError("x"), RuntimeError("x"), made.OutOfMemoryError("CUDA out of memory. Tried to allocate")):
        assert not is_unusable(error)
    assert not is_unusable(RuntimeError("CUDA error: out of memory"))
    assert made.asked == []


def test_a_device_that_works_is_left_alone(torch: Callable[..., Any]) -> None:
    made = torch()
    assert not is_unusable(made.AcceleratorError("CUDA error: invalid configuration argument"))
    assert made.asked == [0]
    assert not is_unusable(torch(broken="CUDA out of memory").AcceleratorError(ASSERT))
    made = torch(initialized=False, broken=ASSERT)
    assert not is_unusable(RuntimeError(ASSERT))
    assert made.asked == []


# ---- in a pool


def poison(text: str) -> int:
    """The first call of a process breaks its CUDA; an error of CUDA's is raised then and later."""
    if "torch" not in sys.modules:
        sys.modules["torch"] = fake_torch(broken=text)
        raise sys.modules["torch"].AcceleratorError(text)
    raise RuntimeError("this process should have been replaced")


@sky.function
def poisoned(text: str, rank: int = 0) -> int:
    return poison(text) if sky.instance_info().rank == rank else os.getpid()


@sky.function
def pid() -> int:
    return os.getpid()


LINE = "skyfab: CUDA no longer works in this process after that error: the next call gets a new process"


@pytest.fixture
def said(events: list[Event]) -> Callable[[], list[str]]:
    """What ranks have written since the last look."""

    def take() -> list[str]:
        found = [str(event) for event in events if isinstance(event, Output)]
        events.clear()
        return found

    return take


def test_the_next_call_gets_a_new_process(pool: sky.Compute, said: Callable[[], list[str]]) -> None:
    """At once, and as often as that happens; the calls that wait behind it run all the same."""
    for _ in range(2):
        before = pid() >> pool
        failing = poisoned(ASSERT) > pool
        behind = [pid() > pool for _ in range(5)]
        with pytest.raises(RuntimeError, match="device-side assert"):
            failing.result()
        after = {future.result() for future in behind} | {pid() >> pool}
        assert len(after) == 1
        assert before not in after
        assert said() == [f"local {LINE}"]


def test_the_next_gang_is_new_too(pool: sky.Compute, said: Callable[[], list[str]]) -> None:
    for _ in range(2):
        before = pid() @ pool
        with pytest.raises(sky.BroadcastError) as caught:
            poisoned(ASSERT, rank=1) @ pool
        assert "device-side assert" in str(caught.value.exceptions[0])
        assert not set(pid() @ pool) & set(before)
        assert said() == [f"local[1] {LINE}"]


def test_a_process_that_ran_out_of_memory_stays(pool: sky.Compute) -> None:
    before = pid() >> pool
    with pytest.raises(RuntimeError, match="out of memory"):
        poisoned("CUDA out of memory") >> pool
    assert pid() >> pool == before
