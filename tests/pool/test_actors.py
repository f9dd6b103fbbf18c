"""Actors: state in a process of its own, order, errors, losses."""

from __future__ import annotations

import asyncio
import os
import queue
import random
import signal
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest
from stage.spot import until

import skyfab as sky


class Account:
    def __init__(self, balance: int = 0) -> None:
        if balance < 0:
            raise ValueError("no debts")
        self.balance = balance
        self.seen: list[int] = []

    def add(self, amount: int = 1, *, twice: bool = False) -> int:
        self.balance += 2 * amount if twice else amount
        return self.balance

    def note(self, number: int) -> None:
        self.seen.append(number)

    def all_seen(self) -> list[int]:
        return self.seen

    def fail_at(self, number: int, bad: int) -> int:
        if number == bad:
            raise LookupError(f"{number} is bad")
        return number

    def pid(self) -> int:
        return os.getpid()

    def die(self) -> None:
        os._exit(3)

    async def later(self, value: int) -> int:
        return value + 1

    async def interrupt(self) -> None:
        raise KeyboardInterrupt

    def gpus(self) -> str | None:
        return os.environ.get("CUDA_VISIBLE_DEVICES")

    def keep_and_return(self, make: Callable[..., Any], *args: Any) -> Any:
        return make(*args)


@pytest.fixture(scope="module")
def compute() -> Iterator[sky.Compute]:
    with sky.Compute("local", ui="none") as pool:
        yield pool


def test_an_actor_keeps_its_state_in_a_process_of_its_own(compute: sky.Compute) -> None:
    with compute.actor(Account, 5) as account, compute.actor(Account) as other:
        assert account.add() == 6
        assert account.add(2, twice=True) == 10
        assert other.add() == 1
        assert len({account.pid(), other.pid(), os.getpid()}) == 3
        assert account.later(1) == 2


def test_calls_run_in_the_order_of_their_submission(compute: sky.Compute) -> None:
    with compute.actor(Account) as account:
        futures = []
        for number in range(3000):
            futures.append(account.note.submit(number))
            if number % 500 == 0:
                futures.append(account.add.submit())
        assert account.all_seen() == list(range(3000))
        assert all(future.done() for future in futures)


def test_submitted_calls_have_the_arguments_of_their_submission(compute: sky.Compute) -> None:
    class Reader:
        def read(self, values: list[int]) -> list[int]:
            time.sleep(0.001)  # later calls wait meanwhile
            return values

    with compute.actor(Reader) as reader:
        values: list[int] = []
        futures = []
        for number in range(50):
            values.append(number)
            futures.append(reader.read.submit(values))
        assert [len(future.result()) for future in futures] == list(range(1, 51))


def test_arrays_of_calls_that_are_sent_together_may_be_changed(compute: sky.Compute) -> None:
    import numpy as np

    class Filler:
        def fill(self, values: Any, value: int) -> Any:
            values[:] = value
            return values

    with compute.actor(Filler) as filler:
        for length in (10, 10_000, 200_000):
            futures = [filler.fill.submit(np.zeros(length), number) for number in range(50)]
            for number, future in enumerate(futures):
                array = future.result()
                array += 1  # results may be changed too
                assert array[0] == array[-1] == number + 1


def test_each_of_many_calls_has_its_own_outcome(compute: sky.Compute) -> None:
    with compute.actor(Account) as account:
        wait(futures := [account.fail_at.submit(number, 700) for number in range(1500)])
        error = futures[700].exception()
        assert isinstance(error, LookupError)
        assert isinstance(error.__cause__, sky.RemoteTraceback)
        assert "in fail_at" in error.__cause__.text
        assert "agent/actors.py" not in error.__cause__.text
        assert [future.result() for future in futures if future is not futures[700]] == [
            number for number in range(1500) if number != 700
        ]


class Unsendable:
    def __init__(self, error: type[BaseException]) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        raise self.error


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_whatever_is_raised_while_a_result_is_pickled_is_an_error_of_its_call(
    compute: sky.Compute, error: type[BaseException]
) -> None:
    with compute.actor(Account, 1) as account:
        with pytest.raises(sky.NotPicklable, match=f"cannot be pickled: {error.__name__}"):
            account.keep_and_return(Unsendable, error)
        futures = [account.keep_and_return.submit(Unsendable, error) for _ in range(20)]
        futures += [account.add.submit() for _ in range(20)]
        wait(futures)
        assert all(isinstance(future.exception(), sky.SkyfabError) for future in futures[:20])
        assert [future.result() for future in futures[20:]] == list(range(2, 22))


def test_what_the_constructor_raises_is_raised_here(compute: sky.Compute) -> None:
    with pytest.raises(ValueError, match="no debts") as raised:
        compute.actor(Account, -1)
    assert isinstance(raised.value.__cause__, sky.RemoteTraceback)
    with pytest.raises(TypeError, match=r"not a class: 'Account'; .*: compute.actor\(Model, …\)"):
        compute.actor("Account")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"pass the class and its arguments: compute.actor\(Model, …\)"):
        compute.actor(Account())  # type: ignore[arg-type]
    with pytest.raises(sky.UsageError, match="restarts"):
        compute.actor(Account, restarts=-1)


def test_an_actor_whose_process_ends_is_lost(compute: sky.Compute) -> None:
    account = compute.actor(Account)
    with pytest.raises(sky.ActorLost, match="exit code 3"):
        account.die()
    with pytest.raises(sky.ActorLost, match="restarts=N"):
        account.add()
    with pytest.raises(sky.ActorLost):
        account.add.submit().result()


def test_an_actor_is_made_again_as_often_as_it_may(compute: sky.Compute) -> None:
    with compute.actor(Account, 7, restarts=1) as account:
        assert account.add() == 8
        lost = [account.die.submit(), account.add.submit()]
        wait(lost)
        for future in lost:
            with pytest.raises(sky.ActorLost, match="the next call creates the object again"):
                future.result()
        assert account.add() == 8
        with pytest.raises(sky.ActorLost, match="restarts=1 is used up"):
            account.die()
        with pytest.raises(sky.ActorLost):
            account.add()


def test_a_dictionary_on_a_host(compute: sky.Compute) -> None:
    with compute.actor(dict, {"a": 1}) as shared:
        shared["b"] = 2
        del shared["a"]
        assert (shared["b"], "b" in shared, "a" in shared, len(shared)) == (2, True, False, 1)
        assert shared.setdefault("c", 3) == 3
        with pytest.raises(TypeError, match="not iterable"):
            list(shared)


def test_a_handle_is_useless_after_its_pool() -> None:
    with sky.Compute("local", ui="none") as pool:
        account = pool.actor(Account)
    with pytest.raises(sky.UsageError, match="was closed, or its pool"):
        account.add()


def test_gpus_are_given_to_one_actor_at_a_time() -> None:
    host = sky.Host(name="box", transport="local", gpus=(0, 1))
    with sky.Compute([host], ui="none") as pool:
        first, second = pool.actor(Account, gpus=1), pool.actor(Account, gpus=1)
        assert [first.gpus(), second.gpus()] == ["0", "1"]
        with pytest.raises(sky.UsageError, match="1 free GPU") as raised:
            pool.actor(Account, gpus=1)
        assert raised.value.hint == "calls or actors use some: end an actor, or request fewer GPUs"
        with pytest.raises(sky.UsageError, match="box does not have 3 free GPUs") as raised:
            pool.actor(Account, gpus=3)
        assert raised.value.hint == "gpus= can be at most 2"
        with first:
            pass
        assert pool.actor(Account, gpus=1).gpus() == "0"


class Shop:
    """Has methods that yield, that wait for each other, and that call another actor."""

    def __init__(self, other: Any = None) -> None:
        self.other = other
        self.state = "open"
        self.changed = asyncio.Event()

    def values(self, count: int) -> Iterator[int]:
        yield from range(count)

    def divided(self, number: int) -> Iterator[float]:
        yield number / 1
        yield number / 0

    def blocked(self) -> Iterator[int]:
        try:
            yield 1
            time.sleep(1000)
        finally:
            self.state = "ended"

    def what(self) -> str:
        return self.state

    def summed(self, numbers: Iterator[int]) -> int:
        return sum(numbers)

    async def until_changed(self) -> str:
        await self.changed.wait()
        return "changed"

    async def change(self) -> None:
        self.changed.set()

    async def later(self, count: int) -> AsyncIterator[int]:
        for number in range(count):
            await asyncio.sleep(0)
            yield number

    def through(self, amount: int) -> Any:
        return self.other.add(amount)


@sky.function
def add_through(handle: Any, amount: int) -> tuple[Any, Any]:
    return handle.add(amount), handle.add.submit(amount).result()


class OnlyThere:
    """Can be pickled on a host, and not unpickled here."""

    def __reduce__(self) -> Any:
        return os.stat, ("/missing",)


def test_arguments_that_cannot_be_unpickled_here_are_an_error_there(compute: sky.Compute) -> None:
    with compute.actor(Account) as account, pytest.raises(FileNotFoundError, match="/missing"):
        sky.function(lambda handle: handle.add(OnlyThere()))(account) >> compute


def test_methods_that_yield_and_read_streams(pool: sky.Compute) -> None:
    with pool.actor(Shop) as shop:
        assert list(shop.values(500)) == list(range(500))
        assert list(shop.later(5)) == list(range(5))
        assert shop.summed(sky.stream(range(500))) == sum(range(500))
        assert shop.summed(number for number in range(500)) == sum(range(500)), "as its parameter is annotated"
        values = shop.blocked()
        assert next(values) == 1
        values.close()
        assert shop.what() == "ended"
        with pytest.raises(sky.UsageError, match="is a generator"):
            shop.values.submit(1)


def test_calls_that_wait_for_each_other(compute: sky.Compute) -> None:
    with compute.actor(queue.Queue, concurrency=2) as waiting, compute.actor(Shop, concurrency=2) as shop:
        first = waiting.get.submit()
        waiting.put("here")
        assert first.result(60) == "here"
        second = shop.until_changed.submit()
        shop.change()
        assert second.result(60) == "changed"


def test_functions_and_actors_on_hosts_call_actors(pool: sky.Compute) -> None:
    with pool.actor(Account, on="head") as account, pool.actor(Shop, account) as shop:
        assert add_through(account, 1) >> pool == (1, 2)
        assert shop.through(5) == 7
        assert sorted(add_through(account, 0) @ pool) == [(7, 7)] * 2
        with pytest.raises(TypeError):
            add_through(account, "x") >> pool
        with pytest.raises(AttributeError, match="missing"):
            sky.function(lambda handle: handle.missing())(account) >> pool


def read_through(handle: Any, count: int) -> tuple[list[int], int]:
    first = handle.values(10**9)
    found = next(first)
    first.close()  # else the actor is busy with it
    handle.values(10**9)  # dropped without being read
    return list(handle.values(count)), found


def test_functions_on_hosts_read_the_values_of_methods(pool: sky.Compute) -> None:
    with pool.actor(Shop, on="head") as shop:
        assert read_through(shop, 3) == ([0, 1, 2], 0)
        assert sky.function(read_through)(shop, 100) @ pool == [(list(range(100)), 0)] * 2
        with pytest.raises(ZeroDivisionError):
            sky.function(lambda handle: list(handle.divided(1)))(shop) >> pool
        assert sky.function(lambda handle: list(handle.later(5)))(shop) >> pool == list(range(5))
        assert shop.what() == "open"


def test_a_function_that_dies_ends_the_generator_that_it_reads(pool: sky.Compute) -> None:
    def die(handle: Any) -> None:
        for _ in handle.blocked():
            os._exit(3)

    with pool.actor(Shop) as shop:
        with pytest.raises(sky.WorkerDied):
            sky.function(die)(shop) >> pool
        assert shop.what() == "ended"


def test_nothing_keeps_what_a_closed_actor_was_made_with(compute: sky.Compute) -> None:
    import numpy as np

    before = set(compute._actors.open)
    cargo = np.zeros(10_000)
    kept = weakref.ref(cargo)
    with compute.actor(list, cargo) as actor:
        assert len(actor) == 10_000
    del cargo
    until(lambda: kept() is None)
    with pytest.raises(TypeError):
        compute.actor(len, 5)
    assert before.issuperset(compute._actors.open)


def test_an_actor_that_is_dropped_ends(compute: sky.Compute) -> None:
    account = compute.actor(Account)
    pid = account.pid()
    del account
    until(lambda: not Path(f"/proc/{pid}").exists())


def test_a_generator_that_is_closed_before_it_begins_leaves_the_actor_alone(compute: sky.Compute) -> None:
    for pause in (0.0, 0.001, 0.002, 0.004):
        with compute.actor(Shop) as shop:
            values = shop.values(10**6)
            time.sleep(pause)
            values.close()
            assert shop.what() == "open"


def test_a_handle_comes_after_other_calls(compute: sky.Compute) -> None:
    class Caller:
        def nothing(self) -> None: ...

        def through(self, other: Any) -> Any:
            return other.add()

    with compute.actor(Account) as account, compute.actor(Caller) as caller:
        caller.nothing()
        assert [caller.through(account) for _ in range(3)] == [1, 2, 3]


def test_a_handle_lives_as_long_as_what_was_made_with_it(compute: sky.Compute) -> None:
    assert compute.actor(Account).add() == 1
    assert compute.actor(Account).add.submit().result() == 1
    assert list(compute.actor(Shop).values(100)) == list(range(100))


@pytest.mark.parametrize("concurrency", [1, 2])
def test_an_asynchronous_method_that_is_interrupted_leaves_the_event_loop_running(
    compute: sky.Compute, concurrency: int
) -> None:
    with compute.actor(Account, concurrency=concurrency) as account:
        with pytest.raises(sky.RemoteError, match="KeyboardInterrupt"):
            account.interrupt()
        assert account.later(1) == 2


# ---- errors that name what is wrong


def test_one_argument_that_cannot_be_pickled_fails_its_own_call_only(compute: sky.Compute) -> None:
    with compute.actor(Account) as account:
        wait([account.note.submit(number) for number in range(200)])  # from here on, calls are sent together
        wait(futures := [account.note.submit(threading.Lock() if number == 50 else number) for number in range(100)])
        assert [number for number, future in enumerate(futures) if future.exception() is not None] == [50]


# ---- waiting


class Slow:
    def __init__(self, path: str = "", seconds: float = 0.0) -> None:
        if path and Path(path).exists():
            raise ValueError("only once")
        time.sleep(seconds)
        if path:
            Path(path).touch()
        self.count = 0

    def nap(self, seconds: float) -> int:
        time.sleep(seconds)
        self.count += 1
        return self.count

    def pid(self) -> int:
        return os.getpid()


def interrupt_soon(seconds: float = 0.3) -> threading.Timer:
    timer = threading.Timer(seconds, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
    timer.start()
    return timer


def test_ctrl_c_says_what_becomes_of_the_call(compute: sky.Compute) -> None:
    with compute.actor(Slow) as slow:
        interrupt_soon()
        with pytest.raises(KeyboardInterrupt) as raised:
            slow.nap(1.5)
        assert vars(raised.value)["stopped"] == "until the pool is closed, Slow.nap continues on local"
        assert slow.nap(0) == 2
        interrupt_soon()
        with pytest.raises(KeyboardInterrupt) as raised:
            compute.actor(Slow, "", 60)
        assert vars(raised.value)["stopped"] == "stopped on local"


# ---- losses


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_process_is_killed_while_calls_wait(compute: sky.Compute, restarts: int) -> None:
    with compute.actor(Slow, restarts=restarts) as slow:
        pid = slow.pid()
        first = slow.nap.submit(60)
        rest = [slow.nap.submit(0) for _ in range(100)]
        os.kill(pid, signal.SIGKILL)
        left = wait([first, *rest], timeout=60).not_done
        assert not left and isinstance(first.exception(), sky.ActorLost)
        lost = [future for future in rest if isinstance(future.exception(), sky.ActorLost)]
        assert rest[: len(lost)] == lost, "the later ones run in the new process, in their order"
        assert [future.result() for future in rest[len(lost) :]] == list(range(1, 101 - len(lost)))
        assert bool(restarts) == (len(lost) < 100)


def test_more_calls_wait_for_a_lost_actor_than_functions_may_be_nested(compute: sky.Compute) -> None:
    with compute.actor(Slow, concurrency=2) as slow:  # each call has a message of its own
        pid = slow.pid()
        futures = [slow.nap.submit(60) for _ in range(1000)]
        os.kill(pid, signal.SIGKILL)
        assert not wait(futures, timeout=60).not_done
        assert {type(future.exception()) for future in futures} == {sky.ActorLost}


class Interrupted(Exception):
    pass


class Interrupts:
    """Signals come to the main thread at random times. Their handler raises Interrupted, once in each `attempt`."""

    def __init__(self, chance: random.Random, longest: float) -> None:
        self.chance, self.longest = chance, longest
        self.may_raise = False
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.send)

    def handle(self, *_: object) -> None:
        if self.may_raise:
            self.may_raise = False
            raise Interrupted

    def send(self) -> None:
        while not self.over.wait(self.chance.uniform(0, self.longest)):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    def attempt(self, action: Callable[[], object]) -> None:
        try:
            self.may_raise = True
            action()
            self.may_raise = False
        except Interrupted:
            pass

    def __enter__(self) -> Interrupts:
        self.before = signal.signal(signal.SIGUSR1, self.handle)
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.thread.join()
        signal.signal(signal.SIGUSR1, self.before)


def test_threads_call_an_actor_while_the_main_thread_is_interrupted(compute: sky.Compute) -> None:
    with compute.actor(Account) as account:
        found: list[int] = []
        own = 0

        def add() -> None:
            found.extend(account.add() for _ in range(100))

        threads = [threading.Thread(target=add) for _ in range(8)]
        for thread in threads:
            thread.start()
        with Interrupts(random.Random(1), 0.02) as interrupts:
            while any(thread.is_alive() for thread in threads):
                own += 1
                interrupts.attempt(lambda: account.add() and account.add.submit(0).result())
        total = account.add(0)
        assert len(found) == len(set(found)) == 800, "each call has its own result"
        assert 800 <= total <= 800 + own
