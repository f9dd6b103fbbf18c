"""What a profile of remote devices counts, and the lines that it names."""

from __future__ import annotations

import re
from typing import Any

import pytest
from stage.spot import until

import skyfab as sky
from skyfab.device import batches, stream
from skyfab.host.device import wire

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.lab, pytest.mark.slow]


def test_operations_plans_and_batches_are_counted(device: Any) -> None:
    a = torch.ones(3, 5, device=device)
    with sky.device.profile() as first:
        for _ in range(300):
            a = a * 2.5
    with sky.device.profile() as second:
        for _ in range(300):
            a = a * 2.5
    assert (first.operations, first.plans) == (300, 1)
    assert (second.operations, second.plans) == (300, 0)
    assert 3 <= second.batches < 300
    assert second.waits == 0
    assert 300 * 3 < second.bytes_sent < 300 * 100
    assert second.seconds > 0


def test_bytes_are_counted_each_way(device: Any) -> None:
    data = torch.zeros(1000, 1000)
    with sky.device.profile() as found:
        there = data.to(device)
        there[:500].cpu()
    assert 4_000_000 < found.bytes_sent < 4_010_000
    assert 2_000_000 < found.bytes_received < 2_010_000


def test_lines_that_waited_are_named_the_slowest_first(device: Any, line: Any) -> None:
    def slow() -> None:
        import time

        time.sleep(2)  # longer than three values take on a busy machine

    a = torch.ones(2, device=device)
    with sky.device.profile() as found:
        for _ in range(3):
            quick = line() + 1
            a.sum().item()
        slept = line() + 1
        sky.run_on(device, slow)
    lines = [(each.site, each.waits) for each in found.lines]
    assert lines == [(f"{__file__}:{slept}", 1), (f"{__file__}:{quick}", 3)]
    assert found.lines[0].longest > 1.9  # this side begins to wait a little later
    assert found.waits == 4


def test_the_table(device: Any) -> None:
    with sky.device.profile() as found:
        torch.ones(2, device=device).sum().item()
    first, second, third, empty, head, line = str(found).splitlines()
    assert first.endswith(" s of it in 1 wait")
    assert re.fullmatch(r"2 operations, \d plans? made, \d other instructions?, in \d batch(es)?", second)
    assert third.endswith(" received")
    assert (empty, head.split()) == ("", ["waits", "seconds", "longest", "line"])
    assert line.split()[0] == "1"
    assert line.endswith("  torch.ones(2, device=device).sum().item()")


def test_an_error_of_an_operation_is_raised_at_the_end(device: Any) -> None:
    index = torch.tensor([7], device=device)
    (mine,) = (one for one in stream.open_streams() if one.index == device.index)

    def program() -> None:
        with found:
            torch.ones(3, device=device)[index]
            mine.flush()
            until(lambda: mine.limit == 0)  # type: ignore[attr-defined]

    found = sky.device.profile()
    with pytest.raises(sky.DeviceError, match="index"):
        program()
    assert found.operations == 2
    assert not batches.observers


def test_numbers_are_readable() -> None:
    found = sky.device.Profile()
    found.sent([[3, 1], [wire.PLAN, 1], [wire.DYNAMIC, "unique"], [wire.FREE, 1]], 12_345_678)
    found.received(512)
    assert "2 operations, 1 plan made, 1 other instruction, in 1 batch\n12 MB sent, 512 bytes received" in str(found)
    assert "host to host" not in str(found)
    found.sent([[wire.RECEIVE, 4, 1, 7, None, (2, 3), 0, 24]], 100)
    assert str(found).endswith("\n1 copy from host to host, 24 bytes")
