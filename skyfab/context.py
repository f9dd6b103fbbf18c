"""What a function sees wherever it runs: its place in the pool, its share of the data, its voice."""

from __future__ import annotations

import functools
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import CoroutineType
from typing import Any, Literal, NamedTuple, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


class InstanceInfo(NamedTuple):
    """The place of one rank. Outside a call: the only rank of the only node."""

    node: int = 0
    """The host's number in the pool."""
    total_nodes: int = 1
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    head_addr: str = "127.0.0.1"
    """Where the other hosts reach the head."""
    head_port: int = 0
    hostname: str = ""
    accelerators: int = 0
    """GPUs of this host."""
    total_accelerators: int = 0
    peers: tuple[str, ...] = ()
    """The addresses of all nodes, in order."""
    job_id: str = ""
    attempt: int = 0
    """How often this call has been started before: see ``@sky.function(retries=…)``."""

    @property
    def is_head(self) -> bool:
        """The first rank of the gang; a solo call is its own head."""
        return self.rank == 0


_current: InstanceInfo | None = None


def enter(info: InstanceInfo) -> None:
    """This process is that rank, from now on. Called once, by the rank itself."""
    global _current
    _current = info


def in_a_rank() -> bool:
    """This process is one that a pool has started for its calls."""
    return _current is not None


def awaited(result: Any) -> Any:
    """What a function returns; what an ``async def`` returns is run to its end, in an event loop of its own."""
    if type(result) is not CoroutineType:
        return result
    import asyncio

    return asyncio.run(result)


_folder = ""


def hold_folder(path: str) -> None:
    """The pool's own folder for its processes, which goes with it. Called once, by the rank itself."""
    global _folder
    _folder = path


def own_folder() -> str:
    """Where this process may keep what must go with its pool; functions start elsewhere, in a working folder."""
    return _folder


_listener = -1


def hold_listener(fd: int) -> None:
    """The head's process has this socket, which listens at `head_port` already."""
    global _listener
    _listener = fd


def take_listener() -> int:
    """The socket for the rendezvous, now the caller's; -1 where there is none."""
    global _listener
    fd, _listener = _listener, -1
    return fd


def close_listener() -> None:
    """Nobody has taken it: its port is free for the function itself."""
    fd = take_listener()
    if fd >= 0:
        os.close(fd)


STACKS = getattr(signal, "SIGRTMIN", signal.SIGUSR2 - 7) + 7
"""The signal on which a rank writes its stacks."""


def offer_stacks(worker: str, rank: int) -> None:
    """Whoever may send us a signal finds out where we are, whatever we are stuck in: see `skyfab.pool.stacks`."""
    import faulthandler

    folder = os.path.join(_folder, "../stacks")  # noqa: PTH118  # no time for pathlib on a cold host
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)  # noqa: PTH103
        file = os.open(f"{folder}/{worker}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
        faulthandler.register(STACKS, file, all_threads=True)
        os.write(file, f"{os.getpid()} {STACKS} {rank} {worker}\n".encode())  # last: who finds it may send the signal
    except (OSError, ValueError):
        pass  # a full disk is no reason not to work


def instance_info() -> InstanceInfo:
    """Where this code runs: node, rank, world size, peers.

    >>> instance_info().world_size
    1
    """
    return _current or InstanceInfo(hostname=os.uname().nodename)


# ---- data


def shard(*data: Any, shuffle: bool = False, seed: int = 0, drop_last: bool = False) -> Any:
    """This rank's share of each argument, in the type it came in.

    Every `world_size`-th element from `rank` on; with `drop_last` a contiguous block, equally long on all ranks.
    Several arguments stay aligned and must be equally long. With `shuffle` all ranks use the same
    order, drawn from `seed`. Outside a call the input is returned as it is.

    Returns one value for one argument, else a tuple.
    """
    if not data:
        raise TypeError("shard() needs at least one argument")
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
    if isinstance(indices, range) and hasattr(column, "__getitem__") and not isinstance(column, dict):
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
    """What the function writes to stdout is shown only for the head, or where the predicate holds.

    Goes above or below ``@sky.function``. Text from C code and child processes is covered too.
    """
    return _limited((1,), only)


def stderr(*, only: Only) -> Callable[[F], F]:
    """As `stdout`, for stderr."""
    return _limited((2,), only)


def silent(function: F) -> F:
    """Nothing that the function writes is shown, on any rank."""
    return _limited((1, 2), lambda info: False)(function)


def _limited(fds: tuple[int, ...], only: Only) -> Callable[[F], F]:
    if only != "head" and not callable(only):
        raise ValueError(f'only={only!r}: "head", or a function of InstanceInfo that says where to speak')

    import inspect  # slow to load, and most ranks have no use for it

    def decorate(function: F) -> F:
        rewrap: Callable[[Any], F] | None = getattr(function, "rewrap", None)
        if rewrap is not None:  # a @sky.function: the limit goes inside
            return rewrap(decorate)

        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def limited(*args: Any, **kwargs: Any) -> Any:
                if may_speak(only):
                    return await function(*args, **kwargs)
                with muted(fds):
                    return await function(*args, **kwargs)

        else:

            @functools.wraps(function)
            def limited(*args: Any, **kwargs: Any) -> Any:
                if may_speak(only):
                    return function(*args, **kwargs)
                with muted(fds):
                    return function(*args, **kwargs)

        return limited  # type: ignore[return-value]

    return decorate


def may_speak(only: Only) -> bool:
    """Whether this rank is shown. Found by name on a host, where a function sent by value has copies of all else."""
    if _current is None:
        return True
    return only(_current) if callable(only) else _current.is_head


@contextmanager
def muted(fds: tuple[int, ...]) -> Iterator[None]:
    """Sends these file descriptors nowhere for a while."""
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
    """Python's buffers, and those of C code."""
    import ctypes

    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    ctypes.CDLL(None).fflush(None)
