"""Errors: whatever a function does, the caller gets one clear, typed error at once, and the pool goes on working."""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from stage.remote import leave, wait_for
from stage.spot import Spot, until

import skyfab as sky
from skyfab.ui.events import Event, Output

np = pytest.importorskip("numpy")
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


class Picky(Exception):
    """One that cannot be made from its `args` alone, as many are."""

    def __init__(self, code: int, *, reason: str) -> None:
        super().__init__(f"{code}: {reason}")
        self.code = code
        self.reason = reason


class Several(ValueError, KeyError):
    pass


class Locked(Exception):
    """One that cannot be pickled at all."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


class Speechless(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


class Exits(Exception):
    """One that ends the program that unpickles it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return sys.exit, (7,)


class NotAnException(BaseException):
    pass


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


@pytest.mark.parametrize(
    "error",
    [
        ValueError("plain"),
        KeyError("key"),
        Several("two bases"),
        OSError(28, "No space left on device", "/some/file"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
        StopIteration(5),
        AssertionError(),
        ExceptionGroup("several", [ValueError(1), KeyError(2)]),
        sky.UsageError("ours", hint="too"),
        TimeoutError("the user's own"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_exceptions_of_all_kinds_arrive_as_themselves(pool: sky.Compute, error: Exception) -> None:
    with pytest.raises(type(error)) as caught:
        fail(error) >> pool
    assert type(caught.value) is type(error)
    assert str(caught.value) == str(error)
    assert vars(caught.value).keys() >= vars(error).keys()
    assert isinstance(caught.value.__cause__, sky.RemoteTraceback)
    assert "raise error" in caught.value.__cause__.text, "a line of a module"
    if isinstance(error, OSError):
        assert isinstance(caught.value, OSError)
        assert (caught.value.errno, caught.value.filename) == (error.errno, error.filename)


def test_an_exception_that_wants_arguments_arrives_as_itself(pool: sky.Compute) -> None:
    @sky.function
    def refuse() -> None:
        raise Picky(404, reason="not there")

    with pytest.raises(Picky) as caught:
        refuse() >> pool
    assert (caught.value.code, caught.value.reason, str(caught.value)) == (404, "not there", "404: not there")
    assert isinstance(caught.value.__cause__, sky.RemoteTraceback)


def test_an_exception_type_made_inside_the_function_arrives_by_name(pool: sky.Compute) -> None:
    @sky.function
    def odd() -> None:
        class Homemade(LookupError):
            pass

        raise Homemade("from there")

    with pytest.raises(LookupError, match="from there") as caught:
        odd() >> pool
    assert type(caught.value).__name__ == "Homemade"


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


def test_an_exception_that_cannot_even_be_printed_is_still_reported(pool: sky.Compute) -> None:
    with pytest.raises((Speechless, sky.RemoteError)) as caught:
        sky.function(lambda: fail.fn(Speechless("x")))() >> pool
    assert isinstance(caught.value.__cause__, sky.RemoteTraceback)


class Empty(Exception):
    """Is false, as one that has a list of what was found."""

    def __len__(self) -> int:
        return 0


@sky.function
def empty(number: int = 0) -> None:
    raise Empty


WAYS: dict[str, Callable[[sky.Compute], Any]] = {
    ">>": lambda pool: empty() >> pool,
    "future": lambda pool: (empty() > pool).result(),
    "map": lambda pool: pool.map(empty, [1, 2]),
    "gather": lambda pool: sky.gather(empty(), empty()) >> pool,
    "executor": lambda pool: pool.executor().submit(empty.fn).result(),
    "@": lambda pool: empty() @ pool,
}


@pytest.mark.parametrize("way", WAYS)
def test_an_exception_that_is_false_is_raised(pool: sky.Compute, way: str) -> None:
    with pytest.raises((Empty, sky.BroadcastError)):
        WAYS[way](pool)


class Vague(Exception):
    def __bool__(self) -> bool:
        raise RuntimeError("neither")


class Closed(Exception):
    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError("no attributes")


@pytest.mark.parametrize("kind", [Vague, Closed])
def test_an_exception_that_cannot_be_examined_is_an_error_of_its_call(pool: sky.Compute, kind: type[Exception]) -> None:
    @sky.function
    def raises() -> int:
        raise kind("odd")

    with pytest.raises(sky.RemoteError) as caught:
        raises() >> pool
    assert isinstance(caught.value, sky.RemoteError)
    assert caught.value.kind.endswith(kind.__name__)
    counter = pool.actor(Raiser)
    with pytest.raises(sky.RemoteError):
        counter.raises(kind)
    assert counter.count() == 1, "its state is kept"


class Raiser:
    def __init__(self) -> None:
        self.calls = 0

    def raises(self, kind: type[Exception]) -> None:
        self.calls += 1
        raise kind("odd")

    def count(self) -> int:
        return self.calls


def test_a_chain_of_exceptions_is_in_the_traceback(pool: sky.Compute) -> None:
    @sky.function
    def chain() -> None:
        try:
            {}["first"]
        except KeyError as error:
            raise ValueError("second") from error

    with pytest.raises(ValueError, match="second") as caught:
        chain() >> pool
    text = caught.value.__cause__.text  # type: ignore[union-attr]
    assert "KeyError: 'first'" in text
    assert "direct cause of the following" in text


@pytest.mark.skipif(sys.version_info < (3, 11), reason="notes came with Python 3.11")
def test_notes_travel(pool: sky.Compute) -> None:
    @sky.function
    def noted() -> None:
        error = ValueError("x")
        error.add_note("look here")
        raise error

    with pytest.raises(ValueError, match="x") as caught:
        noted() >> pool
    assert caught.value.__notes__ == ["look here"]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), GeneratorExit(), NotAnException("mine")], ids=repr)
def test_what_is_no_exception_on_the_host_is_one_here(pool: sky.Compute, error: BaseException) -> None:
    """A KeyboardInterrupt over there is not a person's Ctrl-C over here."""
    with pytest.raises(sky.RemoteError) as caught:
        sky.function(lambda: fail.fn(error))() >> pool  # type: ignore[arg-type]
    assert caught.value.kind.endswith(type(error).__name__)
    assert isinstance(caught.value.__cause__, sky.RemoteTraceback)


def test_an_exception_may_carry_a_large_array(lent_pool: sky.Compute) -> None:
    @sky.function
    def heavy() -> None:
        raise ValueError(np.arange(1_000_000))

    with pytest.raises(ValueError) as caught:
        heavy() >> lent_pool
    assert caught.value.args[0][-1] == 999_999


def test_a_future_has_the_exception(pool: sky.Compute) -> None:
    future = fail(KeyError("k")) > pool
    assert isinstance(future.exception(30), KeyError)
    with pytest.raises(KeyError):
        future.result()
    with pytest.raises(KeyError):
        (ok(1) & fail(KeyError("k")) & ok(2)) >> pool
    with pytest.raises(KeyError):
        list(sky.gather(ok(1), fail(KeyError("k")), stream=True) >> pool)


def test_too_deep_a_recursion_is_an_exception_like_any_other(pool: sky.Compute) -> None:
    @sky.function
    def down(n: int) -> int:
        return down.fn(n + 1)

    with pytest.raises(RecursionError):
        down(0) >> pool


def test_running_out_of_memory_that_python_notices_is_a_memory_error(open_pool: Callable[..., sky.Compute]) -> None:
    pool = open_pool("local", count=1)

    @sky.function
    def greedy() -> int:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
        return len(bytearray(8 << 30))

    with pytest.raises(MemoryError):
        greedy() >> pool
    assert ok(1) >> pool == 1


def test_a_missing_module_names_the_host_and_what_to_do(pool: sky.Compute) -> None:
    @sky.function
    def needs() -> None:
        import no_such_module_anywhere  # noqa: F401

    with pytest.raises(ModuleNotFoundError, match="no_such_module_anywhere") as caught:
        needs() >> pool
    shown = "".join(traceback.format_exception(caught.value))
    assert any(name in shown for name in names(pool))
    if sys.version_info >= (3, 11):
        assert "hint:" in shown


# ---- what cannot be pickled


UNPICKLABLE: dict[str, Callable[[], Any]] = {
    "lock": threading.Lock,
    "generator": lambda: (n for n in range(3)),
    "frame": sys._getframe,
    "socket": socket.socket,
    "inside": lambda: {"deep": [1, {"down": threading.Lock()}]},
}


@pytest.mark.parametrize("kind", UNPICKLABLE)
def test_an_argument_that_cannot_be_pickled_is_named(pool: sky.Compute, kind: str) -> None:
    value = UNPICKLABLE[kind]()

    @sky.function
    def take(*args: Any, **kwargs: Any) -> None:
        pass

    with pytest.raises(sky.NotPicklable) as positional:
        take(1, value, 3) >> pool
    with pytest.raises(sky.NotPicklable) as named:
        take(1, good=2, bad=value) >> pool
    if isinstance(value, socket.socket):
        value.close()
    assert "argument 2 of" in str(positional.value)
    assert type(value).__qualname__ in str(positional.value)
    assert "argument 'bad' of" in str(named.value)
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


def test_a_result_too_deep_to_pickle_is_an_error(pool: sky.Compute) -> None:
    @sky.function
    def deep() -> Any:
        found: Any = []
        for _ in range(100_000):
            found = [found]
        return found

    with pytest.raises((sky.NotPicklable, sky.WorkerDied)):  # undoing it may overflow the stack
        deep() >> pool


def test_an_exception_that_exits_when_it_is_unpickled_does_not_end_the_program(pool: sky.Compute) -> None:
    @sky.function
    def leave() -> None:
        raise Exits("why")

    with pytest.raises(sky.RemoteError, match="Exits: why"):
        leave() >> pool


# ---- the end of a process


def segfault() -> None:
    ctypes.string_at(0)


DEATHS: dict[str, tuple[Callable[[], Any], int, str]] = {
    "sys.exit(3)": (lambda: sys.exit(3), 3, "sys.exit(3)"),
    "sys.exit(text)": (lambda: sys.exit("out of coffee"), 1, "out of coffee"),
    "sys.exit()": (lambda: sys.exit(), 0, "sys.exit(0)"),
    "os._exit(7)": (lambda: os._exit(7), 7, "exit code 7"),
    "os._exit(0)": (lambda: os._exit(0), 0, "exit code 0"),
    "segfault": (segfault, -signal.SIGSEGV, "SIGSEGV"),
    "abort": (os.abort, -signal.SIGABRT, "SIGABRT"),
    "SIGKILL": (lambda: os.kill(os.getpid(), signal.SIGKILL), -signal.SIGKILL, "SIGKILL"),
    "SIGTERM": (lambda: os.kill(os.getpid(), signal.SIGTERM), -signal.SIGTERM, "SIGTERM"),
    "group": (lambda: os.killpg(0, signal.SIGKILL), -signal.SIGKILL, "SIGKILL"),
}


@pytest.mark.parametrize("how", DEATHS)
def test_the_end_of_the_process_is_a_typed_error_with_its_exit_code(pool: sky.Compute, how: str) -> None:
    die, code, said = DEATHS[how]

    @sky.function
    def ends() -> None:
        die()

    with pytest.raises(sky.WorkerDied) as caught:
        ends() >> pool
    assert caught.value.exitcode == code
    assert said in str(caught.value)
    assert "ends" in str(caught.value)
    assert caught.value.host in names(pool)


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


def test_the_first_failure_comes_first(pool: sky.Compute, spot: Spot) -> None:
    """Rank 1 fails; the test has seen that before it lets rank 0 fail."""

    @sky.function
    def both() -> None:
        rank = sky.instance_info().rank
        if rank == 0:
            leave(f"{folder}/ready")
            wait_for(f"{folder}/go")
        else:
            print("about to fail")
        raise ValueError(rank)

    folder = spot / ""

    def let_go(event: Event) -> None:
        if isinstance(event, Output) and event.rank == 1:
            failed.set()

    failed = threading.Event()
    unsubscribe = pool.events.subscribe(let_go)
    future = pool.submit(both(), on="all")
    spot.wait("ready")
    assert failed.wait(30)
    until(lambda: not pool.hosts[1].session.connection.replies.pending, "its failure to arrive")
    spot.leave("go")
    error = future.exception(30)
    unsubscribe()
    assert isinstance(error, sky.BroadcastError)
    assert [e.args for e in error.exceptions] == [(1,), (0,)]
    assert [e.args for e in error.results] == [(0,), (1,)]


def test_unpicklable_results_and_exceptions_of_ranks_are_told_apart(pool: sky.Compute) -> None:
    @sky.function
    def various() -> Any:
        if sky.instance_info().rank == 0:
            return threading.Lock()
        raise KeyboardInterrupt

    with pytest.raises(sky.BroadcastError) as caught:
        various() @ pool
    assert {type(e) for e in caught.value.exceptions} == {sky.NotPicklable, sky.RemoteError}


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


def test_exit_codes_are_those_of_the_command_line() -> None:
    assert sky.UsageError("x").exit_code == 2
    assert sky.InventoryError("x").exit_code == 2
    assert sky.Unreachable("x").exit_code == 3
    assert sky.HostLost("x").exit_code == 3
    assert sky.PoolError("x", [sky.Unreachable("x")]).exit_code == 3
    assert sky.WorkerDied("x").exit_code == 1
