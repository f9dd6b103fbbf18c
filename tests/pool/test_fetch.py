"""Models in the caches of hosts: where they come from, what arrives, and what happens when something fails."""

from __future__ import annotations

import json
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import pytest
from stage import labs
from stage.hub import COMMIT, Hub, Internet

import skyfab as sky
from skyfab.lab import Lab
from skyfab.ui.events import Event, Moved, Notice

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
