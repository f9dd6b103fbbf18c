"""Hosts of which everything runs in an image, with a stand-in for apptainer that writes down how it was called."""

from __future__ import annotations

import os
import shlex
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from stage.remote import leave, wait_for
from stage.spot import Spot, until

import skyfab as sky
from skyfab.lab import Lab

IMAGE = """it's an $(touch x) `image` "of" mine; é\\n!.sif"""
STAND_IN = """\
#!/bin/sh
printf '%s\\n' "$@" >~/called
shift 2
case $1 in -*) shift;; esac
test -e "$1" || { echo "FATAL:   could not open image $1: no such file or directory" >&2; exit 255; }
export APPTAINER_CONTAINER="$1" SINGULARITY_CONTAINER="$1"
shift
for mode; do session=$last last=$mode; done
test "$mode" != start || echo "$session" >>~/started
"$@"
code=$?
test "$mode" != start || echo "$session" >>~/ended
exit "$code"
"""


@sky.function
def image_of_this_process() -> str | None:
    return os.environ.get("APPTAINER_CONTAINER")


@sky.function
def finish_when(path: str) -> str:
    leave(f"{path}.runs")
    return wait_for(path)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[sky.Host]:
    """This machine, with apptainer and an image in its home folder."""
    stand_in = tmp_path / "bin" / "apptainer"
    stand_in.parent.mkdir()
    stand_in.write_text(STAND_IN)
    stand_in.chmod(0o755)
    (tmp_path / IMAGE).touch()
    monkeypatch.setenv("PATH", str(stand_in.parent), prepend=os.pathsep)
    monkeypatch.setenv("HOME", str(tmp_path))
    yield sky.Host(name="here", transport="local", apptainer=f"~/{IMAGE}")
    shutil.rmtree(tmp_path / ".cache", ignore_errors=True)


def test_calls_run_in_the_image_of_a_host_whatever_its_name(here: sky.Host, tmp_path: Path) -> None:
    with sky.Compute([here], ui="none") as compute:
        assert image_of_this_process() >> compute == str(tmp_path / IMAGE)
    words = (tmp_path / "called").read_text().splitlines()
    assert words[:2] == ["-q", "exec"]
    assert words[words.index("/bin/sh") - 1] == str(tmp_path / IMAGE)
    assert not list(tmp_path.glob("**/x"))


@pytest.fixture
def there(hosts_of: Callable[..., list[sky.Host]], namespaces: Lab) -> Iterator[sky.Host]:
    """The same on another machine."""
    (host,) = hosts_of("openssh", 1, user="root", apptainer=f"~/{IMAGE}")
    program, image = "/usr/local/bin/apptainer", shlex.quote(IMAGE)
    make = f"printf %s {shlex.quote(STAND_IN)} >{program}; chmod +x {program}; touch ~/{image}"
    namespaces[host.name].run(["sh", "-c", make])
    yield host
    namespaces[host.name].run(["sh", "-c", f"rm -f {program} ~/{image} ~/called ~/started ~/ended"])


def test_it_is_the_same_over_ssh(there: sky.Host) -> None:
    with sky.Compute([there], ui="none") as compute:
        assert str(image_of_this_process() >> compute).endswith(f"/{IMAGE}")


def test_the_first_process_in_an_image_stays_until_a_detached_run_has_ended(
    there: sky.Host, namespaces: Lab, spot: Spot
) -> None:
    """apptainer unmounts the image after it, and the run would lose its files."""

    def stay() -> set[str]:
        """The sessions whose first process has not ended."""
        machine = namespaces[there.name]
        started, ended = (machine.run(["sh", "-c", f"cat ~/{name} || :"]).stdout for name in ("started", "ended"))
        return {*started.split()} - {*ended.split()}

    with sky.Compute([there], ui="none") as compute:
        run = compute.launch(finish_when(spot / "go"), on="all")
    spot.wait("go.runs")
    time.sleep(1)
    assert len(stay()) == 1
    spot.leave("go")
    assert run.result(timeout=100) == [""]
    until(lambda: not stay())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"apptainer": "/nowhere/a b.sif"}, "its image /nowhere/a b.sif does not run commands: .*could not open image"),
        ({"apptainer": None, "container": "dev"}, "it has neither podman nor docker"),
    ],
)
def test_what_is_missing_is_named(
    here: sky.Host, changes: dict[str, str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("podman", "docker"):  # as on a machine without it
        (tmp_path / "bin" / name).symlink_to("/dev/null")
    for name in ("sh", "printf", "touch"):
        (tmp_path / "bin" / name).symlink_to(str(shutil.which(name)))
    monkeypatch.setattr("skyfab.ssh.container._SCRIPT", _script().replace(":/usr/local/bin:/usr/bin:/bin", ""))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(sky.HostUnfit, match=message):
        sky.Compute([replace(here, **changes)], ui="none").open()


def _script() -> str:
    from skyfab.ssh.container import _SCRIPT

    return _SCRIPT


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"container": "-it"}, "container: must not start with '-'"),
        ({"container": "dev;reboot"}, "container: not the name of a container"),
        ({"container": "dev", "apptainer": "a.sif"}, "container and apptainer cannot be combined"),
    ],
)
def test_names_are_checked_in_the_inventory(changes: dict[str, str], message: str) -> None:
    with pytest.raises(sky.UsageError, match=message):
        sky.Host(name="a", **changes)  # type: ignore[arg-type]


def test_a_container_is_selected_after_the_name_of_its_host() -> None:
    inventory = sky.Inventory.parse('[hosts."node[1-2]"]\n[hosts.box]\naddress = "node1"\ncontainer = "other"')
    chosen = inventory.select("node[1-2]/dev, ada@10.0.0.5/my.sif")
    assert [(host.name, host.container, host.apptainer) for host in chosen] == [
        ("node1", "dev", None),
        ("node2", "dev", None),
        ("ada@10.0.0.5", None, "my.sif"),
    ]
    assert [host.name for host in inventory.select("all,!box")] == ["node1", "node2"]
    with pytest.raises(sky.UsageError, match="two different hosts are called node1"):
        inventory.select("node1,node1/dev")
    with pytest.raises(sky.UnknownHost, match='"nobody"'):
        inventory.select("nobody/dev")
