"""An error on a device that several threads use: each that it concerns is told, and nobody reads wrong values."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import skyfab as sky

torch = pytest.importorskip("torch")
nn = torch.nn

pytestmark = [pytest.mark.lab, pytest.mark.slow]

FAILURE = r"index.Tensor\(float32\[3\], int64\[1\]\) of .*test_device_threads.py:\d+ failed there: IndexError"


class Other:
    """Another thread of the program, as long as it is not ended."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1)

    def __call__(self, function: Callable[[], Any]) -> Any:
        return self._pool.submit(function).result(170)

    def end(self) -> None:
        self._pool.shutdown()


@pytest.fixture
def thread() -> Iterator[Other]:
    other = Other()
    yield other
    other.end()


class Failing:
    """`with failing:` nothing is sent meanwhile, and the first instruction of the block fails on the host."""

    def __init__(self, device: Any) -> None:
        from skyfab.device import tensors

        self.stream = tensors.streams[device.index]
        self._table = torch.zeros(3, device=device)
        self._index = torch.tensor([9]).to(device)

    def __enter__(self) -> None:
        sky.synchronize()
        self.stream._lock.acquire()
        self._result = self._table[self._index]

    def __exit__(self, *_: object) -> None:
        self.stream._lock.release()


@pytest.fixture
def failing(device: Any) -> Failing:
    return Failing(device)


def test_each_thread_is_told_once(device: Any, thread: Other, failing: Failing) -> None:
    mine, theirs = torch.zeros(2, device=device), torch.zeros(2, device=device)
    with failing:
        mine.add_(1)
        thread(lambda: theirs.add_(1))
    with pytest.raises(sky.DeviceError, match=FAILURE):
        sky.synchronize()
    with pytest.raises(sky.DeviceError, match=FAILURE):
        thread(lambda: theirs.mul_(5))
    assert mine.add_(2).tolist() == [2, 2]
    assert thread(lambda: theirs.add_(3).tolist()) == [3, 3]
    assert failing.stream.limit > 0


def test_the_thread_whose_operation_failed_is_told_if_another_one_was_before(
    device: Any, thread: Other, failing: Failing
) -> None:
    with failing:
        pass
    with pytest.raises(sky.DeviceError, match=FAILURE):
        thread(sky.synchronize)
    with pytest.raises(sky.DeviceError, match=FAILURE):
        torch.ones(1, device=device)
    assert torch.ones(1, device=device).item() == 1


def test_nobody_reads_what_a_thread_has_not_changed_before_it_is_told(
    device: Any, thread: Other, failing: Failing
) -> None:
    base = torch.zeros(4, device=device)
    part = base[:2]
    assert part.tolist() == [0, 0]
    made = []
    with failing:
        thread(lambda: (part.add_(1), made.append(torch.ones(2, device=device))))
    with pytest.raises(sky.DeviceError, match=FAILURE):
        sky.synchronize()
    for look in (base, part, base[1:], base.view(2, 2)):
        with pytest.raises(sky.DeviceError, match=f"(?s)a change of a tensor .* not executed.*{FAILURE}"):
            look.tolist()
    with pytest.raises(sky.DeviceError, match=f"(?s)never computed.*{FAILURE}"):
        made[0].tolist()
    with pytest.raises(sky.DeviceError, match=FAILURE):
        thread(lambda: part.add_(1))
    assert base.tolist() == base[:].tolist() == [0, 0, 0, 0]
    assert base[1:].tolist() == [0, 0, 0]
    assert part.add_(1).tolist() == [1, 1]


def test_a_thread_that_has_ended_is_not_forgotten(device: Any, failing: Failing) -> None:
    theirs, mine = torch.zeros(2, device=device), torch.zeros(2, device=device)
    with failing:
        ended = threading.Thread(target=lambda: theirs.add_(1))
        ended.start()
        ended.join(60)
        del ended
    with pytest.raises(sky.DeviceError, match=FAILURE):
        sky.synchronize()
    for _ in range(2):
        with pytest.raises(sky.DeviceError, match=f"(?s)a change of a tensor .* not executed.*{FAILURE}"):
            theirs.sum().item()
    gc.collect()
    assert mine.add_(1).tolist() == [1, 1]
    assert failing.stream.limit > 0, "nobody is left who has to be told"


def test_a_thread_that_waits_for_a_value_is_told(device: Any, thread: Other, failing: Failing) -> None:
    kept = torch.ones(2, device=device)
    asked = threading.Event()

    def ask() -> Any:
        asked.set()
        return kept.tolist()

    with failing:
        future = thread._pool.submit(ask)
        assert asked.wait(60)
    for look in (lambda: future.result(170), lambda: torch.ones(1, device=device).item()):
        with pytest.raises(sky.DeviceError, match=FAILURE):
            look()
    assert thread(kept.tolist) == kept.tolist() == [1, 1]


def test_a_fetch_of_another_thread_tells_it(device: Any, thread: Other, failing: Failing) -> None:
    kept = torch.ones(2, device=device)
    with failing:
        future = thread._pool.submit(lambda: sky.fetch(kept))
    with pytest.raises(sky.DeviceError, match=FAILURE):
        thread(lambda: future.result(170).result(170))
    assert thread(lambda: kept.add_(1).tolist()) == [2, 2]
    with pytest.raises(sky.DeviceError, match=FAILURE):
        sky.synchronize()
    assert kept.tolist() == [2, 2]


def test_others_go_on_while_a_thread_is_not_told(device: Any, thread: Other, failing: Failing) -> None:
    theirs = torch.zeros(2, device=device)
    with failing:
        thread(lambda: theirs.add_(1))
    with pytest.raises(sky.DeviceError, match=FAILURE):
        sky.synchronize()
    number, before = torch.zeros((), device=device), failing.stream.operations
    for _ in range(1000):
        number += 1
    assert number.item() == 1000
    assert failing.stream.operations - before > 900
    second = Failing(device)
    with second:
        pass
    with pytest.raises(sky.DeviceError, match=FAILURE):
        sky.synchronize()
    with pytest.raises(sky.DeviceError, match=FAILURE):
        thread(lambda: theirs.add_(1))
    assert thread(lambda: theirs.add_(1).tolist()) == [1, 1]


def test_buffers_of_a_remote_module(device: Any, thread: Other, failing: Failing) -> None:
    norm = nn.BatchNorm1d(2).to(device)
    fast, x = sky.remote(norm), torch.ones(4, 2, device=device)
    fast(x)
    expected = norm.running_var.tolist()
    with failing:
        thread(lambda: fast(x))
    with pytest.raises(sky.DeviceError, match=FAILURE):
        sky.synchronize()
    with pytest.raises(sky.DeviceError, match="a change of a tensor"):
        norm.running_var.tolist()
    assert norm.weight.tolist() == [1, 1]
    with pytest.raises(sky.DeviceError, match=FAILURE):
        thread(lambda: norm.running_var.tolist())
    assert norm.running_var.tolist() == expected


def test_backward_in_a_thread_is_of_that_thread(device: Any, thread: Other, failing: Failing) -> None:
    weight = torch.ones(3, device=device, requires_grad=True)

    def train() -> None:
        (weight * 2).sum().backward()

    thread(train)
    with failing:
        thread(train)
    with pytest.raises(sky.DeviceError, match=FAILURE):
        thread(sky.synchronize)
    with pytest.raises(sky.DeviceError, match=FAILURE):
        sky.synchronize()
    thread(train)
    assert weight.grad.tolist() == [4, 4, 4]


def insist(function: Callable[[], Any]) -> Any:
    """What the function returns when no other thread's error comes in between."""
    for _ in range(200):
        try:
            return function()
        except sky.DeviceError:
            continue
    raise AssertionError("it is told of errors without end")


def test_threads_count_while_operations_of_all_of_them_fail(device: Any) -> None:
    """Additions are executed, or the thread that asked for them is told before it reads the sum."""
    told, wrong = [], []

    def count(number: int) -> None:
        def begin() -> tuple[Any, Any]:
            made = torch.zeros((), device=device), torch.tensor([9]).to(device)
            assert [each.tolist() for each in made] == [0, [9]]
            return made

        total, index = insist(begin)
        counted = read = 0
        for step in range(300):
            try:
                total += 1
                counted += 1
                if step % 40 == 10 * number:
                    torch.zeros(3, device=device)[index]
                if step % 7 == 0:
                    found = int(total.item())
                    wrong.extend([(found, counted)] if found != counted else [])
                    read = found
            except sky.DeviceError:
                told.append(number)
                found = int(insist(total.item))
                wrong.extend([] if read <= found <= counted else [(read, found, counted)])
                counted = read = found

    threads = [threading.Thread(target=count, args=(number,)) for number in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(100)
    assert not wrong
    assert set(told) == set(range(4))
