"""GPUs as slots, on hosts with two declared ones each: each call has its own, and begins as soon as they are free."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from stage.fakes import FakeNode, packed, result
from stage.remote import linger
from stage.spot import Spot

import skyfab as sky
from skyfab.pool.node import WorkerSpec
from skyfab.pool.scheduler import Scheduler
from skyfab.pool.task import Task


@pytest.fixture(scope="module")
def gpu_pool(transport: str, hosts_of: Callable[..., list[sky.Host]]) -> Iterator[sky.Compute]:
    """Two hosts with two GPUs each."""
    with sky.Compute(hosts_of(transport, gpus=(0, 1)), ui="none") as compute:
        yield compute


def use(seconds: float) -> tuple[str, str, int, float, float]:
    """The host and the GPUs that it has, its process, and when it began and ended. Clocks of lab hosts are the same."""
    began = time.time()
    time.sleep(seconds)
    host = f"{sky.instance_info().hostname}.{sky.instance_info().node}"
    return host, os.environ["CUDA_VISIBLE_DEVICES"], os.getpid(), began, time.time()


Used = tuple[str, str, int, float, float]


def check_apart(calls: list[Used], share: float = 1.0) -> None:
    """No GPU was used by more than one call at a time; or with shares, by more than fit."""
    for host, gpus, _, began, _ in calls:
        for gpu in gpus.split(","):
            same = [one for one in calls if one[0] == host and gpu in one[1].split(",")]
            count = sum(one[3] <= began < one[4] for one in same)
            assert count * share <= 1, f"{count} calls had GPU {gpu} of {host}: {same}"


def test_a_map_gives_each_item_a_gpu_of_its_own(gpu_pool: sky.Compute) -> None:
    found = gpu_pool.map(use, [0.05] * 24, gpus=1)
    check_apart(found)
    assert {(host, gpus) for host, gpus, *_ in found} == {(f, g) for f in {one[0] for one in found} for g in "01"}
    assert len({one[0] for one in found}) == 2
    assert len({(one[0], one[2]) for one in found}) == 4, "a process is kept for the next item"
    assert any(one[3] < other[4] and other[3] < one[4] and one[0] == other[0] for one in found for other in found[1:])


def test_sizes_in_any_order(gpu_pool: sky.Compute) -> None:
    wanted = [1, 2, 1, 1, 2, 0.5, 2, 1, 0.5, 0.5, 1, 2, 1, 0.5]
    futures = [gpu_pool.submit(sky.function(use)(0.05), gpus=gpus) for gpus in wanted]
    found = [future.result() for future in futures]
    assert [len(gpus.split(",")) for _, gpus, *_ in found] == [max(1, int(gpus)) for gpus in wanted]
    check_apart([one for one, gpus in zip(found, wanted, strict=True) if gpus >= 1])
    check_apart(found, share=0.5)


def test_a_function_says_how_many_it_needs(gpu_pool: sky.Compute) -> None:
    @sky.function(gpus=2)
    def count() -> tuple[str, int, int]:
        info = sky.instance_info()
        return os.environ["CUDA_VISIBLE_DEVICES"], info.accelerators, info.total_accelerators

    assert count() >> gpu_pool == ("0,1", 2, 2)
    assert gpu_pool.submit(count(), gpus=1, on=gpu_pool.hosts[1].name).result() == ("0", 1, 1)
    assert gpu_pool.submit(count(), gpus=0).result()[0] == "0,1", "a plain call sees all that are declared"
    assert sky.gather(count(), count()) >> gpu_pool == (("0,1", 2, 2),) * 2


def test_generators_have_gpus(gpu_pool: sky.Compute) -> None:
    @sky.function(gpus=1)
    def values(count: int) -> Iterator[str]:
        for _ in range(count):
            yield os.environ["CUDA_VISIBLE_DEVICES"]

    assert list(values(3) >> gpu_pool) == ["0"] * 3
    held: list[Any] = [values(10**9) >> gpu_pool for _ in range(4)]
    assert sorted(next(one) for one in held) == ["0", "0", "1", "1"]
    waiting = gpu_pool.submit(sky.function(use)(0), gpus=1)
    time.sleep(0.2)
    assert not waiting.done()
    held[0].close()
    assert waiting.result(60)
    for one in held:
        one.close()


def test_a_process_that_is_kept_makes_way(gpu_pool: sky.Compute, runs_on: Callable[[str, int], bool]) -> None:
    head = gpu_pool.hosts[0].name
    call = sky.function(use)(0)
    first = gpu_pool.submit(call, gpus=1, on=head).result()
    assert gpu_pool.submit(call, gpus=1, on=head).result()[2] == first[2]
    other = gpu_pool.submit(call, gpus=2, on=head).result()
    assert not runs_on(head, first[2]), "it had exited before the call began"
    assert gpu_pool.submit(call, gpus=2, on=head).result()[2] == other[2]


def test_a_killed_worker_frees_its_gpu(gpu_pool: sky.Compute, spot: Spot) -> None:
    head = gpu_pool.hosts[0].name
    ones = [gpu_pool.submit(sky.function(linger)(spot / f"pid{n}"), gpus=1, on=head) for n in range(2)]
    waiting = gpu_pool.submit(sky.function(use)(0), gpus=1, on=head)
    [pid] = spot.read("pid0").values()
    assert not waiting.done()
    gpu_pool.submit(sky.function(os.kill)(int(pid), signal.SIGKILL), on=head).result()
    with pytest.raises(sky.WorkerDied):
        ones[0].result()
    assert waiting.result(60)
    ones[1].cancel()
    assert gpu_pool.submit(sky.function(use)(0), gpus=2, on=head).result(60)[1] == "0,1"


def test_cancelled_calls_free_their_gpus(gpu_pool: sky.Compute, spot: Spot) -> None:
    futures = [gpu_pool.submit(sky.function(linger)(spot / f"pid{n}"), gpus=2) for n in range(2)]
    waiting = [gpu_pool.submit(sky.function(use)(0), gpus=1) for _ in range(6)]
    spot.wait("pid0")
    spot.wait("pid1")
    waiting[0].cancel()
    for future in futures:
        future.cancel()
    assert all(future.result(60) for future in waiting[1:])


def test_actors_and_calls_have_different_gpus(gpu_pool: sky.Compute) -> None:
    class Holder:
        def gpus(self) -> tuple[str, int]:
            return os.environ["CUDA_VISIBLE_DEVICES"], sky.instance_info().accelerators

    head = gpu_pool.hosts[0].name
    with gpu_pool.actor(Holder, on=head, gpus=1) as one:
        assert one.gpus() == ("0", 1)
        found = [gpu_pool.submit(sky.function(use)(0.05), gpus=1, on=head) for _ in range(4)]
        assert {future.result()[1] for future in found} == {"1"}
        with pytest.raises(sky.UsageError, match="does not have 2 free GPUs for use") as raised:
            gpu_pool.submit(sky.function(use)(0), gpus=2, on=head)
        assert raised.value.hint == "calls or actors use some: end an actor, or request fewer GPUs"
        two = gpu_pool.submit(sky.function(use)(0), gpus=2).result()
        assert two[1] == "0,1", "on the other host"
    assert gpu_pool.submit(sky.function(use)(0), gpus=2, on=head).result()[1] == "0,1"
    with gpu_pool.actor(Holder, on=head, gpus=0.5) as one, gpu_pool.actor(Holder, on=head, gpus=0.5) as other:
        assert one.gpus()[0] == other.gpus()[0] == "0"


def test_numbers_of_gpus_that_no_host_can_give(gpu_pool: sky.Compute) -> None:
    call = sky.function(use)(0)

    def starts(gpus: Any) -> list[Callable[[], object]]:
        return [
            lambda: gpu_pool.map(use, [0], gpus=gpus),
            lambda: gpu_pool.submit(call, gpus=gpus),
            lambda: gpu_pool.executor(gpus=gpus),
            lambda: sky.function(gpus=gpus)(use)(0) >> gpu_pool,
        ]

    for gpus in (-1, 1.5, True, float("nan")):
        for start in (*starts(gpus), lambda gpus=gpus: gpu_pool.actor(dict, gpus=gpus)):  # type: ignore[misc]
            with pytest.raises(sky.UsageError, match="expected a whole number, 0 or more, or a share"):
                start()
    for start in starts(3):
        with pytest.raises(sky.UsageError, match="3 free GPUs for") as raised:
            start()
        assert raised.value.hint == "gpus= can be at most 2"
    with pytest.raises(sky.UsageError, match="for a call to one host"):
        gpu_pool.submit(call, gpus=1, on="all")


# ---- order, with hosts that only note what they are asked for


def scheduler(*nodes: FakeNode) -> Scheduler:
    made = Scheduler(lambda label, host: lambda error: None)
    made.open(nodes, lambda node, tree: WorkerSpec(tree=tree, env={}, info={}))  # type: ignore[arg-type]
    return made


def task(gpus: float, **options: Any) -> Task:
    call = packed(10, retries=options.pop("retries", 0))
    call.gpus = gpus
    return Task(call, **options)


def test_a_call_that_needs_all_gpus_of_a_host_is_not_overtaken_forever() -> None:
    node = FakeNode(1)
    queue = scheduler(node)
    first, second, large, small = task(1), task(1), task(2), task(1)
    for each in (first, second, large, small):
        queue.add(each)
    assert node.callers == [first, second]
    first.answered(*result(None))
    assert node.callers == [first, second], "the free GPU is kept for the call that needs two"
    second.answered(*result(None))
    assert node.released == ["solo.gpu0", "solo.gpu1"]
    assert len(node.callers) == 2, "the workers have not exited yet"
    queue.ended(node, "solo.gpu0")  # type: ignore[arg-type]
    assert len(node.callers) == 2
    queue.ended(node, "solo.gpu1")  # type: ignore[arg-type]
    assert node.callers[2:] == [large]
    large.answered(*result(None))
    queue.ended(node, "solo.gpu2")  # type: ignore[arg-type]
    assert node.callers[3:] == [small]


def test_a_host_frees_its_own_gpus_alone() -> None:
    node, hostile = FakeNode(1), FakeNode(2, gpus=())
    hostile.gpus = ()  # type: ignore[assignment]
    queue = scheduler(node, hostile)
    first, second, large = task(1), task(1), task(2)
    for each in (first, second, large):
        queue.add(each)
    first.answered(*result(None))
    second.answered(*result(None))
    for worker in node.released:
        queue.ended(hostile, worker)  # type: ignore[arg-type]
    assert node.callers == [first, second], "its workers have not exited"


def test_no_gpu_is_used_twice_whatever_happens() -> None:
    """Thousands of calls of random sizes on three hosts; calls end, workers exit and hosts are lost in any order."""
    import random

    random.seed(26)
    nodes = [FakeNode(number) for number in range(1, 4)]
    queue = scheduler(*nodes)
    running: list[Task] = []
    tasks: list[Task] = []
    for _ in range(1200):
        what = random.random()
        if what < 0.4:
            tasks.append(task(random.choice([1, 1, 2, 0.5, 0.3])))
            queue.add(tasks[-1])
        elif what < 0.75 and running:
            random.choice(running).answered(*result(None))
        else:
            node = random.choice(nodes)
            if node.released:
                queue.ended(node, node.released.pop())  # type: ignore[arg-type]
        running = [each for each in tasks if each.slot is not None and not each.future.done()]
        for node in nodes:
            for gpu in node.gpus:
                had = [each for each in running if each.slot and each.slot.node is node and gpu in each.slot.gpus]  # type: ignore[comparison-overlap]
                assert sum(min(each.call.gpus, 1) for each in had) <= 1.000001
    while running := [each for each in tasks if not each.future.done()]:
        for each in running:
            if each.slot is not None and each in each.slot.tasks:
                each.answered(*result(None))
        for node in nodes:
            while node.released:
                queue.ended(node, node.released.pop())  # type: ignore[arg-type]
    assert all(each.future.done() for each in tasks)
