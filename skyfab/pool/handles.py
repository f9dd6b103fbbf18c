"""Handles: how this program and functions on hosts call actors; and the actors of a pool."""

from __future__ import annotations

import copyreg
import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

from skyfab._util.signals import without_signals
from skyfab.calls.call import Call
from skyfab.calls.pack import PackedCall, collect, pack_function
from skyfab.calls.stream import Offered, found_in_call
from skyfab.context import in_a_rank
from skyfab.errors import ActorLost, SkyfabError, UsageError
from skyfab.host.agent.actors import Methods, RemoteHandle
from skyfab.host.agent.outcomes import said
from skyfab.pool.actor import INVOKE, Actor, Limits, pack_named
from skyfab.pool.futures import CallFuture
from skyfab.pool.gpus import Gpus
from skyfab.pool.node import Node, WorkerSpec
from skyfab.pool.streams import RemoteIterator, exchange
from skyfab.protocol import codec, messages
from skyfab.protocol.batches import as_group, of_group
from skyfab.session.replies import Reply
from skyfab.ui.events import Events

_NUMBERS: Final = itertools.count(1)
"""Of the actors of all pools: a handle that a host returns has only the name of its actor."""


class Method:
    """A method of an actor: calling it waits for the result, `submit` returns a future."""

    def __init__(self, handle: Handle, name: str) -> None:
        self._handle = handle
        """A reference: the actor ends when the handle is dropped."""
        self._actor = handle._actor  # noqa: SLF001 - a class of this module
        self._name = name

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        call = INVOKE(self._name, *args, **kwargs)
        if self._actor.generates(self._name):
            return self._actor.iterate(self._name, call, self._handle)
        return self._actor.call(self._name, call)

    def submit(self, /, *args: Any, **kwargs: Any) -> CallFuture:
        """Calls the method; returns the future of its result."""
        if self._actor.generates(self._name):
            hint = f"call handle.{self._name}(…), which returns an iterator immediately"
            raise UsageError(f"submit cannot call {self._actor.label}.{self._name}: it is a generator", hint=hint)
        future = self._actor.submit(self._name, INVOKE(self._name, *args, **kwargs))
        future.pool = self._handle
        return future

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._handle, self._name)

    def __repr__(self) -> str:
        return f"<method {self._name} of the actor {self._actor.label}>"


class Handle(Methods):
    """Calls the methods of an object on a host: ``handle.method(x)``. `compute.actor` makes it.

    The process ends with the pool, at the end of a ``with`` block of the handle, and when the handle is dropped.
    """

    _actor: Actor

    def __init__(self, actor: Actor) -> None:
        vars(self)["_actor"] = actor
        weakref.finalize(self, _drop, actor).atexit = False

    def _method(self, name: str) -> Method:
        return Method(self, name)

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *_: object) -> None:
        self._actor.close()

    def __reduce__(self) -> tuple[Any, ...]:
        """In the arguments of a call: a handle for the function on the host, whose calls pass through this program."""
        if self._actor.untrusted:
            raise TypeError('an actor cannot be passed to untrusted hosts (results="data")')
        found_in_call(self)
        self._actor.is_shared = True
        return RemoteHandle, (self._actor.worker, self._actor.label)

    def __repr__(self) -> str:
        return f"<actor {self._actor.label} on {self._actor.node.name}>"


def _reduce(handle: RemoteHandle) -> tuple[Any, ...]:
    """Of a handle that a host has returned. A call to which it is passed on may call the actor."""
    if not in_a_rank():
        found_in_call(handle)
    return handle.__reduce__()


copyreg.pickle(RemoteHandle, _reduce)


@without_signals
def _drop(actor: Actor) -> None:
    """Ends it on a new thread: the garbage collector may run on any thread, with any lock held."""
    if not (actor.is_shared or actor.is_closed):
        threading.Thread(target=actor.close, daemon=True).start()


class Actors:
    """The actors of a pool."""

    def __init__(
        self, gpus: Gpus, plugins: tuple[Any, ...], events: Events, sync: Callable[[], object], *, untrusted: bool
    ) -> None:
        """`gpus` chooses their hosts. `sync` sends these the project's files."""
        self.open: dict[str, Actor] = {}
        """Those that are not closed, by the name of their worker."""
        self.gpus, self.plugins, self.events, self.sync, self.untrusted = gpus, plugins, events, sync, untrusted
        self._served: set[tuple[object, str, int]] = set()
        """Processes that have handles."""
        self._offered: weakref.WeakValueDictionary[str, Offered] = weakref.WeakValueDictionary()

    def make(self, made: Call[Any], nodes: Sequence[Node], limits: Limits) -> Handle:
        """Starts an actor on one of the nodes, and waits until `made` has made its object. Raises what that raises."""
        limits.check()
        kind = made.args[0]
        if not callable(kind):
            raise TypeError(f"not a class: {kind!r:.80}; pass the class and its arguments: compute.actor(Model, …)")
        label = getattr(kind, "__qualname__", repr(kind)).replace("<locals>.", "")
        worker = f"actor.{next(_NUMBERS)}"

        def place() -> tuple[Node, WorkerSpec]:
            slot = self.gpus.reserve(worker, nodes, limits.gpus, f"the actor {label}")
            return slot.node, replace(slot.spec, pipelined=True, threads=limits.concurrency)

        arguments, found = pack_named(made, label, kind, "__init__")
        self.check(found)
        function = pack_function(made.function, self.plugins)
        packed = PackedCall(function=function, arguments=arguments, label=label, found=found)
        self.sync()
        actor = Actor(worker, kind, packed, place, limits, self)
        self.open[worker] = actor
        actor.start()
        return Handle(actor)

    def check(self, found: Sequence[Any]) -> None:
        """Raises UsageError for handles of actors of other pools, and for objects that untrusted hosts would call."""
        for one in found:
            if isinstance(one, (Offered, RemoteHandle)) and self.untrusted:
                raise UsageError('hosts cannot use objects of this program with results="data"')
            actor = one._actor if isinstance(one, Handle) else None  # noqa: SLF001 - a class of this module
            if actor is not None and actor.actors is not self:
                raise UsageError(f"{one!r} belongs to another pool", hint="pass it to functions of its own pool")

    def on_found(self, node: Node, worker: str, generation: int, found: Sequence[Any]) -> None:
        """A call with these streams and handles in its arguments was sent to a process."""
        offered = {one.name: one for one in found if isinstance(one, Offered)}
        self._offered.update(offered)
        if offered or any(isinstance(one, Methods) for one in found):
            self.serve(node, worker, generation)

    def serve(self, node: Node, worker: str, generation: int) -> None:
        """Passes the calls of a process, which has a handle, on to actors."""
        if (node.session, worker, generation) not in self._served:
            self._served.add((node.session, worker, generation))
            _Server(self, node, worker).ask()

    def find(self, worker: str) -> Actor | Offered:
        """What a handle that a host has calls: an actor, or an object of this program. Raises ActorLost."""
        found = self._offered.get(worker) or self.open.get(worker)
        if found is None:
            raise ActorLost("the actor is lost: this program has ended it, or its pool")
        return found

    def close(self) -> None:
        """The pool closes: its actors can no longer be called."""
        for actor in list(self.open.values()):
            actor.close()


class _Server:
    """Calls actors for functions on a host. When a call arrives, it asks their process for the next one."""

    def __init__(self, actors: Actors, node: Node, worker: str) -> None:
        self._actors = actors
        self._session = node.session
        self._worker = worker
        self._iterators: dict[int, RemoteIterator[Any]] = {}
        """Those of methods that yield, by the number of the call; until they end, are closed, or the process ends."""

    def ask(self) -> None:
        asked = Reply(lambda: self._arrived(asked))
        exchange(self._session, self._worker, 0, "next", asked)

    def _arrived(self, asked: Reply) -> None:
        """On the thread that reads, which must not wait."""
        with suppress(SkyfabError):
            message, buffers = asked.found
            if isinstance(message, messages.Yielded) and buffers:
                threading.Thread(target=self._serve, args=(buffers,), daemon=True).start()
                self.ask()
                return
        for values in list(self._iterators.values()):  # the process has ended
            values.conversation.close(wait=False)

    def _serve(self, buffers: list[memoryview]) -> None:
        """On a thread of its own."""
        ((data, *more),) = of_group(buffers)
        load = codec.loader(data, more)
        number = load()
        try:
            worker, method, about = load()
            outcome = self._call(number, worker, method, *about) if worker else self._next(method, *about)
            payload = _pickled(outcome)
        except BaseException as error:  # also SystemExit: the function waits for the reply
            object.__setattr__(error.with_traceback(None), "__cause__", None)  # its class may forbid assignments
            try:
                payload = _pickled(("raised", error))
            except BaseException:
                payload = codec.dumps(("raised", RuntimeError(f"{type(error).__qualname__}: {said(error)}")))
        exchange(self._session, self._worker, 0, "give", Reply(), as_group([payload]), number)

    def _call(self, number: int, worker: str, method: str, args: Any, kwargs: Any) -> tuple[str, Any]:
        actor, call = self._actors.find(worker), INVOKE(method, *args, **kwargs)
        if isinstance(actor, Offered):
            return "returned", getattr(actor.made, method)(*args, **kwargs)
        if actor.generates(method):
            self._iterators[number] = actor.iterate(method, call)
            return "yields", number
        return "returned", actor.submit(method, call).result()

    def _next(self, what: str, number: int) -> tuple[str, Any]:
        """The next value of an iterator; or closes it."""
        if what == "next":
            return "returned", next(self._iterators[number])
        self._iterators.pop(number).close()
        return "returned", None


def _pickled(outcome: tuple[str, Any]) -> codec.Payload:
    """The handles in it are for a process that has one already."""
    return collect(lambda: codec.dumps(outcome))[0]
