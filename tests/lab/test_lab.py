"""The lab itself: its hosts are separate machines to their users, and it leaves nothing behind."""

from __future__ import annotations

import base64
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import paramiko
import pytest
from stage.labs import IN_USER_NAMESPACE, answers, greeting, needs_taps, ssh, start
from stage.spot import until

from skyfab import lab as lab_module
from skyfab.errors import Unreachable, UsageError
from skyfab.lab import Lab, LabHost
from skyfab.lab.process import Process

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

pytestmark = pytest.mark.lab
PROJECT = Path(lab_module.__file__).parents[2]


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with start(count=2) as lab:
        yield lab


@pytest.fixture
def node(lab: Lab) -> Iterator[LabHost]:
    """A host, put right again after whatever the test did to it."""
    host = lab.hosts[0]
    yield host
    host.reboot()


def links() -> set[str]:
    return {entry.name for entry in Path("/sys/class/net").iterdir()}


def link_number(name: str) -> str:
    """It is given once; empty if the link is gone."""
    with suppress(OSError):
        return Path("/sys/class/net", name, "ifindex").read_text()
    return ""


def cables(host: LabHost) -> set[str]:
    """The links of this machine that belong to a host's lab."""
    bridge = host.network.bridge
    return {name for name in links() if name == bridge or name.startswith(f"{bridge}n")}


def mentions(text: str) -> list[str]:
    """Mounts and processes of this machine that have the text in them."""
    found = [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if text in line]
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().decode(errors="replace") if entry.name.isdigit() else ""
        except OSError:
            continue
        if text in words:
            found.append(words)
    return found


def children() -> set[str]:
    found = set()
    for task in Path("/proc/self/task").iterdir():
        try:
            found |= set((task / "children").read_text().split())
        except OSError:  # a thread that has ended since
            continue
    return found


def network_spaces() -> set[int]:
    found = set()
    for entry in Path("/proc").iterdir():
        try:
            found |= {(entry / "ns/net").stat().st_ino} if entry.name.isdigit() else set()
        except OSError:
            continue
    return found


# What a host is


def test_each_host_has_its_own_name_files_and_processes(lab: Lab) -> None:
    first, second = lab.hosts
    assert [host.run(["hostname"]).stdout.strip() for host in lab.hosts] == ["node1", "node2"]
    first.run(["sh", "-c", "echo mine > /etc/mark; echo mine > /tmp/mark"])
    assert first.path("/etc/mark").read_text() == "mine\n"
    assert not second.path("/etc/mark").exists()
    assert not Path("/etc/mark").exists()
    assert not Path("/tmp/mark").exists()
    assert first.processes()[0].pid == 1
    assert {p.outside for p in first.processes()}.isdisjoint(p.outside for p in second.processes())


def test_nothing_private_of_this_machine_is_in_sight(lab: Lab, tmp_path: Path) -> None:
    host = lab.hosts[1]
    (tmp_path / "secret").touch()
    assert not host.path(str(tmp_path)).exists()
    assert not host.path(__file__).exists()
    assert host.path("/home").is_dir()
    assert sorted(entry.name for entry in host.path("/home").iterdir()) == ["ada", "pat"]
    assert host.path("/etc/resolv.conf").read_text() == ""
    assert not host.path("/run/netns").exists()


def test_there_is_no_way_out_but_to_the_peers(lab: Lab) -> None:
    first, second = lab.hosts
    routes = first.run(["ip", "route"]).stdout.splitlines()
    assert [line.split()[2] for line in routes] == ["eth0"]
    assert "default" not in routes[0]
    assert first.run(["getent", "hosts", "node2"]).stdout.split() == [second.address, "node2"]
    greeting = "import socket; print(socket.create_connection(('node2', 22), 5).recv(4))"
    assert first.run([first.python, "-c", greeting]).stdout.strip() == "b'SSH-'"


def test_a_lent_interpreter_is_everybodys_to_run_and_nobodys_to_change() -> None:
    with start(python=sys.executable) as lab:
        host = lab.hosts[0]
        for user in ("root", "ada"):
            said = ssh(host, f"id -un; {host.python} -c 'import sys; print(sys.prefix)'; pwd", user)
            assert said.splitlines() == [user, sys.prefix, "/root" if user == "root" else f"/home/{user}"]
        assert tomllib.loads(lab.inventory.read_text())["hosts"]["node1"]["python"] == sys.executable
        assert host.lent
        for folder in host.lent:
            assert host.run(["touch", f"{folder}/mark"], check=False).returncode != 0


def test_an_interpreter_behind_a_chain_of_links_is_lent_whole(tmp_path: Path) -> None:
    """As uv lays them out: an environment's python is a link through a folder that is itself a link."""
    real = Path(sys.executable).resolve()
    (tmp_path / "installed").mkdir()
    (tmp_path / "installed/3").symlink_to(real.parents[1])
    (tmp_path / "env/bin").mkdir(parents=True)
    python = tmp_path / "env/bin/python"
    python.symlink_to(tmp_path / "installed/3/bin" / real.name)
    with start(python=str(python)) as lab:
        assert lab.hosts[0].python == str(python)
        assert ssh(lab.hosts[0], f"{python} -c 'import json; print(json.dumps(1))'", "ada") == "1\n"


# Users


def test_a_password_lets_pat_in_and_a_wrong_one_does_not(lab: Lab) -> None:
    host = lab.hosts[0]
    for password, right in ((lab.password, True), ("wrong", False)):
        with paramiko.SSHClient() as client:
            kind, key = host.host_key.split()
            client.get_host_keys().add(host.address, kind, paramiko.PKey.from_type_string(kind, base64.b64decode(key)))
            login = {"username": "pat", "password": password, "look_for_keys": False, "allow_agent": False}
            if not right:
                with pytest.raises(paramiko.AuthenticationException):
                    client.connect(host.address, **login)
                continue
            client.connect(host.address, **login)
            assert client.exec_command("id -un")[1].read() == b"pat\n"
            with client.open_sftp() as files:
                assert files.normalize(".") == "/home/pat"


# Faults


def test_a_cut_cable_is_silence_and_comes_back(node: LabHost, lab: Lab) -> None:
    node.cut()
    assert not answers(node)
    assert answers(lab.hosts[1])
    node.restore()
    until(lambda: answers(node))


def test_a_killed_host_is_gone_and_a_reboot_brings_it_back_with_its_files(node: LabHost, lab: Lab) -> None:
    node.path("/root/kept").write_text("still here")
    node.run(["sh", "-c", "sleep 1000 >/dev/null 2>&1 &"])
    running = [Process.of(process.outside) for process in node.processes()]
    assert "sleep 1000" in [" ".join(process.cmdline) for process in node.processes()]
    node.kill()
    assert not any(process.alive for process in running)
    assert not node.up
    assert not answers(node)
    with pytest.raises(Unreachable, match="node1: the lab host is down"):
        node.processes()
    other = lab.hosts[1]
    assert answers(other)  # who must not lose sight of us for it
    node.reboot()
    assert answers(other)
    assert ssh(node, "cat /root/kept") == "still here"
    until(lambda: len(node.processes()) == 1)


def test_a_small_disk_fills_up(node: LabHost) -> None:
    node.run(["mkdir", "/home/ada/small"], user="ada")
    node.small_disk("/home/ada/small", 1)
    done = node.run(["dd", "if=/dev/zero", "of=/home/ada/small/x", "bs=1M", "count=2"], user="ada", check=False)
    assert "No space left" in done.stderr


def test_a_slow_link_is_slow_both_ways(node: LabHost) -> None:
    def seconds() -> float:
        began = time.monotonic()
        assert len(ssh(node, "head -c 300000 /dev/zero")) == 300_000
        return time.monotonic() - began

    def limits() -> str:
        return node.run(["tc", "qdisc", "show", "dev", "eth0"]).stdout

    node.slow(2)
    assert seconds() > 1
    assert "tbf" in limits()
    node.slow(None)
    assert "tbf" not in limits()


@needs_taps
@pytest.mark.slow
def test_a_delayed_host_takes_a_longer_round_trip(node: LabHost, lab: Lab) -> None:
    """A greeting takes a round trip and a half, of which nothing can be missing; the least of three is compared."""
    other = lab.hosts[1]
    before = cables(node)
    assert greeting(node) < 0.5
    node.delay(500)
    assert greeting(node) >= 0.74
    assert greeting(other) < 0.5
    node.slow(100)  # both at once
    assert greeting(node) >= 0.74
    node.delay(1000)
    assert greeting(node) >= 1.49
    node.delay(None)
    assert greeting(node) < 0.5
    assert "tbf" in node.run(["tc", "qdisc", "show", "dev", "eth0"]).stdout
    assert cables(node) == before
    assert not list(node.folder.glob("delay.*"))


# Beginnings and ends


def test_stopping_leaves_nothing(tmp_path: Path) -> None:
    before = children()
    lab = start(2, folder=tmp_path / "lab with, 'odd' name")
    with lab:
        host = lab.hosts[0]
        bridge = host.network.bridge
        space = host.path("/proc/1/ns/net").stat().st_ino
        ssh(host, "setsid sleep 1000 >/dev/null 2>&1 &")
        host.small_disk("/mnt", 1)
        assert {bridge, f"{bridge}n1", f"{bridge}n2"} <= cables(host)
        numbers = set(map(link_number, cables(host)))
        assert space in network_spaces()
        assert mentions(str(lab.folder))
    assert not numbers & set(map(link_number, links()))  # by number: another lab may have the names by now
    assert space not in network_spaces()
    assert mentions(str(lab.folder)) == []
    assert children() == before
    assert list(tmp_path.iterdir()) == []
    lab.stop()


def test_taking_down_that_was_interrupted_is_finished_the_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while large files of the hosts are removed: the hosts are down, and the lab can still be found."""
    lab = start(1, folder=tmp_path / "lab")

    def interrupted(path: Path) -> None:
        raise KeyboardInterrupt(path)

    with monkeypatch.context() as patch:
        patch.setattr("skyfab.lab.lab.shutil.rmtree", interrupted)
        with pytest.raises(KeyboardInterrupt, match=r"/hosts$"):
            lab.stop()
    assert [host.up for host in lab_module.status(lab.folder)] == [False]
    assert lab_module.down(lab.folder)
    assert list(tmp_path.iterdir()) == []


def test_another_process_can_come_back_to_a_lab(lab: Lab) -> None:
    again = Lab.load(lab.folder)
    assert again == lab
    assert again["node2"].run(["hostname"]).stdout == "node2\n"
    code = "import sys; from skyfab.lab import Lab; Lab.load(sys.argv[1])['node2'].reboot()"
    subprocess.run([sys.executable, "-c", code, str(lab.folder)], check=True, env=_importable())
    assert lab["node2"].up
    assert answers(lab["node2"])


def test_a_lab_whose_owner_is_killed_is_taken_down(tmp_path: Path) -> None:
    folder = tmp_path / "lab"
    code = f"""
import os
from skyfab.lab import Lab
lab = Lab.start(1, folder={str(folder)!r}, kind="namespace")
os.kill(os.getpid(), {signal.SIGKILL.value})
"""
    done = subprocess.run([sys.executable, "-c", code], env=_importable())
    assert done.returncode == -signal.SIGKILL
    until(lambda: not folder.exists())
    until(lambda: mentions(str(folder)) == [])


def _importable() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(PROJECT)}


def test_up_status_and_down_from_one_program_to_the_next(tmp_path: Path) -> None:
    folder = tmp_path / "standing"
    assert lab_module.status(folder) == []
    code = "import sys; from skyfab import lab; print(lab.up(2, sys.argv[1]))"
    command = [sys.executable, "-c", code, str(folder)]
    said = subprocess.run(command, env=_importable(), check=True, capture_output=True, text=True).stdout
    inventory = Path(said.strip())
    try:
        assert lab_module.up(2, folder) == inventory
        assert [host.up for host in lab_module.status(folder)] == [True, True]
        with pytest.raises(UsageError, match="a lab of 2 hosts is already up, not of 3"):
            lab_module.up(3, folder)
        with pytest.raises(UsageError, match=r"a lab is already up, with the Python .*, not /usr/bin/python9"):
            lab_module.up(2, folder, python="/usr/bin/python9")
        Lab.load(folder).hosts[1].kill()
        assert [host.up for host in lab_module.status(folder)] == [True, False]
        lab_module.up(2, folder)
        assert [host.up for host in lab_module.status(folder)] == [True, True]
    finally:
        assert lab_module.down(folder) is True
    assert lab_module.down(folder) is False
    assert not folder.exists()


def test_a_lab_is_not_put_where_something_else_is(tmp_path: Path) -> None:
    (tmp_path / "precious").touch()
    with pytest.raises(UsageError, match="is not empty"):
        Lab.start(1, folder=tmp_path)
    assert (tmp_path / "precious").exists()
    for count in (0, 1000):
        with pytest.raises(UsageError, match="a lab has 1 to"):
            Lab.start(count)
    with pytest.raises(UsageError, match="no Python interpreter"):
        Lab.start(1, python="/no/python")
    with pytest.raises(UsageError, match="no lab is up"):
        Lab.load(tmp_path)


def test_a_start_that_fails_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    start(1, folder=tmp_path / "works").stop()
    before = children()
    monkeypatch.setattr("skyfab.lab.sshd.settings", lambda **_: "nonsense\n")  # sshd will not start
    with pytest.raises(Unreachable, match=r"node\d: .*sshd"):
        Lab.start(2, folder=tmp_path / "lab")
    assert list(tmp_path.iterdir()) == []
    assert mentions(str(tmp_path)) == []
    assert children() == before


# Without root


@pytest.mark.skipif(IN_USER_NAMESPACE, reason="sshd cannot read the shadow of this machine's root")
def test_loopback_hosts_answer_and_say_what_they_cannot_show(tmp_path: Path) -> None:
    before = children()
    with Lab.start(2, kind="loopback", folder=tmp_path / "lab") as lab:
        assert lab.kind == "loopback"
        assert lab.limits
        first, second = lab.hosts
        assert first.host_key != second.host_key
        ssh(first, "sleep 1000 >/dev/null 2>&1 & echo started")
        until(lambda: [process.cmdline for process in first.processes()] == [("sleep", "1000")])
        assert second.processes() == []
        left = Process.of(first.processes()[0].outside)
        first.reboot()
        assert not left.alive
        assert ssh(first, "echo again") == "again\n"
        assert Lab.load(lab.folder) == lab
        caches = [host["cache"] for host in tomllib.loads(lab.inventory.read_text())["hosts"].values()]
        assert len(set(caches)) == 2
        harm = (first.cut, lambda: first.slow(1), lambda: first.delay(1), lambda: first.block(second))
        for cannot in (*harm, lambda: first.add_user("x")):
            with pytest.raises(UsageError, match="a loopback host cannot"):
                cannot()
    assert children() == before
    assert list(tmp_path.iterdir()) == []


def test_without_root_a_lab_falls_back_to_loopback_and_says_why(nested: Lab) -> None:
    kind, first = _inside(nested, "ada", "auto")
    assert kind.startswith("loopback No namespace hosts on this machine: ")
    assert first == "node1 ada@127.0.0.1"
    with pytest.raises(subprocess.CalledProcessError) as failed:
        _inside(nested, "ada", "namespace")
    assert "UsageError: cannot create namespace hosts" in failed.value.stderr
    assert "skyfab-lab" not in nested.hosts[0].run(["ls", "-A", "/tmp"]).stdout


ORDINARY = """
    node1, node2 = lab.hosts
    node1.add_user("eve")
    print(node1.run(["id", "-nu"], user="eve").stdout, node1.path("/etc/hostname").read_text(), sep="")
    print(sorted(process.cmdline[0] for process in node1.processes()))
    connect = f"import socket; socket.create_connection(({node1.addresses['eth0']!r}, 22), 2)"
    node1.cut()
    print(node2.run(["python3", "-c", connect], check=False).returncode)
    node1.restore()
    while node2.run(["python3", "-c", connect], check=False).returncode:  # it may still remember the silence
        pass
    node1.kill()
    print(node1.up, node2.up)
    node1.reboot()
    print(Lab.load(lab.folder) == lab)
    import subprocess, sys
    words = ["exec", "lab", f"--inventory={lab.inventory}", "--", "id -nu; hostname -I"]
    print(subprocess.run([sys.executable, "-m", "skyfab", *words], capture_output=True, text=True).stdout)
"""


@pytest.mark.slow
def test_an_ordinary_user_has_namespace_hosts_in_a_user_namespace(nested: Lab) -> None:
    if shutil.which("newuidmap") is None or IN_USER_NAMESPACE:
        pytest.skip("needs uidmap, and tests that are not in a user namespace themselves")
    host = nested.hosts[0]
    for table in ("subuid", "subgid"):
        host.path(f"/etc/{table}").write_text("ada:100000:65536\n")
    try:
        said = [line.strip() for line in _inside(nested, "ada", "auto", ORDINARY) if line]
    finally:
        for table in ("subuid", "subgid"):
            host.path(f"/etc/{table}").write_text("")
    assert said[0].startswith("namespace `host.path` can read only those files of a host that ")
    assert said[1] == "node1 root@127.0.0.1"
    assert said[2:4] == ["eve", "node1"]
    assert said[4] == "['sshd: /usr/sbin/sshd -D -e [listener] 0 of 10-100 startups']"
    assert said[5:8] == ["1", "False True", "True"]
    assert sorted(said[8:]) == ["node1 198.18.0.11", "node1 root", "node2 198.18.0.12", "node2 root"]
    assert "skyfab-lab" not in host.run(["ls", "-A", "/tmp"]).stdout
    assert {process.uid for process in host.processes()} == {0}


def test_a_lab_within_a_container_keeps_its_files_in_memory(nested: Lab) -> None:
    """The folder of the lab is in an overlay, as in a container, and no overlay can write to another."""
    host = nested.hosts[0]
    kind, first = _inside(nested, "root", "auto", folder="/srv/lab")
    assert kind == "namespace"
    assert first.startswith("node1 root@198.18.")
    assert first.split("@")[1] != host.address
    assert host.run(["ls", "-A", "/srv"]).stdout == ""
    assert "skyfab-lab" not in host.run(["mount"]).stdout
    assert "sky" not in host.run(["ip", "link"]).stdout


@pytest.fixture(scope="module")
def nested() -> Iterator[Lab]:
    """A lab on whose host labs can be started."""
    with start(lend=[str(PROJECT)], python=sys.executable) as lab:
        yield lab


def _inside(lab: Lab, user: str, kind: str, more: str = "", folder: str | None = None) -> list[str]:
    code = f"""
from skyfab.lab import Lab
with Lab.start(2, kind={kind!r}, folder={folder!r}) as lab:
    print(lab.kind, *lab.limits[:1])
    print(lab.hosts[0].name, f"{{lab.hosts[0].user}}@{{lab.hosts[0].address}}")
{more}"""
    host = lab.hosts[0]
    return host.run(["env", f"PYTHONPATH={PROJECT}", host.python, "-c", code], user=user).stdout.splitlines()
