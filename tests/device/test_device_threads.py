"""An error on a device that several threads use: one of them raises it, and none reads wrong values."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from stage.spot import until
from stage.threads import at_once

import skyfab as sky

torch = pytest.importorskip("torch")
nn = torch.nn

pytestmark = [pytest.mark.lab, pytest.mark.slow]

FAILURE = r"index.Tensor\(float32\[3\], int64\[1\]\) at .*conftest.py:\d+ failed: IndexError"


@pytest.fixture
def thread() -> Iterator[ThreadPoolExecutor]:
    """Another thread of the program."""
    with ThreadPoolExecutor(1) as pool:
        yield pool


def test_the_first_thread_that_uses_the_device_raises_and_the_others_go_on(
    device: Any, thread: ThreadPoolExecutor, failing: Any
) -> None:
    with failing:
        pass
    with pytest.raises(sky.DeviceError, match=FAILURE):
        thread.submit(sky.synchronize).result(170)
    assert torch.ones(1, device=device).item() == 1
    assert thread.submit(lambda: torch.ones(1, device=device).item()).result(170) == 1


def test_what_another_thread_would_have_changed_is_lost(device: Any, thread: ThreadPoolExecutor, failing: Any) -> None:
    mine, base = torch.zeros(2, device=device), torch.zeros(4, device=device)
    part = base[:2]
    assert part.tolist() == [0, 0]
    made = []
    with failing:
        mine.add_(1)
        thread.submit(lambda: (part.add_(1), made.append(torch.ones(2, device=device)))).result(170)
    with pytest.raises(sky.DeviceError, match=FAILURE):
        sky.synchronize()
    assert mine.tolist() == [0, 0], "this thread knows that it stopped before it"
    for look in (base, part, base[1:], base.view(2, 2), made[0]):
        with pytest.raises(sky.DeviceError, match=f"(?s)a tensor that has no value because of.*{FAILURE}"):
            thread.submit(look.tolist).result(170)
    assert mine.add_(2).tolist() == [2, 2]


def test_a_thread_that_waits_for_a_value_raises(device: Any, thread: ThreadPoolExecutor, failing: Any) -> None:
    kept = torch.ones(2, device=device)
    asked = threading.Event()

    def ask() -> Any:
        asked.set()
        return kept.tolist()

    with failing:
        future = thread.submit(ask)
        assert asked.wait(60)
    with pytest.raises(sky.DeviceError, match=FAILURE):
        future.result(170)
    assert thread.submit(kept.tolist).result(170) == kept.tolist() == [1, 1]


def test_buffers_of_a_remote_module(device: Any, thread: ThreadPoolExecutor, failing: Any) -> None:
    norm = nn.BatchNorm1d(2).to(device)
    fast, x = sky.remote(norm), torch.ones(4, 2, device=device)
    fast(x)
    with failing:
        thread.submit(fast, x).result(170)
    with pytest.raises(sky.DeviceError, match=FAILURE):
        sky.synchronize()
    with pytest.raises(sky.DeviceError, match=FAILURE):
        norm.running_var.tolist()
    assert norm.weight.tolist() == [1, 1]


def test_backward_in_a_thread_is_of_that_thread(device: Any, thread: ThreadPoolExecutor, failing: Any) -> None:
    """PyTorch would run it on a thread of its own, whose changes would be lost when this one raises."""
    weight = torch.ones(3, device=device, requires_grad=True)

    def train() -> None:
        (weight * 2).sum().backward()

    train()
    with failing:
        train()
    with pytest.raises(sky.DeviceError, match=FAILURE):
        sky.synchronize()
    train()
    assert weight.grad.tolist() == [4, 4, 4]


def insist(function: Callable[[], Any]) -> Any:
    """What the function returns when no other thread's error comes in between."""
    for _ in range(200):
        try:
            return function()
        except sky.DeviceError:
            continue
    raise AssertionError("errors without end")


def test_threads_count_while_operations_of_all_of_them_fail(device: Any) -> None:
    """A sum has all additions, or reading it raises; one that was lost is begun again."""
    raised, wrong = [], []

    def begin() -> tuple[Any, Any]:
        made = torch.zeros((), device=device), torch.tensor([9]).to(device)
        assert [each.tolist() for each in made] == [0, [9]]
        return made

    def count(number: int) -> None:
        total, index = insist(begin)
        counted = 0
        for step in range(300):
            try:
                total += 1
                counted += 1
                if step % 40 == 10 * number:
                    torch.zeros(3, device=device)[index]
                if step % 7 == 0:
                    found = int(total.item())
                    wrong.extend([(found, counted)] if found != counted else [])
            except sky.DeviceError:
                raised.append(number)
                (total, index), counted = insist(begin), 0

    at_once(count, range(4), 100)
    assert not wrong
    assert raised


def test_an_error_that_nothing_raised_is_reported_when_the_pool_closes(
    remote_pool: sky.Compute, failing_on: Any
) -> None:

    notices: list[str] = []
    with sky.Compute([remote_pool.hosts[1].host], ui="none") as pool:
        pool.events.subscribe(lambda event: notices.append(str(event)))
        device = pool.device("cpu")
        with failing_on(device):
            future = sky.fetch(torch.ones(2, device=device))
        until(future.done)
    assert [text for text in notices if "conftest.py" in text and "was not raised" in text]
