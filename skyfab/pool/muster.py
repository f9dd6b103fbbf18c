"""The muster: all hosts of a pool reached at once, and left at once."""

from __future__ import annotations

import atexit
import resource
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from skyfab.errors import PoolError, SkyfabError, UsageError
from skyfab.pool.node import Node
from skyfab.session.fanout import Raised, abreast
from skyfab.session.transport.process import end_all
from skyfab.ui.events import Events, HostState

_PER_HOST: Final = 8
"""Descriptors: a stream has five. Where a connection breaks, others are tried beside it."""
_SPARE: Final = 128
"""For whatever else the program opens."""


def open_all(nodes: Sequence[Node], events: Events, failed: Callable[[Node], None]) -> None:
    """Opens every node's session. Raises the one failure, or a PoolError with all of them, and leaves none open.

    `failed` is told of each that did, as it does.
    """
    make_room(len(nodes))
    errors: dict[int, Exception] = {}

    def enter(node: Node) -> None:
        try:
            agent = node.session.open()
        except Exception as error:
            errors[node.index] = error
            failed(node)
            events.emit(HostState(host=node.name, state="failed", detail=type(error).__name__))
        else:
            events.emit(HostState(host=node.name, state="ready", detail=f"Python {agent.python}"))

    for node in nodes:
        events.emit(HostState(host=node.name, state="connecting"))
    try:
        _with_each(enter, nodes)
    except BaseException:  # Ctrl-C: those that are still connecting stop too
        close_all(nodes)
        raise
    if errors:
        close_all([node for node in nodes if node.index not in errors])
        raise _all_of([errors[index] for index in sorted(errors)], len(nodes))


def make_room(hosts: int) -> None:
    """Lets this program have as many files open as its hosts need, where it may. Raises UsageError where it may not."""
    soft, hard = (
        sys.maxsize if limit == resource.RLIM_INFINITY else limit
        for limit in resource.getrlimit(resource.RLIMIT_NOFILE)
    )
    used = len(list(Path("/dev/fd").iterdir()))
    if used + _PER_HOST * hosts > hard:
        raise UsageError(
            f"{hosts} hosts need about {used + _PER_HOST * hosts} open files, and this program may have {hard}",
            hint="a larger limit (ulimit -n, LimitNOFILE= of a service), or fewer hosts at a time",
        )
    wanted = used + 2 * _PER_HOST * hosts + _SPARE
    if wanted > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, hard), hard))


def close_all(nodes: Sequence[Node]) -> None:
    """Ends every process of the pool on every host. Interrupted, it leaves that to the hosts."""
    try:
        _with_each(Node.close, nodes)
    except KeyboardInterrupt:
        atexit.register(end_all)
        raise


def _with_each(action: Callable[[Node], None], nodes: Sequence[Node]) -> None:
    for outcome in abreast(action, nodes):
        if isinstance(outcome, Raised):
            raise outcome.error


def _all_of(errors: Sequence[Exception], total: int) -> Exception:
    """One failure as it is, and so a mistake in what was asked of all of them; several as one."""
    for error in errors:
        if not isinstance(error, SkyfabError):
            return error
    if len(errors) > 1 and all(isinstance(error, UsageError) and error.args == errors[0].args for error in errors):
        errors[0].host = None  # type: ignore[attr-defined]
        return errors[0]
    return errors[0] if len(errors) == 1 else PoolError(f"{len(errors)} of {total} hosts failed", errors)
