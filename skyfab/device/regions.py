"""Regions: functions and modules that run as a whole on the host of a device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Final

import torch

from skyfab.device import composed, fused, tensors, wire
from skyfab.device.meta import to_meta
from skyfab.device.tensors import is_remote, operand
from skyfab.errors import NotPicklable, UsageError
from skyfab.protocol import codec
from skyfab.protocol.blobs import name_of

if TYPE_CHECKING:
    from skyfab.device.stream import Batch, DeviceStream

_AHEAD: Final = 16
"""Values of a generator that are asked for before they are needed."""


def run(stream: DeviceStream, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Calls a function on the host and waits. If it is a generator function, returns an iterator."""
    first = tensors.new_block()
    data = _pack(stream, (getattr(function, "fn", function), tuple(args), dict(kwargs)))
    value = stream.ask([wire.RUN, first], memoryview(data)).value()
    if value == {"iterator": None}:
        return _RemoteIterator(stream, first)
    return tensors.restore(value, first, stream.index)


def _pack(stream: DeviceStream, value: Any) -> bytes:
    """Pickles a value; remote tensors become references to the host's. Raises NotPicklable."""

    def reference(item: Any) -> Any:
        if not is_remote(item):
            return None
        if tensors.stream_of(item) is not stream:
            raise UsageError(f"a tensor on {item.device} for a function on {stream.torch_device}")
        if item.is_conj() or item.is_neg():
            raise UsageError("a conjugated or negated view for a function on a device", hint="clone it")
        return (operand(item.detach())[1], item.requires_grad, isinstance(item, torch.nn.Parameter))

    try:
        return codec.dumps_with_references(value, reference)
    except UsageError:
        raise
    except Exception as error:
        raise NotPicklable(f"the function or its arguments cannot be pickled: {error}") from error


class _RemoteIterator(Iterator[Any]):
    """What a generator on the host yields. Some values are asked for ahead, so that the host does not wait."""

    def __init__(self, stream: DeviceStream, ident: int) -> None:
        self._stream = stream
        self._ident = ident
        self._waiting: deque[Future[Any]] = deque()
        self._is_over = False

    def __next__(self) -> Any:
        while not self._is_over and len(self._waiting) < _AHEAD:
            self._ask()
        if not self._waiting:
            raise StopIteration
        future = self._waiting.popleft()
        self._stream.link.wait(future.done)
        try:
            value, first = future.result(0)
        except TimeoutError:
            self._stream.check()
            raise
        except Exception as error:
            self.close()
            self._stream.consume(error)
            raise
        if value == {"end": None}:
            self.close()
            raise StopIteration
        return tensors.restore(value, first, self._stream.index)

    def _ask(self) -> None:
        future: Future[Any] = Future()
        first = tensors.new_block()

        def arrived(batch: Batch, error: Exception | None) -> None:
            try:
                if error is not None:
                    raise error
                future.set_result((batch.value(), first))
            except Exception as found:
                future.set_exception(found)

        self._stream.ask_later([wire.NEXT, self._ident, first], arrived)
        self._waiting.append(future)

    def close(self) -> None:
        """Ends the generator on the host."""
        if not self._is_over:
            self._is_over = True
            self._waiting.clear()
            self._stream.freed.append(self._ident)

    def __del__(self) -> None:
        self.close()


def load(stream: DeviceStream, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Calls a function that returns a module or a state dict; returns the state dict. Raises UsageError."""
    found = run(stream, fused.Loader(getattr(function, "fn", function)), args, kwargs)
    if not isinstance(found, dict):
        raise UsageError(f"load_on: the function returned a {type(found).__name__}, not a module or a state dict")
    return found


# ---- modules


class RemoteModule(torch.nn.Module):  # type: ignore[misc]
    """A module whose forward is one instruction, and whose backward is one. `module` is the module itself."""

    def __init__(self, module: torch.nn.Module) -> None:
        """Raises UsageError if its parameters and buffers are not on one remote device."""
        super().__init__()
        self.module = module
        _device_of(module)
        self._digests: dict[Any, str] = {}
        """What the host has of the module, for each state of `training` of its parts."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        device = _device_of(self.module)
        parameters = dict(self.module.named_parameters())
        buffers = dict(self.module.named_buffers())
        inputs: list[torch.Tensor] = []
        template = fused.template((args, kwargs), inputs)
        spec = (self._on_host(device), tuple(parameters), tuple(buffers), template)
        found = (*inputs, *parameters.values(), *buffers.values())
        results = _Forward.apply(self.module, spec, device, *found)
        return fused.fill_in(_structures[_key(spec, found)], results)

    def _on_host(self, device: torch.device) -> str:
        """Sends the module without its tensors, once. Returns its digest."""
        state = (device.index, tuple(part.training for part in self.module.modules()))
        if state not in self._digests:
            stream = tensors.streams[device.index]
            data = _pack(stream, _Skeleton(self.module))
            self._digests[state] = digest = name_of(data)
            stream.ask([wire.MODULE, digest], memoryview(data)).value()
        return self._digests[state]


class _Skeleton:
    """Pickles a module with tensors on the meta device in place of its own."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module

    def __reduce__(self) -> Any:
        import copy

        memo: dict[int, Any] = {}
        for tensor in (*self._module.parameters(), *self._module.buffers()):
            meta = to_meta(tensor.detach())
            memo[id(tensor)] = (
                torch.nn.Parameter(meta, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else meta
            )
        return fused.itself, (copy.deepcopy(self._module, memo),)


def _device_of(module: torch.nn.Module) -> torch.device:
    found = {tensor.device for tensor in (*module.parameters(), *module.buffers())}
    if len(found) != 1 or next(iter(found)).type != tensors.TYPE:
        places = ", ".join(sorted(map(str, found))) or "nowhere"
        raise UsageError(
            f"the module's tensors must be on one remote device, and are on {places}", hint="module.to(device)"
        )
    return next(iter(found))


_structures: Final[dict[Any, Any]] = {}
"""What modules return, with numbers in place of tensors."""


def _key(spec: Any, inputs: Sequence[torch.Tensor]) -> Any:
    return (spec, tuple((tensor.shape, tensor.stride(), tensor.dtype) for tensor in inputs))


class _Forward(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, module: torch.nn.Module, spec: Any, device: torch.device, *inputs: torch.Tensor) -> Any:
        wanted = ctx.needs_input_grad[3:]

        def outputs() -> list[torch.Tensor]:
            results: list[torch.Tensor] = []
            value = fused.call_module(module, spec, [to_meta(tensor) for tensor in inputs])
            _structures[_key(spec, inputs)] = fused.template(value, results)
            return [*results, torch.empty(0, device="meta")]

        *results, handle = composed.call("module", [list(inputs), spec, wanted], outputs, device)
        ctx.save_for_backward(handle, *inputs)
        ctx.wanted = wanted
        return tuple(results)

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Any) -> Any:
        handle, *inputs = ctx.saved_tensors
        return (None, None, None, *composed.gradients(handle, list(grads), inputs, ctx.wanted))


def remote(module: torch.nn.Module) -> RemoteModule:
    """The module, as one instruction each way. Raises UsageError."""
    return RemoteModule(module)
