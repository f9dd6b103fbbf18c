"""Functions and modules that run as a whole on the host of a device."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch

from skyfab._util.signals import SIGNAL_GUARD, is_from_handler
from skyfab.device import composite_ops, tensors
from skyfab.device.call_site import describe, find_call_site
from skyfab.device.meta import to_meta
from skyfab.device.tensors import is_remote, operand
from skyfab.errors import NotPicklable, SkyfabError, UsageError
from skyfab.host.device import composite_host, entry, wire
from skyfab.protocol import codec
from skyfab.protocol.blobs import name_of

if TYPE_CHECKING:
    from skyfab.device.batches import Batch
    from skyfab.device.stream import DeviceStream

_AHEAD: Final = 4
"""Requests for values of a generator that are sent before the values are needed."""


def run(stream: DeviceStream, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Calls a function on the host and waits. If it is a generator function, returns an iterator."""
    first = tensors.new_block()
    packed, given = pack(stream, (getattr(function, "fn", function), tuple(args), dict(kwargs)), tensors.streams)
    uploads = (memoryview(packed.data), *packed.buffers)
    found = tensors.result_of(stream, [wire.RUN, first], first, *uploads, given=given)
    return _RemoteIterator(stream, first, given) if found is tensors.ITERATOR else found


def pack(
    stream: DeviceStream, value: Any, refused: Collection[DeviceStream]
) -> tuple[codec.Payload, dict[int, torch.Tensor]]:
    """Pickles a value. Tensors of the device become references to the host's; those of other devices are copied.

    Returns these tensors too, by id. The device itself becomes the host's name of it. Raises UsageError for tensors of
    a refused device, and NotPicklable.
    """
    given: dict[int, torch.Tensor] = {}

    def reference(item: Any) -> tuple[Any, ...] | None:
        is_device = isinstance(item, torch.device) and item.type == tensors.TYPE
        if not is_device and not is_remote(item):
            return None
        other = tensors.streams[item.index or 0] if is_device else tensors.stream_of(item)
        if other is not stream:
            if other in refused or is_device:
                raise UsageError(
                    f"expected tensors on {stream.torch_device} ({stream.link.name}), found one on "
                    f"{other.torch_device} ({other.link.name})",
                    hint="move it with tensor.to(device), or copy its values with tensor.cpu()",
                )
            return None
        if is_device:
            return torch.device, (stream.device,)
        if item.is_conj() or item.is_neg():
            raise UsageError(
                "a function on a device does not take conjugated or negated views", hint="clone the tensor"
            )
        if item.is_sparse:
            raise UsageError("a function on a device does not take sparse tensors", hint="pass indices and values")
        detached = item.detach()
        ident = operand(detached)[1]
        given[ident] = detached
        return entry.tensor, (stream.device, ident, item.requires_grad, isinstance(item, torch.nn.Parameter))

    try:
        return codec.dumps(value, reference), given
    except Exception as error:
        if isinstance(error, SkyfabError) or is_from_handler(error):
            raise
        raise NotPicklable(f"cannot pickle the function or its arguments: {error}") from error


class _Found(Exception):
    def __init__(self, stream: DeviceStream) -> None:
        self.stream = stream


def find(value: Any, streams: Collection[DeviceStream]) -> DeviceStream | codec.Payload:
    """The one of these devices that has the first remote tensor in a value; if there is none, the pickled value."""

    def reference(item: Any) -> None:
        if is_remote(item) and (stream := tensors.stream_of(item)) in streams:
            raise _Found(stream)

    try:
        return codec.dumps(value, reference)
    except _Found as found:
        return found.stream


class _RemoteIterator(Iterator[Any]):
    """What a generator on the host yields. Some values are asked for ahead, so that the host does not wait."""

    def __init__(self, stream: DeviceStream, ident: int, given: tensors.Given) -> None:
        self._stream = stream
        self._ident = ident
        self._given = given
        """What its function was called with."""
        self._waiting: deque[tuple[Batch, int]] = deque()
        """Requests, and the first ids of their values."""
        self._values: deque[Any] = deque()
        self._is_over = False
        self._reading = threading.RLock()  # a signal handler may read it too

    def __next__(self) -> Any:
        with SIGNAL_GUARD:
            SIGNAL_GUARD.acquire(self._reading)  # several threads may read
            try:
                return self._next()
            finally:
                self._reading.release()

    def _next(self) -> Any:
        while not self._values:
            if self._is_over:
                raise StopIteration
            while len(self._waiting) < _AHEAD and not (self._waiting and self._stream.earlier_error):
                self._ask()  # raises an earlier error: that of a later value, if there are values to come
            self._receive()
        return self._values.popleft()

    def _ask(self) -> None:
        first = tensors.new_block()
        with SIGNAL_GUARD:
            self._waiting.append((self._stream.start([wire.NEXT, self._ident, first]), first))

    def _receive(self) -> None:
        """Waits for more values."""
        batch, first = self._waiting[0]
        self._stream.wait(batch, find_call_site())
        try:
            if batch.document is None:
                self._stream.check()
            with SIGNAL_GUARD:
                tensors.note_changes(self._given, batch.document or {})
                self._values.extend(tensors.restore(batch.value(), first, self._stream.index, self._given))
                self._waiting.popleft()  # not before: Ctrl-C may end the wait
        except Exception:
            self.close()
            self._stream.consume(batch.error)
            raise
        if batch.document.get("over"):
            self._end()

    def close(self) -> None:
        """Ends the generator on the host. It yields nothing more."""
        self._values.clear()
        self._end()

    def _end(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._stream.freed += [self._ident, *(-first for _, first in self._waiting)]
            for batch, _ in self._waiting:
                tensors.note_changes(self._given, batch.document or {})
            self._waiting.clear()
            self._given = {}

    def __del__(self) -> None:
        self.close()


def load(stream: DeviceStream, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Calls a function that returns a module or a state dict; returns the state dict. Raises UsageError."""
    found = run(stream, composite_host.state_dict, (getattr(function, "fn", function), args, kwargs), {})
    if not isinstance(found, dict):
        raise UsageError(f"load_on: the function returned {type(found).__name__}, not a module or a state dict")
    return found


# ---- modules


_COMPOUND: Final = frozenset({float, complex, tuple})
_PLAIN: Final = frozenset({bool, int, float, str, bytes, complex, type(None), torch.dtype})
_MOST_STATES: Final = 64
_NOTE: Final = 1000
"""Characters of a host's notice that are shown."""


noticed: Final[set[tuple[DeviceStream, str]]] = set()
"""What the user was warned of."""


def notice_once(index: int, text: str, where: str = "") -> None:
    """Warns the user about a device, unless the same was said before, also of another line."""
    stream = tensors.streams[index]
    if (stream, text) not in noticed:
        noticed.add((stream, text))
        stream.link.notice(f"{text}{where}")


def autocast_dtype() -> str:
    """The name of the dtype of autocast on remote devices; empty where it is not enabled."""
    if not torch.is_autocast_enabled(tensors.TYPE):
        return ""
    return str(torch.get_autocast_dtype(tensors.TYPE)).removeprefix("torch.")


def call_module(known: dict[Any, Any], key: Any, spec: Any, found: Sequence[torch.Tensor], device: torch.device) -> Any:
    """Calls a module that the host has (composite_host.py) with these tensors. Returns what it returns.

    `known` has for each kind of call, by its key: the bases of its results and the handle as meta tensors, the base or
    input of each result and which view of it the result is (host_results.py), what the module returns, and the indices
    of the tensors that it changes in place. The first call waits.
    """

    def call(inputs: Sequence[torch.Tensor], wanted: Sequence[bool]) -> tuple[list[torch.Tensor], torch.Tensor]:
        args = [list(inputs), spec, wanted]
        if key in known:
            metas, *expected, _ = known[key]
            *bases, handle = composite_ops.call("module", [*args, tuple(expected)], lambda: metas, device)
            tensors.streams[device.index].flush_if_idle()
        else:
            (*bases, handle), *about, note = composite_ops.call_first("module_first", args, device)
            known[key] = ([to_meta(tensor) for tensor in (*bases, handle)], *about)
            if note:
                line = describe(find_call_site())
                notice_once(device.index, str(note)[:_NOTE], f" (at {line})" if line else "")
        _, locations, _, changed = known[key]
        torch.autograd.graph.increment_version([inputs[at] for at in changed if not inputs[at].is_inference()])
        results = []
        for at, view in locations:
            base = bases[at] if at >= 0 else inputs[~at].to(device)  # a number of this machine was copied
            results.append(base if view is None else tensors.view_of(base, view))
        return results, handle

    results = composite_ops.keep_graph(call, *found)
    return composite_host.fill_in(known[key][2], results)


class RemoteModule(torch.nn.Module):  # type: ignore[misc]
    """A module whose forward is one instruction, and whose backward is one. `module` is the module itself."""

    def __init__(self, module: torch.nn.Module) -> None:
        """Raises UsageError if its parameters and buffers are not on one remote device."""
        super().__init__()
        self.module = module
        _device_of([tensor for tensor, _ in composite_host.own_tensors(module)])
        self._stream: DeviceStream | None = None
        """The device of the last call: one that is opened again has nothing of the module."""
        self._digests: dict[Any, tuple[str, Any]] = {}
        """What the host has of the module, for each state of it; and the functions whose ids the state has."""
        self._known: dict[Any, Any] = {}
        """What is known of each kind of call."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        own = composite_host.own_tensors(self.module)
        found: list[torch.Tensor] = []
        device = _device_of([tensor for tensor, _ in own])
        template = composite_host.template((args, kwargs), found, here=device)
        found += [tensor for tensor, _ in own]
        spec = (self._on_host(device, own), len(own), template, autocast_dtype())
        key = (device.index, spec, tuple((tensor.shape, tensor.stride(), tensor.dtype) for tensor in found))
        return call_module(self._known, key, spec, found, device)

    def _on_host(self, device: torch.device, own: Sequence[tuple[torch.Tensor, Any]]) -> str:
        """Sends the module, unless the host has it as it is now. Returns its digest.

        Raises UsageError if it changes all the time.
        """
        stream = tensors.streams[device.index]
        if self._stream is not stream:
            self._digests.clear()
            self._known.clear()
            self._stream = stream
        state, functions = _state(self.module, [tensor for tensor, _ in own])
        if state not in self._digests:
            if len(self._digests) >= _MOST_STATES:
                raise UsageError(
                    f"attributes of {type(self.module).__name__} changed {_MOST_STATES} times: each change sends the "
                    "module again",
                    hint="pass what changes as an argument of forward, or keep it in a buffer",
                )
            self._digests[state] = send_module(stream, self.module), functions
        return self._digests[state][0]


def send_module(stream: DeviceStream, module: Any) -> str:
    """Sends a module, or a function that makes it on the host. Returns its digest."""
    packed, _ = pack(stream, module, tensors.streams)
    digest = name_of(packed.data, *packed.buffers)
    stream.ask([wire.MODULE, digest], memoryview(packed.data), *packed.buffers).value()
    return digest


def _state(module: torch.nn.Module, own: Sequence[torch.Tensor]) -> tuple[Any, list[Any]]:
    """All of a module that changes what it computes, besides its tensors; and the functions whose ids are in that.

    For each part: its type, where its parts and tensors are, its plain attributes, and its hooks. It is computed for
    each call, and has few function calls.
    """
    parts = list(module.modules())
    number_of = {id(one): at for at, one in enumerate((*parts, *own))}.get
    functions: list[Any] = []
    states: list[Any] = []
    for part in parts:
        held = (part._modules, part._parameters, part._buffers)
        states += [tuple([(name, number_of(id(one))) for name, one in holder.items()]) for holder in held]
        states.append((type(part), _plain(part)))
        if part._forward_pre_hooks or part._forward_hooks:
            hooks = [*part._forward_pre_hooks.values(), None, *part._forward_hooks.values()]
            functions += hooks
            states.append(tuple(map(id, hooks)))
    return tuple(states), functions


def _plain(part: torch.nn.Module) -> tuple[tuple[str, Any, Any], ...]:
    """The attributes of a part that are numbers, texts and the like, or tuples of these: name, type and value."""
    return tuple(
        [
            (name, kind, _exact(value) if kind in _COMPOUND else value)
            for name, value in vars(part).items()
            if (kind := type(value)) in _PLAIN or (kind is tuple and _is_plain(value))
        ]
    )


def _is_plain(value: object) -> bool:
    return type(value) in _PLAIN or (type(value) is tuple and all(map(_is_plain, value)))


def _exact(value: Any) -> Any:
    """A plain value as a key: 2, 2.0 and True are equal, and so are 0.0 and -0.0."""
    if type(value) is tuple:
        return tuple, tuple(map(_exact, value))
    return type(value), repr(value) if type(value) in (float, complex) else value


def _device_of(own: Sequence[torch.Tensor]) -> torch.device:
    """The device of a module with these tensors."""
    found = {tensor.device for tensor in own}
    if len(found) != 1 or next(iter(found)).type != tensors.TYPE:
        devices = ", ".join(sorted(map(str, found))) or "none"
        raise UsageError(
            f"expected all tensors of the module on one remote device, found {devices}", hint="module.to(device)"
        )
    return next(iter(found))
