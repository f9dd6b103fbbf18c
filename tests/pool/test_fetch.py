"""Models in the caches of hosts: where they come from, what arrives, and what happens when something fails."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from stage import labs
from stage.fakes import FakeNode
from stage.hub import COMMIT, Hub, Internet
from stage.projects import inventory, skyfab
from stage.spot import until
from stage.threads import begin

import skyfab as sky
from skyfab.errors import Unreachable
from skyfab.lab import Lab
from skyfab.pool.fetch import _Fetch
from skyfab.pool.hub import Found, HubFile
from skyfab.session.fanout import meanwhile
from skyfab.ui.events import Event, Events, Moved

pytestmark = pytest.mark.lab
MIB = 1 << 20
CONFIG = json.dumps({"model_type": "bert"}).encode()
FOLDER = "/root/.cache/skyfab/hub/models--org--model"


def data(size: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(size)


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with labs.start_for_calls(3) as lab:
        yield lab


@pytest.fixture(scope="module")
def internet(lab: Lab) -> Iterator[Internet]:
    made = Internet(lab)
    yield made
    made.close()


@pytest.fixture
def hub(lab: Lab, internet: Internet, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A hub that all hosts reach, and caches that are empty, here and on hosts."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "here"))
    for name in ("HF_HOME", "HF_TOKEN", "HF_TOKEN_PATH", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    internet.only_for(*(host.name for host in lab.hosts))
    for host in lab.hosts:
        host.run(["sh", "-c", "cd /root/.cache/skyfab && rm -rf hub blobs fetched"], check=False)
    with Hub(internet.address) as made:
        monkeypatch.setenv("HF_ENDPOINT", made.url)
        yield made


@pytest.fixture
def model(hub: Hub) -> dict[str, bytes]:
    files = {
        "config.json": CONFIG,
        "empty.txt": b"",
        "model-1.safetensors": data(6 * MIB, 1),
        "model-2.safetensors": data(5 * MIB, 2),
        "onnx/model.onnx": data(4 * MIB, 3),
        "onnx/notes.txt": b"notes",
    }
    hub.add("org/model", files)
    return files


@pytest.fixture
def pool(lab: Lab) -> Iterator[sky.Compute]:
    with sky.Compute(list(sky.Inventory.of(lab.inventory).hosts.values()), ui="none") as compute:
        yield compute


def on(lab: Lab, host: str, commit: str = COMMIT, name: str = "org/model") -> dict[str, bytes]:
    """The files of the snapshot on a host, as its own library finds them, in a copy: it resolves paths."""
    import huggingface_hub

    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder, "hub")
        shutil.copytree(lab[host].path("/root/.cache/skyfab/hub"), cache, symlinks=True)
        found = Path(huggingface_hub.snapshot_download(name, cache_dir=cache, local_files_only=True))
        assert found == cache / f"models--{name.replace('/', '--')}" / "snapshots" / commit
        return {str(path.relative_to(found)): path.read_bytes() for path in found.rglob("*") if path.is_file()}


def sent(pool: sky.Compute) -> int:
    """Bytes that have left this machine through the sessions of a pool."""
    return sum(node.session.moved[0] for node in pool.hosts)


def test_hosts_download_different_files_and_pass_them_on(
    lab: Lab, hub: Hub, internet: Internet, model: dict[str, bytes], pool: sky.Compute
) -> None:
    internet.only_for("node1", "node2")
    events: list[Event] = []
    pool.events.subscribe(events.append)
    before = sent(pool)
    reports = pool.fetch("hf://org/model")
    assert sent(pool) - before < 200_000
    for host in lab.hosts:
        assert on(lab, host.name) == model
    for path in ("model-1.safetensors", "model-2.safetensors", "onnx/model.onnx"):
        assert [one.sent >= len(model[path]) for one in hub.downloads(path)].count(True) == 1, path
    clients = {one.client for one in hub.asked if one.server == "cdn" and one.sent > MIB}
    assert clients == {lab["node1"].address, lab["node2"].address}
    size = sum(map(len, model.values()))
    assert reports[2].downloaded == 0
    assert reports[2].from_hosts == size
    assert {report.downloaded + report.from_hosts for report in reports} == {size}
    assert {report.path for report in reports} == {f"{FOLDER}/snapshots/{COMMIT}"}
    last = {event.host: event for event in events if isinstance(event, Moved)}
    assert {name: (event.done, event.total) for name, event in last.items()} == {
        host.name: (size, size) for host in lab.hosts
    }
    asked, before = len(hub.asked), sent(pool)
    again = pool.fetch("hf://org/model")
    assert len(hub.asked) == asked + 1, "only the list of files"
    assert sent(pool) - before < 50_000
    assert "nothing to fetch" in str(again[0])


def test_air_gapped_hosts_get_all_from_this_machine(
    lab: Lab, hub: Hub, internet: Internet, model: dict[str, bytes], pool: sky.Compute, tmp_path: Path
) -> None:
    internet.only_for()
    reports = pool.fetch("hf://org/model")
    for host in lab.hosts:
        assert on(lab, host.name) == model
    assert {one.client for one in hub.asked} == {internet.address}
    assert reports[0].from_here == sum(map(len, model.values()))
    asked = len(hub.downloads("model-1.safetensors"))
    lab["node1"].run(["rm", "-rf", FOLDER, "/root/.cache/skyfab/blobs"])
    again = pool.fetch("hf://org/model", on="node1")
    assert len(hub.downloads("model-1.safetensors")) == asked, "this machine still has it"
    assert again[0].from_here == reports[0].from_here
    assert on(lab, "node1") == model


@sky.function
def cache_variable() -> str:
    return os.environ.get("HF_HUB_CACHE", "")


def test_functions_runs_and_shells_find_the_cache(
    lab: Lab, hub: Hub, model: dict[str, bytes], pool: sky.Compute, tmp_path: Path
) -> None:
    pool.fetch("hf://org/model", include=["*.json"])
    expected = "/root/.cache/skyfab/hub"
    assert cache_variable() @ pool == [expected] * 3
    hosts = pool.selected
    with sky.Compute(hosts, env={"HF_HOME": "/x"}, ui="none") as other:
        assert cache_variable() @ other == [""] * 3
    known = inventory(tmp_path / "inventory.toml", list(lab_hosts(lab)))
    (tmp_path / "show.py").write_text("import os\nprint(os.environ['HF_HUB_CACHE'])\n")
    done = skyfab(tmp_path, "run", "--hosts=node1", "show.py", inventory=known)
    assert done.stdout.split()[-1:] == [expected], done
    done = skyfab(tmp_path, "ssh", "node1", "--", "echo $HF_HUB_CACHE; HF_HOME=/x; echo $HF_HOME", inventory=known)
    assert done.stdout.split() == [expected, "/x"], done


def lab_hosts(lab: Lab) -> list[sky.Host]:
    return list(sky.Inventory.of(lab.inventory).hosts.values())


def test_damaged_files_are_named(lab: Lab, hub: Hub, model: dict[str, bytes], pool: sky.Compute) -> None:
    hub.damaged.add("model-2.safetensors")
    with pytest.raises(
        sky.SkyfabError, match=r"model-2.safetensors arrived damaged from .*: expected [0-9a-f]{64}, found [0-9a-f]{64}"
    ):
        pool.fetch("hf://org/model")
    assert not lab["node1"].path(FOLDER).exists(), "nothing finds half a model"
    hub.damaged.clear()
    pool.fetch("hf://org/model")
    assert on(lab, "node2") == model


@pytest.mark.parametrize("reached", [True, False])
def test_a_gated_model(
    lab: Lab,
    hub: Hub,
    internet: Internet,
    model: dict[str, bytes],
    pool: sky.Compute,
    monkeypatch: pytest.MonkeyPatch,
    reached: bool,
) -> None:
    internet.only_for(*(["node1"] if reached else []))
    hub.repositories["org/model"].gated = True
    with pytest.raises(sky.UsageError, match=r"org/model is gated: .* only with a token") as failed:
        pool.fetch("hf://org/model")
    assert failed.value.hint is not None
    assert "set HF_TOKEN" in failed.value.hint
    monkeypatch.setenv("HF_TOKEN", "hf_of_another")
    with pytest.raises(sky.UsageError, match="refuses your token") as failed:
        pool.fetch("hf://org/model")
    assert "hf_of" not in str(failed.value)
    monkeypatch.setenv("HF_TOKEN", hub.token)
    reports = pool.fetch("hf://org/model")
    assert on(lab, "node3") == model
    assert (reports[0].downloaded > 0) == reached
    assert {one.token for one in hub.asked if one.server == "cdn"} == {""}
    for host in lab.hosts:
        found = host.run(["grep", "-rlaF", hub.token, "/root", "/tmp"], check=False)
        assert found.stdout == ""


def test_the_token_stays_here_if_anyone_may_have_the_model(
    lab: Lab, hub: Hub, model: dict[str, bytes], pool: sky.Compute, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", hub.token)
    pool.fetch("hf://org/model")
    own = {host.address for host in lab.hosts}
    assert {one.token for one in hub.asked if one.client in own} == {""}


def test_a_host_that_cannot_go_on_downloading(
    lab: Lab, hub: Hub, internet: Internet, model: dict[str, bytes], pool: sky.Compute
) -> None:
    """The hub is cut off from both hosts that reach it: this machine downloads the rest."""
    internet.only_for("node1", "node2")
    hub.rate = 4e6

    def cut() -> None:
        until(
            lambda: {one.client for one in hub.asked if one.sent > 200_000} >= {host.address for host in lab.hosts[:2]}
        )
        hub.refused = {host.address for host in lab.hosts}
        hub.main.close_all()
        hub.cdn.close_all()
        hub.rate = 0

    with meanwhile(cut):
        reports = pool.fetch("hf://org/model")
    assert sum(report.from_here for report in reports) > 0
    for host in lab.hosts:
        assert on(lab, host.name) == model


def test_it_is_resumed_after_a_kill(
    lab: Lab, hub: Hub, internet: Internet, model: dict[str, bytes], tmp_path: Path
) -> None:
    internet.only_for("node1")
    known = inventory(tmp_path / "inventory.toml", list(lab_hosts(lab)))
    hub.rate = 3e6
    environ = {**os.environ, "SKYFAB_INVENTORY": str(known), "PYTHONDONTWRITEBYTECODE": "1"}
    words = [sys.executable, "-m", "skyfab", "fetch", "hf://org/model", "--hosts=node1,node3"]
    with subprocess.Popen(words, env=environ, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as first:
        until(lambda: any(one.sent > 2 * MIB for one in hub.asked))
        first.send_signal(signal.SIGINT)
        said, _ = first.communicate(timeout=30)
        assert (first.returncode, b"repeat the command to continue" in said) == (130, True), said
    hub.rate, before = 0, len(hub.asked)
    done = skyfab(tmp_path, "fetch", "hf://org/model", "--hosts=node1,node3", inventory=known)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("node1: 6 files, 16 MB; downloaded ")
    assert lines[1].startswith("node3: 6 files, 16 MB; 16 MB from other hosts, in ")
    assert lines[1].endswith(f": {FOLDER}/snapshots/{COMMIT}")
    again = [one for one in hub.asked[before:] if one.sent]
    assert any(one.range for one in again)
    assert sum(one.sent for one in again) < sum(map(len, model.values())) - 2 * MIB
    assert on(lab, "node3") == model


def test_the_command(lab: Lab, hub: Hub, internet: Internet, model: dict[str, bytes], tmp_path: Path) -> None:
    known = inventory(tmp_path / "inventory.toml", list(lab_hosts(lab)))
    digest = hashlib.sha256(model["model-1.safetensors"]).hexdigest()
    url = f"{hub.cdn.url}/org/model/-/model-1.safetensors"
    done = skyfab(tmp_path, "fetch", f"{url}#sha256={digest}", "--hosts=node1,node2", inventory=known)
    assert done.returncode == 0, done.stderr
    path = "/root/.cache/skyfab/fetched/model-1.safetensors"
    assert [line.rpartition(" ")[2] for line in done.stdout.splitlines()] == [path, path]
    assert lab["node2"].path(path).read_bytes() == model["model-1.safetensors"]
    done = skyfab(tmp_path, "fetch", f"{url}#sha256={'0' * 64}", "--hosts=node1", inventory=known)
    assert done.returncode == 1
    assert f"has another sha256: expected {'0' * 64}, found {digest}" in done.stderr
    hub.__exit__(None, None, None)
    done = skyfab(tmp_path, "fetch", "hf://org/model", "--hosts=node1", inventory=known)
    assert done.returncode == 3
    assert " from this machine or any host: this machine: Connection refused; node1: " in done.stderr


def test_a_hub_that_only_a_host_reaches(
    lab: Lab, hub: Hub, model: dict[str, bytes], pool: sky.Compute, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The list of files comes through that host."""
    forward = f"""
import socketserver, urllib.request
class Proxy(socketserver.StreamRequestHandler):
    def handle(self):
        import socket, threading
        there = socket.create_connection(({hub.main.server_address[0]!r}, {hub.main.server_address[1]}))
        def pump(a, b):
            while data := a.recv(65536): b.sendall(data)
            b.shutdown(socket.SHUT_WR)
        threading.Thread(target=pump, args=(self.request, there)).start()
        pump(there, self.request)
server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Proxy)
print(server.server_address[1], flush=True)
server.serve_forever()
"""
    words, environ = lab["node2"].inside(["python3", "-c", forward], None)
    with subprocess.Popen(words, env=environ, stdout=subprocess.PIPE, text=True) as proxy:
        try:
            assert proxy.stdout is not None
            monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{proxy.stdout.readline().strip()}")
            reports = pool.fetch("hf://org/model")
        finally:
            proxy.kill()
    assert [report.downloaded > 0 for report in reports] == [False, True, False]
    assert {one.client for one in hub.asked if one.server == "hub"} == {lab["node2"].address}
    assert on(lab, "node1") == model


def test_what_was_not_used_is_removed(
    lab: Lab, hub: Hub, model: dict[str, bytes], pool: sky.Compute, tmp_path: Path
) -> None:
    pool.fetch("hf://org/model", on="node1")
    known = inventory(tmp_path / "inventory.toml", list(lab_hosts(lab)))
    pool.close()
    assert on(lab, "node1") == model
    skyfab(tmp_path, "gc", "--hosts=node1", "--days=7", inventory=known)
    assert on(lab, "node1") == model
    lab["node1"].run(["sh", "-c", f"find {FOLDER} /root/.cache/skyfab/blobs -exec touch -h -d '9 days ago' {{}} +"])
    done = skyfab(tmp_path, "gc", "--hosts=node1", "--days=7", inventory=known)
    assert "1 model" in done.stdout, done
    assert not lab["node1"].path(FOLDER).exists()


@pytest.mark.slow
def test_hosts_that_do_not_reach_each_other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What one has downloaded this machine downloads too, for the other one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "here"))
    with labs.start_for_calls(2, isolated=True) as lab, ExitStack() as ends:
        internet = Internet(lab)
        ends.callback(internet.close)
        internet.only_for("node1")
        hub = ends.enter_context(Hub(internet.address))
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        files = hub.add("org/model", {"config.json": CONFIG, "model.safetensors": data(MIB)}).files
        with sky.Compute(lab_hosts(lab), ui="none") as pool:
            reports = pool.fetch("hf://org/model")
        assert (reports[0].downloaded, reports[1].from_here) == (MIB + len(CONFIG), MIB + len(CONFIG))
        assert on(lab, "node2") == files


def test_a_download_that_fails_after_the_only_holder_was_lost() -> None:
    file = HubFile("model.safetensors", "f" * 64, 10, "https://hub/model.safetensors")
    holder, other = FakeNode(1), FakeNode(2)

    class Stores:
        """In place of the cache of a host: only the holder has the file, and nobody can download it."""

        def __init__(self, node: Any) -> None:
            self._names = [file.tag if node is holder else ""]

        def find(self, *_: object) -> list[str]:
            return self._names

        def download(self, *_: object) -> str:
            raise Unreachable("down")

        def close(self) -> None: ...

    relay: Any = SimpleNamespace(events=Events())
    caches: Any = {node: Stores(node) for node in (holder, other)}
    one: Any = _Fetch(Found(files=(file,)), caches, caches[other], relay, Stores)  # type: ignore[arg-type]
    one._find()
    one._places = [other, None]
    one._drop(holder, sky.HostLost("gone", host="node1"))
    with pytest.raises(sky.SkyfabError, match=r"cannot download model\.safetensors: node2: down"):
        begin(one._next).result(10)
