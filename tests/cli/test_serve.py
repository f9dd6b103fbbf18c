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

import skyfab as sky
from skyfab.cli.serve import _port_of
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


def test_it_has_one_rank_on_each_host(folder: Path) -> None:
    assert "ranks on each host (default: 1)" in skyfab(folder, "serve", "--help").stdout


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


@pytest.mark.parametrize(
    ("ready", "program", "why"),
    [
        ("http://127.0.0.1:8124/health", "sleep 600", "http://127.0.0.1:8124/health does not respond on its host"),
        ("http://127.0.0.1:8124/", f"exec python3 -c '{GARBAGE}'", "http://127.0.0.1:8124/ does not respond"),
        ("8124", "sleep 600", "port 8124 does not respond on its host"),
        ("at http://all", "sleep 600", "rank 0 has not printed 'at http://all'"),
    ],
)
def test_one_that_is_never_ready_fails(folder: Path, namespaces: Lab, ready: str, program: str, why: str) -> None:
    words = ("slow", f"--ready={ready}", "--timeout=1", "--restarts=0", "--", "sh", "-c", program)
    served = serve(folder, namespaces, *words)
    assert served.returncode == 1
    assert f"it was not ready after 1 s: {why}" in served.stderr
    assert "hint: all output: skyfab logs slow\n" in served.stderr
    until(lambda: not traces.on(namespaces.hosts[0]))


def test_a_command_that_is_not_there_is_not_restarted(folder: Path, namespaces: Lab) -> None:
    served = serve(folder, namespaces, "none", "--", "no-such-program")
    assert served.returncode == 1
    assert "command not found: no-such-program" in served.stderr
    assert "restarting" not in served.stderr


def test_a_text_that_python_prints_is_seen_immediately(folder: Path, namespaces: Lab) -> None:
    """Although its output is not a terminal."""
    script = "import time; print('ready now'); time.sleep(600)"
    served = serve(folder, namespaces, "text", "--ready=ready now", "--timeout=30", "--", "python3", "-c", script)
    assert "text: ready\n" in served.stderr
    logs = skyfab(folder, "logs", "text", inventory=namespaces.inventory)
    assert logs.stdout == "node1 ready now\n"
    stop(folder, namespaces, "text")


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
    """Its process, and not only the program in it: no agent would start it again."""
    words = ("pair", "--hosts=node2", "--detach", "--ready=serving", "--", "sh", "-c", "echo serving; sleep 600")
    assert serve(folder, namespaces, *words).returncode == 0
    until(lambda: phase(folder, namespaces, "pair") == "ready")
    (child,) = [one for one in namespaces.hosts[1].processes() if one.cmdline[:2] == ("sh", "-c")]
    (worker,) = [one for one in namespaces.hosts[1].processes() if one.pid == child.ppid]
    os.kill(worker.outside, signal.SIGKILL)
    followed = skyfab(folder, "attach", "pair", inventory=namespaces.inventory)
    assert followed.returncode == 1
    assert "rank 1 is gone" in followed.stderr
    for host in namespaces.hosts[:2]:
        until(lambda host=host: not traces.on(host))


@pytest.mark.parametrize(
    ("ready", "port"),
    [
        ("8000", 8000),
        ("http://127.0.0.1:8000/health", 8000),
        ("https://localhost/", 0),
        ("http://[::1]:99/x", 99),
        ("Uvicorn running", 0),
        ("note: done", 0),
        ("Listening at tcp://0.0.0.0:99", 0),
        ("", 0),
    ],
)
def test_the_port_is_that_of_the_readiness_check(ready: str, port: int) -> None:
    assert _port_of(ready) == port


@pytest.mark.parametrize(
    "ready", ["0", "70000", "file:///etc/passwd", "ftp://127.0.0.1:99/", "http://127.0.0.1:99999/", "http://x:port/"]
)
def test_a_readiness_check_that_cannot_be(ready: str) -> None:
    with pytest.raises(sky.UsageError, match="invalid --ready="):
        _port_of(ready)
