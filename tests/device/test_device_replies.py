"""Whatever a host sends as a reply of a device is a value or a typed error here, and never more than that."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stage.device_node import Node

import skyfab as sky
from skyfab.device.batches import Batch
from skyfab.device.stream import DeviceStream
from skyfab.protocol import codec, messages

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.lab

SIZES = st.one_of(st.integers(-3, 5), st.sampled_from([2**31, 2**62, 2**63, 2**64, 10**30]))
LENGTHS = st.lists(SIZES, max_size=3)
VIEWS = st.tuples(LENGTHS, LENGTHS, SIZES, SIZES)
PLAIN = st.one_of(st.none(), st.booleans(), SIZES, st.floats(), st.text(max_size=5))
DOCUMENTS = st.recursive(
    PLAIN,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(
            st.sampled_from(["tensor", "plain", "complex", "dict", "tuple", "list", "value", "error", "over", "x"]),
            inner,
            max_size=2,
        ),
        st.fixed_dictionaries({"tensor": st.tuples(st.integers(-1, 2), LENGTHS, LENGTHS, SIZES, st.none() | VIEWS)}),
    ),
    max_leaves=12,
)
often = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def stream() -> Iterator[DeviceStream]:
    made = DeviceStream(99, "cpu", Node())
    yield made
    made.close()


def sent(stream: DeviceStream) -> Batch:
    """The batch of an instruction, which the host has not answered."""
    stream.emit([-9])
    stream.flush()
    (batch,) = stream.link.batches  # type: ignore[attr-defined]
    assert isinstance(batch, Batch)
    return batch


@often
@given(DOCUMENTS)
@pytest.mark.slow
def test_any_description_of_a_result(device: Any, document: Any) -> None:
    from skyfab.device import tensors

    try:
        found = tensors.restore(document, tensors.new_block(), device.index)
    except sky.ProtocolError:
        return
    leaves = torch.utils._pytree.tree_leaves(found)
    assert all(leaf is None or isinstance(leaf, bool | int | float | str | complex | torch.Tensor) for leaf in leaves)


FOUR = [0, [4], [1], 0]
"""A base of four numbers."""


@pytest.mark.parametrize(
    "view",
    [[[2], [1], 3, 0], [[5], [1], 0, 0], [[2], [3], 1, 0], [[1], [1], 4, 0], [[1], [1], -1, 0], [[3], [1], 0, 1]],
)
def test_a_view_that_is_not_in_its_base(device: Any, view: list[Any]) -> None:
    from skyfab.device import tensors

    found = tensors.restore({"tensor": [*FOUR, [[2], [1], 2, 0]]}, tensors.new_block(), device.index)
    assert (found.shape, found.storage_offset()) == ((2,), 2)
    with pytest.raises(sky.ProtocolError):
        tensors.restore({"tensor": [*FOUR, view]}, tensors.new_block(), device.index)
    both = {"list": [{"tensor": [*FOUR, None]}, {"tensor": [0, [9], [1], 0, None]}]}
    with pytest.raises(sky.ProtocolError):
        tensors.restore(both, tensors.new_block(), device.index)


@often
@given(st.one_of(DOCUMENTS.map(lambda document: json.dumps(document).encode()), st.binary(max_size=50)))
def test_any_reply(stream: DeviceStream, data: bytes) -> None:
    fresh = DeviceStream(99, "cpu", Node())
    batch = sent(fresh)
    batch.answered(messages.Result(parts=[len(data)]), [memoryview(data)])
    assert batch.is_there
    for look in (fresh.check, batch.value):
        try:
            look()
        except sky.SkyfabError:
            pass
    fresh.close()


@pytest.mark.parametrize("buffers", [[], [b"123"], [b"12345"], [b"1234", b""]])
def test_bytes_of_another_length(buffers: list[bytes]) -> None:
    from skyfab.device import manual_kernels

    with pytest.raises(sky.ProtocolError, match="bytes for a tensor"):
        manual_kernels.fill(torch.empty(4, dtype=torch.uint8), [memoryview(buffer) for buffer in buffers])


@pytest.mark.parametrize("why", ["died", "exit", "unstarted", "nonsense"])
def test_a_worker_that_ends(stream: DeviceStream, why: str) -> None:
    batch = sent(stream)
    batch.answered(messages.Ended(why=why), [])
    with pytest.raises(sky.WorkerDied, match="tensors are lost"):
        stream.emit([-9])
    assert stream.is_lost


@pytest.mark.parametrize(("unfit", "kind"), [(True, sky.UsageError), (False, sky.WorkerDied)])
def test_a_worker_that_could_not_begin(stream: DeviceStream, unfit: bool, kind: type[Exception]) -> None:
    """It says so: what a device executes may raise errors of the same name."""
    batch = sent(stream)
    text, name = "in use by another program", "skyfab.errors.UsageError"
    batch.answered(messages.Raised(parts=[], kind=name, text=text, traceback="", unfit=unfit), [])
    with pytest.raises(kind, match=text):
        stream.emit([-9])
    assert stream.is_lost


def test_sending_that_is_interrupted_is_not_silent(stream: DeviceStream, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(payload: codec.Payload, batch: Batch) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(stream.link, "send", interrupted)
    with stream._lock, pytest.raises(KeyboardInterrupt):  # nothing is sent by itself meanwhile
        stream.ask([-9])
    with pytest.raises(sky.WorkerDied, match="interrupted"):
        stream.emit([-9])
