"""The muster: all hosts of a pool reached at once, and left at once."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Sequence

from skyfab.abreast import Raised, abreast
from skyfab.errors import PoolError, SkyfabError, UsageError
from skyfab.events import Events, HostState
from skyfab.node import Node
from skyfab.transport.process import end_all


def open_all(nodes: Sequence[Node], events: Events, failed: Callable[[Node], None]) -> None:
    """Opens every node's session. Raises the one failure, or a PoolError with all of them, and leaves none open.

    `failed` is told of each that did, as it does.
    """
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
