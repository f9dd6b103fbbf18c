"""Actors: an object in a process of its own on a host, whose methods this program calls.

Calls run in the order in which they were submitted. Few messages with calls are in progress at a time; calls that wait
for their turn here are then sent together, if they are short and of one method.
"""

from __future__ import annotations

import functools
import itertools
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final

from skyfab._util.signals import SIGNAL_GUARD
from skyfab.calls.call import Call, Function
from skyfab.calls.pack import PackedCall, PackedFunction, pack_arguments, pack_function
from skyfab.calls.results import deliver, unpack_result
from skyfab.errors import ActorLost, HostLost, ProtocolError, SkyfabError, UsageError
from skyfab.host.agent.actors import construct, invoke, invoke_all
from skyfab.pool.futures import CallFuture, refuse_to_block
from skyfab.pool.node import Node, WorkerSpec
from skyfab.protocol import messages
from skyfab.session.replies import Reply

_IN_PROGRESS: Final = 4
"""Messages with submitted calls that may be in progress."""
_TOGETHER: Final = 128
"""Most calls in one message."""
_WORTH: Final = 0.005
"""Seconds that the calls in one message should take together."""
_INVOKE: Final = Function(invoke)
_INVOKE_ALL: Final = Function(invoke_all)

Place = Callable[[], tuple[Node, WorkerSpec]]


@dataclass(slots=True)
class _Submitted:
    """A call that waits to be sent, or for its reply."""

    method: str
    call: Call[Any]
    future: CallFuture


class Actor:
    """One actor: its process, and the calls to it. Thread-safe."""

    def __init__(
        self,
        worker: str,
        made: PackedCall,
        place: Place,
        plugins: tuple[Any, ...],
        *,
        restarts: int,
        untrusted: bool,
    ) -> None:
        """`made` makes the object. `place` chooses the node and the spec for each new process."""
        self.label = made.label
        self._worker = worker
        self._place = place
        self._made = made
        self._one = pack_function(_INVOKE, plugins)
        self._several = pack_function(_INVOKE_ALL, plugins)
        self._restarts = restarts
        self.untrusted = untrusted
        self.is_closed = False
        self._lock = threading.RLock()
        """Held while a call is sent: calls are sent in the order of their submission."""
        self.node: Node
        self._spec: WorkerSpec
        self._session: object = None
        self._generation = 0
        self._waiting: deque[_Submitted] = deque()
        self._in_progress = 0
        self._answered = 0.0
        """Time of the last reply."""
        self._seconds: dict[str, float] = {}
        """How long a call of a method takes."""

    # ---- its process

    def start(self) -> None:
        """Starts the process and waits until the object is made. Raises what making it raises."""
        refuse_to_block()
        try:
            with SIGNAL_GUARD:
                reply = self._spawn()
                self.node.session.read_until_there(reply)
                self.value(self.label, *reply.wait())
        except BaseException:
            self.close()
            raise

    def _spawn(self) -> Reply:
        reply = Reply()
        self.node, self._spec = self._place()
        self._session = self.node.session
        self._generation = self.node.call(self._worker, self._spec, self._made, caller=reply, store="none")
        return reply

    def close(self) -> None:
        """Ends the process."""
        with SIGNAL_GUARD, self._lock, suppress(SkyfabError):  # the process of a lost host has ended
            self.is_closed = True
            if self._generation:
                self.node.release(self._worker)

    def _check(self) -> None:
        """Starts a process that has ended again, if that is allowed. Raises ActorLost; if it is closed, UsageError."""
        if self.is_closed:
            raise UsageError(f"the actor {self.label} has ended", hint="make another one: compute.actor(…)")
        if self.node.session is self._session and self.node.has_worker(self._worker, self._generation):
            return
        if not self._restarts:
            raise self.lost("its process has ended")
        self._restarts -= 1
        self._spawn()

    def lost(self, why: str) -> ActorLost:
        hint = "its state is lost with it; compute.actor(…, restarts=N) makes it again"
        return ActorLost(f"the actor {self.label} is lost: {why}", host=self.node.name, hint=hint)

    # ---- calls

    def call(self, method: str, call: Call[Any]) -> Any:
        """Calls a method and waits for its result."""
        refuse_to_block()
        with SIGNAL_GUARD:
            with self._lock:
                if not self._waiting:
                    reply = Reply()
                    self._send(self._packed(method, self._one, call), reply)
                else:
                    future = self.submit(method, call)
                    reply = None
            if reply is None:
                return future.result()
            self.node.session.read_until_there(reply)
            return self.value(f"{self.label}.{method}", *reply.wait())

    def submit(self, method: str, call: Call[Any]) -> CallFuture:
        """Calls a method; returns the future of its result."""
        future = CallFuture()
        future.label = f"{self.label}.{method}"
        with SIGNAL_GUARD, self._lock:
            self._check()
            future.node = self.node
            self._waiting.append(_Submitted(method, call, future))
            self._advance()
        return future

    def _packed(self, method: str, function: PackedFunction, call: Call[Any]) -> PackedCall:
        return PackedCall(function=function, arguments=pack_arguments(call), label=f"{self.label}.{method}")

    def _send(self, packed: PackedCall, caller: Any) -> None:
        self._check()
        self.node.call(self._worker, self._spec, packed, caller=caller, store="none")

    def _advance(self) -> None:
        """Sends calls that wait, unless enough are in progress."""
        while self._waiting and self._in_progress < _IN_PROGRESS:
            group = self._next_group()
            self._in_progress += 1
            method, call = group[0].method, group[0].call
            sent = _Group(self, group)
            try:
                if len(group) == 1:
                    packed = self._packed(method, self._one, call)
                else:
                    each = [(one.call.args[1:], one.call.kwargs) for one in group]
                    packed = self._packed(method, self._several, _INVOKE_ALL(method, each))
                self._send(packed, sent)
            except Exception as error:
                sent.failed(error)

    def _next_group(self) -> list[_Submitted]:
        """The next calls that are sent in one message."""
        group = [self._waiting.popleft()]
        method = group[0].method
        seconds = self._seconds.get(method, _WORTH)
        most = 1 if self.untrusted else min(_TOGETHER, int(_WORTH / max(seconds, 1e-6)))
        while len(group) < most and self._waiting and self._waiting[0].method == method:
            group.append(self._waiting.popleft())
        return group

    def answered(self, method: str, began: float, seconds: float | None, count: int) -> None:
        """A message has a reply, which says how many seconds its calls took; or None."""
        with self._lock:
            now = time.monotonic()
            if seconds is None:
                seconds = now - max(began, self._answered)
            self._seconds[method] = seconds / count
            self._answered = now
            self._in_progress -= 1
            self._advance()

    def value(self, label: str, message: messages.Message, buffers: list[memoryview]) -> Any:
        """The result in a reply. Raises what the call raised, or ActorLost."""
        if isinstance(message, messages.Ended) and message.why in ("died", "unstarted", "cancelled"):
            raise self.lost(message.text or "its process has ended")
        host, untrusted = self.node.name, self.untrusted
        return unpack_result(message, buffers, host=host, rank=None, label=label, untrusted=untrusted)


class _Group(Reply):
    """Calls in one message: the `Caller` of the actor's node."""

    __slots__ = ("_actor", "_began", "_calls")

    def __init__(self, actor: Actor, calls: Sequence[_Submitted]) -> None:
        super().__init__()
        self._actor = actor
        self._calls = calls
        self._began = time.monotonic()

    def answered(self, message: messages.Message, buffers: list[memoryview]) -> None:
        method, label = self._calls[0].method, self._calls[0].future.label
        if len(self._calls) == 1:
            self._actor.answered(method, self._began, None, 1)
            self._deliver(self._calls[0], message, buffers)
            return
        seconds = None
        try:
            seconds, found = self._actor.value(label, message, buffers)
            replies = [_reply(one) for one in found]
            if len(replies) != len(self._calls):
                raise ProtocolError("invalid reply to an actor's calls", host=self._actor.node.name)
        except Exception as error:
            self.failed(error)
            return
        self._actor.answered(method, self._began, seconds, len(self._calls))
        for one, reply in zip(self._calls, replies, strict=True):
            self._deliver(one, *reply)

    def failed(self, error: Exception) -> None:
        if isinstance(error, HostLost):
            error = self._actor.lost(f"its host is lost: {error.message}")
        self._actor.answered(self._calls[0].method, self._began, None, 1)
        for one in self._calls:
            one.future.settle(None, error)

    def _deliver(self, one: _Submitted, message: messages.Message, buffers: list[memoryview]) -> None:
        unpack = functools.partial(_unpack, self._actor)
        about = {"host": self._actor.node.name, "rank": None, "label": one.future.label}
        deliver(one.future.settle, message, buffers, unpack=unpack, **about)


def _unpack(actor: Actor, message: messages.Message, buffers: list[memoryview], **about: Any) -> Any:
    return actor.value(about["label"], message, buffers)


def _reply(found: Any) -> tuple[messages.Message, list[memoryview]]:
    """One of several outcomes as the reply that a call of its own would have had."""
    if type(found) is tuple:
        return messages.Result(parts=()), [memoryview(part) for part in found]
    kind, text, trace, *parts = found
    return messages.Raised(parts=(), kind=kind, text=text, traceback=trace), [memoryview(part) for part in parts]


class Method:
    """A method of an actor: calling it waits for the result, `submit` returns a future."""

    def __init__(self, actor: Actor, name: str) -> None:
        self._actor = actor
        self._name = name

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self._actor.call(self._name, _INVOKE(self._name, *args, **kwargs))

    def submit(self, /, *args: Any, **kwargs: Any) -> CallFuture:
        return self._actor.submit(self._name, _INVOKE(self._name, *args, **kwargs))

    def __repr__(self) -> str:
        return f"<method {self._name} of the actor {self._actor.label}>"


class Handle:
    """Stands for an object on a host: ``handle.method(x)`` calls its method there. `compute.actor` makes it.

    The process ends with the pool, with a ``with`` block of the handle, and when the handle is dropped.
    """

    def __init__(self, actor: Actor) -> None:
        self._actor = actor
        weakref.finalize(self, _drop, actor).atexit = False

    def __getattr__(self, name: str) -> Method:
        if name.startswith("__"):  # Python and pickle look for such names, and must not find them
            raise AttributeError(name)
        return Method(self._actor, name)

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *_: object) -> None:
        self._actor.close()

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return Method(self._actor, "__call__")(*args, **kwargs)

    def __getitem__(self, key: Any) -> Any:
        return Method(self._actor, "__getitem__")(key)

    def __setitem__(self, key: Any, value: Any) -> None:
        Method(self._actor, "__setitem__")(key, value)

    def __delitem__(self, key: Any) -> None:
        Method(self._actor, "__delitem__")(key)

    def __contains__(self, item: Any) -> bool:
        return bool(Method(self._actor, "__contains__")(item))

    def __len__(self) -> int:
        return int(Method(self._actor, "__len__")())

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"<actor {self._actor.label} on {self._actor.node.name}>"


def _drop(actor: Actor) -> None:
    """On a new thread: the garbage collector may run on any thread, with any lock held."""
    threading.Thread(target=actor.close, daemon=True).start()


class Actors:
    """The actors of a pool."""

    def __init__(
        self, spec_of: Callable[[Node, str], WorkerSpec], plugins: tuple[Any, ...], *, untrusted: bool
    ) -> None:
        """`spec_of` returns the spec of a solo worker on a node."""
        self._spec_of = spec_of
        self._plugins = plugins
        self._untrusted = untrusted
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._actors: dict[str, tuple[weakref.ref[Actor], Node, tuple[int, ...]]] = {}
        """By the name of their worker, each with its node and the GPUs that it has for itself."""

    def make(
        self,
        made: Call[Any],
        nodes: Sequence[Node],
        tree: Callable[[], str],
        *,
        label: str,
        gpus: int,
        restarts: int,
    ) -> Handle:
        """Starts an actor on one of the nodes, and waits until `made` has made its object. Raises what that raises."""
        for option, value in (("gpus", gpus), ("restarts", restarts)):
            if type(value) is not int or value < 0:
                raise UsageError(f"invalid {option}={value!r}: expected 0 or more")
        worker = f"actor.{next(self._numbers)}"
        place = functools.partial(self._place, worker, nodes, tree, gpus, label)
        packed = PackedCall(
            function=pack_function(made.function, self._plugins), arguments=pack_arguments(made), label=label
        )
        actor = Actor(worker, packed, place, self._plugins, restarts=restarts, untrusted=self._untrusted)
        self._actors[worker] = (weakref.ref(actor), nodes[0], ())
        actor.start()
        return Handle(actor)

    def _place(
        self, worker: str, nodes: Sequence[Node], tree: Callable[[], str], gpus: int, label: str
    ) -> tuple[Node, WorkerSpec]:
        """The node with the fewest actors that has enough GPUs, and the spec for a process there."""
        synced = tree()
        with self._lock:
            others = [
                (node, taken)
                for name, (actor, node, taken) in list(self._actors.items())
                if name != worker and (found := actor()) is not None and not found.is_closed
            ]
            free = {
                node: [gpu for gpu in node.gpus if not any(gpu in taken for other, taken in others if other is node)]
                for node in nodes
                if node.lost is None
            }
            fitting = [node for node in free if len(free[node]) >= gpus]
            if not fitting:
                raise self._nowhere(nodes, gpus, label)
            node = min(fitting, key=lambda node: sum(other is node for other, _ in others))
            taken = tuple(free[node][:gpus])
            self._actors[worker] = (self._actors[worker][0], node, taken)
        spec = self._spec_of(node, synced)
        env = {**spec.env, "CUDA_VISIBLE_DEVICES": ",".join(map(str, taken))} if gpus else spec.env
        return node, replace(spec, env=env, pipelined=True)

    def _nowhere(self, nodes: Sequence[Node], gpus: int, label: str) -> SkyfabError:
        lost = [node.lost for node in nodes if node.lost is not None]
        if len(lost) == len(nodes):
            return HostLost(f"no host is left for the actor {label}", host=nodes[0].name)
        most = max(len(node.gpus) for node in nodes if node.lost is None)
        have = f"of {len(nodes)} hosts none has" if len(nodes) > 1 else f"{nodes[0].name} does not have"
        return UsageError(
            f"{have} {gpus} free GPUs for the actor {label}",
            hint=f"a host has {most}" + (", and other actors use some: end one (with …)" if most >= gpus else ""),
        )

    def close(self) -> None:
        """The pool closes: its actors can no longer be called."""
        for found, _, _ in list(self._actors.values()):
            if (actor := found()) is not None:
                actor.close()
        self._actors.clear()


def made_by(kind: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call[Any]:
    """The call that makes the object of an actor. Raises TypeError if `kind` cannot be called."""
    if not callable(kind):
        raise TypeError(f"not a class: {kind!r:.80}")
    return Function(construct)(kind, args, kwargs)
