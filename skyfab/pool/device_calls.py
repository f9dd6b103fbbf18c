"""Calls that run in the worker of a remote device, in order with its instructions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from skyfab.calls.results import not_unpickled, unpack_result
from skyfab.errors import DeviceError
from skyfab.pool.futures import CallFuture
from skyfab.pool.node import Node
from skyfab.protocol import messages
from skyfab.ui.events import Events

if TYPE_CHECKING:
    from collections.abc import Callable

    from skyfab.device.stream import DeviceStream

_CONTINUES: Final = ("exit", "unpicklable")
"""Endings of a call after which its process continues."""


class DeviceFuture(CallFuture):
    """The future of a call on a device. Cancelling it does not stop the call: its worker's tensors would be lost."""

    def __init__(self, stream: DeviceStream) -> None:
        super().__init__()
        self._stream = stream

    def result(self, timeout: float | None = None) -> Any:
        try:
            return super().result(timeout)
        except DeviceError as error:
            self._stream.consume(error)  # the program knows of it now
            raise

    def exception(self, timeout: float | None = None) -> BaseException | None:
        error = super().exception(timeout)
        self._stream.consume(error)
        return error


class DeviceCall:
    """One call: its future, and what becomes of its reply. It is the `Caller` of its node."""

    def __init__(
        self, stream: DeviceStream, node: Node, worker: str, label: str, first: int, *, untrusted: bool
    ) -> None:
        """The tensors of its result stay on the host if `first` is not 0: that is the id of the first of them."""
        self._stream = stream
        self._node = node
        self._worker = worker
        self._label = label
        self._first = first
        self._untrusted = untrusted
        self._ended: Callable[[BaseException | None], None] | None = None
        self.future = DeviceFuture(stream)
        self.future.node = node

    def begin(self, events: Events) -> None:
        self._ended = events.call(self._label, self._node.name)

    def processes(self) -> list[tuple[Node, str, int | None]]:
        """Node, worker and rank (None) where it runs."""
        return [(self._node, self._worker, None)]

    def is_wanted(self) -> bool:
        return True

    def sent(self, stream: int) -> None:
        pass

    def answered(self, message: messages.Message, buffers: list[memoryview]) -> None:
        if isinstance(message, messages.Ended) and message.why not in _CONTINUES:
            self._stream.end(message.text or f"{self._label}: {message.why}")
        try:
            result = self._result(message, buffers)
        except Exception as error:
            self.failed(error)
        except BaseException as error:  # raised by unpickling the result, or by a signal handler of the program
            self.failed(not_unpickled(error, host=self._node.name, rank=None, label=self._label))
            raise
        else:
            self._finish(result, None)

    def _result(self, message: messages.Message, buffers: list[memoryview]) -> Any:
        if self._first and isinstance(message, messages.Result) and buffers:
            return self._stays(buffers[0])
        if isinstance(message, messages.Ended) and message.why == "unstarted" and self._stream.earlier_error:
            raise self._stream.earlier_error
        try:
            return unpack_result(
                message, buffers, host=self._node.name, rank=None, label=self._label, untrusted=self._untrusted
            )
        except DeviceError:  # it was not called, or needs a tensor that was never computed
            cause = self._stream.earlier_error
            if cause is None:
                raise
            raise cause from None

    def _stays(self, data: memoryview) -> Any:
        """The result, with remote tensors. Raises ProtocolError."""
        from skyfab.device import tensors
        from skyfab.host.device import wire

        document = wire.decode(data)
        value = document.get("value") if isinstance(document, dict) else None
        return tensors.restore(value, self._first, self._stream.index)

    def failed(self, error: BaseException) -> None:
        self._finish(None, error)

    def _finish(self, result: Any, error: BaseException | None) -> None:
        if self._ended is not None:
            self._ended(error)  # before threads that wait for the future continue
        self.future.settle(result, error)
