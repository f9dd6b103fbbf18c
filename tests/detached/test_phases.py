"""Phases of detached runs, and the rank channel inside one, on real hosts."""

from __future__ import annotations

import json
import secrets
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from stage.spot import Spot, until

import skyfab as sky
from skyfab import context
from skyfab.detached.folder import question
from skyfab.host import phase
from skyfab.host.rank_channel import Channel, Head
from skyfab.host.supervise import _Readiness
from skyfab.lab import Lab
from skyfab.plugins.base import OwnPort
from skyfab.session.question import Reply

Hosts = Callable[..., list[sky.Host]]


@sky.function
def meet(secret: bytes, go: str) -> list[Any]:
    """Every rank tells rank 0 its host; rank 0 sends all of them to each."""
    info = sky.instance_info()
    names: dict[int, str] = {}
    if info.is_head:
        phase.enter("waiting", f"for {info.world_size} ranks")
        listener = socket.socket(fileno=context.take_listener())
        head = Head(listener, secret, lambda rank, message: names.setdefault(rank, message["name"]) and {})
    channel = Channel.connect(info.head_addr, info.head_port, secret, info.rank)
    channel.request({"name": info.hostname})
    if info.is_head:
        while len(names) < info.world_size or not Path(go).exists():
            time.sleep(0.01)
        phase.enter("ready")
        head.push({"names": sorted(names.values())})
    found = channel.receive(60)
    while info.is_head and not Path(go + ".end").exists():
        time.sleep(0.01)
    channel.close()
    return [] if found is None else found["names"]


@pytest.mark.lab
def test_a_run_notes_its_phase_and_its_ranks_meet_without_the_client(
    namespaces: Lab, hosts_of: Hosts, spot: Spot, capsys: pytest.CaptureFixture[str]
) -> None:
    from skyfab.cli.runs import facts_of, show_runs  # here: hosts import this module, and have no commands

    hosts = hosts_of("openssh", 2)
    with sky.Compute(hosts, ui="none", plugins=[OwnPort()]) as pool:
        run = pool.launch(meet(secrets.token_bytes(32), spot / "go"), name="phases")

    def shown() -> tuple[Any, ...]:
        found = sky.attach(run.id, hosts)
        noted = facts_of(found)["phase"]
        return () if noted is None else (found.state, noted["phase"], noted["text"])

    until(lambda: shown() == ("running", "waiting", "for 2 ranks"), "waiting")
    show_runs([sky.attach(run.id, hosts)])
    assert "for 2 ranks" in capsys.readouterr().out
    spot.leave("go")
    until(lambda: shown() == ("running", "ready", ""), "ready")
    show_runs([sky.attach(run.id, hosts)])
    assert "ready" in capsys.readouterr().out
    for host in namespaces.hosts[:1]:
        file = host.path(f"/root/.cache/skyfab/runs/{run.id}/phase.0")
        assert file.stat().st_mode & 0o077 == 0
    spot.leave("go.end")
    assert run.result(60) == [[host.name for host in hosts]] * 2
    assert shown() == ()  # it has ended


@pytest.mark.parametrize(
    "noted",
    [
        {"phase": "hacked", "text": "", "since": 0},
        {"phase": "ready"},
        {"phase": "ready", "text": 1, "since": 0},
        "ready",
        [1],
    ],
)
def test_a_phase_that_is_not_one_is_not_believed(noted: object) -> None:
    about = {"id": "abc", "name": "n", "function": "f", "hosts": ["a"], "place": 0, "ranks": [0], "world": 1}
    about |= {"on": "all", "elastic": False}
    told = {"about": about, "state": "running", "started": 1.5e9, "phase": noted}
    assert question().parse(sky.Host(name="liar"), iter([Reply(json.loads(json.dumps(told)), b"")])) == []


def test_a_server_whose_log_is_rotated_while_it_starts_becomes_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context, "worker_run", str(tmp_path))
    log = tmp_path / "logs" / "0.out"
    log.parent.mkdir()
    log.write_text("ready\n" * 100)
    log.with_suffix(".err").touch()
    readiness = _Readiness({"port": 0, "ready": "ready", "timeout": 60.0})
    assert not readiness._is_ready(), "an earlier start has printed it"
    log.rename(f"{log}.1")
    log.write_text("ready\n")
    assert readiness._is_ready()
