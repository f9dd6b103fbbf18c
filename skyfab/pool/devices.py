"""The remote devices of a pool: for each a worker of its own, whose calls are batches of instructions.

A call of the program that has remote tensors among its arguments runs in the same worker, between two batches: it has
the tensors themselves, and everything that was sent before it has been executed.
"""

from __future__ import annotations

import atexit
import copy
import getpass
import os
import socket
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from skyfab import context
from skyfab._util.signals import SIGNAL_GUARD, is_from_handler
from skyfab._util.sizes import counted, seconds_of
from skyfab.calls.call import Call, Function, as_function, check_seconds
from skyfab.calls.pack import (
    PackedCall,
    PackedFunction,
    pack_arguments,
    pack_function,
    send_main_by_value,
    sources_of,
)
from skyfab.calls.results import deliver, unpack_result
from skyfab.detached.run import Run
from skyfab.device import devices
from skyfab.device.stream import DeviceFuture, DeviceStream
from skyfab.errors import DeviceError, HostLost, HostUnfit, SkyfabError, UsageError, WorkerDied
from skyfab.host.device import entry, wire
from skyfab.pool.addresses import meeting_addresses
from skyfab.pool.futures import CallFuture
from skyfab.pool.node import Caller, Node, WorkerSpec
from skyfab.protocol import codec, messages
from skyfab.session.reader import is_handling, refuse_to_wait
from skyfab.ui.events import Events, Notice

if TYPE_CHECKING:
    from skyfab.device.batches import Batch


_CONTINUES: Final = ("exit", "unpicklable")
"""Endings of a call after which its process continues."""


class DeviceLink:
    """The worker of a device, as the device's stream sees it."""

    def __init__(self, node: Node, worker: str, spec: WorkerSpec, executor: PackedFunction, events: Events) -> None:
        self.name = node.name
        self.node = node
        self.worker = worker
        self.tree = spec.tree
        """The project's files that the worker imports, or those that the user was last warned about."""
        self._session = node.session
        self._spec = spec
        self._executor = executor
        self._events = events
        self._generation = 0

    def addresses_for(self, other: object) -> Sequence[str]:
        if not isinstance(other, DeviceLink):
            return ()
        return meeting_addresses(self.node, other.node)

    def notice(self, text: str) -> None:
        self._events.emit(Notice(host=self.name, text=text))

    def send(self, payload: codec.Payload, batch: Batch) -> None:
        self.call(PackedCall(function=self._executor, arguments=payload, label=""), batch)

    def call(self, call: PackedCall, caller: Caller) -> None:
        """Sends a call. Raises HostLost and WorkerDied."""
        if self.node.session is not self._session:  # the host was lost, and has a new agent
            raise HostLost("the host was lost, and its tensors with it", host=self.name)
        if not self.is_alive():
            hint = "open the device again: compute.device(…)"
            raise WorkerDied("the worker of the device ended; its tensors are lost", host=self.name, hint=hint)
        self._generation = self.node.call(self.worker, self._spec, call, caller=caller, store="none")

    def is_alive(self) -> bool:
        return not self._generation or self.node.has_worker(self.worker, self._generation)

    def receive(self, batch: Batch) -> None:
        refuse_to_wait()
        with SIGNAL_GUARD:
            self._session.read_until_there(batch)

    def may_wait(self) -> bool:
        return not is_handling()

    def close(self) -> None:
        self.node.release(self.worker)


class DeviceCallFuture(DeviceFuture, CallFuture):
    """The future of a call on a device. Cancelling it does not stop the call: its worker's tensors would be lost."""


class DeviceCall(Caller):
    """One call: its future, and what becomes of its reply."""

    def __init__(
        self,
        stream: DeviceStream,
        label: str,
        first: int,
        given: Mapping[int, Any],
        events: Events,
        *,
        untrusted: bool,
    ) -> None:
        """The tensors of its result stay on the host if `first` is not 0: that is the id of the first of them.

        `given` are the tensors that it has, by id.
        """
        self._stream = stream
        self._given = given
        link = stream.link
        assert isinstance(link, DeviceLink)
        self._link = link
        self._label = label
        self._first = first
        self._untrusted = untrusted
        self._changed: Any = None
        """What the host says of changes: None if the call failed."""
        self._ended = events.call(label, link.name)
        self.future = DeviceCallFuture(stream)
        self.future.node = link.node

    def processes(self) -> list[tuple[Node, str, int | None]]:
        """Node, worker and rank (None) where it runs."""
        return [(self._link.node, self._link.worker, None)]

    def answered(self, message: messages.Message, buffers: list[memoryview]) -> None:
        if isinstance(message, messages.Ended) and message.why not in _CONTINUES:
            self._stream.end(message.text or f"{self._label}: {message.why}")
        about = {"host": self._link.name, "rank": None, "label": self._label, "untrusted": self._untrusted}
        deliver(self._finish, message, buffers, unpack=self._result, **about)

    def _result(self, message: messages.Message, buffers: list[memoryview], **about: Any) -> Any:
        if self._first and isinstance(message, messages.Result) and buffers:
            return self._stays(buffers[0])
        if isinstance(message, messages.Ended) and message.why == "unstarted" and self._stream.earlier_error:
            raise copy.copy(self._stream.earlier_error)
        try:
            value, changed = unpack_result(message, buffers, **about)
            self._changed = {"changed": changed}
            return value
        except DeviceError:  # it was not called, or needs a tensor that was never computed
            cause = self._stream.earlier_error
            if cause is None:
                raise
            raise cause from None

    def _stays(self, data: memoryview) -> Any:
        """The result, with remote tensors. Raises ProtocolError."""
        from skyfab.device import tensors

        self._changed = document = wire.decode(data)
        value = document.get("value") if isinstance(document, dict) else None
        return tensors.restore(value, self._first, self._stream.index, self._given)

    def failed(self, error: BaseException) -> None:
        self._finish(None, error)

    def _finish(self, result: Any, error: BaseException | None) -> None:
        from skyfab.device import tensors

        tensors.note_changes(self._given, self._changed)
        self._given = {}  # before the future is settled: this frame must keep no tensor that the program drops
        self._ended(error)  # before threads that wait for the future continue
        self.future.settle(result, error)


class Devices:
    """The open devices of a pool, by host and name."""

    def __init__(
        self, spec_of: Callable[[Node, str], WorkerSpec], plugins: tuple[Any, ...], events: Events, *, untrusted: bool
    ) -> None:
        self._spec_of = spec_of
        self._plugins = plugins
        self._events = events
        self._untrusted = untrusted
        self._caller = as_function(entry.call)
        self._execute = as_function(entry.execute)
        self._opening: defaultdict[tuple[str, str], threading.Lock] = defaultdict(threading.Lock)
        self._lock = threading.Lock()
        self.streams: dict[tuple[str, str], DeviceStream] = {}

    def open(self, node: Node, kind: str, tree: str) -> DeviceStream:
        """The device of a host. The same one is the same device. Raises UsageError and HostUnfit."""
        name = device_name(node, kind)
        with self._lock:
            opening = self._opening[node.name, name]
        with opening:  # threads that ask for one device at once get the same one, and do not wait for other hosts
            stream = self.streams.get((node.name, name))
            if stream is not None and not stream.is_lost and not stream.link.is_alive():
                stream.end("its process ended")
            if stream is None or stream.is_lost:
                worker = f"device.{name.replace(':', '.')}"
                spec = replace(self._spec_of(node, tree), pipelined=True)
                executor = pack_function(self._execute, self._plugins, each=False)
                link = DeviceLink(node, worker, spec, executor, self._events)
                stream = self.streams[node.name, name] = devices.open_device(name, link)
            return stream

    def join(self, node: Node, run: str, tree: str, *, seeded: bool) -> DeviceStream:
        """The device that a detached run has. Raises UsageError if another program uses it.

        Its worker gives its pipes to the process of the run (host/agent/join.py).
        """
        holder = f"{getpass.getuser()}@{socket.gethostname()} (process {os.getpid()})"
        spec = self._spec_of(node, "")
        env = {**spec.env, context.JOINED: run, context.HOLDER: holder}
        spec = replace(spec, env=env, pipelined=True, claims=False)
        link = DeviceLink(node, f"device.{run}", spec, pack_function(self._execute, each=False), self._events)
        link.tree = tree
        stream = self.streams[node.name, run] = devices.open_device(run, link, run=run, seeded=seeded)
        atexit.register(self.close)  # the kernel of a notebook may end without closing the pool
        return stream

    def find_lasting(self, node: Node, name: str, runs: Sequence[Run]) -> DeviceStream | None:
        """The device called `name` that this pool has made on the node. Raises UsageError if something else is."""
        run = next((run for run in runs if run.name == name and run.state == "running"), None)
        if run is None or (node.name, run.id) in self.streams:
            return None if run is None else self.streams[node.name, run.id]
        hint = f'sky.attach_device("{name}"), or delete it with all that it keeps: skyfab stop {run.id[:8]}'
        raise UsageError(f"a run named {name!r} is already running", host=run.hosts[0], hint=hint)

    def join_new(self, node: Node, run: Run, tree: str) -> DeviceStream:
        """The device of a run that has just begun. If that fails, stops the run, and raises why it failed."""
        try:
            return self.join(node, run.id, tree, seeded=True)
        except BaseException:
            if run.status == "failed":
                run.raise_failure()
            run.stop()
            raise

    def close(self) -> None:
        """The pool closes. An error that no use of a device has raised is reported."""
        streams, self.streams = self.streams, {}
        for stream in streams.values():
            error = stream.earlier_error
            if (kept := devices.kept_on(stream)) and not stream.is_lost:
                from skyfab.device import keeping

                keeping.save(stream, kept)
            stream.close()
            if isinstance(error, DeviceError):
                text = f"this error was not raised, because the device was not used again: {error.message}"
                self._events.emit(Notice(host=stream.link.name, text=text))

    # ---- calls

    def find(self, call: Call[Any], node: Node | None) -> DeviceStream | codec.Payload:
        """The device in whose worker a call runs; its packed arguments, if they have no tensor of the pool's devices.

        With a node, only devices of that host count. Raises NotPicklable, and errors of devices.
        """
        from skyfab.device import remote_functions

        send_main_by_value()
        try:
            return remote_functions.find((*call.args, call.kwargs or None), self._on(node))
        except Exception as error:
            if isinstance(error, SkyfabError) or is_from_handler(error):  # the former of a tensor that is copied
                raise
            return pack_arguments(call)  # raises it again, with the name of the argument

    def _on(self, node: Node | None) -> list[DeviceStream]:
        return [stream for (host, _), stream in self.streams.items() if node is None or host == node.name]

    def start(
        self, stream: DeviceStream, call: Call[Any], on: Node | None, tree: str, *, timeout: float | None, keep: bool
    ) -> DeviceCall:
        """Starts a call in the worker of a device. Raises UsageError, NotPicklable, and the error of an earlier one.

        Tensors of other devices on which it might run are refused, any other ones are copied.
        """
        from skyfab.device import remote_functions, tensors

        link = stream.link
        assert isinstance(link, DeviceLink)
        if tree != link.tree:
            link.tree = tree
            text = f"project files changed; the worker of {stream.device} still uses the old ones"
            self._events.emit(Notice(host=link.name, text=text))
        first = tensors.new_block() if keep else 0
        values = (stream.device, first, call.function, sources_of(call.function), call.args, call.kwargs, None)
        arguments, given = remote_functions.pack(stream, values, self._on(on))
        packed = PackedCall(
            function=pack_function(self._caller, self._plugins),
            arguments=arguments,
            label=call.function.label,
            timeout=timeout,
        )
        started = DeviceCall(stream, packed.label, first, given, self._events, untrusted=self._untrusted)

        def send() -> None:
            with SIGNAL_GUARD:
                link.call(packed, started)

        try:
            stream.send_between(send)
        except BaseException as error:
            started.failed(error)
            if isinstance(error, DeviceError) or not isinstance(error, SkyfabError):
                raise  # an error that is raised once must not wait in a future; the device's end is found again
        return started


def call_that_stays(node: Node, kind: str, *, keep: str | float, idle: str | float | None) -> Call[Any]:
    """The call of a detached run that is a device. Raises UsageError and HostUnfit."""
    from skyfab.host.device.stay import device_that_stays  # loads the code of workers

    limits = _seconds("keep", keep), None if idle is None else _seconds("idle", idle)
    stay: Function[..., Any] = Function(device_that_stays, timeout=1e9)  # that of the pool is for other calls
    return stay(device_name(node, kind), *limits)


def _seconds(option: str, value: str | float) -> float:
    """Raises UsageError."""
    found = seconds_of(value) if isinstance(value, str) else value
    check_seconds(option, value if found is None else found)
    return float(found or 0)


def device_name(node: Node, kind: str) -> str:
    """The device's name on its host. Raises UsageError and HostUnfit."""
    base, _, number = kind.partition(":")
    if base == "auto" and not number:
        base = "cuda" if node.gpus else "cpu"
    if base not in ("cuda", "cpu") or (number and not number.isdigit()) or (base == "cpu" and number not in ("", "0")):
        raise UsageError(f"unknown device: {kind!r}", hint='expected "auto", "cpu", "cuda" or "cuda:1"')
    if base == "cpu":
        return "cpu"
    if int(number or 0) >= len(node.gpus):
        found = counted(len(node.gpus), "GPU") if node.gpus else "no GPU"
        raise HostUnfit(f"no {kind}: the host has {found}", host=node.name, hint='compute.device("cpu")')
    return f"cuda:{int(number or 0)}"
