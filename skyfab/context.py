"""What a user's function can query and use while it runs: its rank in the pool, its share of the data, its output."""

from __future__ import annotations

import functools
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from types import AsyncGeneratorType, CoroutineType
from typing import Any, Literal, NamedTuple, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

_YIELDS = 0x220
"""Flags of the code of generators and asynchronous generators; importing `inspect` for them is slow."""


class InstanceInfo(NamedTuple):
    """The rank of a process and its position in the pool. Outside a call: the only rank of the only node.

    `node` and `rank` are its numbers among `total_nodes` and `world_size`, `local_rank` is that among the
    `local_world_size` of its host. The other hosts reach the head at `head_addr` and `head_port`. `hostname` is this
    host's, `accelerators` its GPUs, of `total_accelerators`; `peers` has the addresses of all nodes, in order. `job_id`
    names the call, `attempt` counts how often it was started before: see ``@sky.function(retries=…)``.
    """

    node: int = 0
    total_nodes: int = 1
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    head_addr: str = "127.0.0.1"
    head_port: int = 0
    hostname: str = ""
    accelerators: int = 0
    total_accelerators: int = 0
    peers: tuple[str, ...] = ()
    job_id: str = ""
    attempt: int = 0

    @property
    def is_head(self) -> bool:
        """True for the first rank of the gang; a solo call is its own head."""
        return self.rank == 0


_current: InstanceInfo | None = None


def enter(info: InstanceInfo) -> None:
    """Sets the rank of this process. Called once, by the worker itself."""
    global _current
    _current = info


def in_a_rank() -> bool:
    """Whether this process is a worker, started by a pool to run calls."""
    return _current is not None


def awaited(result: Any) -> Any:
    """Returns the result of a function; the coroutine of an ``async def`` is first run, in its own event loop."""
    if type(result) is not CoroutineType:
        return result
    import asyncio

    return asyncio.run(result)


def yields(function: Any) -> bool:
    """Whether a call of it returns a generator, or an asynchronous one."""
    function = getattr(function, "func", function)  # that of functools.partial
    kind = type(function)
    code = getattr(function, "__code__", None) or getattr(vars(kind).get("__call__"), "__code__", None)
    return code is not None and bool(code.co_flags & _YIELDS)


def iterated(values: Any) -> Iterator[Any]:
    """The values of a generator; an asynchronous one runs in an event loop of its own."""
    if type(values) is not AsyncGeneratorType:
        return iter(values)
    import asyncio

    def run() -> Iterator[Any]:
        with closing(asyncio.new_event_loop()) as loop:
            yield from from_async(values, loop.run_until_complete)

    return run()


def from_async(values: Any, run: Callable[[Any], Any]) -> Iterator[Any]:
    """The values of an asynchronous generator; `run` waits for a coroutine of it."""
    try:
        while True:
            try:
                value = run(values.__anext__())
            except StopAsyncIteration:
                return
            yield value
    finally:
        run(values.aclose())


class Client:
    """What a worker can ask of the program that has opened the pool. Replaced by the worker itself."""

    def argument(self, number: int) -> Iterator[Any]:
        raise RuntimeError("a stream can be read only in the process of its call")

    def ask(self, request: tuple[Any, ...]) -> Any:
        raise RuntimeError("an actor can be called only in a process of its pool")


# Set once, by the worker itself.
client = Client()
"""How the program is asked."""
worker_folder = ""
"""The pool's folder for its processes, which is deleted with the pool."""
worker_stores: Sequence[str] = ()
"""The folders of the host's store."""
worker_run = ""
"""The folder of the detached run that this worker belongs to."""


def argument(number: int) -> Iterator[Any]:
    """An argument that is a stream, of the call that is being unpickled: pickles of calls refer to this function."""
    return client.argument(number)


def ask_client(request: tuple[Any, ...]) -> Any:
    """Asks the program that has opened the pool to call an actor: whether it returned, and the value or exception."""
    return client.ask(request)


def own_folder() -> str:
    """A folder for files that must be deleted with the pool. Functions start in another one, the working folder."""
    return worker_folder


def own_stores() -> Sequence[str]:
    """The folders of the host's store: for what is deleted with the pool, and for what is kept."""
    return worker_stores


def run_folder() -> str:
    """The folder of this host's part of a detached run; empty in any other call."""
    return worker_run


_listener = -1


def hold_listener(fd: int) -> None:
    """Stores the socket of the head's process, which already listens at `head_port`."""
    global _listener
    _listener = fd


def take_listener() -> int:
    """Returns the socket for the rendezvous and passes its ownership to the caller; -1 if there is none."""
    global _listener
    fd, _listener = _listener, -1
    return fd


def close_listener() -> None:
    """Closes the socket if it was not taken, so that the function itself can use the port."""
    fd = take_listener()
    if fd >= 0:
        os.close(fd)


JOINED, HOLDER = "SKYFAB_DEVICE", "SKYFAB_HOLDER"
"""Variables of a worker that joins a device that stays: the id of its run, and the program that uses it."""
GPU_SHARE = "SKYFAB_GPU_SHARE"
"""Variable of a worker that shares its GPU with others: which share of its memory it may use."""
STACKS = getattr(signal, "SIGRTMIN", signal.SIGUSR2 - 7) + 7
"""The signal on which a worker writes its stacks."""


def offer_stacks(worker: str, rank: int) -> None:
    """Registers a signal that dumps this process's stacks, even when it hangs in C code: see `host.ask.stacks`."""
    import faulthandler

    folder = os.path.join(worker_folder, "../stacks")  # noqa: PTH118  # importing pathlib is slow on a cold host
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)  # noqa: PTH103
        file = os.open(f"{folder}/{worker}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
        faulthandler.register(STACKS, file, all_threads=True)
        os.write(file, f"{os.getpid()} {STACKS} {rank} {worker}\n".encode())  # last: its readers may send the signal
    except (OSError, ValueError):
        pass  # not essential: a full disk must not keep the worker from starting


def instance_info() -> InstanceInfo:
    """Where this code runs: node, rank, world size, peers.

    >>> instance_info().world_size
    1
    """
    return _current or InstanceInfo(hostname=os.uname().nodename)


# ---- data


def shard(*data: Any, shuffle: bool = False, seed: int = 0, drop_last: bool = False) -> Any:
    """This rank's share of each of `data`, in the argument's own type.

    Takes every `world_size`-th element, starting at `rank`; with `drop_last` a contiguous block, equally long on all
    ranks. Several arguments stay aligned and must be equally long. With `shuffle` all ranks use the same order,
    generated from `seed`. Outside a call the input is returned unchanged.

    Returns one value for one argument, else a tuple.
    """
    if not data:
        raise TypeError("shard() needs at least one argument")
    for column in data:
        if isinstance(column, Mapping) or not hasattr(column, "__getitem__"):
            kind = type(column).__name__
            raise TypeError(f"shard() takes sequences, arrays, tensors and data frames, not {kind}")
    lengths = {len(column) for column in data}
    if len(lengths) > 1:
        sizes = ", ".join(str(len(column)) for column in data)
        raise ValueError(f"shard() keeps its arguments aligned: they must be equally long, not {sizes}")
    if _current is not None:
        indices = _share(lengths.pop(), instance_info(), shuffle=shuffle, seed=seed, drop_last=drop_last)
        data = tuple(_take(column, indices) for column in data)
    return data[0] if len(data) == 1 else data


def _share(length: int, info: InstanceInfo, *, shuffle: bool, seed: int, drop_last: bool) -> range | list[int]:
    if drop_last:
        size = length // info.world_size
        mine = range(info.rank * size, (info.rank + 1) * size)
    else:
        mine = range(info.rank, length, info.world_size)
    if not shuffle:
        return mine
    import random

    order = list(range(length))
    random.Random(seed).shuffle(order)
    return [order[i] for i in mine]


def _take(column: Any, indices: range | list[int]) -> Any:
    column = getattr(column, "iloc", column)  # pandas: rows by their position, not by their label
    if isinstance(column, deque):
        return deque([column[i] for i in indices], column.maxlen)
    if isinstance(indices, range):
        return column[indices.start : indices.stop : indices.step]
    if isinstance(column, (str, bytes)):
        return type(column)().join(column[i : i + 1] for i in indices)  # type: ignore[misc]
    if isinstance(column, (tuple, bytearray)):
        return type(column)(column[i] for i in indices)
    if hasattr(column, "typecode"):  # array.array
        return type(column)(column.typecode, [column[i] for i in indices])
    if isinstance(column, Sequence):
        return [column[i] for i in indices]
    return column[indices]  # numpy arrays and tensors take a list of positions


# ---- output

Only = Literal["head"] | Callable[[InstanceInfo], bool]


def stdout(*, only: Only) -> Callable[[F], F]:
    """Shows the function's stdout on some ranks only: on the head (``"head"``), or where `only(info)` is true.

    Goes above or below ``@sky.function``. Output of C code and of child processes is covered too.
    """
    return _limited((1,), only)


def stderr(*, only: Only) -> Callable[[F], F]:
    """The same as `stdout`, for stderr; `only` has the same meaning."""
    return _limited((2,), only)


def silent(function: F) -> F:
    """Hides all output of `function`, on every rank."""
    return _limited((1, 2), lambda info: False)(function)


def _limited(fds: tuple[int, ...], only: Only) -> Callable[[F], F]:
    if only != "head" and not callable(only):
        raise ValueError(f'invalid only={only!r}: expected "head", or a function that takes an InstanceInfo')

    import inspect  # slow to import, and most workers do not need it

    def decorate(function: F) -> F:
        rewrap: Callable[[Any], F] | None = getattr(function, "rewrap", None)
        if rewrap is not None:  # a @sky.function: the limit is applied to the function inside it
            return rewrap(decorate)

        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def limited(*args: Any, **kwargs: Any) -> Any:
                with nullcontext() if may_speak(only) else muted(fds):
                    return await function(*args, **kwargs)

        elif yields(function):

            @functools.wraps(function)
            def limited(*args: Any, **kwargs: Any) -> Any:
                with nullcontext() if may_speak(only) else muted(fds):
                    yield from iterated(function(*args, **kwargs))

        else:

            @functools.wraps(function)
            def limited(*args: Any, **kwargs: Any) -> Any:
                with nullcontext() if may_speak(only) else muted(fds):
                    return function(*args, **kwargs)

        return limited  # type: ignore[return-value]

    return decorate


def may_speak(only: Only) -> bool:
    """Whether this rank's output is shown.

    Must be looked up by name on the host: a function that is pickled by value has copies of its other globals.
    """
    if _current is None:
        return True
    return only(_current) if callable(only) else _current.is_head


@contextmanager
def muted(fds: tuple[int, ...]) -> Iterator[None]:
    """Redirects these file descriptors to /dev/null for the duration of the block."""
    _flush()
    saved = [(fd, os.dup(fd)) for fd in fds]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        for fd in fds:
            os.dup2(nowhere, fd)
        yield
    finally:
        _flush()
        for fd, copy in saved:
            os.dup2(copy, fd)
            os.close(copy)
        os.close(nowhere)


def _flush() -> None:
    """Flushes Python's buffers and those of C code."""
    import ctypes

    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    ctypes.CDLL(None).fflush(None)


def flush_files() -> None:
    """Flushes every open file. When the garbage collector closes one that belongs to a cycle, text can be lost."""
    import gc
    import io

    for one in gc.get_objects():
        if issubclass(type(one), (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)):
            try:
                one.flush()
            except Exception:  # it is closed, or its disk is full, of which Python would only warn
                pass
