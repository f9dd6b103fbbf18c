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
from skyfab.calls.call import AHEAD, Call, Function
from skyfab.calls.pack import PackedCall, PackedFunction, pack_function, pack_streams
from skyfab.calls.results import deliver, unpack_result
from skyfab.errors import ActorLost, HostLost, ProtocolError, SkyfabError, UsageError
from skyfab.host.agent.actors import invoke, invoke_all
from skyfab.pool.feeds import converse
from skyfab.pool.futures import CallFuture, refuse_to_block
from skyfab.pool.node import Node, WorkerSpec
from skyfab.pool.streams import Conversation
from skyfab.protocol import messages
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

    gpus: int = 0
    concurrency: int = 1
    restarts: int = 0

    def check(self) -> None:
        """Raises UsageError."""
        for name, least in (("gpus", 0), ("concurrency", 1), ("restarts", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise UsageError(f"invalid {name}={value!r}: expected {least} or more")


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
        limits: Limits,
        *,
        untrusted: bool,
    ) -> None:
        """`made` is the call that makes the object. `place` chooses the node and the spec for each new process."""
        self.label = made.label
        self.worker = worker
        self.check: Callable[[Sequence[Any]], None] = lambda found: None
        """Raises UsageError for handles of other pools."""
        self.generators: Callable[[str], bool] = lambda method: False
        """Whether a method yields values."""
        self._place = place
        self._made = made
        self._one = pack_function(INVOKE, plugins)
        self._several = pack_function(_INVOKE_ALL, plugins)
        self._restarts = limits.restarts
        self._most = max(_IN_PROGRESS, 2 * limits.concurrency)
        self._together = 1 if untrusted or limits.concurrency > 1 else _TOGETHER
        self.untrusted = untrusted
        self._process = os.getpid()
        self.is_closed = False
        self.is_shared = False
        """Hosts have handles of it: it keeps running when the handle in this program is dropped."""
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
        self._generation = self.node.call(self.worker, self._spec, self._made, caller=reply, store="none")
        return reply

    def close(self) -> None:
        """Ends the process. Does nothing in a forked child: the parent owns it."""
        if self._process != os.getpid():
            return
        with SIGNAL_GUARD, self._lock, suppress(SkyfabError):  # the process of a lost host has ended
            self.is_closed = True
            if self._generation:
                self.node.release(self.worker)

    def _check(self) -> None:
        """Restarts a process that has ended, if restarts are left. Raises ActorLost; if it is closed, UsageError."""
        if self._process != os.getpid():
            raise UsageError("this actor belongs to another process, and only that process can call it")
        if self.is_closed:
            raise UsageError(f"the actor {self.label} has ended", hint="create another one: compute.actor(…)")
        session = self.node.session
        runs = session is self._session and not session.has_ended
        if runs and self.node.has_worker(self.worker, self._generation):
            return
        if not self._restarts:
            raise self.lost("its process has ended")
        self._restarts -= 1
        self._spawn()

    def lost(self, why: str) -> ActorLost:
        hint: str | None = "its state is lost; compute.actor(…, restarts=N) creates the object again"
        if self.is_closed:
            why, hint = "this program has ended it, or its pool", None
        return ActorLost(f"the actor {self.label} is lost: {why}", host=self.node.name, hint=hint)

    # ---- calls

    def call(self, method: str, call: Call[Any]) -> Any:
        """Calls a method and waits for its result."""
        refuse_to_block()
        with SIGNAL_GUARD:
            reply = Reply()
            packed = self._packed(method, self._one, call)
            if packed.talks:
                return self.submit(method, call).result()
            with self._lock:
                self._check()
                self._advance(everything=True)
                self._send(packed, reply)
            self.node.session.read_until_there(reply)
            try:
                found = reply.wait()
            except HostLost as error:
                raise self.lost(f"its host is lost: {error.message}") from error
            return self.value(f"{self.label}.{method}", *found)

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

    def iterate(self, method: str, call: Call[Any]) -> Conversation:
        """Calls a method that yields values."""
        packed = replace(self._packed(method, self._one, call), yields=True, ahead=AHEAD)
        with SIGNAL_GUARD, self._lock:
            self._check()
            self._advance(everything=True)
            return self._converse(packed)

    def _converse(self, packed: PackedCall) -> Conversation:
        [conversation] = converse(packed, 1, untrusted=self.untrusted)
        self._send(packed, _Talk(self, conversation))
        return conversation

    def _packed(self, method: str, function: PackedFunction, call: Call[Any]) -> PackedCall:
        arguments, found = pack_streams(call)
        self.check(found)
        return PackedCall(function=function, arguments=arguments, label=f"{self.label}.{method}", found=found)

    def _send(self, packed: PackedCall, caller: Any) -> None:
        self._check()
        if packed.talks and isinstance(caller, _Group):
            [caller.conversation] = converse(packed, 1, untrusted=self.untrusted)
        self.node.call(self.worker, self._spec, packed, caller=caller, store="none")

    def _advance(self, *, everything: bool = False) -> None:
        """Sends calls that wait, unless enough are in progress; or all of them."""
        while self._waiting and (everything or self._in_progress < self._most):
            group = self._next_group()
            self._in_progress += 1
            sent = _Group(self, group)
            try:
                self._send(self._packed_group(group), sent)
            except Exception as error:
                sent.failed(error)

    def _packed_group(self, group: list[_Submitted]) -> PackedCall:
        """The message for several calls; for the first alone if one of them has a stream as an argument."""
        method = group[0].method
        if len(group) > 1:
            each = [(one.call.args[1:], one.call.kwargs) for one in group]
            packed = self._packed(method, self._several, _INVOKE_ALL(method, each))
            if not packed.talks:
                return packed
            self._waiting.extendleft(reversed(group[1:]))
            del group[1:]
        return self._packed(method, self._one, group[0].call)

    def _next_group(self) -> list[_Submitted]:
        """The next calls that are sent in one message."""
        group = [self._waiting.popleft()]
        method = group[0].method
        seconds = self._seconds.get(method, _WORTH)
        most = min(self._together, int(_WORTH / max(seconds, 1e-6)))
        while len(group) < most and self._waiting and self._waiting[0].method == method:
            group.append(self._waiting.popleft())
        return group

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

    def value(self, label: str, message: messages.Message, buffers: list[memoryview]) -> Any:
        """The result in a reply. Raises what the call raised, or ActorLost."""
        if isinstance(message, messages.Ended) and message.why in ("died", "unstarted", "cancelled"):
            raise self.lost(message.text or "its process has ended")
        host, untrusted = self.node.name, self.untrusted
        return unpack_result(message, buffers, host=host, rank=None, label=label, untrusted=untrusted)


class _Talk(Reply):
    """A call with which values are exchanged: the `Caller` of the actor's node."""

    __slots__ = ("_actor", "_conversation")

    def __init__(self, actor: Actor, conversation: Conversation) -> None:
        super().__init__()
        self._actor = actor
        self._conversation = conversation

    def sent(self, stream: int) -> None:
        super().sent(stream)
        self._conversation.begin(self._actor.node, self._actor.worker, stream)

    def yielded(self, message: messages.Message, buffers: list[memoryview]) -> None:
        self._conversation.yielded(message, buffers)

    def answered(self, message: messages.Message, buffers: list[memoryview]) -> None:
        try:
            self._actor.value(self._conversation.future.label, message, buffers)
        except Exception as error:
            self._conversation.end(error)
        else:
            self._conversation.end(None)

    def failed(self, error: Exception) -> None:
        self._conversation.end(self._actor.lost(str(error)) if isinstance(error, HostLost) else error)


class _Group(Reply):
    """Calls in one message: the `Caller` of the actor's node."""

    __slots__ = ("_actor", "_began", "_calls", "conversation")

    def __init__(self, actor: Actor, calls: Sequence[_Submitted]) -> None:
        super().__init__()
        self._actor = actor
        self._calls = calls
        self._began = time.monotonic()
        self.conversation: Conversation | None = None
        """Sends the streams among the arguments."""

    def sent(self, stream: int) -> None:
        super().sent(stream)
        if self.conversation is not None:
            self.conversation.begin(self._actor.node, self._actor.worker, stream)

    def answered(self, message: messages.Message, buffers: list[memoryview]) -> None:
        method, label = self._calls[0].method, self._calls[0].future.label
        if self.conversation is not None:
            self.conversation.end(None)
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
        if self.conversation is not None:
            self.conversation.end(error)
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
    """One of several outcomes, as the reply that a separate call would have had."""
    if type(found) is tuple:
        return messages.Result(parts=()), [memoryview(part) for part in found]
    kind, text, trace, *parts = found
    return messages.Raised(parts=(), kind=kind, text=text, traceback=trace), [memoryview(part) for part in parts]
