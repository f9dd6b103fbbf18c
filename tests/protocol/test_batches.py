"""Groups of values in one message, whatever a peer makes of them."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from skyfab.errors import ProtocolError
from skyfab.protocol import codec
from skyfab.protocol.batches import as_group, of_group


def received(payload: codec.Payload) -> list[memoryview]:
    return [memoryview(bytes(part)) for part in (payload.data, *payload.buffers)]


def test_values_of_all_sizes_are_found_again() -> None:
    values = [1, "two", np.arange(2000), [3], np.zeros(5000), np.ones(3), None]
    found = [codec.loads(data, more) for data, *more in of_group(received(as_group([*map(codec.dumps, values)])))]
    for value, other in zip(values, found, strict=True):
        assert np.array_equal(value, other) if isinstance(value, np.ndarray) else value == other
    assert of_group(received(as_group([]))) == []


def test_values_of_a_dumper_share_nothing() -> None:
    shared, dump = [1], codec.dumper()
    one, two = (codec.loads(payload.data, payload.buffers) for payload in (dump([shared]), dump([shared])))
    one[0].append(2)
    assert two == [[1]]
    array = np.zeros(2000)
    sent = dump(array).copied()
    array[:] = 1
    assert not codec.loads(sent.data, sent.buffers).any()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"1234567",
        struct.pack("<Q", 1),
        struct.pack("<Q", 2**64 - 1),
        struct.pack("<3Q", 1, 2, 0),
        struct.pack("<3Q", 1, 2**63, 0) + b"x",
        struct.pack("<3Q", 1, 0, 1),
        struct.pack("<3Q", 1, 1, 2**64 - 1) + b"x",
        struct.pack("<3Q", 1, 0, 0) + b"more",
    ],
)
def test_a_table_that_does_not_fit_is_an_error(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        of_group([memoryview(data)])
