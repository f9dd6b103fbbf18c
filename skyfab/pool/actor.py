"""Actors: objects, each in its own process on a host, whose methods this program calls.

Calls run in the order of their submission. Only a few messages with calls are in progress at a time. Short calls of one
method that wait meanwhile are sent together.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final

from skyfab._util.signals import SIGNAL_GUARD
from skyfab.calls.call import AHEAD, Call, Function, check_gpus
from skyfab.calls.pack import NOTHING, PackedCall, pack_arguments, pack_function, pack_streams
from skyfab.calls.results import deliver, unpack_result
from skyfab.calls.stream import parameters, streamed
from skyfab.context import yields
from skyfab.errors import ActorLost, CallCancelled, HostLost, NotPicklable, ProtocolError, SkyfabError, UsageError
from skyfab.host.agent.actors import invoke, invoke_all
from skyfab.pool.feeds import converse
from skyfab.pool.futures import CallFuture, refuse_to_block
from skyfab.pool.node import Node, WorkerSpec
from skyfab.pool.streams import Conversation, RemoteIterator
from skyfab.protocol import codec, messages
from skyfab.session.replies import Reply

_IN_PROGRESS: Final = 4
"""Messages with submitted calls that may be in progress."""
_TOGETHER: Final = 128
"""Most calls in one message."""
_WORTH: Final = 0.005
"""Seconds that the calls in one message should take together."""
INVOKE: Final = Function(invoke)
_INVOKE_ALL: Final = Function(invoke_all)

Place = Callable[[], tuple[Node, WorkerSpec]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What an actor may use."""

    gpus: float = 0
    concurrency: int = 1
    restarts: int = 0

    def check(self) -> None:
        """Raises UsageError."""
        check_gpus(self.gpus)
        for name, least in (("concurrency", 1), ("restarts", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise UsageError(f"invalid {name}={value!r}: expected {least} or more")


@dataclass(slots=True)
class _Submitted:
    """A call that waits to be sent, or for its reply."""

    method: str
    packed: PackedCall
    future: CallFuture
    conversation: Conversation | None = None
    """The exchanges with it: the values that it yields, and the streams among its arguments."""


class Actor:
    """One actor: its process, and the calls to it. Thread-safe."""

    def __init__(
        self, worker: str, kind: Callable[..., Any], made: PackedCall, place: Place, limits: Limits, actors: Any
    ) -> None:
        """`made` is the call of `kind`. `place` chooses the node and the spec for each new process. `actors` are the
        `Actors` of its pool (handles.py)."""
        self.label = made.label
        self.worker = worker
        self._kind = kind
        self.actors = actors
        self._methods: dict[str, tuple[bool, frozenset[int | str]]] = {}
        """Whether a method yields values, and its parameters that are annotated as iterators."""
        self._place = place
        self._made = made
        self._one = pack_function(INVOKE, actors.plugins)
        self._several = pack_function(_INVOKE_ALL, actors.plugins)
        self._restarts = self._restarts_left = limits.restarts
        self._most = max(_IN_PROGRESS, 2 * limits.concurrency)
        self._together = 1 if actors.untrusted or limits.concurrency > 1 else _TOGETHER
        self.untrusted: bool = actors.untrusted
        self._process = os.getpid()
        self.is_closed = False
        self.is_shared = False
        """Hosts have handles of it: it keeps running when the handle in this program is dropped."""
        self._lock = threading.RLock()
        """Held while a call is sent: calls are sent in the order of their submission."""
        self.node: Node
        self._spec: WorkerSpec
        self._session: object = None
        self.generation = 0
        self._waiting: deque[_Submitted] = deque()
        self._in_progress = 0
        self._is_advancing = False
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
                self._wait(self.label, reply, "stopped")
        except BaseException:
            self.close()
            raise

    def _spawn(self) -> Reply:
        reply = Reply()
        self.node, self._spec = self._place()
        self._session = self.node.session
        self.generation = self.node.call(self.worker, self._spec, self._made, caller=reply, store="none")
        return reply

    def close(self) -> None:
        """Ends the process. Does nothing in a forked child: the parent owns it."""
        if self._process != os.getpid():
            return
        with SIGNAL_GUARD, self._lock, suppress(SkyfabError):  # the process of a lost host has ended
            self.is_closed = True
            self._made = replace(self._made, arguments=NOTHING, found=())  # its arguments may be large
            self.actors.open.pop(self.worker, None)
            self.actors.gpus.leave(self.worker)
            if self.generation:
                self.node.release(self.worker)

    def _prepare(self) -> None:
        """Syncs the project's files if a call may start a process. Without the lock: the reader may wait for it."""
        if self._process != os.getpid():
            raise UsageError("this actor belongs to another process, and only that process can call it")
        if self._restarts_left and not self.is_closed:
            self.actors.sync()

    def _check(self) -> None:
        """Restarts a process that has ended, if restarts are left. Raises ActorLost; if it is closed, UsageError."""
        if self.is_closed:
            hint = "call it while its pool is open, or create another one: compute.actor(…)"
            raise UsageError(f"the actor {self.label} was closed, or its pool", hint=hint)
        session = self.node.session
        runs = session is self._session and not session.has_ended
        if runs and self.node.has_worker(self.worker, self.generation):
            return
        if not self._restarts_left:
            raise self.lost("its process has ended")
        self._spawn()
        self._restarts_left -= 1  # not before: if its host is away, none is made

    def lost(self, why: str) -> ActorLost:
        how = "compute.actor(…, restarts=N) creates the object again up to N times"
        if self._restarts_left:
            how = "the next call creates the object again"
        elif self._restarts:
            how = f"restarts={self._restarts} is used up: compute.actor(…, restarts=N) with more"
        hint: str | None = f"its state is lost; {how}"
        if self.is_closed:
            why, hint = "this program has ended it, or its pool", None
        return ActorLost(f"the actor {self.label} is lost: {why}", host=self.node.name, hint=hint)

    # ---- calls

    def call(self, method: str, call: Call[Any]) -> Any:
        """Calls a method and waits for its result."""
        refuse_to_block()
        self._prepare()
        with SIGNAL_GUARD:
            reply = Reply()
            packed = self._packed(method, call)
            if packed.converses:
                return self.submit(method, call).result()
            with self._lock:
                self._advance(everything=True)
                self._send(packed, reply)
            try:
                return self._wait(packed.label, reply, f"until the pool is closed, {packed.label} continues")
            except (HostLost, CallCancelled) as error:
                raise self.lost(f"its host is lost: {error.message}") from error

    def _wait(self, label: str, reply: Reply, interrupted: str) -> Any:
        """The result in a reply. `interrupted` is what Ctrl-C says of the call on the host."""
        ended = self.actors.events.call(label, self.node.name)
        try:
            with self.actors.events.waiting:
                self.node.session.read_until_there(reply)
                found = reply.wait()
            result = self.value(*found, label=label)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                vars(error)["stopped"] = f"{interrupted} on {self.node.name}"
            ended(CallCancelled("interrupted") if isinstance(error, KeyboardInterrupt) else error)
            raise
        ended(None)
        return result

    def submit(self, method: str, call: Call[Any]) -> CallFuture:
        """Calls a method with its arguments as they are now; returns the future of its result."""
        self._prepare()
        future = CallFuture()
        future.label = f"{self.label}.{method}"
        with SIGNAL_GUARD:
            try:
                packed = self._packed(method, call)
            except Exception as error:
                future.settle(error=error)
                return future
            with self._lock:
                self._check()
                future.node = self.node
                conversation = self._converse(packed, future) if packed.converses else None
                self._waiting.append(_Submitted(method, packed, future, conversation))
                self._advance()
        return future

    def iterate(self, method: str, call: Call[Any], owner: object = None) -> RemoteIterator[Any]:
        """Calls a method that yields values. `owner` must not be dropped before the iterator is."""
        self._prepare()
        packed = replace(self._packed(method, call), yields=True, ahead=AHEAD)
        future = CallFuture()
        begun: Conversation | None = None
        try:
            with SIGNAL_GUARD:
                with self._lock:
                    self._advance(everything=True)
                    conversation = self._converse(packed, future)
                    sent = _Group(self, [_Submitted(method, packed, future, conversation)])
                    self._send(packed, sent, conversation)
                    self._in_progress += 1
                    begun = conversation
                return RemoteIterator(conversation, owner)
        except BaseException:  # what a handler raises at the end of the block: nothing would end the generator
            if begun is not None:
                begun.close(wait=False)
            raise

    def generates(self, method: str) -> bool:
        """Whether a method yields values."""
        return self._about(method)[0]

    def _about(self, method: str) -> tuple[bool, frozenset[int | str]]:
        found = self._methods.get(method)
        if found is None:
            fn = getattr(self._kind, method, None)
            found = self._methods[method] = (yields(fn), parameters(fn))
        return found

    def _packed(self, method: str, call: Call[Any]) -> PackedCall:
        label, places = f"{self.label}.{method}", self._about(method)[1]
        if places:  # the method's name has the place of its parameter `self`
            call = Call(call.function, *streamed(places, call.args, call.kwargs))
        arguments, found = pack_named(call, label, self._kind, method)
        self.actors.check(found)
        return PackedCall(function=self._one, arguments=arguments, label=label, found=found)

    def _converse(self, packed: PackedCall, future: CallFuture) -> Conversation:
        """The exchanges with a call that is sent alone."""
        [conversation] = converse(packed, [future], untrusted=self.untrusted)
        return conversation

    def _send(self, packed: PackedCall, caller: Reply, conversation: Conversation | None = None) -> None:
        self._check()
        begin = None if conversation is None else conversation.begin
        self.node.call(self.worker, self._spec, packed, caller=caller, store="none", begin=begin)

    def _advance(self, *, everything: bool = False) -> None:
        """Sends calls that wait, unless enough are in progress; or all of them.

        Calls may fail meanwhile, which calls this again: that returns at once, and the loop continues.
        """
        if self._is_advancing:
            return
        self._is_advancing = True
        try:
            while self._waiting and (everything or self._in_progress < self._most):
                if group := self._next_group():
                    self._in_progress += 1
                    self._send_group(group)
        finally:
            self._is_advancing = False

    def _send_group(self, group: list[_Submitted]) -> None:
        sent = _Group(self, group)
        try:
            self._send(self._packed_group(group), sent, group[0].conversation)
        except Exception as error:
            sent.failed(error)

    def _packed_group(self, group: list[_Submitted]) -> PackedCall:
        """The message for several calls."""
        first = group[0].packed
        if len(group) == 1:
            return first
        found = [handle for one in group for handle in one.packed.found]
        each = [(one.packed.arguments.data, *map(bytearray, one.packed.arguments.buffers)) for one in group]
        arguments = pack_arguments(_INVOKE_ALL(each))
        return PackedCall(function=self._several, arguments=arguments, label=first.label, found=found)

    def _next_group(self) -> list[_Submitted]:
        """The next calls that are sent in one message. From then on, they cannot be cancelled."""
        group = [self._waiting.popleft()]
        method = group[0].method
        seconds = self._seconds.get(method, _WORTH)
        most = min(self._together, int(_WORTH / max(seconds, 1e-6)))
        while len(group) < most and self._waiting and self._waiting[0].method == method:
            if group[0].conversation or self._waiting[0].conversation:  # a call with a stream is sent alone
                break
            group.append(self._waiting.popleft())
        return [one for one in group if one.future.start()]

    def answered(self, method: str, began: float, seconds: float | None, count: int) -> None:
        """A message has a reply. `seconds` is how long its calls took; None if the reply does not say."""
        with self._lock:
            now = time.monotonic()
            if seconds is None:
                seconds = now - max(began, self._answered)
            self._seconds[method] = seconds / count
            self._answered = now
            self._in_progress -= 1
            self._advance()

    def value(self, message: messages.Message, buffers: list[memoryview], *, label: str, **_: object) -> Any:
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
            seconds, found = self._actor.value(message, buffers, label=label)
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
        if isinstance(error, (HostLost, CallCancelled)):
            error = self._actor.lost(f"its host is lost: {error.message}")
        for one in self._calls:
            self._settle(one, None, error)
        self._actor.answered(self._calls[0].method, self._began, None, 1)

    def _deliver(self, one: _Submitted, message: messages.Message, buffers: list[memoryview]) -> None:
        about = {"host": self._actor.node.name, "rank": None, "label": one.future.label}
        deliver(functools.partial(self._settle, one), message, buffers, unpack=self._actor.value, **about)

    def _settle(self, one: _Submitted, result: Any, error: Exception | None) -> None:
        if one.conversation is None:
            one.future.settle(result, error)
        else:
            one.conversation.end(result, error)


def pack_named(call: Call[Any], label: str, kind: Any, method: str) -> tuple[codec.Payload, tuple[Any, ...]]:
    """As `pack_streams`, for a call of `invoke` or `construct`. NotPicklable names the parameter of the method."""
    try:
        return pack_streams(call)
    except NotPicklable:
        _, args, kwargs = call.args if method == "__init__" else (method, call.args[1:], call.kwargs)
        code = getattr(getattr(kind, method, None), "__code__", None)
        names = code.co_varnames[1 : code.co_argcount] if code and code.co_varnames[:1] == ("self",) else ()
        function = Function(invoke)
        function.label = label
        pack_streams(Call(function, args[len(names) :], dict(zip(names, args, strict=False)) | kwargs))
        raise


def _reply(found: Any) -> tuple[messages.Message, list[memoryview]]:
    """One of several outcomes, as the reply that a separate call would have had."""
    if type(found) is tuple:
        return messages.Result(parts=()), [memoryview(part) for part in found]
    head, *parts = found
    return messages.decode(head), [memoryview(part) for part in parts]
