"""Boxes of Vagrant: what its commands print, with real SSH servers behind forwarded ports in place of boxes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from stage.labs import start
from stage.spot import until

import skyfab as sky
from skyfab.lab import Lab, LabHost
from skyfab.providers.vagrant import parse

ROOT = Path(__file__).parents[2]

VIRTUALBOX = """\
Host node1
  HostName 127.0.0.1
  User vagrant
  Port 2222
  UserKnownHostsFile /dev/null
  StrictHostKeyChecking no
  PasswordAuthentication no

  IdentityFile "/home/ada/my boxes/.vagrant/machines/node1/virtualbox/private_key"

  IdentityFile /home/ada/.vagrant.d/insecure_private_key
  IdentitiesOnly yes
  LogLevel FATAL

Host node2
  HostName 127.0.0.1
  User vagrant
  Port 2200
  UserKnownHostsFile /dev/null
  StrictHostKeyChecking no
  PasswordAuthentication no
  IdentityFile /home/ada/.vagrant/machines/node2/virtualbox/private_key
  IdentitiesOnly yes
  LogLevel FATAL
  PubkeyAcceptedKeyTypes +ssh-rsa
  HostKeyAlgorithms +ssh-rsa

"""
LIBVIRT = VIRTUALBOX.replace("127.0.0.1", "192.168.121.57").replace("Port 2222", "Port 22").partition("Host node2")[0]

PROGRAM = """\
#!/bin/sh
# Takes the place of vagrant: the boxes are files with their states, and what is printed was recorded.
state=$(dirname "$0")/boxes
echo "$*" >>"$state/../asked"
command=$1
shift
case $command in
status)
    cd "$state" || exit
    for box in *; do
        printf '1700000000,%s,metadata,provider,virtualbox\\n1700000000,%s,provider-name,virtualbox\\n' "$box" "$box"
        printf '1700000000,%s,state,%s\\n1700000000,%s,state-human-short,x\\n' "$box" "$(cat "$box")" "$box"
    done
    echo '1700000000,,ui,info,Current machine states:'
    ;;
up) for box in "$@"; do [ ! -e "$state/../broken" ] || { echo 'VT-x is not available' >&2; exit 1; }
        echo running >"$state/$box"; done ;;
halt) for box in "$@"; do echo poweroff >"$state/$box"; done ;;
ssh-config) for box in "$@"; do cat "$state/../$box.config"; done ;;
esac
"""


class Boxes:
    """A folder with a Vagrantfile, a vagrant program, and hosts of the lab as boxes."""

    def __init__(self, folder: Path, lab: Lab) -> None:
        self.folder = folder
        self._program = folder / "bin"
        (self._program / "boxes").mkdir(parents=True)
        (folder / "Vagrantfile").write_text("")
        (self._program / "vagrant").write_text(PROGRAM)
        (self._program / "vagrant").chmod(0o755)
        for host in lab.hosts:
            self.set(host.name, "running")
            self.machine(host.name).mkdir(parents=True)
            (self.machine(host.name) / "id").write_text(f"id-of-{host.name}")
            self.answers(host.name, host)
        self.path = f"{self._program}:{os.environ['PATH']}"

    def answers(self, name: str, host: LabHost) -> None:
        """From now on that host is the box of this name."""
        config = (
            VIRTUALBOX.partition("Host node2")[0].replace("node1", name).replace("User vagrant", f"User {host.user}")
        )
        config = config.replace("/home/ada/.vagrant.d/insecure_private_key", str(host.identity))
        (self._program / f"{name}.config").write_text(config.replace("2222", str(host.port)))

    def machine(self, name: str) -> Path:
        return self.folder / ".vagrant" / "machines" / name / "virtualbox"

    def set(self, name: str, state: str) -> None:
        (self._program / "boxes" / name).write_text(f"{state}\n")

    def state(self, name: str) -> str:
        return (self._program / "boxes" / name).read_text().strip()

    def asked(self) -> list[str]:
        """The commands, but for those that only look."""
        lines = (self._program / "asked").read_text().splitlines()
        return [line for line in lines if line.split()[0] not in ("status", "ssh-config")]

    def break_up(self) -> None:
        (self._program / "broken").touch()


@pytest.fixture(scope="module")
def private() -> Iterator[Lab]:
    """As in VirtualBox: forwarded ports, one address for all of them, and a private network."""
    with start(2, forwarded=True, second_network=True, python=sys.executable) as lab:
        yield lab


@pytest.fixture
def boxes(private: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Boxes:
    made = Boxes(tmp_path / "my boxes", private)
    monkeypatch.setenv("PATH", made.path)
    return made


def test_what_virtualbox_and_libvirt_give_is_read() -> None:
    first, second = parse(VIRTUALBOX, ["node1", "node2"])
    assert (first.name, first.login) == ("node1", "vagrant@127.0.0.1:2222")
    assert first.identity == "/home/ada/my boxes/.vagrant/machines/node1/virtualbox/private_key"
    assert (second.name, second.login) == ("node2", "vagrant@127.0.0.1:2200")
    (box,) = parse(LIBVIRT, ["node1"])
    assert box.login == "vagrant@192.168.121.57:22"
    with pytest.raises(sky.UsageError, match="ProxyCommand"):
        parse(LIBVIRT.replace("  LogLevel", "  ProxyCommand ssh hypervisor -W %h:%p\n  LogLevel"), ["node1"])


def test_without_vagrant_or_a_vagrantfile_the_error_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(sky.UsageError, match="vagrant is not installed"):
        sky.Vagrant(tmp_path).start()
    (tmp_path / "vagrant").write_text("")
    (tmp_path / "vagrant").chmod(0o755)
    with pytest.raises(sky.UsageError, match="has no Vagrantfile"):
        sky.Vagrant(tmp_path).start()


@pytest.mark.lab
def test_calls_run_on_boxes_that_are_up(boxes: Boxes, private: Lab) -> None:
    image = sky.Image(python=sys.executable)
    with sky.Compute(provider=sky.Vagrant(boxes.folder), image=image, ui="none") as compute:
        names = sky.function(lambda: os.uname().nodename)() @ compute
        hosts = [node.host for node in compute.hosts]
    assert names == ["node1", "node2"]
    assert [host.host_key for host in hosts] == [host.host_key for host in private.hosts]
    assert boxes.asked() == []


@pytest.mark.lab
@pytest.mark.slow
@pytest.mark.torch
def test_ranks_on_boxes_meet_on_their_private_network(boxes: Boxes, private: Lab) -> None:
    pytest.importorskip("torch")

    def summed() -> tuple[float, str]:
        import torch
        import torch.distributed as dist

        import skyfab as sky

        net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
        net(torch.full((1, 1), 1.0 + dist.get_rank())).sum().backward()
        return float(next(net.parameters()).grad), sky.instance_info().head_addr  # type: ignore[arg-type]

    options = {"image": sky.Image(python=sys.executable), "plugins": [sky.plugins.torch()]}
    with sky.Compute(provider=sky.Vagrant(boxes.folder), ui="none", **options) as compute:  # type: ignore[arg-type]
        assert sky.function(summed)() @ compute == [(1.5, private.hosts[0].addresses["fast0"])] * 2


@pytest.mark.lab
def test_the_key_of_a_box_is_the_one_on_record_until_it_is_made_anew(boxes: Boxes, private: Lab) -> None:
    first, second = private.hosts
    with sky.Vagrant(boxes.folder) as inventory:
        assert inventory.hosts["node1"].host_key == first.host_key
    boxes.answers("node1", second)  # another machine in its place
    image = sky.Image(python=sys.executable)
    with pytest.raises(sky.HostKeyRefused):
        sky.Compute("node1", provider=sky.Vagrant(boxes.folder), image=image, ui="none").open()
    (boxes.machine("node1") / "id").write_text("id-of-another")  # vagrant destroy, vagrant up
    with sky.Vagrant(boxes.folder) as inventory:
        assert inventory.hosts["node1"].host_key == second.host_key


@pytest.mark.lab
def test_boxes_that_are_brought_up_are_halted_and_no_others(boxes: Boxes) -> None:
    boxes.set("node2", "poweroff")
    with sky.Vagrant(boxes.folder) as inventory:
        assert list(inventory.hosts) == ["node1"]
    with sky.Vagrant(boxes.folder, up=True) as inventory:
        assert list(inventory.hosts) == ["node1", "node2"]
        assert boxes.asked() == ["up node2"]
    assert boxes.asked() == ["up node2", "halt node2"]
    assert (boxes.state("node1"), boxes.state("node2")) == ("running", "poweroff")


@pytest.mark.lab
def test_the_example_brings_boxes_up_and_halts_them(boxes: Boxes, tmp_path: Path) -> None:
    boxes.set("node2", "poweroff")
    words = [sys.executable, str(ROOT / "examples" / "vagrant.py"), str(boxes.folder)]
    ran = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert ran.stdout.splitlines()[-2:] == ["node1 3.0", "node2 4.0"], ran.stderr
    assert boxes.asked() == ["up node2", "halt node2"]


@pytest.mark.lab
def test_boxes_that_do_not_come_up_are_an_error(boxes: Boxes) -> None:
    for name in ("node1", "node2"):
        boxes.set(name, "not_created")
    with pytest.raises(sky.UsageError, match=r"no box is running: node1 \(not_created\), node2") as raised:
        sky.Vagrant(boxes.folder).start()
    assert "up=True" in str(raised.value.hint)
    boxes.break_up()
    with pytest.raises(sky.HostUnfit, match="VT-x is not available"):
        sky.Vagrant(boxes.folder, up=True).start()
    assert boxes.asked() == ["up node1 node2", "halt node1 node2"]


@pytest.mark.lab
def test_a_program_that_is_killed_halts_what_it_brought_up(boxes: Boxes) -> None:
    boxes.set("node2", "poweroff")
    code = "import sys, time, skyfab as sky\nwith sky.Vagrant(sys.argv[1], up=True): print(flush=True); time.sleep(60)"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", code, str(boxes.folder)], env=env, stdout=subprocess.PIPE) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == b"\n" and boxes.state("node2") == "running"
        program.send_signal(signal.SIGKILL)
    until(lambda: boxes.state("node2") == "poweroff")
    assert boxes.asked() == ["up node2", "halt node2"]


@pytest.mark.slow
def test_our_vagrantfile_is_valid(tmp_path: Path) -> None:
    if shutil.which("vagrant") is None:
        pytest.skip("there is no vagrant (Debian's package vagrant)")
    shutil.copy(ROOT / "vagrant" / "Vagrantfile", tmp_path)
    env = {**os.environ, "VAGRANT_HOME": str(tmp_path / "home"), "VAGRANT_CHECKPOINT_DISABLE": "1"}
    # Providers are left out, because a machine has at most one of them.
    words = ["vagrant", "validate", "--ignore-provider"]
    said = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert "validated successfully" in said.stdout, said.stderr
