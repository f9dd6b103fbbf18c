"""Elastic gangs: real torch.distributed.elastic on real hosts, whose ranks fail and which are killed and cut off."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from stage.remote import leave, linger
from stage.spot import Spot, until

import skyfab as sky
from skyfab.context import InstanceInfo
from skyfab.lab import Lab
from skyfab.plugins import elastic
from skyfab.plugins.base import Elastic
from skyfab.ui.events import Event, Output

pytest.importorskip("torch", reason="torch is not installed")
pytestmark = [pytest.mark.torch, pytest.mark.lab]


@sky.function
def stumble(times: int) -> tuple[int, int, float]:
    """Fails on rank 1 so many times; then says who is there, and that they can talk."""
    import torch
    import torch.distributed as dist

    info = sky.instance_info()
    if info.attempt < times and info.rank == 1:
        raise ValueError(f"stumbled in attempt {info.attempt}")
    found = torch.ones(1)
    dist.all_reduce(found)
    return info.attempt, info.world_size, found.item()


@sky.function
def lookup(key: str) -> str:
    return {}[key]


@sky.function
def zeros(count: int) -> Any:
    import numpy as np

    return np.zeros(count)


@sky.function
def epochs(folder: str, count: int) -> dict[str, Any]:
    """Counts epochs in a checkpoint on every host, with all ranks in step; goes on where the furthest one was."""
    import torch
    import torch.distributed as dist

    info, checkpoint = sky.instance_info(), Path(folder) / "checkpoint"
    done = torch.tensor([int(checkpoint.read_text()) if checkpoint.exists() else 0])
    dist.all_reduce(done, dist.ReduceOp.MAX)
    began = done.item()
    for epoch in range(int(began), count):
        dist.barrier()
        leave(str(checkpoint), str(epoch + 1))
        if epoch == 3:
            leave(f"{folder}/midway")
        time.sleep(0.2)
    return {"began": began, "world": info.world_size, "attempt": info.attempt, "host": info.hostname}


@pytest.mark.slow
def test_ranks_that_fail_are_started_again_and_what_fails_too_often_is_raised_as_itself() -> None:
    plugin = sky.plugins.torch(elastic=(1, 1), max_restarts=1)
    with sky.Compute("local", ranks=2, plugins=[plugin], ui="none") as pool:
        seen: list[Event] = []
        pool.events.subscribe(seen.append)
        with pytest.raises(sky.BroadcastError) as raised:
            stumble(5) @ pool
        ended = [one.text for one in seen if isinstance(one, Output) and "ended" in one.text]
        assert ended == ["attempt 0 ended: a rank on this host failed"]
        first = raised.value.exceptions[0]
        assert isinstance(first, ValueError)
        assert str(first) == "stumbled in attempt 1"
        assert "in stumble" in str(first.__cause__)
        with pytest.raises(sky.BroadcastError) as raised:
            lookup("missing") @ pool
        assert isinstance(raised.value.exceptions[0], KeyError), "not that of the call before"
        for array in zeros(1000) @ pool:
            array += 1


JOINS = "another host joins, or restarts its ranks"
SILENT = "2 of 3 hosts sent no heartbeat for 10 s"
FAILED = "a rank on this host failed"


@pytest.mark.parametrize(
    ("states", "found", "reason"),
    [
        (["abc", "abc"], [0, 0], FAILED),
        (["a", "same", "a"], [0, 0, 2], SILENT),
        (["ab", "same", "ab+c"], [0, 0, 1], JOINS),
        (["ab", "abc", "ab"], [0, 0, 0], FAILED),
    ],
    ids=["all take part", "two are silent", "one restarts its ranks", "one was missing for a moment"],
)
def test_an_attempt_that_ended_says_why(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    states: list[str],
    found: list[int],
    reason: str,
) -> None:
    """Each state is written as the hosts that take part, those that wait after a plus, and a period if it is closed.

    Torch reads it once a second, and has the same one meanwhile.
    """
    from torch.distributed import HashStore
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

    monkeypatch.setenv("SKYFAB_ATTEMPT", "")
    monkeypatch.setattr(DynamicRendezvousHandler, "next_rendezvous", lambda self: SimpleNamespace(world_size=3))
    info = InstanceInfo(peers=("a", "b", "c"), total_nodes=3, job_id="job")
    rendezvous = elastic._rendezvous(Elastic(2, 3, 1), HashStore(), info)
    rendezvous.next_rendezvous()
    assert capsys.readouterr().err == ""
    holder = rendezvous._state_holder = SimpleNamespace(sync=lambda: None)
    for written, waiting in zip(states, found, strict=True):
        hosts, _, waits = written.rstrip(".").partition("+")
        if written != "same":
            holder.state = SimpleNamespace(participants=hosts, wait_list=waits, closed=written.endswith("."))
        assert rendezvous.num_nodes_waiting() == waiting, "torch starts the ranks again if there are some"
    rendezvous.next_rendezvous()
    assert capsys.readouterr().err == f"attempt 0 ended: {reason}\n"


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "how"), [(0, "kill"), pytest.param(1, "cut", marks=pytest.mark.soak)])
def test_a_host_that_dies_is_left_out(namespaces: Lab, victim: int, how: str) -> None:
    """Training goes on from the checkpoint with those that remain, the head or not, silently gone or not."""
    with Lab.start(3, kind="namespace", python=sys.executable) as lab:
        spot = Spot(lab.hosts)
        hosts = list(sky.Inventory.of(lab.inventory).hosts.values())
        plugin = sky.plugins.torch(elastic=(2, 3), max_restarts=2)
        with sky.Compute(hosts, plugins=[plugin], ui="none") as pool:
            future = pool.submit(epochs(str(spot / ""), 8), on="all")
            spot.wait("midway", 3)
            getattr(lab[hosts[victim].name], how)()
            found = future.result(170)
        assert len(found) == 2
        assert {report["world"] for report in found} == {2}
        assert all(report["began"] >= 3 and report["attempt"] >= 1 for report in found)
        assert hosts[victim].name not in {report["host"] for report in found}
        spot.close()


INTRUDER = """
import base64, datetime, os, pickle, sys
from torch.distributed import TCPStore

class Command:
    def __reduce__(self):
        return os.system, (f"id -u >{sys.argv[4]}",)

store = TCPStore(sys.argv[1], int(sys.argv[2]), is_master=False, timeout=datetime.timedelta(seconds=20))
store.set(f"torch.rendezvous.{sys.argv[3]}", base64.b64encode(pickle.dumps(Command())).decode())
"""


def gang_of(pool: sky.Compute) -> Any:
    """The gang whose broadcast is under way."""
    call = until(lambda: pool._broadcasts.at_work)
    assert call is not None
    return call.gang


@pytest.mark.slow
def test_another_user_of_the_heads_host_gets_no_code_into_the_rendezvous(
    lent_lab: Lab, lent_hosts_of: Callable[..., list[sky.Host]], request: pytest.FixtureRequest
) -> None:
    """Its port is open to all users there, and torch unpickles what it finds: the command would run as us."""
    if lent_lab.kind != "namespace":
        pytest.skip(lent_lab.limits[0])
    spot = Spot(lent_lab.hosts)
    request.addfinalizer(spot.close)
    host, plugin = lent_hosts_of("openssh", 1, user="root")[0], sky.plugins.torch(elastic=(1, 1))
    with sky.Compute([host], plugins=[plugin], ui="none") as pool:
        future = pool.submit(sky.function(linger)(spot / "rank"), on="all")
        until(lambda: spot.notes("rank"), "a rank that works", timeout=170)  # torch is imported twice
        gang = gang_of(pool)
        info = gang.members[0].spec.info
        place = [info["head_addr"], str(info["head_port"]), info["job_id"], spot / "ran"]
        tried = lent_lab[host.name].run([sys.executable, "-c", INTRUDER, *place], user="ada", check=False)
        assert not tried.returncode, tried.stderr
        with pytest.raises(sky.BroadcastError) as raised:
            future.result(170)
    assert "does not belong to this gang" in str(raised.value)
    assert "ran" not in spot.names()


@sky.function
def listeners(port: int) -> set[str]:
    """The addresses, as the kernel writes them, at which somebody listens at a port of this host."""
    lines = Path("/proc/net/tcp").read_text() + Path("/proc/net/tcp6").read_text()
    words = [line.split() for line in lines.splitlines()]
    places = [word[1].split(":") for word in words if len(word) > 3 and word[3] == "0A"]
    return {address for address, number in places if int(number, 16) == port}


@pytest.mark.slow
def test_the_rendezvous_listens_at_the_heads_address_alone() -> None:
    """Also in the second call, for which there is no socket from the agent any more."""
    with sky.Compute("local", plugins=[sky.plugins.torch(elastic=(1, 1))], ui="none") as pool:
        for _ in range(2):
            future = pool.submit(stumble(0), on="all")
            port = gang_of(pool).members[0].spec.port
            until(lambda: (listeners(port) >> pool) or future.done())  # noqa: B023
            found = listeners(port) >> pool
            assert future.result(170)
            assert found <= {"0100007F"}
