"""Calls: what a user says with >>, @, >, &, gather, map and submit does what it says, over every transport."""

from __future__ import annotations

import enum
import functools
import math
import operator
import os
import pathlib
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, as_completed, wait
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
from stage.remote import leave, linger, wait_for
from stage.spot import Spot, until
from stage.threads import begin

import skyfab as sky
from skyfab.ui.events import CallEnded, Event

np = pytest.importorskip("numpy")
pytestmark = pytest.mark.lab

MB = 1 << 20
FACTOR = 3


@sky.function
def add(a: int, b: int = 10, *, c: int = 0) -> int:
    return a + b + c


@sky.function
def identity(value: Any) -> Any:
    return value


@sky.function
def where() -> sky.InstanceInfo:
    return sky.instance_info()


@sky.function
def process() -> tuple[str, int]:
    return sky.instance_info().hostname, os.getpid()


@sky.function
def stay(path: str) -> None:
    linger(path)


@sky.function
def wait_at(path: str, value: Any = None) -> Any:
    wait_for(path)
    return value


def square(x: int) -> int:
    return x * x


# ---- the operators and what they are made of


def test_every_rank_knows_its_place(pool: sky.Compute, transport: str) -> None:
    infos = where() @ pool
    for rank, info in enumerate(infos):
        assert (info.node, info.total_nodes) == (rank, 2)
        assert (info.rank, info.world_size) == (rank, 2)
        assert (info.local_rank, info.local_world_size) == (0, 1)
        assert info.is_head is (rank == 0)
        assert info.hostname == pool.hosts[rank].agent.hostname
        assert info.head_addr == infos[0].peers[0]
        assert info.head_port == infos[0].head_port > 0
        assert len(info.peers) == 2
        assert info.job_id == infos[0].job_id != ""
        assert (info.accelerators, info.total_accelerators) == (len(pool.hosts[rank].gpus), 2 * len(pool.hosts[0].gpus))
    if transport != "local":
        assert list(infos[0].peers) == [node.host.address for node in pool.hosts]


def test_a_solo_call_is_a_world_of_its_own(pool: sky.Compute) -> None:
    """It must not wait for others in a rendezvous, whatever the size of the pool."""
    info = where() >> pool
    assert (info.rank, info.world_size, info.local_rank, info.local_world_size) == (0, 1, 0, 1)
    assert info.is_head

    @sky.function
    def variables() -> list[str | None]:
        return [os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT")]

    assert variables() >> pool == [None, None, None]


def test_several_ranks_on_a_host_have_local_ranks(open_pool: Callable[..., sky.Compute]) -> None:
    pool = open_pool("openssh", count=2, ranks=2)
    infos = where() @ pool
    assert pool.world_size == 4
    assert [(i.node, i.rank, i.local_rank, i.local_world_size) for i in infos] == [
        (0, 0, 0, 2),
        (0, 1, 1, 2),
        (1, 2, 0, 2),
        (1, 3, 1, 2),
    ]
    assert len(set(process() @ pool)) == 4


def test_submit_returns_a_future_at_once(pool: sky.Compute, spot: Spot) -> None:
    future = wait_at(spot / "go", 7) > pool
    assert isinstance(future, Future)
    assert not future.done()
    spot.leave("go")
    assert future.result(170) == 7
    assert future.done()


def test_ampersand_runs_calls_side_by_side_and_keeps_their_order(pool: sky.Compute, spot: Spot) -> None:
    """The first ends only after the second has ended: one after the other would never end."""

    def ended(event: Event) -> None:
        if isinstance(event, CallEnded) and event.function == "add":
            spot.leave("go")

    unsubscribe = pool.events.subscribe(ended)
    assert (wait_at(spot / "go", "first") & add(1)) >> pool == ("first", 11)
    unsubscribe()


def test_exceptions_are_results_where_they_are_to_be_returned(pool: sky.Compute) -> None:
    divide = sky.function(lambda number: 6 // number)
    one, wrong, three = sky.gather(divide(1), divide(0), divide(2), errors="return") >> pool
    assert (one, type(wrong), three) == (6, ZeroDivisionError, 3)
    streamed = sky.gather(divide(0), divide(3), stream=True, errors="return") >> pool
    assert [*map(str, streamed)] == ["integer division or modulo by zero", "2"]
    found = pool.map(divide, [2, 0, 3], errors="return")
    assert (found[0], type(found[1]), found[2]) == (3, ZeroDivisionError, 2)
    assert isinstance(found[1].__cause__, sky.RemoteTraceback)
    locked = threading.Lock()
    assert [*map(type, pool.map(divide, [2, locked, 3, locked], errors="return"))] == [int, sky.NotPicklable] * 2
    assert [*map(type, pool.gather(sky.gather(divide(2), divide(locked), errors="return")))] == [int, sky.NotPicklable]
    with pytest.raises(sky.NotPicklable) as refused:
        pool.map(divide, [2, 3, locked, 1])
    assert vars(refused.value)["item_index"] == 2
    for wrong_word in (pool.map, lambda *_, errors: sky.gather(errors=errors)):
        with pytest.raises(sky.UsageError, match="invalid errors='ignore': expected 'raise' or 'return'"):
            wrong_word(divide, [1], errors="ignore")  # type: ignore[operator]


def test_a_stream_yields_results_as_they_come(pool: sky.Compute, spot: Spot) -> None:
    """The slow call is let go only after the fast one's result is in our hands."""
    stream = sky.gather(wait_at(spot / "go", "slow"), identity("fast"), stream=True, ordered=False) >> pool
    assert next(stream) == "fast"
    spot.leave("go")
    assert list(stream) == ["slow"]


def test_leaving_a_stream_stops_what_still_runs(
    pool: sky.Compute, spot: Spot, runs_on: Callable[[str, int], bool]
) -> None:
    stream = sky.gather(identity(1), stay(spot / "pid"), stream=True) >> pool
    assert next(stream) == 1
    ((machine, pid),) = spot.read("pid").items()
    stream.close()
    until(lambda: not runs_on(machine, int(pid)), "the end of the abandoned call")
    assert add(1) >> pool == 11


# ---- map


def test_nothing_waits_behind_a_long_call_while_a_host_is_free(pool: sky.Compute, spot: Spot) -> None:
    """The first item blocks its host until all the others are through: none of them may be stuck behind it."""

    def work(item: int) -> int:
        if item == 0:
            wait_for(f"{folder}/go")
        else:
            leave(f"{folder}/{item}")
        return item

    folder = spot / ""
    assert pool.map(square, range(100))  # short calls: the next ones are handed out ahead
    found = begin(lambda: pool.map(work, range(41)))
    others = {str(item) for item in range(1, 41)}
    until(lambda: spot.names() >= others, "all items but the one that blocks")
    spot.leave("go")
    assert found.result(170) == list(range(41))


def test_map_takes_several_iterables_and_any_callable(pool: sky.Compute) -> None:
    assert pool.map(add, [1, 2], [3, 4]) == [4, 6]
    assert pool.map(pow, [2, 3], [4, 2]) == [16, 9]
    assert pool.map(lambda x: x + FACTOR, iter([1, 2])) == [4, 5]
    assert pool.map(str.upper, ["a", "b"]) == ["A", "B"]
    assert pool.map(functools.partial(pow, 2), range(4)) == [1, 2, 4, 8]
    assert pool.map("x-y".split, ["-"]) == [["x", "y"]]
    assert pool.map(Adder(5), [1]) == [6]
    assert pool.map(Adder(5).twice, [1]) == [7]
    with pytest.raises(TypeError, match=r"map\(\) takes items too: compute\.map\(add, items\)"):
        pool.map(add)
    with (
        pool.actor(Adder, 5) as adder,
        pytest.raises(Exception, match=r"to map a method of an actor: \[model\.f\.sub"),
    ):
        pool.map(adder.twice, [1])
    assert pool.map(Adder, [1]) == [Adder(1)]
    assert pool.map(square, []) == []


@dataclass
class Adder:
    n: int

    def __call__(self, x: int) -> int:
        return x + self.n

    def twice(self, x: int) -> int:
        return 2 * x + self.n


# ---- futures


def test_cancelling_a_running_call_ends_its_process_on_the_host(
    pool: sky.Compute, spot: Spot, runs_on: Callable[[str, int], bool]
) -> None:
    future = stay(spot / "pid") > pool
    ((machine, pid),) = spot.read("pid").items()
    assert runs_on(machine, int(pid))
    assert future.cancel()
    assert future.cancelled()
    with pytest.raises(CancelledError):
        future.result(170)
    until(lambda: not runs_on(machine, int(pid)), "the end of the cancelled call")
    assert [add(n) >> pool for n in range(4)] == [10, 11, 12, 13]


def test_cancelling_a_queued_call_means_it_never_begins(open_pool: Callable[..., sky.Compute], spot: Spot) -> None:
    pool = open_pool("local", count=1)
    running = wait_at(spot / "go", "ran") > pool
    queued = [pool.submit(sky.function(leave)(spot / f"queued{n}")) for n in range(5)]
    assert all(future.cancel() for future in queued)
    spot.leave("go")
    assert running.result(170) == "ran"
    assert add(1) >> pool == 11
    assert not [name for name in spot.names() if name.startswith("queued")]


@pytest.mark.parametrize("end", ["cancel", "timeout", "death"])
def test_the_calls_behind_one_that_is_ended_run_all_the_same(
    open_pool: Callable[..., sky.Compute], spot: Spot, end: str
) -> None:
    """They may have been handed ahead to the process that had to go."""
    pool = open_pool("local", count=1)
    assert [add(n) >> pool for n in range(50)]  # short calls: the queue hands them out ahead
    first = sky.function(timeout=3)(linger) if end == "timeout" else sky.function(linger)
    running = first(spot / "pid") > pool
    behind = [add(n) > pool for n in range(50)]
    ((_, pid),) = spot.read("pid").items()
    if end == "cancel":
        assert running.cancel()
    elif end == "death":
        os.kill(int(pid), signal.SIGKILL)
    assert [future.result(170) for future in behind] == [n + 10 for n in range(50)]
    expected = {"cancel": CancelledError, "timeout": sky.CallTimeout, "death": sky.WorkerDied}[end]
    with pytest.raises(expected):
        running.result(170)


def test_a_function_has_a_timeout_after_which_it_is_stopped(
    pool: sky.Compute, spot: Spot, runs_on: Callable[[str, int], bool]
) -> None:
    slow = sky.function(timeout=3)(linger)  # on a busy machine it takes seconds to begin
    with pytest.raises(sky.CallTimeout) as caught:
        slow(spot / "pid") >> pool
    assert isinstance(caught.value, TimeoutError)
    assert "took longer than its timeout of 3 s" in str(caught.value)
    assert caught.value.host in {node.name for node in pool.hosts}
    ((machine, pid),) = spot.read("pid").items()
    until(lambda: not runs_on(machine, int(pid)), "the end of the call that took too long")
    assert sky.function(timeout=60)(square)(3) >> pool == 9


def test_the_time_in_the_queue_does_not_count(open_pool: Callable[..., sky.Compute], spot: Spot) -> None:
    """The first call holds the only slot for longer than the second may take."""
    pool = open_pool("local", count=1)

    @sky.function(timeout=3)
    def brief() -> str:
        return "done"

    first = sky.function(time.sleep)(3.5) > pool
    second = brief() > pool
    assert second.result(170) == "done"
    assert first.result(170) is None


def test_a_pool_has_a_timeout_for_functions_that_have_none(open_pool: Callable[..., sky.Compute]) -> None:
    pool = open_pool("local", count=1, timeout=0.3)
    with pytest.raises(sky.CallTimeout):
        sky.function(time.sleep)(600) >> pool
    assert sky.function(timeout=60)(time.sleep)(0.6) >> pool is None


def test_futures_work_with_the_standard_library(pool: sky.Compute, spot: Spot) -> None:
    futures = [add(n) > pool for n in range(10)]
    done, open_ = wait(futures, timeout=170)
    assert len(done) == 10
    assert not open_
    assert sorted(future.result() for future in as_completed([add(n) > pool for n in range(10)])) == list(range(10, 20))
    called: list[Any] = []
    future = add(5) > pool
    future.add_done_callback(called.append)
    until(lambda: called == [future], "the callback, though nobody waits for the result")


# ---- data


class Point(NamedTuple):
    x: int
    y: int


class Colour(enum.Enum):
    RED = "red"


@dataclass
class Tree:
    value: Any
    children: list[Tree] = field(default_factory=list)


DATA: list[Any] = [
    None,
    -(2**200),
    math.inf,
    "ünïcode \U0001f600 \0 \x1b[31m",
    "\ud800",
    b"\x00\xff" * 1000,
    bytearray(b"abc"),
    {"a": [1, {"b": (2, 3)}], 4: None, (5, 6): {7}},
    Point(1, 2),
    Colour.RED,
    Tree(1, [Tree(2), Tree(3, [Tree(4)])]),
    ValueError("an exception is a value too"),
    len,
    "x" * (3 * MB),
]


def test_data_of_all_kinds_arrives_and_comes_back_the_same(pool: sky.Compute) -> None:
    for value, found in zip(DATA, identity(DATA) >> pool, strict=True):
        assert type(found) is type(value)
        if not isinstance(value, Exception):
            assert found == value


@pytest.mark.parametrize("size", [100, 8 * 1024, 5 * MB], ids=["small", "middle", "large"])
def test_arrays_can_be_written_to_on_both_sides(lent_pool: sky.Compute, size: int) -> None:
    @sky.function
    def change(array: np.ndarray) -> np.ndarray:
        array[0] = 7
        return array

    sent = np.zeros(size, dtype=np.uint8)
    for _ in range(3):  # inline, into the store, from the store
        found = lent_pool.submit(change(sent), on="head").result()
        assert found[0] == 7
        assert found.flags.writeable
        found[1] = 8
        assert sent[:2].tolist() == [0, 0]


def moved(pool: sky.Compute) -> int:
    """Bytes sent to the pool's first host so far."""
    return int(pool.hosts[0].session.moved[0])


def test_a_changed_argument_is_sent_again_whatever_it_looks_like_from_afar(lent_pool: sky.Compute) -> None:
    """Only one byte differs, where a sample of the content would not look."""
    sent = np.zeros(4 * MB, dtype=np.uint8)
    total = sky.function(lambda array: int(array.sum()))
    for count in range(5):
        assert lent_pool.submit(total(sent), on="head").result() == count
        sent[100 + 1000 * count] = 1


def test_a_function_is_sent_once(lent_pool: sky.Compute) -> None:
    """Even one that carries a large array in its closure."""
    weights = np.random.default_rng().integers(0, 255, 5 * MB, dtype=np.uint8)

    @sky.function
    def use(n: int) -> int:
        return int(weights[n])

    assert lent_pool.submit(use(3), on="head").result() == weights[3]
    before = moved(lent_pool)
    assert [lent_pool.submit(use(n), on="head").result() for n in range(5)] == weights[:5].tolist()
    assert moved(lent_pool) - before < 100_000


def test_deeply_nested_data_is_an_error_that_names_the_argument(pool: sky.Compute) -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(sky.NotPicklable, match="argument 1 of identity"):
        identity(deep) >> pool
    while deep:  # its destruction in one go would be as deep
        deep = deep[0]
    assert add(1) >> pool == 11


# ---- functions


def test_a_call_is_a_value_that_has_not_run() -> None:
    call = add(1)
    assert repr(call) == "<call of add; to run it: call >> compute>"
    assert repr(add) == "<sky.function add>"
    assert add.fn(1) == 11
    with pytest.raises(TypeError, match="has not run: write add"):
        bool(call)
    with pytest.raises(sky.UsageError, match=r"(?s)not a pool: 'node1'.*with sky.Compute\('node1'\) as compute"):
        call >> "node1"  # type: ignore[operator]
    with pytest.raises(sky.UsageError, match="not a pool: None"):
        (call & call) >> None
    with pytest.raises(TypeError, match="takes calls"):
        sky.gather(1)  # type: ignore[arg-type]


@pytest.mark.parametrize("use", [bool, list, lambda call: 1 if call else 2, lambda call: sum(call)])
def test_a_call_in_place_of_its_result_says_how_to_run_it(use: Callable[[Any], object]) -> None:
    with pytest.raises(TypeError, match=r"^add\(…\) has not run: write add\(…\) >> compute$"):
        use(add(1))


def test_a_pool_on_the_left_of_an_operator() -> None:
    pool = sky.Compute("local", ui="none")
    for run in (operator.rshift, operator.matmul, operator.gt, operator.and_):
        with pytest.raises(sky.UsageError, match=r"the pool is on the left of add\(…\): write add\(…\) >> compute"):
            run(pool, add(1))
        with pytest.raises(sky.UsageError, match="the pool is on the left of the calls: write calls >> compute"):
            run(pool, add(1) & add(2))
        with pytest.raises(sky.UsageError, match="3 is a value, not a call"):
            run(pool, 3)


def test_only_calls_can_be_run(pool: sky.Compute) -> None:
    for wrong, words in (
        (add, r"add is a function, not a call: write add\(…\)"),
        (len, "len is a plain function: decorate it with @sky.function"),
        (5, "5 is a value, not a call: is the function that returned it decorated"),
        (None, "None is a value"),
        ("add(1)", r"'add\(1\)' is a value"),
    ):
        for send in (pool.run, pool.submit, pool.broadcast):
            with pytest.raises(sky.UsageError, match=words):
                send(wrong)  # type: ignore[operator]


def test_two_names_of_one_machine_are_two_hosts_of_the_pool(home: pathlib.Path) -> None:
    """They share a cache folder there, and must not share an agent."""
    hosts = [sky.Host(name=name, transport="local") for name in ("a", "b")]
    with sky.Compute(hosts, ui="none") as pool:
        assert [info.rank for info in where() @ pool] == [0, 1]
        assert [pool.submit(where(), on=name).result(170).node for name in ("a", "b")] == [0, 1]


def test_defaults_keywords_and_stars_are_passed_on(pool: sky.Compute) -> None:
    @sky.function
    def everything(a: Any, /, b: Any = 2, *args: Any, c: Any, d: Any = (4,), **rest: Any) -> Any:
        return a, b, args, c, d, rest

    assert everything(1, c=3) >> pool == (1, 2, (), 3, (4,), {})
    assert everything(1, 5, 6, 7, c=8, d=9, self=10, worker=11, timeout=12) >> pool == (
        1,
        5,
        (6, 7),
        8,
        9,
        {"self": 10, "worker": 11, "timeout": 12},
    )


def test_a_function_may_start_processes_of_its_own(pool: sky.Compute) -> None:
    @sky.function
    def spread(method: str) -> list[int]:
        import multiprocessing

        with multiprocessing.get_context(method).Pool(2) as workers:
            return workers.map(square, range(5))

    for method in ("fork", "spawn", "forkserver"):
        assert spread(method) >> pool == [0, 1, 4, 9, 16]


def test_variables_come_from_host_image_and_pool_the_nearest_last(open_pool: Callable[..., sky.Compute]) -> None:
    host = {"env": {"A": "host", "B": "host", "C": "host"}}
    image = sky.Image(env={"B": "image", "C": "image", "D": "$HOME 'quotes' \"both\" \\ \n ü"})
    pool = open_pool("openssh", count=1, host=host, image=image, env={"C": "pool", "EMPTY": ""})
    look = sky.function(lambda: [os.environ.get(name) for name in ("A", "B", "C", "D", "EMPTY")])
    expected = ["host", "image", "pool", "$HOME 'quotes' \"both\" \\ \n ü", ""]
    assert look() >> pool == expected
    assert look() @ pool == [expected]


@sky.function
def misses(module: str) -> None:
    raise ModuleNotFoundError(f"No module named {module!r}", name=module)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have notes from Python 3.11 on")
@pytest.mark.parametrize(
    ("module", "package"),
    [
        ("cv2", "opencv-python"),
        ("yaml.nodes", "pyyaml"),
        ("hydra", "hydra-core"),
        ("pkg_resources", "setuptools<82"),
        ("no_such", "no_such"),
    ],
)
def test_the_hint_for_a_missing_module_names_the_package(pool: sky.Compute, module: str, package: str) -> None:
    with pytest.raises(ModuleNotFoundError) as caught:
        misses(module) >> pool
    (note,) = caught.value.__notes__  # type: ignore[attr-defined]
    assert f"Image(pip=['{package}']) installs it" in note.replace("PyYAML", "pyyaml")


def test_options_of_functions_are_checked() -> None:
    wrong: list[dict[str, Any]] = [
        *({"timeout": value} for value in ("60", True, 0, float("nan"))),
        *({"stall": 0}, {"retries": -1}, {"retries": 1.0}),
    ]
    for options in wrong:
        ((name, value),) = options.items()
        with pytest.raises(sky.UsageError, match=re.escape(f"invalid {name}={value!r}: expected ")):
            sky.function(**options)(leave)


@sky.function
def shorten_what_is_sent() -> int:
    import builtins

    builtins.len = lambda _: 3  # type: ignore[assignment]
    return 5


def test_a_process_that_sends_invalid_replies_is_ended_alone() -> None:
    with sky.Compute("local", ui="none") as compute:
        with pytest.raises(sky.WorkerDied):
            shorten_what_is_sent() >> compute
        assert (add(1, 2) >> compute) == 3
