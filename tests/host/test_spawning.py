"""Processes that cannot be started: the call that wanted one says why, and the others go on."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import skyfab as sky
from skyfab.host.agent import zygote
from skyfab.host.agent.handlers import Handlers
from skyfab.host.agent.run_folder import RunFolder
from skyfab.host.agent.workers import Workers
from skyfab.lab import Lab
from skyfab.protocol import messages


@sky.function
def add(n: int) -> int:
    return n + 10


# ---- requests of any size


def test_any_number_of_variables_reaches_a_process(open_pool: Callable[..., sky.Compute]) -> None:
    """Far more than one packet of the agent's socket holds; and the largest that a program can be given."""
    sizes = {**dict.fromkeys([f"V{n}" for n in range(12)], 100_000), "V": 131_069}
    pool = open_pool("local", count=1, env={name: "x" * size for name, size in sizes.items()})

    @sky.function
    def found() -> list[int]:
        import subprocess

        largest = {"V": os.environ["V"]}
        seen = subprocess.run(["/bin/sh", "-c", 'printf %s "$V"'], env=largest, capture_output=True, check=True).stdout
        return [*(len(os.environ[f"V{n}"]) for n in range(12)), len(seen)]

    assert found() >> pool == list(sizes.values())


@pytest.mark.parametrize("head", [b'{"op":"call","worker":3}', messages.Done().encode()], ids=["invalid", "of agents"])
def test_a_message_that_is_not_for_an_agent_is_answered(head: bytes) -> None:
    """It counts as received: nobody would send it again."""
    refused: list[tuple[int, Exception]] = []
    handlers = Handlers.__new__(Handlers)
    handlers._uploads = SimpleNamespace(fail=lambda *about: refused.append(about))  # type: ignore[assignment]
    handlers.take(7, head, [])
    ((stream, error),) = refused
    assert stream == 7 and isinstance(error, sky.ProtocolError)


def test_neither_of_agent_and_zygote_waits_for_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """For far more processes than there is room for requests and notices."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    wakeup, other = os.pipe()

    def refuse() -> int:
        raise OSError(errno.EAGAIN, "no more processes")

    monkeypatch.setattr(os, "fork", refuse)
    ours.settimeout(60)
    served = threading.Thread(target=zygote._attend, args=(theirs, wakeup, {}, lambda request, fds: None))
    served.start()
    try:
        for number in range(2000):
            ours.send(zygote._LAST + json.dumps({"id": number, "text": "x" * 500}).encode())
        found = [json.loads(ours.recv(1000)) for _ in range(2000)]
    finally:
        ours.close()
        served.join()
        theirs.close()
        os.close(wakeup)
        os.close(other)
    assert [notice[:2] for notice in found] == [["failed", number] for number in range(2000)]


# ---- reasons


def test_a_call_whose_process_cannot_be_started_says_why(open_pool: Callable[..., sky.Compute], home: Path) -> None:
    pool = open_pool("local", count=1)
    assert add(1) >> pool == 11
    folder = max((home / "cache1" / "logs").iterdir(), key=lambda path: path.stat().st_mtime)
    shutil.rmtree(folder)
    folder.touch()  # nothing can be made below it
    try:
        with pytest.raises(sky.WorkerDied, match="exit code 3"):
            sky.function(os._exit)(3) >> pool
        with pytest.raises(sky.WorkerDied, match=r"could not be started: .*(File exists|Not a directory)"):
            add(1) >> pool
        with pytest.raises(sky.BroadcastError) as caught:
            add(1) @ pool
        assert "could not be started" in str(caught.value.exceptions[0])
    finally:
        folder.unlink()
    assert add(2) >> pool == 12


@sky.function
def limit_processes(soft: int) -> tuple[int, int]:
    """Of the zygote, this rank's parent; returns this process's number and what the limit was."""
    before, hard = resource.prlimit(os.getppid(), resource.RLIMIT_NPROC)
    resource.prlimit(os.getppid(), resource.RLIMIT_NPROC, (soft, hard))
    return os.getpid(), before


@pytest.mark.lab
def test_at_a_limit_of_processes_a_call_says_so_and_others_go_on(
    namespaces: Lab, open_pool: Callable[..., sky.Compute]
) -> None:
    """Of a user who is not root. Ranks that are there stay."""
    pool = open_pool("openssh", count=1, user="ada", ranks=1)
    own, before = limit_processes(1) >> pool
    with pytest.raises(sky.BroadcastError) as caught:
        add(1) @ pool
    assert "could not be started: [Errno 11]" in str(caught.value.exceptions[0])
    assert limit_processes(before) >> pool == (own, 1)
    assert add(1) @ pool == [11]
    assert limit_processes(before) >> pool == (own, before)


def test_a_call_that_arrives_after_its_process_could_not_be_started_is_told_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not only that it had not begun, which would let a broadcast fail without a reason."""
    workers = Workers.__new__(Workers)
    workers._zygote = SimpleNamespace(notices=lambda: [("failed", 7, "no room")])  # type: ignore[assignment]
    workers._workers = {"gang1.0": SimpleNamespace(number=7, name="gang1.0", rank=3)}  # type: ignore[dict-item]
    workers.not_started = {}
    monkeypatch.setattr(Workers, "_reap", lambda self, worker, exitcode, text: self._workers.clear())
    workers._on_zygote()
    sent: list[tuple[int, bytes]] = []
    workers.mux = SimpleNamespace(send=lambda stream, head: sent.append((stream, head)))  # type: ignore[assignment]
    nothing: Any = None
    Handlers(nothing, workers, nothing, nothing, run="", cache="")._refuse(5, "gang1.0")
    assert [(stream, messages.decode(head)) for stream, head in sent] == [
        (5, messages.Ended(why="died", text="its process could not be started: no room"))
    ]


def test_a_detached_run_whose_process_cannot_be_started_has_failed_and_says_why(tmp_path: Path) -> None:
    """The reason is in the record of the run."""
    workers: Any = SimpleNamespace(
        get=lambda name: None, not_started={"gang1.0": (3, "it could not be started: no room")}
    )
    nothing: Any = None
    handlers = Handlers(nothing, workers, nothing, nothing, run=str(tmp_path), cache=str(tmp_path))
    handlers.record = workers.mux = RunFolder(str(tmp_path / "runs" / "a"), {}, nothing)
    handlers.take(5, messages.Call(worker="gang1.0", function="f", parts=[]).encode(), memoryview(b""))
    assert not handlers.record.running
    assert b"no room" in (tmp_path / "runs" / "a" / "result.3").read_bytes()
    handlers.close()
    assert json.loads((tmp_path / "runs" / "a" / "status").read_text())["state"] == "failed"


def test_a_process_that_cannot_be_replaced_runs_no_call_with_its_old_code(
    open_pool: Callable[..., sky.Compute], home: Path, tmp_path: Path
) -> None:
    module = tmp_path / "replaced_code.py"
    module.write_text("version = 1\n")

    @sky.function
    def version() -> int:
        import replaced_code  # type: ignore[import-not-found]

        return int(replaced_code.version)

    pool = open_pool("local", count=1, image=sky.Image(includes=[str(tmp_path)]))
    assert version() >> pool == 1
    module.write_text("version = 22\n")
    assert version() @ pool == [22]
    (tree,) = (path.parents[1] for path in home.glob("cache1/trees/*/*/replaced_code.py") if "22" in path.read_text())
    tree.rename(home / "elsewhere")
    with pytest.raises(sky.WorkerDied, match=r"could not be started: .*No such file"):
        version() >> pool
    (home / "elsewhere").rename(tree)
    assert version() >> pool == 22
