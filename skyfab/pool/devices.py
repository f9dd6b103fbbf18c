"""The remote devices of a pool: for each a worker of its own, whose calls are batches of instructions."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from skyfab.calls.call import as_function
from skyfab.calls.pack import PackedFunction, pack_function
from skyfab.device import devices
from skyfab.device.entry import execute
from skyfab.errors import HostLost, HostUnfit, UsageError
from skyfab.pool.node import Node, WorkerSpec
from skyfab.protocol import codec
from skyfab.session.sigint import SIGINT_GUARD

if TYPE_CHECKING:
    import torch

    from skyfab.device.stream import Batch, DeviceStream


class DeviceLink:
    """The worker of a device, as the device's stream sees it."""

    def __init__(self, node: Node, worker: str, spec: WorkerSpec) -> None:
        self.name = node.name
        self.guard = SIGINT_GUARD
        self._node = node
        self._session = node.session
        self._worker = worker
        self._spec = spec

    def send(self, payload: codec.Payload, batch: Batch) -> None:
        if self._node.session is not self._session:  # the host was lost, and has a new agent
            raise HostLost("it was lost, and the tensors there are gone", host=self.name)
        self._node.call_in_order(self._worker, self._spec, _executor(), payload, batch)

    def wait(self, done: Callable[[], bool]) -> None:
        self._session.wait(done)

    def close(self) -> None:
        self._node.release(self._worker)


class Devices:
    """The open devices of a pool, by host and name."""

    def __init__(self, spec_of: Callable[[Node, str], WorkerSpec]) -> None:
        self._spec_of = spec_of
        self._streams: dict[tuple[str, str], DeviceStream] = {}
        self._lock = threading.Lock()

    def open(self, node: Node, kind: str, tree: str) -> torch.device:
        """The device of a host. The same one is the same device. Raises UsageError and HostUnfit."""
        name = _device_name(node, kind)
        with self._lock:  # threads that ask for one device at once get the same one
            stream = self._streams.get((node.name, name))
            if stream is None or stream.is_lost:
                worker = f"device.{name.replace(':', '.')}"
                spec = replace(self._spec_of(node, tree), pipelined=True)
                stream = self._streams[node.name, name] = devices.open_device(name, DeviceLink(node, worker, spec))
            return stream.torch_device

    def close(self) -> None:
        """The pool closes."""
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.close()


@functools.cache
def _executor() -> PackedFunction:
    """What workers of devices run."""
    return pack_function(as_function(execute))


def _device_name(node: Node, kind: str) -> str:
    """The device's name on its host. Raises UsageError and HostUnfit."""
    base, _, number = kind.partition(":")
    if base == "auto" and not number:
        base = "cuda" if node.gpus else "cpu"
    if base not in ("cuda", "cpu") or (number and not number.isdigit()) or (base == "cpu" and number not in ("", "0")):
        raise UsageError(f"not a kind of device: {kind!r}", hint='"auto", "cpu", "cuda" or "cuda:1"')
    if base == "cpu":
        return "cpu"
    if int(number or 0) >= len(node.gpus):
        found = f"it has {len(node.gpus)} GPUs" if node.gpus else "it has no GPU"
        raise HostUnfit(f"there is no {kind} there: {found}", host=node.name, hint='compute.device("cpu")')
    return f"cuda:{int(number or 0)}"
