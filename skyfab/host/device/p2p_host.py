"""Copies from one device to another, as their workers execute them: over channels, by the number of the copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from skyfab.host.channel import Channel
from skyfab.host.device.memory import DTYPES, Tensors, bytes_of


class TensorChannels:
    """The channels of a device's worker, by id, and what goes over them."""

    def __init__(self, tensors: Tensors, device: torch.device) -> None:
        self._tensors = tensors
        self._device = device
        self._channels: dict[int, Channel] = {}

    def listen(self, instruction: Sequence[Any]) -> list[int]:
        _, ident, *made, addresses = instruction
        self._channels[ident] = Channel(*made)
        return self._channels[ident].listen(addresses)

    def connect(self, instruction: Sequence[Any]) -> bool:
        _, ident, *made, endpoints = instruction
        self._channels[ident] = Channel(*made)
        return self._channels[ident].connect(endpoints)

    def close(self, ident: int) -> None:
        if ident in self._channels:
            self._channels.pop(ident).close()

    def close_all(self) -> None:
        for ident in list(self._channels):
            self.close(ident)

    def _channel(self, ident: int) -> Channel:
        found = self._channels.get(ident)
        if found is None:  # it was broken, and is forgotten
            found = Channel("the other host", "", "")
            found.close()
        return found

    def send(self, instruction: Sequence[Any], failed: str) -> None:
        """Sends a tensor; or why it cannot, if the worker has failed before or fails now: the other one waits."""
        _, channel, number, ident = instruction
        found = self._channel(channel)
        try:
            found.send(number, failed or bytes_of(self._tensors[ident]))
        except Exception as error:
            found.send(number, f"{type(error).__name__}: {error}")
            raise

    def receive(self, instruction: Sequence[Any], *, is_wanted: bool) -> None:
        """Makes a tensor of what comes, or writes it into one. A worker that has failed does not want it."""
        _, channel, number, ident, layout, shape, dtype, size = instruction
        found = self._channel(channel)
        if not is_wanted:
            found.skip(number)
            return
        try:
            data = torch.empty(size, dtype=torch.uint8)
        except Exception:
            found.skip(number)
            raise
        found.receive(number, memoryview(data.numpy()))
        data = data.view(DTYPES[dtype]).view(shape)
        if layout is None:
            self._tensors[ident].copy_(data)
        elif layout == (data.shape, data.stride(), dtype):
            self._tensors[ident] = data.to(self._device)
        else:
            shape, strides, dtype = layout
            made = torch.empty_strided(shape, strides, dtype=DTYPES[dtype], device=self._device)
            self._tensors[ident] = made.copy_(data)
