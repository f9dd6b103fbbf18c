"""Errors: whatever a function does, the caller gets one clear, typed error at once, and the pool goes on working."""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from stage.remote import leave, wait_for
from stage.spot import Spot, until

import skyfab as sky
from skyfab.ui.events import Event, Output

pytestmark = pytest.mark.lab

if sys.version_info < (3, 11):
    from exceptiongroup import ExceptionGroup


@sky.function
def ok(value: int = 1) -> int:
    return value


@sky.function
def fail(error: BaseException) -> None:
    raise error


@pytest.fixture(autouse=True)
def the_pool_goes_on_working(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each of these tests the same pool still runs calls, alone and together, on every host."""
    yield
    if "pool" in request.fixturenames:
        pool = request.getfixturevalue("pool")
        assert [pool.submit(ok(5), on=node.name).result(170) for node in pool.hosts] == [5, 5]
        assert ok(6) @ pool == [6, 6]


def names(pool: sky.Compute) -> set[str]:
    return {node.name for node in pool.hosts}


# ---- exceptions


class Several(ValueError, KeyError):
    pass


class Picky(Exception):
    """One that cannot be made from its `args` alone, as many are."""

    def __init__(self, code: int, *, reason: str) -> None:
        super().__init__(f"{code}: {reason}")
        self.code = code


class Empty(Exception):
    """Is false, as one that has a list of what was found."""

    def __len__(self) -> int:
        return 0


class Locked(Exception):
    """One that cannot be pickled at all."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


def test_an_exception_arrives_as_its_own_type_with_the_remote_traceback_as_cause(pool: sky.Compute) -> None:
    @sky.function
    def explode(value: int) -> None:
        numbers = [1, 2]
        numbers[value]  # the line that the user must see

    with pytest.raises(IndexError) as caught:
        explode(7) >> pool
    assert str(caught.value) == "list index out of range"
    cause = caught.value.__cause__
    assert isinstance(cause, sky.RemoteTraceback)
    assert cause.host in names(pool)
    assert cause.rank is None
    assert "numbers[value]  # the line that the user must see" in cause.text
    assert f'File "{__file__}"' in cause.text
    assert "in explode" in cause.text
    assert "skyfab/host/agent" not in cause.text, "our own frames are not the user's business"


def test_exceptions_of_all_kinds_arrive_as_themselves(pool: sky.Compute) -> None:
    for error in (
        Several("two bases"),
        Picky(404, reason="not there"),
        OSError(28, "No space left on device", "/some/file"),
        StopIteration(5),
        ExceptionGroup("several", [ValueError(1), KeyError(2)]),
        sky.UsageError("ours", hint="too"),
    ):
        with pytest.raises(type(error)) as caught:
            fail(error) >> pool
        assert type(caught.value) is type(error)
        assert str(caught.value) == str(error)
        assert vars(caught.value).keys() >= vars(error).keys()
        assert isinstance(caught.value.__cause__, sky.RemoteTraceback)
        assert "raise error" in caught.value.__cause__.text, "a line of a module"


def test_an_exception_that_is_false_is_raised(pool: sky.Compute) -> None:
    call = fail(Empty())
    for way in (
        lambda: call >> pool,
        lambda: (call > pool).result(),
        lambda: pool.map(fail, [Empty(), Empty()]),
        lambda: sky.gather(call, call) >> pool,
        lambda: pool.executor().submit(fail.fn, Empty()).result(),
        lambda: call @ pool,
    ):
        with pytest.raises((Empty, sky.BroadcastError)):
            way()


def test_an_exception_that_cannot_be_pickled_gives_its_type_text_and_traceback(pool: sky.Compute) -> None:
    @sky.function
    def lock_up() -> None:
        raise Locked("no way out")

    with pytest.raises(sky.RemoteError) as caught:
        lock_up() >> pool
    assert caught.value.kind == f"{__name__}.Locked"
    assert "no way out" in str(caught.value)
    assert caught.value.host in names(pool)
    assert 'raise Locked("no way out")' in caught.value.__cause__.text  # type: ignore[union-attr]


def test_what_is_no_exception_on_the_host_is_one_here(pool: sky.Compute) -> None:
    """A KeyboardInterrupt over there is not a person's Ctrl-C over here."""
    for error in (KeyboardInterrupt(), GeneratorExit()):
        with pytest.raises(sky.RemoteError) as caught:
            fail(error) >> pool
        assert caught.value.kind.endswith(type(error).__name__)
        assert isinstance(caught.value.__cause__, sky.RemoteTraceback)


# ---- what cannot be pickled


def test_an_argument_that_cannot_be_pickled_is_named(pool: sky.Compute) -> None:
    @sky.function
    def take(*args: Any, **kwargs: Any) -> None:
        pass

    for value in (threading.Lock(), (n for n in range(3)), {"deep": [1, {"down": threading.Lock()}]}):
        with pytest.raises(sky.NotPicklable) as positional:
            take(1, value, 3) >> pool
        with pytest.raises(sky.NotPicklable, match="argument 'bad' of"):
            take(1, good=2, bad=value) >> pool
        assert "argument 2 of" in str(positional.value)
        assert type(value).__qualname__ in str(positional.value)
        assert isinstance(positional.value, TypeError)
        assert positional.value.hint


def test_a_result_that_cannot_be_pickled_is_named(pool: sky.Compute) -> None:
    with pytest.raises(sky.NotPicklable) as caught:
        sky.function(lambda: threading.Lock())() >> pool
    assert "the result, a lock, cannot be pickled" in str(caught.value)
    assert caught.value.host in names(pool)
    assert caught.value.hint
    with pytest.raises(sky.NotPicklable):
        sky.function(lambda: (n for n in range(3)))() >> pool


class OnlyOneWay:
    """Pickles well, and cannot be made again."""

    def __reduce__(self) -> tuple[Any, ...]:
        return int, ("not a number",)


def test_a_result_that_cannot_be_unpickled_here_says_so(pool: sky.Compute) -> None:
    with pytest.raises(sky.NotPicklable, match="cannot be unpickled on this machine") as caught:
        sky.function(lambda: OnlyOneWay())() >> pool
    assert caught.value.host in names(pool)


def test_an_argument_that_cannot_be_unpickled_there_is_an_error_and_not_a_hang(pool: sky.Compute) -> None:
    with pytest.raises((ValueError, sky.SkyfabError)) as caught:
        ok(OnlyOneWay()) >> pool
    assert isinstance(caught.value.__cause__, sky.RemoteTraceback)


# ---- the end of a process


def segfault() -> None:
    ctypes.string_at(0)


DEATHS: dict[str, tuple[Callable[[], Any], int, str]] = {
    "sys.exit(3)": (lambda: sys.exit(3), 3, "sys.exit(3)"),
    "sys.exit(text)": (lambda: sys.exit("out of coffee"), 1, "out of coffee"),
    "os._exit(0)": (lambda: os._exit(0), 0, "exit code 0"),
    "segfault": (segfault, -signal.SIGSEGV, "SIGSEGV"),
    "group": (lambda: os.killpg(0, signal.SIGKILL), -signal.SIGKILL, "SIGKILL"),
}


def test_the_end_of_the_process_is_a_typed_error_with_its_exit_code(pool: sky.Compute) -> None:
    for how, (die, code, said) in DEATHS.items():
        ends = sky.function(named_ends(die))
        with pytest.raises(sky.WorkerDied) as caught:
            ends() >> pool
        assert caught.value.exitcode == code, how
        assert said in str(caught.value)
        assert "ends" in str(caught.value)
        assert caught.value.host in names(pool)


def named_ends(die: Callable[[], Any]) -> Callable[[], None]:
    def ends() -> None:
        die()

    return ends


def test_where_a_segfault_happened_is_shown(pool: sky.Compute, events: list[Event]) -> None:
    with pytest.raises(sky.WorkerDied) as caught:
        sky.function(segfault)() >> pool
    assert "faulthandler" in caught.value.hint
    shown = [event.text for event in events if isinstance(event, Output)]
    assert any("Segmentation fault" in line for line in shown)
    assert any("in segfault" in line for line in shown)


def test_the_last_words_of_a_process_are_not_lost(pool: sky.Compute, events: list[Event]) -> None:
    @sky.function
    def last_words() -> None:
        print("first line")
        os.write(2, b"unfinished")
        os._exit(1)

    with pytest.raises(sky.WorkerDied):
        last_words() >> pool
    # The end of the process may be told before what it has said.
    until(lambda: {event.text for event in events if isinstance(event, Output)} == {"first line", "unfinished"})


def test_a_kill_for_lack_of_memory_says_so(open_pool: Callable[..., sky.Compute], spot: Spot) -> None:
    """A real one: the kernel kills the process in a group of its own with a limit."""
    group = Path("/sys/fs/cgroup") / f"skyfab-test-{os.getpid()}"
    memory = Path("/sys/fs/cgroup/memory")
    if memory.is_dir():
        group, limit = memory / group.name, "memory.limit_in_bytes"
    else:
        limit = "memory.max"
    try:
        group.mkdir()
        (group / limit).write_text(str(200 << 20))
        swap = group / "memory.swap.max"
        if swap.exists():
            swap.write_text("0")
    except OSError as error:
        if group.is_dir():
            group.rmdir()
        pytest.skip(f"no memory limit can be set on this machine: {error}")
    try:
        pool = open_pool("local", count=1)

        @sky.function
        def greedy() -> int:
            leave(note, str(os.getpid()))
            wait_for(go)
            return len(b"x" * (1 << 30))

        note, go = spot / "pid", spot / "go"
        future = greedy() > pool
        ((_, pid),) = spot.read("pid").items()
        (group / "cgroup.procs").write_text(pid)
        spot.leave("go")
        with pytest.raises(sky.WorkerDied) as caught:
            future.result(170)
        assert caught.value.exitcode == -signal.SIGKILL
        assert "out of memory" in str(caught.value)
        assert caught.value.hint
        assert ok(1) >> pool == 1
    finally:
        until(lambda: not (group / "cgroup.procs").read_text(), "the end of what was in the group")
        group.rmdir()


# ---- broadcasts


def test_a_broadcast_error_has_every_failure_and_the_results_of_the_others(pool: sky.Compute) -> None:
    @sky.function
    def half() -> int:
        rank = sky.instance_info().rank
        if rank == 1:
            raise KeyError("the second")
        return rank

    with pytest.raises(sky.BroadcastError) as caught:
        half() @ pool
    error = caught.value
    assert isinstance(error, ExceptionGroup)
    assert error.results[0] == 0
    assert error.results[1] is error.exceptions[0]
    assert isinstance(error.exceptions[0], KeyError)
    assert error.exceptions[0].__cause__.rank == 1  # type: ignore[union-attr]
    assert error.exceptions[0].__cause__.host == pool.hosts[1].name  # type: ignore[union-attr]
    assert "half failed on 1 of 2 ranks" in str(error)
    assert "KeyError: 'the second'" in str(error)
    assert error.exit_code == 1


# ---- the errors themselves


def test_errors_survive_being_pickled() -> None:
    """They cross process boundaries: test runners, multiprocessing, a call within a call."""
    died = sky.WorkerDied("gone", exitcode=-9, host="node1", rank=3, hint="try less")
    found = pickle.loads(pickle.dumps(died))
    assert (type(found), str(found), found.exitcode) == (sky.WorkerDied, str(died), -9)
    assert str(died) == "node1[3]: gone\nhint: try less"
    group = sky.BroadcastError("2 of 2", [ValueError(1), died], [ValueError(1), died])
    found = pickle.loads(pickle.dumps(group))
    assert [type(e) for e in found.exceptions] == [ValueError, sky.WorkerDied]
    assert len(found.results) == 2
    pool = pickle.loads(pickle.dumps(sky.PoolError("all", [sky.Unreachable("x", host="a")])))
    assert pool.exceptions[0].host == "a"
