"""`skyfab doctor` on real hosts: every finding is planted on a host, and found."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from stage.gpus import BROKEN, gpu, plant
from stage.labs import start

from skyfab.lab import Lab

pytestmark = [pytest.mark.lab, pytest.mark.timeout(300)]

SILENT = "import socket, time; s = socket.socket(type=socket.SOCK_DGRAM); s.bind(('127.0.0.1', 53)); time.sleep(600)"
"""A name server that never answers."""


class Ran(NamedTuple):
    code: int
    out: str
    err: str

    def found(self, host: str, check: str) -> dict[str, Any]:
        """The one finding of a check on a host or pair, of those that `--json` prints."""
        (one,) = (one for one in json.loads(self.out) if (one["host"], one["check"]) == (host, check))
        return dict(one)

    def levels(self, check: str) -> dict[str, str]:
        return {one["host"]: one["level"] for one in json.loads(self.out) if one["check"] == check}


def doctor(inventory: Path, *words: str, cwd: Path | None = None) -> Ran:
    argv = [sys.executable, "-m", "skyfab", "doctor", f"--inventory={inventory}", *words]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=cwd, timeout=200)
    return Ran(done.returncode, done.stdout, done.stderr)


def put(lab: Lab, name: str, path: str, text: str, mode: int = 0o644) -> None:
    """Writes a file of a host."""
    file = lab[name].path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    file.chmod(mode)


@pytest.fixture(scope="module")
def sick() -> Iterator[tuple[Lab, Ran]]:
    """Hosts with a fault each in every section, and what doctor says."""
    with start(5, sshd={"MaxStartups": "2:30:20", "MaxSessions": "1"}) as lab:
        plant(lab, "node1", gpu(use=99), "echo 'GPU-0, 1, 69000'")
        plant(lab, "node2", gpu(throttled="0x0000000000000020") + "; " + gpu(1, ecc=3))
        plant(lab, "node3", BROKEN)
        plant(lab, "node4", gpu(driver="470.82"))
        # Over it: in a user namespace, nothing in that folder can be changed.
        lab["node1"].run(["sh", "-c", "mkdir -p /etc/systemd && mount -t tmpfs none /etc/systemd"])
        put(lab, "node1", "/etc/systemd/logind.conf", "[Login]\nKillUserProcesses=yes\n")
        lab["node2"].small_disk("/root/.cache", 300)
        lab["node3"].run(["mount", "-t", "tmpfs", "-o", "noexec,nr_inodes=5000", "none", "/mnt"])
        lab["node4"].run(["sh", "-c", "mkdir -p /scratch && mount -t tmpfs none /scratch"])
        put(lab, "node3", "/etc/hosts", "127.0.0.1 localhost\n")
        put(lab, "node3", "/etc/resolv.conf", "nameserver 127.0.0.1\n")
        lab["node3"].run(["sh", "-c", f'"{lab["node3"].python}" -c "{SILENT}" >/dev/null 2>&1 &'])
        put(lab, "node4", "/root/.bashrc", "echo Welcome to node4\n")
        lab["node4"].run(["chsh", "-s", "/bin/bash", "root"], check=False)
        doctor(lab.inventory, "node5")  # with a clock of faketime, sending the bundle to a new host would never end
        faketime = next(iter([*Path("/usr/lib").glob("*/faketime/libfaketime.so.1")]), None)
        late = f"export LD_PRELOAD={faketime} FAKETIME=-300s FAKETIME_DONT_FAKE_MONOTONIC=1" if faketime else ""
        text = lab.inventory.read_text()
        text = text.replace("[hosts.node3]\n", '[hosts.node3]\ncache = "/mnt/skyfab"\n')
        text = text.replace("[hosts.node5]\n", f'[hosts.node5]\nsetup = "{late}; ulimit -n 300"\n')
        inventory = lab.folder / "sick.toml"
        inventory.write_text(text)
        yield lab, doctor(inventory, "--json")


def test_this_machine_has_no_login(tmp_path: Path) -> None:
    done = doctor(lab_less(tmp_path), "--json")
    assert {one["host"] for one in json.loads(done.out)} == {"local"}, done.err
    assert done.levels("shell") == done.levels("bandwidth") == {}


def lab_less(folder: Path) -> Path:
    """An inventory with this machine alone."""
    (folder / "inventory.toml").write_text("[hosts.local]\n")
    return folder / "inventory.toml"


def test_findings_do_not_count_as_unreachable(sick: tuple[Lab, Ran]) -> None:
    assert sick[1].code == 1, sick[1].err
    assert set(sick[1].levels("login").values()) == {"ok"}


def test_sshd(sick: tuple[Lab, Ran]) -> None:
    assert "while 2 others" in sick[1].found("node1", "MaxStartups")["what"]
    assert sick[1].found("node1", "MaxSessions")["level"] == "warning"


def test_a_clock_that_is_late(sick: tuple[Lab, Ran]) -> None:
    if not [*Path("/usr/lib").glob("*/faketime/libfaketime.so.1")]:
        pytest.skip("faketime is not installed")
    late = sick[1].found("node5", "clock")
    assert late["level"] == "warning" and re.search(r"(299|300|301)\.\d s behind", late["what"])
    assert [host for host, level in sick[1].levels("clock").items() if level != "ok"] == ["node5"]


def test_a_name_server_that_does_not_answer(sick: tuple[Lab, Ran]) -> None:
    assert "more than 5 s" in sick[1].found("node3", "name")["what"]
    assert sick[1].levels("reverse name") == {"node3": "advice"}
    assert [host for host, level in sick[1].levels("name").items() if level == "warning"] == ["node3"]


def test_limits_and_logouts(sick: tuple[Lab, Ran]) -> None:
    assert sick[1].found("node5", "limits")["what"] == "its limit on open files is 300"
    assert sick[1].levels("limits") == {"node5": "warning"}
    assert sick[1].levels("KillUserProcesses") == {"node1": "warning"}


def test_disks(sick: tuple[Lab, Ran]) -> None:
    assert sick[1].found("node2", "disk")["level"] == "failure"
    assert sick[1].levels("noexec") == {"node3": "failure"}
    assert sick[1].levels("inodes") == {"node3": "warning"}


def test_a_shell_that_talks(sick: tuple[Lab, Ran]) -> None:
    assert "'Welcome to node4'" in sick[1].found("node4", "shell")["what"]


def test_gpus(sick: tuple[Lab, Ran]) -> None:
    assert "in use by root" in sick[1].found("node1", "in use")["what"]
    assert "its temperature, at 88 °C" in sick[1].found("node2", "throttling")["what"]
    assert sick[1].found("node2", "ECC")["setting"] == ["gpus", "[0]"]
    assert sick[1].levels("GPU tool") == {"node3": "failure"}
    assert sick[1].levels("driver") == {"node1": "ok", "node2": "ok", "node4": "warning"}


def test_the_report_and_the_fix(sick: tuple[Lab, Ran], tmp_path: Path) -> None:
    lab, _ = sick
    inventory = tmp_path / "inventory.toml"
    inventory.write_text(lab.inventory.read_text())
    done = doctor(inventory, "node2")
    assert done.code == 1, done.err
    assert "GPUs     1 failure, 1 warning" in done.out
    assert "    fix: on the host: sudo nvidia-smi --gpu-reset" in done.out
    assert f"    in {inventory}: [hosts.node2] gpus = [0]\n" in done.out
    assert f'    in {inventory}: [hosts.node2] cache = "/var/tmp/root/skyfab"\n' in done.out
    text = inventory.read_text().replace("[hosts.node2]", '[hosts.node2]\ncache = "/var/tmp/root/skyfab"')
    inventory.write_text(text)
    assert "disk     fine" in doctor(inventory, "node2").out


# ---- between hosts


@pytest.fixture(scope="module")
def trio() -> Iterator[Lab]:
    with start(3, second_network=True) as lab:
        yield lab


def test_a_port_that_is_blocked(trio: Lab) -> None:
    """Names who cannot connect to whom, and the others are examined nevertheless."""
    trio["node3"].block(trio["node1"])
    try:
        done = doctor(trio.inventory, "--json")
    finally:
        trio["node3"].unblock(trio["node1"])
    assert done.code == 1, done.err
    assert done.levels("ports") == {"node3": "failure"}
    assert "cannot connect to node1" in done.found("node3", "ports")["what"]
    assert "node1 → node2" in done.levels("bandwidth")


def test_a_slow_link(trio: Lab) -> None:
    trio["node3"].slow(5)
    try:
        done = doctor(trio.inventory, "--json")
    finally:
        trio["node3"].slow(None)
    assert {one["setting"][0] for one in json.loads(done.out) if one["check"] == "interface"} == {"interface"}
    slow = [host for host, level in done.levels("bandwidth").items() if level != "ok"]
    assert "node2 → node3" in slow and "node1 → node3" in slow and "node1 → node2" not in slow


def test_a_host_that_is_down_does_not_hold_up_the_others(trio: Lab) -> None:
    done = doctor(trio.inventory, "--hosts=node1,root@127.0.0.1:1,node2", "--json")
    assert done.code == 3
    assert done.found("root@127.0.0.1:1", "reachability")["level"] == "failure"
    assert set(done.levels("bandwidth")) == {"node1 → node2"}


@pytest.mark.slow
def test_measurements_are_compared_with_those_before(
    trio: Lab, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    done = doctor(trio.inventory, "--measure", "--json")
    speeds = [one for one in json.loads(done.out) if one["section"] == "speed"]
    assert {one["host"] for one in speeds} == {"node1", "node2", "node3"} and len(speeds) == 9
    for file in tmp_path.rglob("measured/*.json"):
        file.write_text(json.dumps([{"memory": 1e15}] * 3))
    done = doctor(trio.inventory, "--measure", "--json", "--hosts=node1")
    assert any("3 earlier measurements" in one["what"] for one in json.loads(done.out) if one["level"] == "warning")


def test_what_is_pasted(sick: tuple[Lab, Ran]) -> None:
    lab, _ = sick
    done = doctor(lab.inventory, "node1", "root@127.0.0.1:1", "--paste")
    assert done.code == 3
    assert "host1 GPUs/in use advice: GPU 0 is in use" in done.out and "host2 login/reachability failure: " in done.out
    assert "node1" not in done.out and "127.0.0.1" not in done.out
