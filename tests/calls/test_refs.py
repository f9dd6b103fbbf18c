"""References: what `compute.put` makes is sent to a host once, and arrives in every call as the object."""

from __future__ import annotations

import copy
import gc
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from stage.spot import until

import skyfab as sky
from skyfab.calls.refs import put
from skyfab.lab import Lab

np = pytest.importorskip("numpy")
pytestmark = pytest.mark.lab


@pytest.fixture(scope="module")
def lab(lent_lab: Lab) -> Lab:
    """Arrays are what references are for: hosts need numpy."""
    return lent_lab


MB = 1 << 20
EXAMPLES = Path(__file__).parents[2] / "examples" / "models"


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


@pytest.mark.slow
def test_calls_that_begin_together_wait_for_the_same_content(pool: sky.Compute) -> None:
    array = random(8 * MB)
    ref = pool.put(array)
    pool.submit(total(random(8)), on="head").result()  # the project's files are there
    before = moved(pool)[0]
    futures = [pool.submit(total(ref, n), on="head") for n in range(8)]
    assert [future.result(170) for future in futures] == [int(array.sum()) + n for n in range(8)]
    assert moved(pool)[0] - before < 8.2 * MB


def test_equal_content_is_sent_once_however_often_it_is_put(pool: sky.Compute) -> None:
    array = random(2 * MB)
    pool.submit(total(random(8)), on="head").result()  # the project's files are there
    before = moved(pool)[0]
    for _ in range(3):
        assert pool.submit(total(pool.put(array)), on="head").result() == int(array.sum())
    assert moved(pool)[0] - before < 2.2 * MB


def test_a_reference_goes_with_any_pool(open_pool: Callable[..., sky.Compute]) -> None:
    """Also with one that opens later, and after the one that made it is closed."""
    array = random(2 * MB)
    with open_pool("local") as first:
        ref = first.put(array)
        assert total(ref) >> first == int(array.sum())
    assert total(ref) >> open_pool("openssh") == int(array.sum())
    with first:
        assert total(ref) >> first == int(array.sum())


def test_a_new_process_in_a_seat_uses_what_the_host_has(open_pool: Callable[..., sky.Compute]) -> None:
    pool = open_pool("local")
    array = random(2 * MB)
    ref = pool.put(array)
    assert total(ref) >> pool == int(array.sum())
    with pytest.raises(sky.WorkerDied):
        sky.function(lambda _: os.kill(os.getpid(), signal.SIGKILL))(ref) >> pool
    before = moved(pool)[0]
    assert total(ref) >> pool == int(array.sum())
    assert moved(pool)[0] - before < 100_000


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


@pytest.mark.parametrize(
    "value",
    [None, 0, "", "text", b"", b"x", [], {"a": (1, 2.5)}, bytearray(10_000), Job(1), np.zeros(0), np.arange(3)],
    ids=repr,
)
def test_small_objects_work_as_well(pool: sky.Compute, value: Any) -> None:
    found = identity(pool.put(value)) >> pool
    assert type(found) is type(value)
    assert np.array_equal(found, value) if isinstance(value, np.ndarray) else found == value


def test_a_function_is_an_object_too(pool: sky.Compute) -> None:
    offset = 5
    ref = pool.put(lambda x: x + offset)
    assert sky.function(lambda fn, x: fn(x))(ref, 1) >> pool == 6


def test_a_reference_in_what_is_put_is_its_object(pool: sky.Compute) -> None:
    inner = pool.put(np.arange(10_000))
    outer = pool.put({"inner": inner, "again": inner})
    assert sky.function(lambda d: (int(d["inner"].sum()), d["inner"] is d["again"]))(outer) >> pool == (49995000, True)
    assert outer.get()["inner"].sum() == 49995000  # type: ignore[attr-defined]


def test_many_references_in_one_call(pool: sky.Compute) -> None:
    """More than a process may have open files."""
    refs = [pool.put(n) for n in range(1001)]
    assert sky.function(sum)(refs) >> pool == sum(range(1001))
    assert pool.map(lambda n: n + 1, refs) == list(range(1, 1002))


def test_a_returned_reference_arrives_as_its_object(pool: sky.Compute) -> None:
    found = sky.function(lambda: put(np.arange(100_000)))() >> pool
    assert isinstance(found, np.ndarray)
    assert np.array_equal(found, np.arange(100_000))


# ---- every call has its own


@pytest.mark.parametrize("size", [1, 1000, MB], ids=["in the pickle", "beside it", "large"])
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


def test_get_gives_a_new_object_each_time() -> None:
    ref = put(np.zeros(100_000))
    first, second = ref.get(), ref.get()
    first[0] = 1
    assert second[0] == 0
    assert ref.get()[0] == 0


# ---- the reference itself


@pytest.mark.parametrize(
    ("value", "text"),
    [(np.zeros(8 * MB), "67 MB ndarray"), (b"x" * 2000, "2.1 kB bytes"), (None, "68 bytes NoneType")],
    ids=["large", "middle", "small"],
)
def test_it_says_what_it_stands_for(value: Any, text: str) -> None:
    assert repr(put(value)) == f"<sky.Ref {text}>"


def test_it_is_frozen_and_its_own_copy() -> None:
    ref = put([1])
    with pytest.raises(AttributeError):
        ref.name = "other"  # type: ignore[misc]
    assert copy.copy(ref) is copy.deepcopy([ref])[0] is ref


@pytest.mark.parametrize("size", [10, 8 * MB], ids=["small", "large"])
def test_its_memory_is_freed_with_the_last_reference(pool: sky.Compute, size: int) -> None:
    """Also where it was a part of a cycle, with views of it in calls that are done.

    What has been sent is kept until the host has acknowledged it, which it does when more comes.
    """
    ref = pool.put(bytearray(size))
    assert sky.gather(*(sky.function(len)(ref) for _ in range(4))) >> pool == (size,) * 4
    assert pool.map(len, [ref] * 4) == [size] * 4
    memory = weakref.ref(ref.memory)
    gone = threading.Event()
    weakref.finalize(ref.memory.obj, gone.set) if size >= MB else gone.set()  # a bytearray has no weak references
    ring: list[Any] = [ref]
    ring.append(ring)
    del ref, ring

    def freed() -> bool:
        sky.function(len)(os.urandom(MB)) @ pool
        gc.collect()
        return memory() is None and gone.is_set()

    until(freed, "the end of its memory")


# ---- what goes wrong


def test_what_cannot_be_pickled_is_refused_at_once(pool: sky.Compute) -> None:
    with pytest.raises(sky.NotPicklable, match="to put, a lock, cannot be pickled"):
        pool.put(threading.Lock())


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


@pytest.mark.parametrize("transport", ["fabric", "openssh"])
def test_a_disk_without_room_fails_the_call_and_the_pool_goes_on(
    small_disk: str, open_pool: Callable[..., sky.Compute], transport: str
) -> None:
    alone = sky.Image(excludes=("*",))
    pool = open_pool(transport, ranks=2, host={"cache": f"{small_disk}/cache"}, image=alone)
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


# ---- torch


@pytest.mark.torch
@pytest.mark.slow
def test_a_model_arrives_with_its_weights_tied(hosts_of: Callable[..., list[sky.Host]]) -> None:
    torch = pytest.importorskip("torch")

    @sky.function
    def touch(model: Any) -> tuple[bool, float, float]:
        before = model[1].weight[0, 0].item()
        with torch.no_grad():
            model[0].weight.zero_()
        return model[0].weight is model[1].weight, before, model[1].weight.abs().sum().item()

    model = torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.Linear(1024, 1024))
    model[1].weight = model[0].weight
    with sky.Compute(hosts_of("local", 1), ranks=2, ui="none") as pool:
        ref = pool.put(model)
        assert 4.1 * MB > ref.size > 4 * MB, "tied weights are there once"
        assert sky.function(len)("ab") >> pool == 2  # the project's files are there
        before = moved(pool)[0]
        expected = (True, model[0].weight[0, 0].item(), 0.0)
        assert [touch(ref) @ pool for _ in range(2)] == [[expected] * 2] * 2
        assert moved(pool)[0] - before < 4.5 * MB
    again = ref.get()
    assert again[0].weight is again[1].weight
    assert torch.equal(again[0].weight, model[0].weight)


# ---- examples


def run_example(name: str) -> list[str]:
    ran = subprocess.run([sys.executable, str(EXAMPLES / name), "local"], capture_output=True, text=True, timeout=170)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()


@pytest.mark.torch
@pytest.mark.slow
def test_the_state_dict_example_learns() -> None:
    pytest.importorskip("torch")
    before, trained, after = run_example("state_dict.py")
    assert int(before.partition("%")[0]) < 40
    assert trained.startswith("trained on local: 8 tensors came back")
    assert int(after.partition("%")[0]) > 90


@pytest.mark.torch
@pytest.mark.slow
def test_the_large_model_example_sends_its_model_once() -> None:
    pytest.importorskip("torch")
    first, *noises, last = run_example("large_model.py")
    assert first == "<sky.Ref 17 MB Net>: 4.3 million weights"
    assert [line.partition(":")[0] for line in noises] == ["noise 0.0", "noise 0.2", "noise 0.4", "noise 0.8"]
    assert last == "4 calls, 1.0 times the model sent to 1 host(s)"
