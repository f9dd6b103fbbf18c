"""Generators that run on hosts, and arguments that are read there as they are produced here."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import AsyncIterator, Generator, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from stage.spot import until

import skyfab as sky


@sky.function
def count(until: int, start: int = 0) -> Iterator[int]:
    yield from range(start, until)


@sky.function
def fail_at(number: int) -> Iterator[int]:
    yield from range(number)
    raise LookupError(f"{number} is bad")


@sky.function
def note_how_far(path: str) -> Generator[int, None, None]:
    for number in range(10_000):
        Path(path).write_text(str(number))
        yield number


@sky.function
def guarded(path: str, block: bool = True) -> Generator[int, None, None]:
    try:
        yield 1
        if block:
            time.sleep(1000)
        yield 2
    finally:
        Path(path).write_text("ended")


@sky.function
def total(numbers: Iterable[int]) -> int:
    return sum(numbers)


@sky.function
def doubled(numbers: Iterator[int]) -> Iterator[int]:
    for number in numbers:
        yield 2 * number


@sky.function
def of_rank(number: int) -> Iterator[tuple[int, int]]:
    for value in range(number):
        yield sky.instance_info().rank, value


@sky.function
async def later(number: int) -> AsyncIterator[int]:
    for value in range(number):
        await asyncio.sleep(0)
        yield value


# ---- over every transport


def test_values_come_in_order_and_the_end(pool: sky.Compute) -> None:
    assert list(count(1000) >> pool) == list(range(1000))
    assert list(count(0) >> pool) == []
    assert list(later(5) >> pool) == [0, 1, 2, 3, 4]


def test_an_exception_is_raised_where_the_value_would_have_come(pool: sky.Compute) -> None:
    values = fail_at(30) >> pool
    assert [next(values) for _ in range(30)] == list(range(30))
    with pytest.raises(LookupError, match="30 is bad") as raised:
        next(values)
    assert isinstance(raised.value.__cause__, sky.RemoteTraceback)


@pytest.mark.parametrize("small", [0, 1, 21, 63])
def test_small_and_large_values_come_in_order(compute: sky.Compute, small: int) -> None:
    @sky.function
    def mixed() -> Iterator[tuple[int, bytes]]:
        for number in range(150):
            yield number, bytes(100_000 if number % (small + 1) == small else 2_000)

    assert [(number, len(content)) for number, content in mixed() >> compute] == [
        (number, 100_000 if number % (small + 1) == small else 2_000) for number in range(150)
    ]


def test_a_stream_goes_there_and_comes_back(pool: sky.Compute) -> None:
    assert list(doubled(iter(range(2000))) >> pool) == [2 * number for number in range(2000)]
    assert total(number for number in range(1000)) >> pool == 499_500
    assert total([1, 2, 3]) >> pool == 6


def test_every_rank_has_its_iterator(pool: sky.Compute) -> None:
    assert [list(values) for values in of_rank(3) @ pool] == [[(rank, n) for n in range(3)] for rank in range(2)]
    merged = list(sky.merge(*(of_rank(40) @ pool)))
    assert sorted(merged) == [(rank, (rank, n)) for rank in range(2) for n in range(40)]
    assert [value for rank, value in merged if rank == 1] == [(1, n) for n in range(40)]


def test_a_broadcast_gives_every_rank_all_values_or_its_share(pool: sky.Compute) -> None:
    assert total(sky.stream(range(100))) @ pool == [4950, 4950]
    assert total(sky.stream(range(100), shard=True)) @ pool == [sum(range(0, 100, 2)), sum(range(1, 100, 2))]


@pytest.mark.parametrize("shard", [False, True])
def test_iterators_of_ranks_that_share_a_stream_may_be_read_one_after_another(pool: sky.Compute, shard: bool) -> None:
    """A rank whose values nobody reads does not read its input, which must not hold up that of the other rank."""

    @sky.function
    def doubled(numbers: Iterator[int]) -> Iterator[int]:
        for number in numbers:
            yield 2 * number

    found = [list(values) for values in doubled(sky.stream(range(1000), shard=shard)) @ pool]
    expected = [range(0, 2000, 4), range(2, 2000, 4)] if shard else [range(0, 2000, 2)] * 2
    assert found == [list(values) for values in expected]


# ---- on this machine


@pytest.fixture(scope="module")
def compute() -> Iterator[sky.Compute]:
    with sky.Compute("local", ui="none") as pool:
        yield pool


def test_a_value_is_here_before_the_next_is_produced(compute: sky.Compute, tmp_path: Path) -> None:
    go = tmp_path / "go"

    @sky.function
    def waits() -> Iterator[str]:
        yield "first"
        yield "second"
        until(go.exists)
        yield "third"

    values = waits() >> compute
    assert [next(values), next(values)] == ["first", "second"]
    go.write_text("")
    assert list(values) == ["third"]


@pytest.mark.parametrize(("ahead", "most"), [(64, 65), (1, 2), (0, 1)])
def test_a_generator_does_not_run_further_ahead_than_it_may(
    compute: sky.Compute, tmp_path: Path, ahead: int, most: int
) -> None:
    path = tmp_path / "far"
    values = sky.function(ahead=ahead)(note_how_far.fn)(str(path)) >> compute
    assert [next(values) for _ in range(200)] == list(range(200))
    time.sleep(0.3)
    assert int(path.read_text()) < 200 + most
    values.close()


def test_the_input_is_not_read_further_ahead_than_it_may(compute: sky.Compute) -> None:
    produced = 0
    closed = threading.Event()

    def numbers() -> Iterator[int]:
        nonlocal produced
        try:
            while True:
                produced += 1
                yield produced
        finally:
            closed.set()

    @sky.function
    def reads_three(numbers: Iterator[int]) -> list[int]:
        found = [next(numbers) for _ in range(3)]
        time.sleep(0.5)
        return found

    assert reads_three(numbers()) >> compute == [1, 2, 3]
    assert closed.wait(10)
    assert produced < 3 + 66


@pytest.mark.parametrize(("how", "block"), [("close", True), ("close", False), ("drop", True)])
def test_ending_an_iterator_ends_the_generator(compute: sky.Compute, tmp_path: Path, how: str, block: bool) -> None:
    path = tmp_path / "ended"
    values = guarded(str(path), block) >> compute
    assert next(values) == 1
    if how == "close":
        values.close()
        assert path.exists()
        assert list(values) == []
    else:
        del values
        gc.collect()
        until(path.exists)
    assert total([1]) >> compute == 1


def test_ctrl_c_while_several_are_read_ends_all(compute: sky.Compute, tmp_path: Path) -> None:
    paths = [tmp_path / "first", tmp_path / "second"]
    values = [guarded(str(path)) >> compute for path in paths]
    merged = sky.merge(*values)
    assert [next(merged), next(merged)]
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt) as raised:
        next(merged)
    assert vars(raised.value)["stopped"] == "stopped on local"
    for path in paths:
        until(path.exists)


@pytest.mark.parametrize("how", ["aclose", "while another thread waits"])
def test_closing_what_is_merged_ends_all(compute: sky.Compute, tmp_path: Path, how: str) -> None:
    paths = [tmp_path / "first", tmp_path / "second"]
    merged = sky.merge(*[guarded(str(path)) >> compute for path in paths])
    assert [next(merged), next(merged)]
    reader = threading.Thread(target=lambda: [*merged])
    if how == "aclose":
        asyncio.run(merged.aclose())
    else:
        reader.start()
        merged.close()
    assert [path.exists() for path in paths] == [True, True]
    assert list(merged) == []
    merged.close()
    if reader.ident is not None:
        reader.join(10)
        assert not reader.is_alive()


def test_a_generator_that_ignores_its_end_is_killed(
    compute: sky.Compute, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skyfab.pool.streams._CLOSING", 0.5)
    path = tmp_path / "begun"

    @sky.function
    def stubborn() -> Generator[int, None, None]:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        yield os.getpid()
        path.write_text("")
        while True:
            time.sleep(1)

    values = stubborn() >> compute
    pid = next(values)
    until(path.exists)
    values.close()
    until(lambda: not Path(f"/proc/{pid}").exists())
    assert list(count(2) >> compute) == [0, 1]


def test_a_value_that_cannot_be_pickled(compute: sky.Compute) -> None:
    @sky.function
    def odd() -> Iterator[Any]:
        yield 1
        yield threading.Lock()

    values = odd() >> compute
    assert next(values) == 1
    with pytest.raises(sky.NotPicklable, match="a value that it yielded, a lock"):
        next(values)


def test_hosts_that_are_not_trusted_yield_plain_data() -> None:
    class Own:
        pass

    @sky.function
    def mixed() -> Iterator[Any]:
        yield {"a": [1, 2]}
        yield Own()

    with sky.Compute("local", ui="none", results="data") as pool:
        values = mixed() >> pool
        assert next(values) == {"a": [1, 2]}
        with pytest.raises(sky.UntrustedResult):
            next(values)
        assert list(doubled(iter(range(50))) >> pool) == [2 * number for number in range(50)]


def test_async_for_and_futures(compute: sky.Compute) -> None:
    async def read() -> list[int]:
        values: Any = count(100) >> compute
        return [value async for value in values]

    async def read_all() -> list[tuple[int, int]]:
        return [found async for found in sky.merge(count(3) >> compute, count(2) >> compute)]

    assert asyncio.run(read()) == list(range(100))
    assert sorted(asyncio.run(read_all())) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
    assert list((count(3) > compute).result()) == [0, 1, 2]
    assert list(compute.submit(count(3), on="local").result()) == [0, 1, 2]


@sky.function
def slow(number: int) -> Iterator[int]:
    for value in range(number):
        time.sleep(0.05)
        yield value


@pytest.mark.parametrize(("generator", "closed"), [(count, False), (slow, True)])
def test_an_iterator_is_freed_without_the_garbage_collector(compute: sky.Compute, generator: Any, closed: bool) -> None:
    gc.disable()
    try:
        values: Any = generator(4) >> compute
        assert [next(values), next(values)] == [0, 1]
        if closed:
            values.close()
        assert list(values) == ([] if closed else [2, 3])
        freed = weakref.ref(values.conversation)
        del values
        until(lambda: freed() is None, "no reference")
    finally:
        gc.enable()


def test_a_stream_is_for_one_call(compute: sky.Compute) -> None:
    numbers = sky.stream(range(4))
    assert total(numbers) >> compute == 6
    for again in (lambda: total(numbers) >> compute, lambda: total(numbers) @ compute):
        with pytest.raises(sky.UsageError, match="an earlier call has read this stream"):
            again()


def test_a_worker_that_dies_ends_the_iterator(compute: sky.Compute) -> None:
    @sky.function
    def dies(numbers: Iterator[int]) -> Iterator[int]:
        yield next(numbers)
        os._exit(3)

    values = dies(iter(range(1_000_000))) >> compute
    assert next(values) == 0
    with pytest.raises(sky.WorkerDied, match="exit code 3"):
        next(values)
    with pytest.raises((StopIteration, sky.WorkerDied)):
        next(values)


def test_a_forked_child_leaves_iterators_and_actors_to_its_parent(compute: sky.Compute) -> None:
    values, counter = count(500) >> compute, compute.actor(dict)
    first = [next(values) for _ in range(3)]
    child = os.fork()
    if not child:
        refused = 0
        for use in (lambda: next(values), lambda: counter.get(1)):
            try:
                use()
            except sky.UsageError:
                refused += 1
        del values, counter
        gc.collect()
        os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
    assert [*first, *values] == list(range(500))
    assert counter.get(1) is None


@pytest.mark.parametrize("error", [SystemExit(3)])
def test_a_producer_that_ends_its_thread_ends_the_stream(compute: sky.Compute, error: BaseException) -> None:
    def numbers() -> Iterator[int]:
        yield 1
        raise error

    with pytest.raises(RuntimeError, match=f"its producer raised {type(error).__name__}"):
        total(numbers()) >> compute


def test_an_iterator_where_none_is_expected_is_explained(compute: sky.Compute) -> None:
    plain = sky.function(len)
    with pytest.raises(sky.NotPicklable, match=r"sky.stream\(…\)"):
        plain(number for number in range(3)) >> compute
    with pytest.raises(TypeError, match=r"has not run: write count\(…\) >> compute"):
        list(count(3))


@sky.function(ahead=6000)
def import_between(folder: str, packages: int) -> Iterator[bytes]:
    sys.path.append(folder)
    for number in range(packages):
        for _ in range(40):
            yield bytes(30_000)
        __import__(f"package{number}")


def test_a_generator_can_import_while_its_values_are_sent(compute: sky.Compute, tmp_path: Path) -> None:
    """The import is reported by its own thread, the values are sent by another one."""
    for number in range(100):
        (tmp_path / f"package{number}").mkdir()
        (tmp_path / f"package{number}/__init__.py").touch()
    assert sum(1 for _ in import_between(str(tmp_path), 100) >> compute) == 4000
