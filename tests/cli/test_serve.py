"""`skyfab serve`: a server of two ranks on real hosts, which is ready, restarts, gives up, and ends."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from stage import traces
from stage.projects import skyfab
from stage.spot import until

from skyfab.lab import Lab, LabHost

pytestmark = [pytest.mark.lab, pytest.mark.programs]

EXAMPLE = Path(__file__).parents[2] / "examples" / "rank_server.py"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copy(EXAMPLE, tmp_path)
    return tmp_path


@contextlib.contextmanager
def serving(folder: Path, lab: Lab, *words: str) -> Iterator[subprocess.Popen[str]]:
    """The command, as it runs in a terminal, until the block ends."""
    argv = [sys.executable, "-m", "skyfab", "serve", *words]
    env = {**os.environ, "SKYFAB_INVENTORY": str(lab.inventory)}
    process = subprocess.Popen(
        argv, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def run_of(folder: Path, lab: Lab, name: str) -> dict[str, Any]:
    listed = skyfab(folder, "runs", "--hosts=node1,node2", "--json", inventory=lab.inventory)
    found: list[dict[str, Any]] = [one for one in json.loads(listed.stdout) if one["name"] == name]
    return found[0]


def phase(folder: Path, lab: Lab, name: str) -> str:
    found = run_of(folder, lab, name)
    return str(found["phase"]["phase"]) if found["phase"] else str(found["state"])


def stop(folder: Path, lab: Lab, name: str) -> None:
    stopped = skyfab(folder, "stop", name, inventory=lab.inventory)
    assert stopped.returncode == 0, stopped.stderr
    assert phase(folder, lab, name) == "stopped"
    for host in lab.hosts[:2]:
        until(lambda host=host: not traces.on(host), f"the end of all processes on {host.name}")


def programs(host: LabHost) -> list[int]:
    """The processes of the server on a host, as this machine numbers them."""
    return [one.outside for one in host.processes() if "rank_server.py" in one.cmdline]


def page(url: str) -> list[str]:
    with contextlib.suppress(OSError), urlopen(url, timeout=5) as reply:
        return reply.read().decode().splitlines()  # type: ignore[no-any-return]
    return []


@pytest.mark.slow
def test_a_server_of_two_ranks_is_here_and_restarts_when_a_rank_is_killed(folder: Path, namespaces: Lab) -> None:
    words = ("pages", "--hosts=node1,node2", "--sync", "--ready=8123", "--", "python3", "rank_server.py", "8123")
    with socket.create_server(("127.0.0.1", 8123)), serving(folder, namespaces, *words) as command:
        assert command.stdout is not None
        command.stdout.readline()  # its id
        url, _, where = command.stdout.readline().partition(" → ")
        assert url.startswith("http://127.0.0.1:") and ":8123" not in url
        assert where == "node1:8123; port 8123 is in use on this machine; it also runs on node2\n"
        before = page(url)
        assert [line.partition(",")[0] for line in before] == ["rank 0 on node1", "rank 1 on node2"]
        assert phase(folder, namespaces, "pages") == "ready"

        (victim,) = programs(namespaces.hosts[1])
        os.kill(victim, signal.SIGKILL)
        until(lambda: page(url) and not {*page(url)} & {*before}, "both ranks, started again")
        until(lambda: phase(folder, namespaces, "pages") == "ready", "ready again")
        command.send_signal(signal.SIGINT)
        _, said = command.communicate(timeout=60)
        assert command.returncode == 130
        assert "pages: restarting: rank 1: python3 was killed by SIGKILL; restart 1 of 3\n" in said
        again = "to forward its port: skyfab forward 8123 --host=node1; to stop it: skyfab stop pages"
        assert f"interrupted: pages continues on node1, node2; {again}\n" in said
    assert phase(folder, namespaces, "pages") == "ready"  # without this program
    stop(folder, namespaces, "pages")


def serve(folder: Path, lab: Lab, *words: str) -> subprocess.CompletedProcess[str]:
    return skyfab(folder, "serve", "--hosts=node1", *words, inventory=lab.inventory)


@pytest.mark.slow
def test_it_fails_when_there_were_too_many_restarts(folder: Path, namespaces: Lab) -> None:
    served = serve(folder, namespaces, "short", "--restarts=1", "--", "sh", "-c", "echo attempt; exit 3")
    assert served.returncode == 1
    assert "rank 0: sh ended with exit code 3 (restarts: 1)\n" in served.stderr
    assert "hint: its last line of output: attempt; all output: skyfab logs short\n" in served.stderr
    assert phase(folder, namespaces, "short") == "failed"
    logs = skyfab(folder, "logs", "short", inventory=namespaces.inventory)
    assert logs.stdout == "node1 attempt\n" * 2


def test_a_port_that_is_taken_is_an_error_immediately(folder: Path, namespaces: Lab) -> None:
    """Else another program would be taken for the server that is ready."""
    words = ("pages", f"--ready={namespaces.hosts[0].port}", "--", "sleep", "600")
    served = serve(folder, namespaces, *words)
    assert served.returncode == 1
    assert f"port {namespaces.hosts[0].port} is not free: Address already in use" in served.stderr
    assert "hint: another program may use it, such as an earlier server" in served.stderr
    until(lambda: not traces.on(namespaces.hosts[0]))


GARBAGE = """
import socket
with socket.create_server(("127.0.0.1", 8124)) as server:
    while True:
        server.accept()[0].sendall(b"not HTTP at all\\n")
"""


def test_one_that_is_never_ready_fails(folder: Path, namespaces: Lab) -> None:
    """Also if something answers that is not HTTP."""
    words = ("slow", "--ready=http://127.0.0.1:8124/", "--timeout=1", "--restarts=0", "--", "sh", "-c")
    served = serve(folder, namespaces, *words, f"exec python3 -c '{GARBAGE}'")
    assert served.returncode == 1
    assert "it was not ready after 1 s: http://127.0.0.1:8124/ does not respond" in served.stderr
    assert "hint: all output: skyfab logs slow\n" in served.stderr
    until(lambda: not traces.on(namespaces.hosts[0]))


def test_what_a_program_left_running_is_ended_before_it_is_restarted(folder: Path, namespaces: Lab) -> None:
    """Also if it ignores SIGTERM. A text that is printed says when it is ready."""
    script = """
        if [ -f first ]; then kill -0 $(cat first) 2>/dev/null && echo still there || echo ready now; sleep 600; fi
        (trap '' TERM; exec sleep 600) & echo $! >first; exit 1
    """
    words = ("left", "--ready=ready now", "--workdir=temp", "--", "sh", "-c", script)
    served = serve(folder, namespaces, *words)
    assert served.returncode == 0, served.stderr
    assert "left: ready\n" in served.stderr
    assert "left: restarting: rank 0: sh ended with exit code 1; restart 1 of 3\n" in served.stderr
    stop(folder, namespaces, "left")


def test_the_loss_of_a_rank_ends_the_server_everywhere(folder: Path, namespaces: Lab) -> None:
    """Its process, and not only the program in it: no agent would start it again.

    What Python prints is seen immediately, although its output is not a terminal.
    """
    script = "import time; print('serving'); time.sleep(600)"
    words = ("pair", "--hosts=node2", "--detach", "--ready=serving", "--", "python3", "-c", script)
    assert serve(folder, namespaces, *words).returncode == 0
    until(lambda: phase(folder, namespaces, "pair") == "ready")
    (child,) = [one for one in namespaces.hosts[1].processes() if one.cmdline[:2] == ("python3", "-c")]
    (worker,) = [one for one in namespaces.hosts[1].processes() if one.pid == child.ppid]
    os.kill(worker.outside, signal.SIGKILL)
    followed = skyfab(folder, "attach", "pair", inventory=namespaces.inventory)
    assert followed.returncode == 1
    assert "rank 1 is gone" in followed.stderr
    for host in namespaces.hosts[:2]:
        until(lambda host=host: not traces.on(host))
