"""Does the same work on every host, each in a pool of its own, so that a failing host does not stop the others."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from skyfab.calls.call import Call, as_function
from skyfab.calls.image import Image
from skyfab.errors import HostUnfit, RemoteTraceback, SkyfabError
from skyfab.host.ask.survey import look
from skyfab.inspect.survey import Survey
from skyfab.inventory.host import Host
from skyfab.inventory.inventory import Inventory
from skyfab.pool.compute import Compute
from skyfab.session.bootstrap import storage_hint
from skyfab.session.fanout import Raised, for_each_host
from skyfab.ui.display import attach
from skyfab.ui.events import Events, FilesWritten, HostState

R = TypeVar("R")

_CLOSE_TIMEOUT: Final = 3.0
"""Timeout in seconds for closing the pools after Ctrl-C."""


@dataclass(frozen=True, slots=True)
class Outcome(Generic[R]):
    """The result or error of the work on one host."""

    host: Host
    result: R | None = None
    error: SkyfabError | None = None


def fan_out(
    work: Callable[[Compute], R],
    hosts: Sequence[Host],
    inventory: Inventory,
    *,
    show: bool,
    workdir: str = "temp",
    ended: Callable[[Host], None] = lambda host: None,
) -> list[Outcome[R]]:
    """Does the work on all hosts in parallel; returns one outcome for each, in order. Ctrl-C stops all.

    `workdir` is that of `Compute`. `ended` is called for each host when its work has ended or could not begin. If what
    is shown is not read any more (`| head`), stops all and raises BrokenPipeError.

    Raises an error that is not a SkyfabError: that is a bug in the work itself.
    """
    nothing = Image(excludes=("*",))  # of the caller's project is sent
    pools = [
        Compute([host], inventory=inventory, image=nothing, workdir=workdir, results="data", ui="none")
        for host in hosts
    ]
    events = Events()
    reader = _Reader()
    detach = attach(events, "auto", on_closed=reader.left) if show else lambda: None
    for host, pool in zip(hosts, pools, strict=True):
        events.emit(HostState(host=host.name, state="connecting"))
        pool.events.subscribe(lambda event: None if isinstance(event, FilesWritten) else events.emit(event))
    try:
        with reader:
            found = _run(work, pools, ended)
    finally:
        detach()
    return [_outcome(host, one) for host, one in zip(hosts, found, strict=True)]


def survey(pool: Compute) -> Survey:
    """What the one host of a pool is and does right now. Raises a HostError."""
    (host,) = pool.hosts
    return Survey.parse(ask(pool, as_function(look)(host.host.cache)), host.name)


def ask(pool: Compute, call: Call[str]) -> str:
    """What the one host of a pool answers to a function of skyfab. Raises HostUnfit where that fails: others go on."""
    try:
        return str(pool.run(call))
    except Exception as error:
        if not isinstance(error.__cause__, RemoteTraceback):
            raise
        what = f"it cannot be examined: {type(error).__name__}: {error}"
        hint = storage_hint(str(error)) or "please report this, with the output of skyfab doctor --paste"
        raise HostUnfit(what, host=pool.hosts[0].name, hint=hint) from error


def surveys(hosts: Sequence[Host], inventory: Inventory) -> list[Survey | SkyfabError]:
    """The survey of each host, or why there is none."""
    outcomes = fan_out(survey, hosts, inventory, show=False)
    return [outcome.result or outcome.error or SkyfabError("no answer") for outcome in outcomes]


class _Reader:
    """Who reads the output. Leaves the block with BrokenPipeError when that one is gone, as Ctrl-C leaves it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_waited_for = self._is_gone = False
        self._thread = threading.get_ident()

    def left(self) -> None:
        with self._lock:
            if self._is_waited_for:
                self._is_gone = True
                signal.pthread_kill(self._thread, signal.SIGINT)

    def __enter__(self) -> None:
        self._is_waited_for = True

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._lock:
            self._is_waited_for = False
        if self._is_gone and kind is KeyboardInterrupt:
            raise BrokenPipeError from None


def _outcome(host: Host, found: R | Raised | None) -> Outcome[R]:
    if not isinstance(found, Raised):
        return Outcome(host, found)
    if not isinstance(found.error, SkyfabError):
        raise found.error
    return Outcome(host, error=found.error)


def _run(
    work: Callable[[Compute], R], pools: Sequence[Compute], ended: Callable[[Host], None]
) -> list[R | Raised | None]:
    over = threading.Event()

    def run(pool: Compute) -> R | None:
        try:
            with pool:
                return None if over.is_set() else work(pool)
        finally:
            ended(pool.selected[0])

    try:
        return for_each_host(run, pools)
    except BaseException:  # Ctrl-C
        over.set()
        closing = threading.Thread(target=for_each_host, args=(Compute.close, pools), daemon=True)
        closing.start()
        closing.join(_CLOSE_TIMEOUT)
        raise
