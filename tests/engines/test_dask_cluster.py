"""Dask on hosts that have nothing of it: what its client does there, who else can connect, and that nothing stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from stage import remote, traces
from stage.labs import start
from stage.spot import until

import skyfab as sky
from skyfab.lab import Lab, LabHost
from skyfab.ui.events import Event

pytest.importorskip("distributed")
np = pytest.importorskip("numpy")

pytestmark = [
    pytest.mark.lab,
    pytest.mark.slow,
    # A client of Dask whose scheduler was lost leaves sockets and exceptions to the garbage collector.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

COUNT = 2
"""Hosts."""


@pytest.fixture(scope="module")
def seen() -> list[Event]:
    """What the pool has reported."""
    return []


@pytest.fixture(scope="module")
def compute(hosts_of: Callable[..., list[sky.Host]], seen: list[Event]) -> Iterator[sky.Compute]:
    pool = sky.Compute(hosts_of("openssh", COUNT), plugins=[sky.plugins.dask()], ui="none")
    pool.events.subscribe(seen.append)
    with pool:
        yield pool


@pytest.fixture(scope="module")
def client(compute: sky.Compute) -> Iterator[Any]:
    with compute.dask() as made:
        yield made


@pytest.fixture(autouse=True)
def nothing_stays_in_this_process() -> None:
    """The client of the module stays, with its threads; tests/engines/test_dask_local.py looks at them."""


def addresses_of(client: Any) -> dict[str, str]:
    """The address of each worker, by its name."""
    found = client.scheduler_info(n_workers=-1)["workers"]
    return {worker["name"]: address for address, worker in found.items()}


def listeners(host: LabHost) -> set[tuple[str, int]]:
    """Addresses and ports where TCP connections are taken; those of IPv6 as the kernel writes them."""
    lines = [line for name in ("tcp", "tcp6") for line in host.run(["cat", f"/proc/net/{name}"]).stdout.splitlines()]
    found = set()
    for words in map(str.split, lines):
        if words[3] == "0A":
            address, _, port = words[1].partition(":")
            if len(address) == 8:
                address = ".".join(str(byte) for byte in bytes.fromhex(address)[::-1])
            found.add((address, int(port, 16)))
    return found


# ---- the client


def test_an_array_is_summed_by_all_hosts(client: Any) -> None:
    import dask.array as da

    x = da.arange(1_000_000, chunks=50_000)
    assert int((x * 2).sum().compute()) == 999_999_000_000
    names = client.gather(client.map(lambda _: os.uname().nodename, range(40), pure=False))
    assert set(names) == {"node1", "node2"}
    assert set(addresses_of(client)) == {"node1", "node2"}
    assert f"processes={COUNT}" in repr(client)


def test_a_dataframe_is_grouped_and_shuffled_between_hosts(client: Any) -> None:
    pd, dd = pytest.importorskip("pandas"), pytest.importorskip("dask.dataframe")
    pytest.importorskip("pyarrow")
    frame = pd.DataFrame({"key": np.arange(10_000) % 7, "x": np.arange(10_000.0)})
    remote_frame = dd.from_pandas(frame, npartitions=8)
    found = remote_frame.groupby("key").x.mean().compute().sort_index()
    pd.testing.assert_series_equal(found, frame.groupby("key").x.mean(), check_names=False)
    merged = remote_frame.shuffle("key").map_partitions(lambda part: part.key.nunique()).compute()
    assert merged.sum() == 7  # all rows of a key are in one partition


def test_modules_of_the_project_are_there(client: Any) -> None:
    assert client.submit(remote.greeted, workers="node2").result()[0] == "node2"


def test_a_killed_worker_is_started_again(client: Any, namespaces: Lab) -> None:
    before = addresses_of(client)["node2"]
    pid = client.submit(os.getpid, workers="node2", pure=False).result()
    namespaces.hosts[1].run(["kill", "-9", str(pid)])
    until(lambda: "node2" in (found := addresses_of(client)) and found["node2"] != before)
    assert client.submit(os.getpid, workers="node2", pure=False).result(timeout=60) != pid


# ---- the dashboard


def test_the_dashboard_responds_only_to_those_who_know_its_address(client: Any) -> None:
    host, _, _ = client.dashboard_link.removeprefix("http://").partition("/")
    for path in (
        "/",
        "/status",
        "/sitemap.json",
        "/info/main/workers.html",
        "/json/counts.json",
        "/health",
        "/x/status",
    ):
        with pytest.raises(urllib.error.HTTPError) as raised:
            urllib.request.urlopen(f"http://{host}{path}", timeout=20)
        raised.value.close()
        assert raised.value.code == 404, path


# ---- who else can connect

STRANGER = """
import http.client, socket, ssl, sys

def tls(address):
    anyone = ssl._create_unverified_context()
    with socket.create_connection(address, 3) as plain, anyone.wrap_socket(plain) as secure:
        secure.sendall(bytes(64))
        return secure.recv(1)

def page(address, path):
    connection = http.client.HTTPConnection(*address, timeout=10)
    connection.request("GET", path)
    return connection.getresponse().status

for word in sys.argv[1:]:
    host, _, port = word.rpartition(":")
    try:
        said = tls((host, int(port)))
        print(word, "answers" if said else "refuses")
    except OSError as error:
        try:
            found = {page((host, int(port)), path) for path in ("/", "/status", "/info/logs.html", "/metrics")}
            print(word, "hides its pages" if found == {404} else found)
        except (OSError, http.client.HTTPException):
            print(word, "refuses")
"""


def test_nothing_that_listens_serves_others(client: Any, namespaces: Lab) -> None:
    """Another user of the hosts, and any machine: without the pool's certificate, connections are refused."""
    for host in namespaces.hosts[:COUNT]:
        open_ports = {(address, port) for address, port in listeners(host) if port != host.port}
        assert {address for address, _ in open_ports} == {host.address, "127.0.0.1"}
        words = [f"{address}:{port}" for address, port in sorted(open_ports)]
        said = host.run(["python3", "-c", STRANGER, *words], user="ada").stdout.splitlines()
        verdicts = [line.partition(" ")[2] for line in said]
        assert set(verdicts) == {"refuses", "hides its pages"}
        for (address, _), verdict in zip(sorted(open_ports), verdicts, strict=True):
            assert (verdict == "refuses") == (address == host.address), said


def test_the_key_is_in_no_file_and_no_command_line(client: Any, namespaces: Lab) -> None:
    for host in namespaces.hosts[:COUNT]:
        for process in host.processes():
            assert "PRIVATE KEY" not in " ".join(process.cmdline)
        look = "for f in /proc/[0-9]*/environ; do tr '\\0' '\\n' < $f; done 2>/dev/null | grep -c 'PRIVATE KEY'"
        assert host.run(["sh", "-c", look], check=False).stdout.strip() == "0"
        places = ["/root/.cache/skyfab/run", "/tmp", "/dev/shm"]
        found = host.run(["grep", "-rIl", "PRIVATE KEY", *places], check=False).stdout
        assert found == ""


# ---- how it ends


def run_folders(hosts: list[LabHost]) -> set[Path]:
    """What processes of a pool have made in its own folder."""
    return {path for host in hosts for path in host.path("/root/.cache/skyfab/run").glob("*/*/work*/*")}


def test_all_is_gone_after_the_block(compute: sky.Compute, namespaces: Lab) -> None:
    sky.function(os.getpid)() @ compute
    hosts = namespaces.hosts[:COUNT]
    before = [{process.pid for process in host.processes()} for host in hosts], [listeners(host) for host in hosts]
    folders = run_folders(hosts)
    with compute.dask(workers=2, threads=1) as client:  # besides the one of the module
        assert set(addresses_of(client)) == {f"node{n}-{k}" for n in (1, 2) for k in (0, 1)}
        client.run(os.getpid)
    until(
        lambda: (
            ([{one.pid for one in host.processes()} for host in hosts], [listeners(host) for host in hosts]) == before
        )
    )
    assert run_folders(hosts) == folders


def test_a_user_may_shut_dask_down(open_pool: Callable[..., sky.Compute]) -> None:
    with open_pool("local").dask() as client:
        client.shutdown()


def test_a_block_ends_also_if_the_scheduler_is_lost(open_pool: Callable[..., sky.Compute]) -> None:
    compute = open_pool("local")
    with compute.dask() as client:
        os.kill(client.run_on_scheduler(os.getpid), signal.SIGKILL)
        until(lambda: client.status != "running")
    with compute.dask() as client:
        assert client.submit(sum, [1, 2]).result() == 3


PROGRAM = """
import sys
import skyfab as sky

with sky.Compute("node1,node2", inventory=sys.argv[1], plugins=[sky.plugins.dask()], ui="none") as compute:
    with compute.dask() as client:
        print(client.submit(sum, [1, 2]).result(), flush=True)
        input()
"""


def test_all_is_gone_after_the_program_was_killed(namespaces: Lab, tmp_path: Path) -> None:
    hosts = namespaces.hosts[2:4]
    script = tmp_path / "program.py"
    script.write_text(PROGRAM.replace("node1,node2", ",".join(host.name for host in hosts)))
    before = [listeners(host) for host in hosts]
    command = [sys.executable, str(script), str(namespaces.inventory)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "3\n"
        assert any("multiprocessing" in trace for host in hosts for trace in traces.on(host))
        program.kill()
    until(lambda: not any(traces.on(host) | traces.folders(host) for host in hosts), timeout=40)
    assert [listeners(host) for host in hosts] == before


@pytest.fixture(scope="module")
def apart() -> Iterator[Lab]:
    """Forwarded ports, and no network between them."""
    with start(2, forwarded=True, python=sys.executable) as lab:
        yield lab


def test_hosts_that_do_not_reach_each_other_are_an_error(apart: Lab) -> None:
    with sky.Compute(inventory=apart.inventory, ui="none") as compute:
        sky.function(os.getpid)() @ compute
        before = [{process.pid for process in host.processes()} for host in apart.hosts]
        with pytest.raises((sky.PeersUnreachable, sky.PoolError)) as raised:
            with compute.dask():
                pass
        errors = getattr(raised.value, "exceptions", [raised.value])
        assert {type(error) for error in errors} == {sky.PeersUnreachable}
        assert [{process.pid for process in host.processes()} for host in apart.hosts] == before
        with sky.Compute("node1", inventory=apart.inventory, ui="none") as alone, alone.dask() as client:
            assert client.submit(sum, [1, 2]).result() == 3  # one host needs no network


def test_a_host_without_dask_is_an_error_that_names_the_plugin(open_pool: Callable[..., sky.Compute]) -> None:
    compute = open_pool("openssh", 2)
    with pytest.raises(sky.HostUnfit, match="Dask is not installed") as raised:
        with compute.dask():
            pass
    assert "plugins.dask()" in str(raised.value.hint) and "except for a Python" in str(raised.value.hint)
    assert sky.function(abs)(-1) >> compute == 1
