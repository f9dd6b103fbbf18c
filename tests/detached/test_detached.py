"""Detached runs on real hosts: they outlive the program, and any other one finds them, reads them and ends them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from stage import labs, traces
from stage.remote import leave, wait_for
from stage.spot import Spot, until
from stage.threads import begin
from stage.typist import Typist

import skyfab as sky
from skyfab.lab import Lab, LabHost
from skyfab.lab.process import LabProcess
from skyfab.session.session import Session

pytestmark = pytest.mark.lab

Hosts = Callable[..., list[sky.Host]]


@sky.function
def count(lines: int, go: str = "") -> tuple[int, int, bytes]:
    """Writes `lines` lines, waits in the middle for `go` if it is given, and returns its place and a megabyte."""
    info = sky.instance_info()
    for number in range(lines):
        print(f"line {number} of rank {info.rank}")
        if go and number == lines // 2:
            leave(f"{go}.waits")
            wait_for(go, 60)
    print("a last word", file=sys.stderr)
    return info.rank, info.world_size, bytes([info.rank]) * 1_000_000


@sky.function
def fail(how: str) -> None:
    if sky.instance_info().rank == 1:
        raise ValueError("lost its way") if how == "raise" else os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(120)


@sky.function
def save_when_stopped(path: str) -> None:
    def save(*_: object) -> None:
        time.sleep(0.5)
        leave(path + ".done")
        print("saved", flush=True)
        raise SystemExit(0)

    signal.signal(signal.SIGTERM, save)
    leave(path + ".waits")
    time.sleep(600)


@pytest.fixture
def hosts(namespaces: Lab, hosts_of: Hosts) -> list[sky.Host]:
    return hosts_of("openssh", 2)


@pytest.fixture(autouse=True)
def nothing_runs_on(namespaces: Lab) -> Iterator[None]:
    """A run that is over has no process and no socket; its folder stays, for a while."""
    yield
    for host in namespaces.hosts[:2]:
        until(lambda host=host: not traces.on(host) and not traces.folders(host), f"the end of all runs on {host.name}")


def lines_of(run: sky.Run, **options: Any) -> dict[tuple[int, str], list[str]]:
    found: dict[tuple[int, str], list[str]] = {}
    for rank, stream, line in run.logs(**options):
        found.setdefault((rank, stream), []).append(line)
    return found


def launch(hosts: list[sky.Host], call: Any, **options: Any) -> sky.Run:
    """Starts a run from a pool that is closed right afterwards."""
    with sky.Compute(hosts, ui="none") as pool:
        return pool.launch(call, **options)


@pytest.mark.slow
def test_a_run_goes_on_without_its_program(hosts: list[sky.Host], spot: Spot) -> None:
    """On all ranks, with its output and its results in their order; and a second time."""
    run = launch(hosts, count(10, spot / "go"), name="count-to-ten")
    assert (run.name, run.hosts, run.world_size) == ("count-to-ten", [host.name for host in hosts], 2)
    spot.wait("go.waits", 2)
    assert run.status == "running"
    with pytest.raises(TimeoutError, match="still running"):
        run.result(0.1)
    spot.leave("go")
    found = sky.attach(run.id[:6], hosts)
    assert [(rank, world, len(data), data[0]) for rank, world, data in found.result(170)] == [
        (rank, 2, 1_000_000, rank) for rank in range(2)
    ]
    assert found.status == "done"
    expected = {(rank, "out"): [f"line {n} of rank {rank}" for n in range(10)] for rank in range(2)}
    expected |= {(rank, "err"): ["a last word"] for rank in range(2)}
    assert lines_of(found) == expected
    assert lines_of(found, rank=1) == {key: value for key, value in expected.items() if key[0] == 1}
    assert [rank for rank, _, _ in sky.attach("count-to-ten", hosts).result()] == [0, 1]


def test_a_run_on_one_host_returns_one_result(hosts: list[sky.Host], namespaces: Lab) -> None:
    run = launch(hosts, count(1), on=hosts[1].name, name="one")
    assert run.result(170)[:2] == (0, 1)
    assert run.hosts == [hosts[1].name]
    folder = namespaces.hosts[1].path(f"/root/.cache/skyfab/runs/{run.id}")
    assert {path.stat().st_mode & 0o077 for path in [folder, *folder.rglob("*")]} == {0}


def test_a_run_that_ends_before_its_client_has_left_keeps_no_agent(
    hosts: list[sky.Host], namespaces: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client has gone for good: no program can come back within the lease."""
    abandon = Session.abandon

    def abandon_late(self: Session) -> None:
        time.sleep(1)
        abandon(self)

    monkeypatch.setattr(Session, "abandon", abandon_late)
    run = launch(hosts, count(1), on=hosts[0].name)
    assert run.status == "done"
    until(lambda: not traces.on(namespaces.hosts[0]), "the end of its agent", 7)


def test_logs_are_followed_to_the_end(hosts: list[sky.Host], spot: Spot) -> None:
    run = launch(hosts, count(40, spot / "go"), name="followed")
    spot.wait("go.waits", 2)
    follower = run.logs(follow=True)
    first = [next(follower) for _ in range(5)]
    spot.leave("go")
    rest = list(follower)
    for rank in range(2):
        lines = [line for number, stream, line in [*first, *rest] if (number, stream) == (rank, "out")]
        assert lines == [f"line {n} of rank {rank}" for n in range(40)]


def connections() -> set[int]:
    """The ssh programs that this process has started, without those that only print settings (``ssh -G``)."""
    found = {words.split()[1].rstrip(":"): words for words in traces.children()}
    return {int(pid) for pid, words in found.items() if ": ssh " in words and " -G " not in words}


def logins(host: LabHost) -> list[LabProcess]:
    """The connections that a host's sshd has, by the processes that have them."""
    return [process for process in host.processes() if re.match(r"sshd: \w+@", process.cmdline[0])]


@pytest.mark.slow
def test_following_a_run_takes_one_login(hosts: list[sky.Host], spot: Spot) -> None:
    run = launch(hosts, count(4, spot / "go"), name="polite")
    spot.wait("go.waits", 2)
    follower = run.logs(follow=True)
    next(follower)
    seen = connections()
    assert len(seen) == 2
    listening = begin(lambda: list(follower))
    waiting = begin(lambda: run.result(170))
    until(lambda: len(connections()) == 4, "a reader that waits for the result")
    both = connections()
    for _ in range(30):
        time.sleep(0.05)
        assert connections() == both
    spot.leave("go")
    assert len(listening.result(170)) == 9
    assert len(waiting.result(170)) == 2
    assert connections() == set()


@pytest.mark.slow
def test_following_a_run_survives_connections_that_break(namespaces: Lab, hosts_of: Hosts, spot: Spot) -> None:
    hosts = hosts_of("openssh", 2)
    run = launch(hosts, count(40, spot / "go"), name="patient")
    spot.wait("go.waits", 2)
    follower = run.logs(follow=True)
    first = [next(follower) for _ in range(5)]
    waiting = begin(lambda: run.result(170))
    until(lambda: sum(map(len, map(logins, namespaces.hosts[:2]))) == 4, "a reader that waits for the result")
    for host in namespaces.hosts[:2]:
        for process in logins(host):
            os.kill(process.outside, signal.SIGKILL)
    spot.leave("go")
    rest = list(follower)
    for rank in range(2):
        lines = [line for number, stream, line in [*first, *rest] if (number, stream) == (rank, "out")]
        assert lines == [f"line {n} of rank {rank}" for n in range(40)]
    assert [rank for rank, _, _ in waiting.result(170)] == [0, 1]


@pytest.mark.parametrize(("how", "kind"), [("raise", ValueError), ("die", sky.WorkerDied)])
@pytest.mark.slow
def test_a_rank_that_fails_ends_the_run(hosts: list[sky.Host], how: str, kind: type[Exception]) -> None:
    """With the others of its host, which would wait for it for ever; the first failure is what is raised."""
    with sky.Compute(hosts[:1], ranks=3, ui="none") as pool:
        run = pool.launch(fail(how), name="bad")
    with pytest.raises(sky.BroadcastError) as raised:
        run.result(170)
    assert any(isinstance(error, kind) for error in raised.value.exceptions)
    assert run.status == "failed"


@pytest.mark.slow
def test_a_run_that_is_stopped_has_time_to_save(hosts: list[sky.Host], spot: Spot) -> None:
    run = launch(hosts, save_when_stopped(spot / "saves"), name="careful")
    spot.wait("saves.waits", 2)
    run.stop()
    assert spot.wait("saves.done", 2)
    assert run.status == "stopped"
    assert lines_of(run)[1, "out"] == ["saved"]


def test_a_broadcast_that_is_under_way_is_left_to_its_hosts(hosts: list[sky.Host], spot: Spot) -> None:
    heard: list[str] = []
    with sky.Compute(hosts, ui="none") as pool:
        pool.events.subscribe(lambda event: heard.append(str(event)))
        with pytest.raises(sky.UsageError, match="no broadcast"):
            pool.detach()
        future = pool.submit(count(10, spot / "go"), on="all")
        spot.wait("go.waits", 2)
        run = pool.detach(name="handed over")
        with pytest.raises(sky.CallCancelled, match=f"continues as run {run.id[:8]}"):
            future.result(10)
    assert run.status == "running"
    spot.leave("go")
    assert [rank for rank, _, _ in run.result(170)] == [0, 1]
    assert lines_of(run)[1, "out"] == [f"line {n} of rank 1" for n in range(10)]


@pytest.mark.slow
def test_a_program_that_is_killed_leaves_its_runs_alone(namespaces: Lab, hosts: list[sky.Host], spot: Spot) -> None:
    program = f"""
        import os, signal, sys
        import skyfab as sky

        def work(go):
            import time
            from pathlib import Path

            Path(go + ".waits").touch()
            while not Path(go).exists():
                time.sleep(0.05)
            return "done"

        with sky.Compute("node1", ui="none", lease=2) as pool:
            print(pool.launch(sky.function(work)({spot / "go"!r}), on="node1").id, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
    """
    env = {**os.environ, "SKYFAB_INVENTORY": str(namespaces.inventory)}
    argv = [sys.executable, "-c", textwrap.dedent(program)]
    ended = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=170)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    run = sky.attach(ended.stdout.strip(), inventory=namespaces.inventory)
    spot.wait("go.waits")
    assert run.status == "running"
    spot.leave("go")
    assert run.result(170) == "done"


@pytest.mark.slow
def test_a_run_whose_host_was_started_again_is_lost_and_its_logs_are_there(spot: Spot, namespaces: Lab) -> None:
    with labs.start_for_calls(1) as lab:
        own = Spot(lab.hosts)
        inventory = sky.Inventory.of(lab.inventory)
        with sky.Compute("node1", inventory=inventory, ui="none") as pool:
            run = pool.launch(count(4, own / "never"), name="unlucky")
        own.wait("never.waits")
        lab["node1"].reboot()
        found = sky.attach("unlucky", inventory=inventory)
        assert found.status == "lost"
        assert lines_of(found)[0, "out"] == [f"line {n} of rank 0" for n in range(3)]
        with pytest.raises(sky.HostLost) as raised:
            run.result(10)
        assert raised.value.hint == f"its output until then: skyfab logs {run.id[:8]}"
        said = skyfab(lab, "get", "--run=unlucky").stderr
        assert "run unlucky (lost) has no list of its files\nhint: name them: skyfab get --run=unlucky PATH\n" in said
        own.close()


@pytest.mark.slow
def test_a_run_that_does_not_end_says_what_to_do(
    namespaces: Lab, hosts: list[sky.Host], spot: Spot, runs_on: Callable[[str, int], bool]
) -> None:
    """Its agent is frozen: `stop` says, in time, what would help."""
    run = launch(hosts[:1], count(4, spot / "never"), on="one", name="frozen")
    spot.wait("never.waits")
    about = namespaces.hosts[0].path(f"/root/.cache/skyfab/runs/{run.id}/agent").read_text().split()
    (agent,) = [one for one in namespaces.hosts[0].processes() if one.pid == int(about[0])]
    os.kill(agent.outside, signal.SIGSTOP)
    try:
        with pytest.raises(sky.HostUnfit, match=f"kill -9 {agent.pid}"):
            run.stop()
    finally:
        os.kill(agent.outside, signal.SIGCONT)
    until(lambda: not runs_on("node1", agent.pid), "its end, when it wakes")
    assert run.status == "stopped"


# ---- as a person sees it


def skyfab(lab: Lab, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "SKYFAB_INVENTORY": str(lab.inventory)}
    argv = [sys.executable, "-m", "skyfab", *arguments]
    return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=170, stdin=subprocess.DEVNULL)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "job.py"
    path.write_text("import os, time\nprint('rank', os.environ['RANK'], flush=True)\ntime.sleep(600)\n")
    return path


@pytest.mark.slow
def test_the_commands(namespaces: Lab, script: Path) -> None:
    begun = skyfab(namespaces, "run", "--detach", "--hosts=node1,node2", str(script))
    assert begun.returncode == 0, begun.stderr
    name = begun.stdout.strip()
    assert f"skyfab stop {name}" in begun.stderr
    until(lambda: "rank 1" in skyfab(namespaces, "logs", name).stdout, "the second rank's line")
    listed = skyfab(namespaces, "runs", "--hosts=node1,node2")
    head, *lines = listed.stdout.splitlines()
    assert re.split("  +", head) == ["run", "state", "started", "ranks", "GPUs", "hosts", "name", "last line"]
    (line,) = [line for line in lines if line.startswith(name)]
    assert re.fullmatch(
        rf"{name} +running +\d\d-\d\d \d\d:\d\d +2 +\S.* +node1, node2 +{re.escape(str(script))} +rank [01]", line
    )
    (facts,) = [run for run in json.loads(skyfab(namespaces, "runs", "--json").stdout) if run["id"].startswith(name)]
    assert (facts["state"], facts["ranks"], facts["hosts"]) == ("running", 2, ["node1", "node2"])
    none = skyfab(namespaces, "logs", name, "--rank=2")
    assert (none.returncode, none.stderr) == (2, f"error: run {name} has no rank 2: it has ranks 0 to 1\n")
    assert skyfab(namespaces, "stop", name).stdout.split()[:2] == [name, "stopped"]
    attached = skyfab(namespaces, "attach", name)
    assert attached.returncode == 1
    assert sorted(attached.stdout.splitlines()) == ["node1[0] rank 0", "node2[1] rank 1"]
    assert "stopped" in attached.stderr
    missing = skyfab(namespaces, "logs", "missing")
    assert missing.returncode == 2
    assert missing.stderr.splitlines()[0] == "error: no run 'missing' on the hosts of the inventory or on this machine"


@pytest.mark.slow
def test_ctrl_c_may_detach(namespaces: Lab, script: Path, host_with_runs: Callable[[], set[str]]) -> None:
    before = host_with_runs()
    argv = [sys.executable, "-m", "skyfab", "run", "--hosts=node1", str(script)]
    with Typist(argv, script.parent, SKYFAB_INVENTORY=str(namespaces.inventory)) as person:
        for answer in ("c", "d"):
            person.sees(r"1 rank · 0:0")
            person.presses(b"\x03")
            person.sees("etach and leave it running")
            person.types(answer)
        person.sees("was started on node1")
        assert person.ends() == 0
    (name,) = host_with_runs() - before
    kept = {path.name for path in namespaces.hosts[0].path(f"/root/.cache/skyfab/runs/{name}").iterdir()}
    assert kept >= {"about", "agent", "logs", "status"}
    run = sky.attach(name, inventory=namespaces.inventory)
    assert run.status == "running"
    run.stop()


@pytest.fixture
def host_with_runs(namespaces: Lab) -> Callable[[], set[str]]:
    host: LabHost = namespaces.hosts[0]
    return lambda: {path.name for path in host.path("/root/.cache/skyfab/runs").glob("*")}
