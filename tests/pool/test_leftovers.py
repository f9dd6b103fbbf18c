"""Leftovers: whatever ends a program, a pool or a part of one, nothing of it stays on any machine."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from stage import remains, traces
from stage.remote import leave, linger, wait_for
from stage.spot import Spot, until

import skyfab as sky
from skyfab.lab import Lab, LabHost
from skyfab.lab.process import LabProcess
from skyfab.ui.events import HostState, Output

pytestmark = pytest.mark.lab

LEASE = 2.0
"""Seconds that a host waits for a client that is gone."""
KEPT = {"bundles", "blobs", "trees", "files", "logs", "run"}
"""What a cache may hold."""


# ---- what could be left


def drafts(host: LabHost) -> set[str]:
    """Files that were begun and never finished, and whatever else a cache has no room for."""
    found = set()
    for cache in remains.caches(host):
        found |= {str(entry) for entry in cache.iterdir() if entry.name not in KEPT}
        for kind in ("blobs", "trees", "bundles"):
            entries = (cache / kind).iterdir() if (cache / kind).is_dir() else ()
            found |= {str(entry) for entry in entries if "." in entry.name}
        found |= {str(entry) for entry in cache.glob("run/*/*")}
    return found


def sockets(host: LabHost) -> set[str]:
    """Unix sockets that have a name, by that."""
    lines = host.run(["cat", "/proc/net/unix"]).stdout.splitlines()[1:]
    return {words[7] for line in lines if len(words := line.split()) > 7}


def listeners(host: LabHost) -> set[str]:
    """Where TCP connections are taken, as the kernel writes it."""
    lines = [line for name in ("tcp", "tcp6") for line in host.run(["cat", f"/proc/net/{name}"]).stdout.splitlines()]
    return {line.split()[1] for line in lines if line.split()[3] == "0A"}


def temporary(host: LabHost) -> set[str]:
    return {f"{host.name}: {path}" for place in ("/tmp", "/var/tmp", "/dev/shm") for path in host.path(place).glob("*")}


@sky.function
def daemonize(path: str, never: str) -> None:
    """Starts a process that is nobody's child, in a session of its own, and stays."""
    program = (
        f"import os, time; os.setsid(); os.fork() and os._exit(0); open('{path}.new', 'w').write(str(os.getpid()));"
    )
    program += f"os.rename('{path}.new', '{path}'); time.sleep(600)"
    leave(f"{path}.rank", str(os.getpid()))
    subprocess.run([sys.executable, "-c", program], check=True)
    wait_for(never, 600)


@sky.function
def leave_and_wait(path: str, go: str) -> int:
    """Leaves this process's number, and returns it once it may go."""
    leave(path, str(os.getpid()))
    wait_for(go)
    return os.getpid()


@pytest.fixture
def hosts(namespaces: Lab, spot: Spot) -> list[LabHost]:
    return namespaces.hosts[:2]


@pytest.fixture(autouse=True)
def clean(
    hosts: list[LabHost], spot: Spot, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[], None]]:
    """After each test, and whenever it asks: no process, socket, run folder, draft or temporary file is left."""
    place = tmp_path_factory.mktemp("temporary")  # this machine's /tmp is everybody's
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    looks = (temporary, sockets, listeners, drafts)
    before = {name for host in hosts for look in looks for name in look(host)}

    def left() -> set[str]:
        found = {str(path) for path in place.iterdir()}
        for host in hosts:
            for look in (traces.on, traces.folders, *looks):
                found |= look(host)
        return found

    def check() -> None:
        found = traces.left([left], before, timeout=30)
        assert not found, f"left behind: {sorted(found)}"

    yield check
    try:
        check()
    finally:
        remains.sweep(hosts)


# ---- the ends of programs


class Client:
    """A program of a person, in a process of its own, with temporary files of its own."""

    def __init__(self, folder: Path, lab: Lab, spot: Spot) -> None:
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        self._script = folder / "client.py"
        self._env = {
            **os.environ,
            "SKYFAB_INVENTORY": str(lab.inventory),
            "TMPDIR": str(self.temporary),
            "SPOT": spot / "",
        }

    def start(self, text: str, *, lease: float = LEASE) -> subprocess.Popen[str]:
        """`text` is what it does with `compute`."""
        body = textwrap.indent(textwrap.dedent(text).strip(), "    ")
        self._script.write_text(
            f"{HEAD}\nwith sky.Compute('node1,node2', lease={lease}, ui='none') as compute:\n{body}\n"
        )
        return subprocess.Popen(
            [sys.executable, str(self._script)],
            env=self._env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def end(self, running: subprocess.Popen[str]) -> tuple[int, str]:
        """Its exit code and last words. Nothing of it is left on this machine."""
        _, err = running.communicate(timeout=170)
        looks = [lambda: traces.here(self._script.parent), lambda: set(map(str, self.temporary.iterdir()))]
        left = traces.left(looks)
        assert not left, f"left behind on this machine: {sorted(left)}"
        return running.returncode, err


HEAD = """
import os, signal, subprocess, sys, threading, time
import skyfab as sky

spot = os.environ["SPOT"]

def note(name, text):
    with open(f"{spot}/{name}.new", "w") as file:
        file.write(text)
    os.rename(f"{spot}/{name}.new", f"{spot}/{name}")

@sky.function
def ok(x=1):
    return x

@sky.function
def stay():
    child = subprocess.Popen(["sleep", "600"])
    note("pids", f"{os.getpid()} {child.pid}")
    time.sleep(600)
"""


@pytest.fixture
def client(tmp_path: Path, namespaces: Lab, spot: Spot) -> Client:
    return Client(tmp_path, namespaces, spot)


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("raise LookupError('in the block')", 1),
        ("signal.raise_signal(signal.SIGINT)", 130),
        ("(stay() > compute); (stay() > compute)", 0),
    ],
    ids=["exception", "interrupt", "calls-still-run"],
)
def test_the_end_of_the_block_is_the_end_on_the_hosts(
    client: Client, clean: Callable[[], None], hosts: list[LabHost], ending: str, code: int
) -> None:
    """At once: the lease is far longer than this test."""
    text = f"""
        ok() >> compute
        ok() @ compute
        {ending}
    """
    found, err = client.end(client.start(text, lease=600))
    assert found in ((130, -signal.SIGINT) if code == 130 else (code,)), err
    clean()


@pytest.mark.slow
def test_a_program_that_never_closes_its_pool_ends_and_leaves_nothing(
    client: Client, clean: Callable[[], None], hosts: list[LabHost]
) -> None:
    text = """
        pass
    compute = sky.Compute('node1,node2', lease=2, ui='none')
    compute.open()
    ok() @ compute
    future = stay() > compute
    """
    code, err = client.end(client.start(textwrap.dedent(text).replace("\n    ", "\n")))
    assert code == 0, err
    clean()


@pytest.mark.parametrize("way", ["stay() >> compute", "stay() @ compute", "map"])
def test_ctrl_c_stops_the_calls_that_run(
    client: Client, spot: Spot, runs_on: Callable[[str, int], bool], clean: Callable[[], None], way: str
) -> None:
    """On the hosts too, with what they have started; the lease is not waited for."""
    text = "compute.map(lambda n: stay.fn(), [1, 2])" if way == "map" else way
    running = client.start(text, lease=600)
    pids = spot.read("pids", count=1 if way.startswith("stay() >>") else 2)
    assert all(runs_on(machine, int(pid)) for machine, found in pids.items() for pid in found.split())
    running.send_signal(signal.SIGINT)
    code, err = client.end(running)
    assert code in (130, -signal.SIGINT)
    assert err.rstrip().splitlines()[-1].startswith("interrupted")
    for machine, found in pids.items():
        for pid in found.split():
            until(lambda machine=machine, pid=pid: not runs_on(machine, int(pid)), "the end of the call")
    clean()


def test_ctrl_c_twice_waits_for_nobody(
    client: Client, hosts: list[LabHost], spot: Spot, clean: Callable[[], None]
) -> None:
    """The hosts cannot be reached, so the goodbye takes its time: the second Ctrl-C cuts it short."""
    running = client.start("ok() @ compute; print('open', flush=True); stay() @ compute")
    assert running.stdout is not None
    assert running.stdout.readline() == "open\n"
    spot.wait("pids")
    for host in hosts:
        host.cut()
    try:
        running.send_signal(signal.SIGINT)
        time.sleep(1)
        assert running.poll() is None, "the goodbye was over before anybody was in a hurry"
        running.send_signal(signal.SIGINT)
        running.wait(3)
        code, err = client.end(running)
    finally:
        for host in hosts:
            host.restore()
    assert code in (130, -signal.SIGINT), err
    assert err.rstrip().splitlines()[-1].startswith("interrupted")
    clean()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_a_client_that_is_killed_is_waited_for_no_longer_than_its_lease(
    client: Client, spot: Spot, clean: Callable[[], None], number: signal.Signals
) -> None:
    running = client.start("stay() @ compute")
    spot.wait("pids", count=2)
    running.send_signal(number)
    code, err = client.end(running)
    assert code == -number, err
    clean()


def test_ctrl_c_while_connecting(client: Client, hosts: list[LabHost], clean: Callable[[], None]) -> None:
    """One host answers, the other is cut off: the one that answered is let go of at once."""
    hosts[1].cut()
    try:
        running = client.start("pass", lease=600)
        until(lambda: traces.on(hosts[0]), "an agent on the first host")
        running.send_signal(signal.SIGINT)
        code, _ = client.end(running)
    finally:
        hosts[1].restore()
    assert code in (130, -signal.SIGINT)
    clean()


# ---- the ends of parts


def chain(host: LabHost, pid: int) -> tuple[LabProcess, LabProcess, LabProcess]:
    """A rank, its zygote and their agent."""
    by_number = {process.pid: process for process in host.processes()}
    rank = by_number[pid]
    zygote = by_number[rank.ppid]
    return rank, zygote, by_number[zygote.ppid]


def link(host: LabHost) -> LabProcess:
    """The process that sshd started for the pool."""
    found = {process.pid: process for process in host.processes()}
    (one,) = [
        process
        for process in found.values()
        if process.cmdline[-1] == "start" and process.ppid != 1 and "sshd" in found[process.ppid].cmdline[0]
    ]
    return one


@sky.function
def ok(value: int = 1) -> int:
    return value


@sky.function
def pid() -> int:
    return os.getpid()


@sky.function
def linger_with_a_child(path: str) -> None:
    child = subprocess.Popen(["sleep", "600"])
    leave(f"{path}.child", str(child.pid))
    linger(path)


@pytest.mark.parametrize("victim", ["rank", "zygote"])
def test_a_rank_or_zygote_that_is_killed_takes_its_children_along_and_the_pool_goes_on(
    hosts: list[LabHost],
    open_pool: Callable[..., sky.Compute],
    spot: Spot,
    runs_on: Callable[[str, int], bool],
    victim: str,
) -> None:
    pool = open_pool("openssh", count=1, lease=600)
    future = linger_with_a_child(spot / "rank") > pool
    number = int(spot.read("rank")["node1"])
    rank, zygote, _ = chain(hosts[0], number)
    os.kill((rank if victim == "rank" else zygote).outside, signal.SIGKILL)
    with pytest.raises(sky.WorkerDied) as caught:
        future.result(170)
    if victim == "rank":
        assert caught.value.exitcode == -signal.SIGKILL
    until(lambda: not runs_on("node1", number), "the end of the rank")
    assert ok(1) >> pool == 1
    assert ok(2) @ pool == [2]
    until(lambda: not runs_on("node1", int(spot.notes("rank.child")["node1"])), "the end of the child", 60)


def test_an_agent_that_is_killed_is_a_host_lost_and_the_others_go_on(
    hosts: list[LabHost],
    open_pool: Callable[..., sky.Compute],
    spot: Spot,
    runs_on: Callable[[str, int], bool],
    clean: Callable[[], None],
) -> None:
    pool = open_pool("openssh", count=2, lease=LEASE)
    future = pool.submit(linger_with_a_child(spot / "rank"), on="node1")
    number = int(spot.read("rank")["node1"])
    _, _, agent = chain(hosts[0], number)
    assert agent.pid == pool.hosts[0].agent.pid
    os.kill(agent.outside, signal.SIGKILL)
    with pytest.raises(sky.HostLost) as caught:
        future.result(170)
    assert caught.value.host == "node1"
    for name in ("rank", "rank.child"):
        until(lambda name=name: not runs_on("node1", int(spot.notes(name)["node1"])), f"the end of the {name}")
    assert [ok(n) >> pool for n in range(3)] == [0, 1, 2]
    until(lambda: pool.hosts[0].lost is None, "the lost host is taken back, with another agent", 60)
    assert pool.hosts[0].agent.pid != agent.pid
    assert {pool.submit(ok(n), on=name).result(170) for n, name in enumerate(("node1", "node2"))} == {0, 1}
    assert ok(5) @ pool == [5, 5]
    pool.close()
    clean()


@pytest.mark.parametrize("victim", ["link", "ssh"])
def test_a_connection_that_is_killed_is_replaced_and_nothing_is_lost(
    hosts: list[LabHost], open_pool: Callable[..., sky.Compute], spot: Spot, clean: Callable[[], None], victim: str
) -> None:
    pool = open_pool("openssh", count=2, lease=20)
    states: list[str] = []
    pool.events.subscribe(lambda event: states.append(event.state) if isinstance(event, HostState) else None)
    future = pool.submit(leave_and_wait(spot / "rank", spot / "go"), on="node1")
    spot.wait("rank")
    os.kill(link(hosts[0]).outside if victim == "link" else ssh(), signal.SIGKILL)
    until(lambda: states == ["reconnecting", "ready"], "another connection")
    spot.leave("go")
    assert future.result(170) == int(spot.notes("rank")["node1"])
    assert [ok(n) >> pool for n in range(3)] == [0, 1, 2]
    pool.close()
    clean()


def ssh() -> int:
    """The ssh program of this process that leads to node1."""
    children = [words.split(":")[0].split()[1] for words in traces.children() if "skyfab-node1" in words]
    (one,) = children
    return int(one)


@pytest.mark.parametrize("how", ["cancel", "close", "lease"])
def test_children_in_sessions_of_their_own_go_too(
    hosts: list[LabHost],
    open_pool: Callable[..., sky.Compute],
    spot: Spot,
    runs_on: Callable[[str, int], bool],
    how: str,
) -> None:
    """With the rank that started them, or with the pool at the latest: here one that is a daemon."""
    pool = open_pool("openssh", count=1, lease=LEASE)
    future = daemonize(spot / "daemon", spot / "never") > pool
    daemon = int(spot.read("daemon")["node1"])
    assert runs_on("node1", daemon)
    if how == "cancel":
        future.cancel()
    elif how == "close":
        pool.close()
    else:
        _, _, agent = chain(hosts[0], int(spot.notes("daemon.rank")["node1"]))
        os.kill(agent.outside, signal.SIGKILL)
    until(lambda: not runs_on("node1", daemon), "the end of the daemon", 60)
    if how == "cancel":
        assert ok(1) >> pool == 1


def test_what_a_host_that_lost_power_has_left_is_swept_by_the_next_pool(
    namespaces: Lab, open_pool: Callable[..., sky.Compute]
) -> None:
    host = namespaces.hosts[0]
    pool = open_pool("openssh", count=1)
    folder = next(iter(remains.caches(host)[0].glob("run/*/*")))
    assert ok(1) >> pool == 1
    dead, young = folder.parent / "0123456789abcdef-0", folder.parent / "fedcba9876543210-0"
    for stale in (dead, young):
        stale.mkdir(mode=0o700)
        with socket.socket(socket.AF_UNIX) as listener:  # a name that nobody listens at any more
            listener.bind(str(stale / "agent.sock"))
    os.utime(dead, (0, 0))
    os.utime(folder, (0, 0))  # alive, and old
    second = open_pool("openssh", count=1)
    assert ok(2) >> second == 2
    assert ok(3) >> pool == 3
    assert (dead.exists(), young.exists(), folder.exists()) == (False, True, True)
    shutil.rmtree(young)


def test_an_agent_that_is_asked_to_end_cleans_up(
    hosts: list[LabHost], open_pool: Callable[..., sky.Compute], spot: Spot
) -> None:
    """As when the host shuts down: SIGTERM."""
    pool = open_pool("openssh", count=1, lease=600)
    future = linger_with_a_child(spot / "rank") > pool
    _, _, agent = chain(hosts[0], int(spot.read("rank")["node1"]))
    os.kill(agent.outside, signal.SIGTERM)
    with pytest.raises(sky.HostError):
        future.result(170)
    until(lambda: not traces.on(hosts[0]) and not traces.folders(hosts[0]), "the end of everything on the host")


# ---- the ends of pools


def test_children_that_a_function_has_started_are_gone_when_the_pool_closes(
    open_pool: Callable[..., sky.Compute], spot: Spot, runs_on: Callable[[str, int], bool], clean: Callable[[], None]
) -> None:
    @sky.function
    def start() -> int:
        return subprocess.Popen(["sleep", "600"]).pid

    pool = open_pool("openssh", count=2, lease=600)
    alone, together = pool.submit(start(), on="node1").result(170), start() @ pool
    assert runs_on("node1", alone) and runs_on("node1", together[0]) and runs_on("node2", together[1])
    pool.close()
    clean()


@pytest.mark.parametrize("how", ["cancel", "kill", "program"])
def test_shared_memory_and_semaphores_go_with_their_processes(
    hosts: list[LabHost], open_pool: Callable[..., sky.Compute], spot: Spot, clean: Callable[[], None], how: str
) -> None:
    """Multiprocessing leaves these to a process that outlives the others for a moment."""

    def share() -> None:
        import multiprocessing
        from multiprocessing.shared_memory import SharedMemory

        share.kept = [multiprocessing.get_context("spawn").Semaphore(1)]  # type: ignore[attr-defined]
        share.kept.append(SharedMemory(create=True, size=4096))  # type: ignore[attr-defined]

    @sky.function
    def work(path: str) -> None:
        if how == "program":
            program = "import multiprocessing.shared_memory as m, time; m.SharedMemory(create=True, size=1); {}"
            open_and_stay = f"open({path!r} + '.child', 'w').close(); time.sleep(600)"
            subprocess.Popen([sys.executable, "-c", program.format(open_and_stay)], start_new_session=True)
            wait_for(path + ".child")
        else:
            share()
        leave(path)
        if how == "kill":
            wait_for(path + ".go")
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "cancel":
            time.sleep(600)

    before = temporary(hosts[0])
    pool = open_pool("openssh", count=1, lease=600)
    future = pool.submit(work(spot / "work"))
    spot.wait("work")
    assert any("psm_" in path for path in temporary(hosts[0]) - before)
    if how == "cancel":
        future.cancel()
    elif how == "kill":
        spot.leave("work.go")
    if how == "program":
        future.result(170)
    else:
        until(lambda: temporary(hosts[0]) <= before, "the end of the shared memory, while the pool is open")
    pool.close()
    clean()


def test_what_functions_leave_to_atexit_is_done_when_the_pool_closes(
    open_pool: Callable[..., sky.Compute], spot: Spot, clean: Callable[[], None]
) -> None:
    """As writers of metrics do. One that does not return is not waited for long."""

    @sky.function
    def start(path: str) -> None:
        atexit.register(time.sleep, 600)  # the last one that is called
        atexit.register(leave, path, "the last steps")
        atexit.register(print, "all is written", flush=True)
        atexit.register(int, "one that fails")
        start.log = open(path + ".log", "w")  # type: ignore[attr-defined]  # noqa: SIM115,PTH123
        start.log.write("a line")  # type: ignore[attr-defined]

    pool = open_pool("openssh", count=2, lease=600)
    said: list[str] = []
    pool.events.subscribe(lambda event: said.append(event.text) if isinstance(event, Output) else None)
    start(spot / "written") @ pool
    assert not spot.notes("written")
    pool.close()
    assert list(spot.read("written", 2).values()) == ["the last steps"] * 2
    assert list(spot.notes("written.log").values()) == ["a line"] * 2
    assert said.count("all is written") == 2 and sum("one that fails" in line for line in said) == 2
    clean()


def test_what_runs_when_the_pool_closes_has_time_to_save(
    open_pool: Callable[..., sky.Compute], spot: Spot, clean: Callable[[], None]
) -> None:
    @sky.function
    def train(path: str) -> None:
        def save(*_: object) -> None:
            time.sleep(0.5)
            leave(path + ".saved")
            raise SystemExit(0)

        signal.signal(signal.SIGTERM, save)
        leave(path + ".waits")
        time.sleep(600)

    pool = open_pool("openssh", count=1, lease=600)
    pool.submit(train(spot / "train"), on="all")
    spot.wait("train.waits")
    pool.close()
    assert spot.notes("train.saved")
    clean()


def test_two_pools_on_one_host_do_not_disturb_each_other(
    hosts: list[LabHost], open_pool: Callable[..., sky.Compute], spot: Spot
) -> None:
    """One closes, one loses its agent, while calls of the third run."""

    @sky.function
    def wait() -> str:
        leave(f"{folder}/begun")
        wait_for(f"{folder}/go")
        return "done"

    folder = spot / ""
    first, second, third = (open_pool("openssh", count=1, lease=LEASE) for _ in range(3))
    future = wait() > third
    spot.wait("begun")
    pids = {pid() >> first, pid() >> second}
    assert len(pids) == 2
    assert len(traces.folders(hosts[0])) == 3
    first.close()
    until(lambda: len(traces.folders(hosts[0])) == 2, "the end of the first pool's folder")
    _, _, agent = chain(hosts[0], pid() >> second)
    os.kill(agent.outside, signal.SIGKILL)
    with pytest.raises(sky.HostError):
        ok() >> second
    second.close()
    assert ok(3) @ third == [3]
    spot.leave("go")
    assert future.result(170) == "done"


@pytest.mark.slow
def test_caches_are_for_their_owner_alone(
    hosts: list[LabHost], open_pool: Callable[..., sky.Compute], spot: Spot
) -> None:
    """Whatever the umask: folders are 0700, and nothing in them can be read or written by others."""
    host = hosts[0]
    host.add_user("careless", shell="/bin/bash", bashrc="umask 000\n")  # noqa: S604  # a user's shell, not ours
    for user in ("root", "ada", "careless"):
        pool = open_pool("openssh", count=1, user=user)
        assert ok(1) @ pool == [1]
        assert (sky.function(lambda: len(bytes(3 << 20)))() >> pool) == 3 << 20
        home = host.path("/root" if user == "root" else f"/home/{user}")
        cache = home / ".cache/skyfab"
        environments = {"envs", "packages", "pythons", "uv"}  # of other tests on this host
        assert {entry.name for entry in cache.iterdir()} <= KEPT | environments
        users = set(cache.glob("files/*/**/*"))  # what users have put into working folders keeps their modes
        folders = [path for path in cache.rglob("*") if path.is_dir() and path.name != "__pycache__"]
        for folder in [cache, *(path for path in folders if path not in users)]:
            mode = stat.S_IMODE(folder.stat().st_mode)
            assert mode == 0o700, f"{oct(mode)} {folder}"
        logs = [path for path in cache.glob("logs/**/*") if path.is_file()]
        assert logs
        for path in logs:
            assert not stat.S_IMODE(path.stat().st_mode) & 0o077, path
        pool.close()


def test_nothing_listens_on_the_network_but_sshd(
    hosts: list[LabHost], open_pool: Callable[..., sky.Compute], spot: Spot
) -> None:
    """While a pool with ranks is open and works."""
    before = [listeners(host) for host in hosts]
    assert all(place.endswith(":0016") for places in before for place in places), "port 22"
    pool = open_pool("openssh", count=2, ranks=2)
    assert ok(1) @ pool == [1] * 4
    future = pool.submit(sky.function(linger)(spot / "rank"), on="node1")
    spot.wait("rank")
    assert [listeners(host) for host in hosts] == before
    future.cancel()


def test_nothing_of_a_pool_is_in_the_way_of_others_on_the_host(
    hosts: list[LabHost], open_pool: Callable[..., sky.Compute]
) -> None:
    """All its files lie in the cache while it is open, too: nothing in /tmp, sockets in the run folder only."""
    before = {*temporary(hosts[0]), *sockets(hosts[0])}
    pool = open_pool("openssh", count=1, ranks=2)
    assert ok(1) @ pool == [1, 1]
    assert temporary(hosts[0]) <= before
    assert sockets(hosts[0]) - before == {"agent.sock"}, "a relative name: it lies in the run folder"


def test_opening_and_closing_many_times_leaves_no_more_than_once(
    hosts: list[LabHost], hosts_of: Callable[..., list[sky.Host]], clean: Callable[[], None]
) -> None:
    """Neither on the host nor here: content is named by itself, and only logs grow."""

    def kept() -> set[str]:
        return {
            str(path)
            for cache in remains.caches(hosts[0])
            for kind in ("bundles", "blobs", "trees")
            for path in (cache / kind).glob("*")
        }

    counts: list[set[Any]] = []
    for _ in range(3):
        with sky.Compute(hosts_of("openssh", 1), ui="none") as pool:
            assert ok(1) >> pool == 1
        counts.append(kept())
    assert counts[0] == counts[1] == counts[2]
    clean()
