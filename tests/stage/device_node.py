"""A host as the stream of a device sees it: a stand-in that notes what it is sent, and replies as a test says."""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from typing import Any

from skyfab.device.batches import Batch
from skyfab.errors import HostLost
from skyfab.protocol import codec, messages


class Node:
    """A host that keeps what it is sent, and replies to the oldest batch when a test says so, or the program waits."""

    name = "node1"

    def __init__(self, value: Any = None) -> None:
        """`value` is the reply to every batch, at once. Without it, a test calls `reply`."""
        self.value = value
        self.sent: list[list[Any]] = []
        """The instructions of each batch."""
        self.buffers: list[list[bytes]] = []
        self.devices: list[str] = []
        self.batches: list[Batch] = []
        self.open: list[Batch] = []
        self.waits = 0
        self.is_gone = False
        self.is_closed = False
        self.is_reading = False
        """A callback is running."""

    def send(self, payload: codec.Payload, batch: Batch) -> None:
        if self.is_gone:
            raise HostLost("no route", host=self.name)
        device, instructions, *carried, last = pickle.loads(payload.data, buffers=payload.buffers)
        assert last is None
        self.devices.append(device)
        self.sent.append([list(one) for one in instructions])
        self.buffers.append([bytes(part[:8]) for part in carried])
        self.batches.append(batch)
        self.open.append(batch)
        if self.value is not None:
            self.reply({"value": self.value})

    def reply(self, document: Any = None, *buffers: bytes) -> None:
        data = b"" if document is None else json.dumps(document).encode()
        parts = [memoryview(part) for part in (data, *buffers)]
        self.open.pop(0).answered(messages.Result(parts=[len(part) for part in parts]), parts)

    def receive(self, batch: Batch) -> None:
        self.waits += 1
        while not batch.is_there and self.open:
            self.reply()

    def addresses_for(self, other: object) -> Sequence[str]:
        return []

    def notice(self, text: str) -> None:
        pass

    def may_wait(self) -> bool:
        return not self.is_reading

    def is_alive(self) -> bool:
        return True

    def close(self) -> None:
        self.is_closed = True
