"""`Files`: transfers to and from several hosts, each of which is a process beside this one."""

from __future__ import annotations

import errno
import multiprocessing
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import skyfab as sky
from skyfab.calls.project import with_local_paths
from skyfab.errors import ProtocolError
from skyfab.host.ask import files as host_files
from skyfab.pool.file_worker import Answer, Remote
from skyfab.pool.files import Files
from skyfab.pool.node import WorkerSpec
from skyfab.pool.relay import Relay
from skyfab.protocol import codec, messages
from skyfab.ui.events import Event, Events, Step

SPEC = WorkerSpec(tree="", env={}, info={})


def serve(folder: Path, pipe: Any) -> None:
    """What a worker on a host does."""
    os.chdir(folder)
    vars(host_files).update(note_transferred=lambda *_: None, own_folder=lambda: "/run/worker")
    while (found := pipe.recv()) is not None:
        if found == "released":  # the next worker is another process
            vars(host_files).update(_mirror=None)
            continue
        *arguments, _ = codec.loads(*found)
        reply = host_files.serve(*arguments)
        pipe.send((reply.data, [bytes(buffer) for buffer in reply.buffers]))


class Served:
    """A node whose worker is a process of this machine, in a folder of its own."""

    def __init__(self, name: str, folder: Path) -> None:
        folder.mkdir()
        self.name = name
        self.folder = folder
        self.session: object = object()
        self.workdir = SimpleNamespace(callers=False)
        self.specs: dict[str, WorkerSpec] = {}
        self.released: list[str] = []
        self.requests: list[str] = []
        self.says: dict[str, Any] = {}
        """Replies in place of the true ones; a function is called before the true one."""
        self._pipe, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("fork")
        self._process = context.Process(target=serve, args=(folder, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def call(self, worker: str, spec: WorkerSpec, call: Any, *, caller: Answer, store: str) -> None:
        self.specs[worker] = spec
        self.requests.append(call.label)
        found = self.says.get(call.label)
        if callable(found):
            found()
        elif found is not None:
            caller.answered(messages.Result(parts=()), [memoryview(found)])
            return
        self._pipe.send((call.arguments.data, [bytes(buffer) for buffer in call.arguments.buffers]))
        data, buffers = self._pipe.recv()
        caller.answered(messages.Result(parts=()), [memoryview(data), *map(memoryview, buffers)])

    def release(self, worker: str) -> None:
        self.released.append(worker)
        self._pipe.send("released")

    def close(self) -> None:
        self._pipe.send(None)
        self._process.join()
        self._pipe.close()
        self._process.close()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[Any]]:
    made = [Served(name, tmp_path / name) for name in ("n1", "n2")]
    yield made
    for node in made:
        node.close()
        assert set(node.specs) == set(node.released), "every worker is released, some twice"


@pytest.fixture
def events() -> list[Event]:
    return []


@pytest.fixture
def files(events: list[Event]) -> Files:
    emitted = Events()
    emitted.subscribe(events.append)
    return Files(lambda node, tree: SPEC, Relay(lambda node, tree: SPEC, emitted))


def fill(folder: Path, **contents: str) -> None:
    """Keyword arguments are paths, with __ for / and _ for a dot."""
    for name, content in contents.items():
        path = folder / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


def tree(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in sorted(folder.rglob("*")) if not path.is_dir()}


# ---- to hosts


@pytest.mark.parametrize(
    ("count", "path", "to", "found"),
    [
        (2, "d", None, {"d/a.txt": "a", "d/e/b": "b"}),
        (2, "../outside/f/..", None, {"outside/c": "c"}),
        (1, "d", "x/y", {"x/y/a.txt": "a", "x/y/e/b": "b"}),
        (1, "d/e/..", "x/", {"x/d/a.txt": "a", "x/d/e/b": "b"}),
        (1, "d/a.txt", "z", {"z": "a"}),
        (1, "../link/d/e/b", None, {"d/e/b": "b"}),
    ],
)
def test_uploads(
    files: Files, here: Path, nodes: list[Any], count: int, path: str, to: str | None, found: dict[str, str]
) -> None:
    fill(here, d__a_txt="a", d__e__b="b")
    fill(here.parent, outside__c="c")
    (here.parent / "outside" / "f").mkdir()
    (here.parent / "link").symlink_to(here)
    reports = files.upload(path, to, nodes[:count])
    assert [tree(node.folder) for node in nodes[:count]] == [found] * count
    assert [(report.host, report.sent, report.folder) for report in reports] == [
        (node.name, len(found), "") for node in nodes[:count]
    ]
    assert nodes[count:] == [] or nodes[1].requests == []
    (spec,) = nodes[0].specs.values()
    assert (spec.pipelined, spec.reported, spec.plain, spec.claims) == (True, False, True, True)


def test_a_new_folder_has_the_mode_and_time_of_the_one_here(files: Files, here: Path, nodes: list[Any]) -> None:
    fill(here, d__a="a", d__e__b="b")
    for folder, mode in (("d/e", 0o500), ("d", 0o700)):
        (here / folder).chmod(mode)
        os.utime(here / folder, (5, 5))
    (nodes[1].folder / "d").mkdir(mode=0o755)
    files.upload("d", None, nodes)
    new, old = (node.folder / "d" for node in nodes)
    for folder, mode in ((new, 0o700), (new / "e", 0o500), (old / "e", 0o500)):
        assert (folder.stat().st_mode & 0o777, folder.stat().st_mtime) == (mode, 5)
    assert old.stat().st_mode & 0o777 == 0o755


def test_a_project_is_laid_out(files: Files, here: Path, nodes: list[Any]) -> None:
    fill(here, train_py="new", data="x", n1__fetched="y", _gitignore="data\n", sub__n1="z")
    fill(nodes[0].folder, train_py="newer")
    os.utime(nodes[0].folder / "train.py", (4e9, 4e9))
    place, reports = files.lay_out(here, nodes)
    assert place == "." and len(reports) == 2
    trace = with_local_paths(f'File "{nodes[0].folder}/train.py", line 3', "n1")
    assert trace == f'File "{here}/train.py", line 3', "tracebacks name the files here"
    kept = {".gitignore": "data\n", "sub/n1": "z"}
    assert [tree(node.folder) for node in nodes] == [{"train.py": "newer", **kept}, {"train.py": "new", **kept}]
    assert reports[0].skipped == [("train.py", "newer on the host: kept")]
    nodes[0].workdir.callers = True  # it works in this folder itself
    place, reports = files.lay_out(here, nodes, ignored=True)
    assert [report.host for report in reports] == ["n2"]
    assert tree(nodes[1].folder) == {"train.py": "new", "data": "x", **kept}


# ---- from hosts


def test_a_download_of_one_host(files: Files, here: Path, nodes: list[Any]) -> None:
    fill(nodes[0].folder, ckpt__a_pt="a", ckpt__b_txt="b")
    (report,) = files.download(["ckpt/*.pt"], "results", nodes[:1], apart=False)
    assert tree(here) == {"results/ckpt/a.pt": "a"}
    assert (report.host, report.folder, report.sent) == ("n1", "results", 1)
    assert nodes[0].requests[-1] == "fetched"
    (spec,) = nodes[0].specs.values()
    assert not spec.claims, "it only looks at files"
    (report,) = files.download(["ckpt/*.pt"], here.parent / "elsewhere", nodes[:1], apart=False)
    assert report.folder == str(here.parent / "elsewhere")


def test_a_download_apart(files: Files, here: Path, nodes: list[Any]) -> None:
    """What one host alone has keeps its place; what several have goes into folders of their names."""
    for node in nodes:
        fill(node.folder, out__log=node.name, **{f"out__only_{node.name}": "x"}, n1__odd="odd")
        (node.folder / "out" / "link").symlink_to("log")
    (nodes[0].folder / "out" / "mine").symlink_to("log")
    (nodes[1].folder / "out" / "yours").symlink_to("only.n2")
    reports = files.download(["out"], ".", nodes, apart=True)
    assert sorted(tree(here)) == [
        *("n1/out/link", "n1/out/log", "n1/out/mine", "n2/out/link", "n2/out/log"),
        *("out/only.n1", "out/only.n2", "out/yours"),
    ]
    assert (here / "n2" / "out" / "log").read_text() == "n2"
    assert [report.folder for report in reports] == [".", "."]


@pytest.mark.parametrize("newer", ["n1", "n2"])
def test_a_download_is_repeated_without_another_result(files: Files, here: Path, nodes: list[Any], newer: str) -> None:
    """Each host has another version: the one that was fetched is not replaced by an older one, nor in turn by both."""
    for node in nodes:
        fill(node.folder, out=node.name)
        os.utime(node.folder / "out", (0, 2e9 if node.name == newer else 1e9))
    files.download(["out"], ".", nodes[:1], apart=False)
    assert tree(here) == {"out": "n1"}
    for _ in range(2):
        reports = files.download(["out"], ".", nodes, apart=True)
    assert sum(report.sent for report in reports) == 0
    older = "n1" if newer == "n2" else "n2"
    assert tree(here) == {"out": newer, f"{older}/out": older}


def test_a_folder_that_is_named_as_a_host_is_not_mixed_with_that_of_the_host(
    files: Files, here: Path, nodes: list[Any]
) -> None:
    fill(nodes[0].folder, n2__a="a")
    fill(nodes[1].folder, b="b")
    files.download(["n2", "b"], ".", nodes, apart=True)
    assert tree(here) == {"b": "b", "n1/n2/a": "a"}


# ---- what goes wrong


def test_not_enough_space(files: Files, here: Path, nodes: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    fill(here, a="x" * 2000)
    nodes[0].says = {"receive": b'{"value": ["/data", "a", 1999]}', "compare": b'{"value": [[0, "missing", 0, ""]]}'}
    with pytest.raises(sky.HostUnfit, match=r"they need 2\.0 kB, 2\.0 kB is free") as raised:
        files.upload("a", None, nodes[:1])
    assert raised.value.hint == "free some space on it, or use another disk (to=…, --to=…; --workdir=… of run)"
    nodes[0].says["receive"] = b'{"errno": 28, "text": "No space left on device"}'
    nodes[1].says["receive"] = b'{"errno": 13, "text": "Permission denied"}'
    with pytest.raises(sky.PoolError, match="2 of 2 hosts failed"):
        files.upload("a", None, nodes)
    fill(nodes[0].folder, b="x" * 2000)
    monkeypatch.setattr(os, "fstatvfs", lambda fd: SimpleNamespace(f_frsize=1, f_bavail=10, f_bfree=10))
    with pytest.raises(OSError, match="not enough space for these files") as here_raised:
        files.download(["b"], ".", nodes[:1], apart=False)
    assert here_raised.value.errno == errno.ENOSPC
    monkeypatch.setattr(os, "fstatvfs", lambda fd: SimpleNamespace(f_frsize=1, f_bavail=2000, f_bfree=2000))
    files.download(["b"], ".", nodes[:1], apart=False)


def test_an_error_of_one_host_is_raised_with_its_name(files: Files, here: Path, nodes: list[Any]) -> None:
    fill(here, a="x")
    nodes[1].says["compare"] = b'{"value": [[7, "missing", 0, ""]]}'
    with pytest.raises(ProtocolError, match="no file 7 in this transfer") as raised:
        files.upload("a", None, nodes)
    assert raised.value.host == "n2"
    with pytest.raises(ProtocolError) as raised:
        files.upload("a", None, nodes[1:])
    assert raised.value.host == "n2"
    nodes[1].says["compare"] = b"rubbish"
    with pytest.raises(ProtocolError, match="not a reply to compare") as raised:
        files.upload("a", None, nodes)
    assert raised.value.host == "n2"


def test_a_host_that_is_lost_during_a_transfer(files: Files, here: Path, nodes: list[Any], events: list[Event]) -> None:
    fill(here, a="x")

    def lose() -> None:
        nodes[0].session = object()

    nodes[0].says["compare"] = lose
    with pytest.raises(sky.HostLost, match="it was lost during the transfer") as raised:
        files.upload("a", None, nodes[:1])
    assert (raised.value.host, raised.value.hint) == ("n1", "run it again: it resumes where it stopped")
    assert events == [Step(host="n1", text="")], "its progress is no longer shown"


def test_a_host_that_lists_one_file_for_ever(monkeypatch: pytest.MonkeyPatch, here: Path, nodes: list[Any]) -> None:
    monkeypatch.setattr("skyfab.pool.file_worker.MOST_ENTRIES", 5)
    nodes[0].says["rows"] = b'{"value": [[["a", "f", 1, 0, 420, ""]], []]}'
    remote = Remote(nodes[0], SPEC, threading.Event())
    remote.list(os.fsencode(here))
    assert nodes[0].requests == ["rows"] * 6
    remote.close()


# ---- replies


def test_what_a_host_raises_is_not_unpickled() -> None:
    found = Answer("n1", "rows")
    data = codec.dumps(KeyError("x")).data
    found.answered(
        messages.Raised(parts=[len(data)], kind="builtins.KeyError", text="'x'", traceback="t"), [memoryview(data)]
    )
    with pytest.raises(sky.RemoteError, match="KeyError"):
        found.result()
