"""References: what `compute.put` makes is sent to a host once, and arrives in every call as the object."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pytest

import skyfab as sky
from skyfab.lab import Lab

np = pytest.importorskip("numpy")
pytestmark = pytest.mark.lab


@pytest.fixture(scope="module")
def lab(lent_lab: Lab) -> Lab:
    """Arrays are what references are for: hosts need numpy."""
    return lent_lab


MB = 1 << 20


@sky.function
def total(array: np.ndarray, plus: int = 0) -> int:
    return int(array.sum()) + plus


@sky.function
def identity(value: Any) -> Any:
    return value


@sky.function
def count_up(numbers: Any) -> int:
    """Changes what it is given, in place."""
    numbers[0] += 1
    return int(numbers[0])


def random(size: int) -> np.ndarray:
    return np.random.default_rng().integers(0, 255, size, dtype=np.uint8)


def moved(pool: sky.Compute) -> list[int]:
    """Bytes sent to each host so far."""
    return [node.session.moved[0] for node in pool.hosts]


# ---- sent once


@pytest.mark.slow
def test_content_is_sent_to_each_host_once_whatever_uses_it(
    transport: str, open_pool: Callable[..., sky.Compute]
) -> None:
    pool = open_pool(transport, count=2, ranks=2)
    array = random(64 * MB)
    expected = int(array.sum())
    assert identity(0) @ pool == [0] * 4
    before = moved(pool)
    ref = pool.put(array)
    sent = [now - then for now, then in zip(moved(pool), before, strict=True)]
    assert all(bytes_ < 10_000 for bytes_ in sent), "nothing but heartbeats is sent before a call needs it"
    assert total(ref) >> pool == expected
    assert total(ref) @ pool == [expected] * 4
    sent = [now - then for now, then in zip(moved(pool), before, strict=True)]
    assert all(64 * MB < bytes_ < 64.2 * MB for bytes_ in sent)

    before = moved(pool)
    assert total(ref) >> pool == expected
    assert total(ref, plus=1) @ pool == [expected + 1] * 4
    assert (total(ref) > pool).result(170) == expected
    assert sky.gather(*(total(ref, n) for n in range(5))) >> pool == tuple(expected + n for n in range(5))
    assert pool.map(total, [ref] * 10, range(10)) == [expected + n for n in range(10)]
    assert all(now - then < 50_000 for now, then in zip(moved(pool), before, strict=True))


def test_a_reference_goes_with_any_pool(open_pool: Callable[..., sky.Compute]) -> None:
    """Also with one that opens later, and after the one that made it is closed."""
    array = random(2 * MB)
    with open_pool("local") as first:
        ref = first.put(array)
        assert total(ref) >> first == int(array.sum())
    assert total(ref) >> open_pool("openssh") == int(array.sum())
    with first:
        assert total(ref) >> first == int(array.sum())


# ---- what arrives


@dataclass
class Job:
    """References as a part of something else."""

    data: Any
    options: dict[str, Any] = field(default_factory=dict)


def test_references_may_be_anywhere_in_the_arguments(pool: sky.Compute) -> None:
    array = np.arange(100)
    ref = pool.put(array)

    @sky.function
    def look(a: Any, job: Job, *, k: Any) -> list[int]:
        return [int(found.sum()) for found in (a[1][0], job.data["x"], job.options["y"][0], k)]

    sent = look([0, (ref,)], Job({"x": ref}, {"y": [ref]}), k=ref)
    assert sent >> pool == [4950] * 4
    assert sent @ pool == [[4950] * 4] * 2


def test_a_reference_arrives_in_one_call_as_one_object(pool: sky.Compute) -> None:
    ref, other = pool.put([1]), pool.put([1])
    same = sky.function(lambda a, b, c: (a is b, a is c, a == c))
    assert same(ref, ref, other) >> pool == (True, False, True)


def test_functions_may_use_references(pool: sky.Compute) -> None:
    array = random(2 * MB)
    ref = pool.put(array)

    @sky.function
    def closure(n: int) -> int:
        return int(ref[n])

    def default(n: int, data: Any = ref) -> int:
        return int(data[n])

    assert pool.submit(closure(3), on="head").result() == array[3]
    before = moved(pool)[0]
    assert [pool.submit(closure(n), on="head").result() for n in range(4)] == array[:4].tolist()
    assert pool.submit(sky.function(default)(5), on="head").result() == array[5]
    assert pool.submit(closure(0), on="all").result() == [array[0]] * 2
    assert pool.map(default, range(50)) == array[:50].tolist()
    assert moved(pool)[0] - before < 100_000


def test_small_objects_work_as_well(pool: sky.Compute) -> None:
    for value in (None, "", b"x", {"a": (1, 2.5)}, bytearray(10_000), Job(1), np.zeros(0)):
        found = identity(pool.put(value)) >> pool
        assert type(found) is type(value)
        assert np.array_equal(found, value) if isinstance(value, np.ndarray) else found == value


def test_many_references_in_one_call(pool: sky.Compute) -> None:
    """More than a process may have open files."""
    refs = [pool.put(n) for n in range(1001)]
    assert sky.function(sum)(refs) >> pool == sum(range(1001))
    assert pool.map(lambda n: n + 1, refs) == list(range(1, 1002))


# ---- every call has its own


@pytest.mark.parametrize("size", [1, MB], ids=["in the pickle", "large"])
def test_what_a_call_changes_in_place_no_other_call_sees(pool: sky.Compute, size: int) -> None:
    ref = pool.put(np.zeros(size))
    assert [count_up(ref) >> pool for _ in range(4)] == [1] * 4
    assert [count_up(ref) @ pool for _ in range(2)] == [[1, 1]] * 2
    assert sky.gather(*(count_up(ref) for _ in range(10))) >> pool == (1,) * 10
    assert set(pool.map(count_up, [ref] * 300)) == {1}, "nor do the items that travel together"
    assert ref.get()[0] == 0


def test_put_takes_the_object_as_it_is_now(pool: sky.Compute) -> None:
    array = np.zeros(MB)
    ref = pool.put(array)
    array[:] = 1
    assert total(ref) >> pool == 0


# ---- the reference itself


# ---- what goes wrong


class Elsewhere:
    """Cannot be made again on a host."""

    def __init__(self) -> None:
        self.home = os.getpid()

    def __setstate__(self, state: dict[str, int]) -> None:
        self.__dict__.update(state)
        if self.home != os.getpid():
            raise KeyError("far from home")


def test_an_object_that_cannot_be_made_on_the_host_fails_its_call(pool: sky.Compute) -> None:
    ref = pool.put(Elsewhere())
    with pytest.raises(KeyError, match="far from home"):
        identity(ref) >> pool
    with pytest.raises(sky.BroadcastError):
        identity(ref) @ pool
    assert identity(1) >> pool == 1
    assert ref.get().home == os.getpid()


@pytest.fixture
def small_disk(namespaces: Lab) -> Iterator[str]:
    """A disk of six megabytes on node1, everybody's."""
    host, place = namespaces.hosts[0], "/small-for-refs"
    host.run(["mkdir", "-m", "1777", place])
    host.small_disk(place, 6)
    yield place
    host.run(["umount", place])
    host.run(["rmdir", place])


def test_a_disk_without_room_fails_the_call_and_the_pool_goes_on(
    small_disk: str, open_pool: Callable[..., sky.Compute]
) -> None:
    alone = sky.Image(excludes=("*",))
    pool = open_pool("fabric", ranks=2, host={"cache": f"{small_disk}/cache"}, image=alone)
    size = sky.function(len)
    large, small = pool.put(random(16 * MB)), pool.put(random(MB))
    for _ in range(2):
        with pytest.raises(sky.HostUnfit, match="No space left") as caught:
            size(large) >> pool
        assert caught.value.hint
        with pytest.raises(sky.BroadcastError) as group:
            size(large) @ pool
        assert {type(error) for error in group.value.exceptions} == {sky.HostUnfit}
    assert size(small) >> pool == MB
    assert size(small) @ pool == [MB, MB]


def test_a_host_that_is_lost_fails_the_calls_that_wait_for_content(open_pool: Callable[..., sky.Compute]) -> None:
    pool = open_pool("openssh", lease=5)
    ref = pool.put(random(64 * MB))
    assert identity(1) >> pool == 1
    futures = [pool.submit(total(ref)) for _ in range(4)]
    os.kill(pool.hosts[0].session.connection.stream._process.pid, signal.SIGKILL)
    for future in futures:
        with suppress(sky.HostError):
            future.result(170)
        assert future.done()
