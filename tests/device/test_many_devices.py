"""A device on every host of a pool: opened at once, used, and gone without a trace."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from stage.spot import until

import skyfab as sky
from skyfab.lab import Lab

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.lab, pytest.mark.soak]


def test_devices_on_four_hosts_do_not_wait_for_each_other_and_leave_nothing(lent_lab: Lab) -> None:
    if lent_lab.kind != "namespace":
        pytest.skip("needs namespace hosts, which can be cut off")
    before = [len(host.processes()) for host in lent_lab.hosts]
    found: dict[str, Any] = {}
    hosts = list(sky.Inventory.of(lent_lab.inventory).hosts.values())
    with sky.Compute(hosts, lease=100, heartbeat_timeout=100, ui="none") as pool:

        def opened(name: str) -> None:
            found[name] = torch.full((2,), 3.0, device=pool.device("cpu", on=name))

        sky.function(abs)(-1) @ pool  # all hosts have the project
        away, *others = (host.name for host in pool.hosts)
        late, *threads = (threading.Thread(target=opened, args=(name,)) for name in (away, *others))
        lent_lab[away].cut()
        try:
            late.start()
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(50)
            assert late.is_alive()
            assert sorted(found) == sorted(others)
        finally:
            lent_lab[away].restore()
        late.join(50)
        assert {name: value.sum().item() for name, value in found.items()} == dict.fromkeys([away, *others], 6)
        assert len({value.device for value in found.values()}) == 4
        assert sum(len(host.processes()) for host in lent_lab.hosts) > sum(before)
    until(lambda: [len(host.processes()) for host in lent_lab.hosts] == before)
