"""Copies from one remote device to another. The bytes go from host to host, if the hosts can reach each other.

For each copy one worker gets an instruction to send and the other one to receive. Workers execute their instructions in
order, and may wait for each other: so the copies of a program have one order, and sending comes before receiving.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from typing import Final

import torch

from skyfab._util.certificate import new_certificate
from skyfab.device.arguments import is_recorded
from skyfab.device.stream import DeviceStream
from skyfab.device.tensors import DTYPE_NUMBERS, new_id, operand, stream_of
from skyfab.host.channel import endpoints_of
from skyfab.host.device import wire

_lock: Final = threading.RLock()
"""Held while a copy is emitted: they have one order."""
_new_number: Final = itertools.count(1).__next__
_channels: Final[weakref.WeakKeyDictionary[DeviceStream, weakref.WeakKeyDictionary[DeviceStream, int]]] = (
    weakref.WeakKeyDictionary()
)
"""By the device that sends, and the one that receives; 0 if their hosts do not reach each other."""


def channel_between(sender: DeviceStream, receiver: DeviceStream) -> int:
    """The channel for copies between two devices; 0 if their hosts do not reach each other. The first copy waits.

    Raises errors of both devices.
    """
    sender.check()
    receiver.check()
    with _lock:
        known = _channels.setdefault(sender, weakref.WeakKeyDictionary())
        if known.get(receiver) in receiver.broken:
            _forget(known.pop(receiver), sender, receiver)
        if receiver not in known:
            known[receiver] = _connect(sender, receiver)
            if not known[receiver]:
                _channels.setdefault(receiver, weakref.WeakKeyDictionary())[sender] = 0
        return known[receiver]


def copy(channel: int, target: torch.Tensor, source: torch.Tensor, *, is_new: bool = False) -> None:
    """Copies a tensor of one device to another, as `copy_` does; to one that its host does not know yet if it is new.

    Raises errors of both devices, and RuntimeError if the shapes do not fit.
    """
    sender, receiver = stream_of(source), stream_of(target)
    source = source.expand(target.shape)
    for dim, step in enumerate(source.stride()):
        if not step:  # equal elements are sent once
            source = source.narrow(dim, 0, 1)
    if not source.numel():
        return
    if target.dtype.itemsize < source.dtype.itemsize:
        source = source.to(target.dtype)
    shape, dtype, size = tuple(source.shape), DTYPE_NUMBERS[source.dtype], source.numel() * source.element_size()
    layout = (tuple(target.shape), target.stride(), DTYPE_NUMBERS[target.dtype]) if is_new else None
    read, written = operand(source)[1], operand(target)[1]
    with _lock:
        number = _new_number()
        sender.emit([wire.SEND, channel, number, read])
        sender.flush()
        instruction = [wire.RECEIVE, channel, number, written, layout, shape, dtype, size]
        receiver.emit(instruction, recorded=not is_new and is_recorded((target, source)))


def _connect(*pair: DeviceStream) -> int:
    """Makes a channel between two devices. Each may be the one that the other can connect to."""
    made = new_certificate()
    if made is None:
        return 0
    first, second = sorted(pair, key=lambda stream: stream.index)
    for listening, calling in ((first, second), (second, first)):
        addresses = listening.link.addresses_for(calling.link)
        if not addresses:
            continue
        calling.ask([wire.SYNC])  # it comes to what follows at once
        ident = new_id()
        ports = listening.ask([wire.LISTEN, ident, calling.link.name, *made, addresses]).value()
        endpoints = endpoints_of(addresses, ports)
        if calling.ask([wire.CONNECT, ident, listening.link.name, *made, endpoints]).value() is True:
            return ident
        _forget(ident, *pair)
    pair[0].link.notice(
        f"no connection with {pair[1].link.name} in either direction: copies between them go through this program"
    )
    return 0


def _forget(channel: int, *pair: DeviceStream) -> None:
    for stream in pair:
        stream.broken.discard(channel)
        stream.freed.append(channel)
