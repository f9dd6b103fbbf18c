"""`compute.executor()`: what a program that takes a `concurrent.futures.Executor` may do with it."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future, wait
from pathlib import Path

import pytest
from stage import labs
from stage.spot import until

import skyfab as sky
from skyfab.errors import HostLost, UsageError, WorkerDied


def square(number: int) -> int:
    return number * number


async def cube(number: int) -> int:
    return number**3


def fail(number: int) -> int:
    raise ZeroDivisionError(f"no {number}")


class Adder:
    def __init__(self, more: int) -> None:
        self.more = more

    def add(self, number: int) -> int:
        return number + self.more


@pytest.fixture(scope="module")
def two(home: object) -> Iterator[sky.Compute]:
    with sky.Compute("local", slots=2, ui="none") as compute:
        yield compute


def test_anything_that_can_be_called(two: sky.Compute) -> None:
    with two.executor() as executor:
        assert isinstance(executor, Executor)
        for fn, expected in (
            (lambda number: number + 1, 4),
            (Adder(7).add, 10),
            (functools.partial(pow, 2), 8),
            (sky.function(square), 9),
            (float, 3.0),
            (cube, 27),
        ):
            assert executor.submit(fn, 3).result() == expected
            assert list(executor.map(fn, [3] * 5, chunksize=2)) == [expected] * 5


def test_a_call_whose_process_dies_is_the_only_one_that_fails(two: sky.Compute) -> None:
    with two.executor() as executor:
        died = executor.submit(os._exit, 3)
        others = [executor.submit(square, number) for number in range(10)]
        assert isinstance(died.exception(), WorkerDied)
        assert [future.result() for future in others] == [number * number for number in range(10)]


def test_a_waiting_call_can_be_cancelled_and_a_running_one_cannot(two: sky.Compute) -> None:
    with two.executor() as executor:
        futures = [executor.submit(time.sleep, 0.5) for _ in range(8)]
        until(futures[0].running)
        assert not futures[0].cancel()
        assert futures[7].cancel() and futures[7].cancelled() and not futures[7].running()
        done, not_done = wait(futures)
    assert done == set(futures) and not not_done
    assert [future.cancelled() for future in futures] == [False] * 7 + [True]
    assert not futures[0].cancel()


def test_after_shutdown_nothing_is_taken_and_what_was_is_finished(two: sky.Compute) -> None:
    executor = two.executor()
    futures = [executor.submit(square, number) for number in range(20)]
    executor.shutdown(wait=False)
    with pytest.raises(RuntimeError, match="after shutdown"):
        executor.submit(square, 1)
    assert [future.result() for future in futures] == [number * number for number in range(20)]
    executor.shutdown()
    executor.shutdown(cancel_futures=True)
    assert two.executor().submit(square, 3).result() == 9, "another executor of the pool is not affected"


# ---- pools that close, and hosts that are lost


def test_a_pool_that_closes_ends_the_calls_of_its_executor(open_pool: Callable[..., sky.Compute]) -> None:
    compute = open_pool("local", slots=2)
    executor = compute.executor()
    futures = [executor.submit(time.sleep, 60) for _ in range(10)]
    until(lambda: sum(future.running() for future in futures) == 4)
    compute.close()
    assert not wait(futures, timeout=60).not_done
    for future in futures:
        with pytest.raises(CancelledError, match="closed"):
            future.result()
    with pytest.raises(UsageError, match="the pool of this executor is closed"):
        executor.submit(square, 1)
    executor.shutdown()
    with pytest.raises(UsageError, match="not open"):
        compute.executor()


@pytest.mark.lab
@pytest.mark.slow
def test_a_lost_host_fails_its_own_calls_and_the_last_one_breaks_the_executor() -> None:
    with labs.start_for_calls(2) as lab:
        if lab.kind != "namespace":
            pytest.skip(lab.limits[0])
        with (
            sky.Compute(inventory=lab.inventory, slots=2, lease=2, ui="none") as compute,
            compute.executor() as executor,
        ):
            futures = [executor.submit(time.sleep, 0.01) for _ in range(1000)]
            futures[100].result()
            lab.hosts[0].kill()
            wait(futures)
            failed = [future for future in futures if future.exception() is not None]
            assert 0 < len(failed) <= 4 and all(isinstance(future.exception(), HostLost) for future in failed)
            futures = [executor.submit(time.sleep, 30) for _ in range(20)]
            lab.hosts[1].kill()
            wait(futures)
            assert all(isinstance(future.exception(), BrokenExecutor) for future in futures)
            assert isinstance(futures[0].exception().__cause__, HostLost)
            assert isinstance(executor.submit(square, 1).exception(), BrokenExecutor)


PROGRAM = """
import time
from concurrent.futures import as_completed

import skyfab as sky

if __name__ == "__main__":
    with sky.Compute("local", slots=2, ui="none") as compute:
        with compute.executor() as executor:
            futures = [executor.submit(time.sleep, 600) for _ in range(20)]
            print("waits", flush=True)
            for future in as_completed(futures):
                print("never")
"""


@pytest.mark.programs
def test_ctrl_c_in_as_completed_ends_everything(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    program = subprocess.Popen(
        [sys.executable, str(script)], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert program.stdout is not None
    if program.stdout.readline() != "waits\n":
        pytest.fail(program.communicate(timeout=60)[1])
    time.sleep(0.5)
    program.send_signal(signal.SIGINT)
    said, errors = program.communicate(timeout=60)
    assert (said, errors, program.returncode) == ("", "interrupted\n", -signal.SIGINT)


def test_an_exception_in_the_block_waits_for_calls_and_ctrl_c_stops_them(two: sky.Compute) -> None:
    def leave(error: BaseException, seconds: float, count: int) -> list[Future[None]]:
        with contextlib.suppress(type(error)), two.executor() as executor:
            futures = [executor.submit(time.sleep, seconds) for _ in range(count)]
            raise error
        return futures

    assert [future.result() for future in leave(ZeroDivisionError(), 0.2, 4)] == [None] * 4
    for future in leave(KeyboardInterrupt(), 600, 10):
        with pytest.raises(CancelledError):
            future.result()


def test_a_forked_child_leaves_the_block_at_once_and_ends_nothing() -> None:
    program = """if True:
        import os, time
        import skyfab as sky
        with sky.Compute("local") as pool, pool.executor() as executor:
            future = executor.submit(time.sleep, 1)
            child = os.fork()
        if child:
            print(os.waitpid(child, 0)[1], future.result(0))
    """
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "0 None\n", "")
