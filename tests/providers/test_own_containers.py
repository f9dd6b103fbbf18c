"""Containers that a host has already, with podman: everything of skyfab runs inside them."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from stage.podman import podman
from stage.program import Skyfab, program

import skyfab as sky
from skyfab.calls.call import Call
from skyfab.lab import Lab

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # the first of them makes an image


def about() -> Call[tuple[str, str | None, str]]:
    """Functions are nested: the containers do not have what this module imports."""

    def about() -> tuple[str, str | None, str]:
        import os.path
        import socket

        return socket.gethostname(), os.environ.get("GREETING"), os.path.expanduser("~")  # noqa: PTH111

    return sky.function(about)()


def echo(data: bytes) -> Call[bytes]:
    return sky.function(lambda data: data)(data)


def slept(seconds: float) -> Call[str]:
    def slept() -> str:
        import socket
        import time

        time.sleep(seconds)
        return socket.gethostname()

    return sky.function(slept)()


def serve(address: str, port: int) -> Call[None]:
    def serve() -> None:
        import http.server
        import threading

        server = http.server.HTTPServer((address, port), http.server.SimpleHTTPRequestHandler)
        threading.Thread(target=server.serve_forever, daemon=True).start()

    return sky.function(serve)()


@contextlib.contextmanager
def container(image: str, *options: str) -> Iterator[str]:
    name = f"own-{uuid.uuid4().hex[:8]}"
    podman("run", "--detach", f"--name={name}", f"--hostname={name}", *options, image, "sleep", "infinity")
    try:
        yield name
    finally:
        podman("rm", "--force", "--time=0", name)


@pytest.fixture(scope="module")
def name(image: str) -> Iterator[str]:
    with container(image) as made:
        yield made


@pytest.fixture
def dev(name: str) -> sky.Host:
    return sky.Host(name="dev", transport="local", container=name)


@pytest.fixture
def skyfab(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path, name: str) -> Skyfab:
    """The program, in a folder with an inventory of this container."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "inventory.toml").write_text(f'[hosts.dev]\ntransport = "local"\ncontainer = "{name}"\n')
    return program(monkeypatch, capfd)


def test_ranks_run_in_a_container_of_the_host(dev: sky.Host, name: str) -> None:
    with sky.Compute([dev], ranks=2, ui="none") as compute:
        assert about() @ compute == [(name, "good=morning to all", "/root")] * 2
        assert echo(bytes(range(256)) * 40_000) >> compute == bytes(range(256)) * 40_000


@pytest.mark.parametrize("transport", ["openssh", "fabric"])
def test_a_container_is_reached_over_ssh_and_again_after_a_cut(
    image: str, name: str, transport: str, tmp_path: Path
) -> None:
    with Lab.start(1, kind="loopback", folder=tmp_path / "lab") as lab:
        inventory = sky.Inventory.of(lab.inventory)
        host = replace(
            inventory.hosts["node1"], transport=transport, container=name, cache="~/.cache/skyfab", python="auto"
        )
        with sky.Compute([host], inventory=inventory, ui="none") as compute:
            assert about() >> compute == (name, "good=morning to all", "/root")
            future = slept(5) > compute
            cut(lab)
            assert future.result(timeout=100) == name


def cut(lab: Lab) -> None:
    """Ends the server's processes of open connections; the server itself stays."""
    (server,) = subprocess.check_output(["pgrep", "-f", f"{lab['node1'].folder}/sshd_config"], text=True).split()
    for pid in subprocess.check_output(["pgrep", "--parent", server], text=True).split():
        os.kill(int(pid), signal.SIGKILL)


def test_commands_work_inside(skyfab: Skyfab, name: str, tmp_path: Path) -> None:
    hosts = skyfab("hosts")
    assert f"this machine (container {name})" in hosts.out
    assert "ready" in hosts.out
    assert skyfab("exec", "--", "hostname; pwd").out.split()[1] == name
    assert skyfab("doctor").code == 0
    (tmp_path / "data.txt").write_text("as it was")
    assert skyfab("put", "data.txt").code == 0
    (tmp_path / "data.txt").unlink()
    assert skyfab("get", "data.txt").code == 0
    assert (tmp_path / "data.txt").read_text() == "as it was"
    shell = [sys.executable, "-m", "skyfab", "ssh", "dev", "--", "cat data.txt; hostname; exit 9"]
    done = subprocess.run(shell, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert (done.returncode, done.stdout) == (9, f"as it was{name}\n")
    assert skyfab("gc").code == 0


def test_files_that_are_written_inside_are_reported_with_the_command_that_fetches_them(
    skyfab: Skyfab, name: str, tmp_path: Path
) -> None:
    (tmp_path / "write.py").write_text("open('model.pt', 'w').write('weights')")
    for words, host in (["--hosts=dev"], "dev"), (["--hosts=local", f"--container={name}"], f"local/{name}"):
        said = skyfab("run", *words, "write.py").err
        command = f"skyfab get model.pt --hosts={host} --to={host.partition('/')[0]}"
        assert command in said
        assert skyfab(*command.split()[1:]).code == 0
        assert (tmp_path / host.partition("/")[0] / "model.pt").read_text() == "weights"


def test_an_environment_is_built_inside(dev: sky.Host) -> None:
    def prefix() -> str:
        import six  # type: ignore[import-untyped]

        return str(six.__file__)

    with sky.Compute([dev], image=sky.Image(pip=["six"]), ui="none") as compute:
        assert (sky.function(prefix)() >> compute).startswith("/root/.cache/skyfab/envs/")


def test_a_detached_run_goes_on_inside_and_the_commands_for_it_name_the_container(
    skyfab: Skyfab, name: str, tmp_path: Path
) -> None:
    (tmp_path / "night.py").write_text(
        "import socket, time\nprint(socket.gethostname(), flush=True)\ntime.sleep(600)\n"
    )
    started = skyfab("run", "--hosts=local", f"--container={name}", "--detach", "--name=night", "night.py")
    where = f"--hosts=local/{name}"
    assert f"skyfab logs night {where}" in started.err
    for _ in range(200):
        if said := skyfab("logs", "night", where).out:
            break
        time.sleep(0.1)
    assert said.split()[-1] == name
    assert "running" in skyfab("runs", where).out
    assert "stopped" in skyfab("stop", "night", where).out
    assert "running" not in skyfab("runs", where).out


def test_a_port_is_forwarded_to_where_the_container_has_it(image: str, dev: sky.Host) -> None:
    with sky.Compute([dev], ui="none") as compute:
        serve("0.0.0.0", 8123) >> compute
        with compute.forward(8123) as forward:
            assert urllib.request.urlopen(forward.url).status == 200
    for option in ("--network=host", "--publish=127.0.0.1::8124"):
        with container(image, option) as other, sky.Compute([replace(dev, container=other)], ui="none") as compute:
            serve("127.0.0.1" if option == "--network=host" else "0.0.0.0", 8124) >> compute
            with compute.forward(8124) as forward:
                assert urllib.request.urlopen(forward.url).status == 200
    with (
        container(image, "--network=none") as other,
        sky.Compute([replace(dev, container=other)], ui="none") as compute,
        pytest.raises(sky.HostUnfit, match=f"does not reach port 8123 of its container {other}") as raised,
    ):
        compute.forward(8123)
    assert "--publish=127.0.0.1::8123" in str(raised.value.hint)


def test_a_container_that_stops_is_a_lost_host(image: str, dev: sky.Host) -> None:
    with container(image) as other, sky.Compute([replace(dev, container=other)], ui="none") as compute:
        future = slept(600) > compute
        podman("kill", other)
        with pytest.raises(sky.HostLost):
            future.result(timeout=100)


def broken(image: str, command: str) -> contextlib.AbstractContextManager[str]:
    @contextlib.contextmanager
    def made() -> Iterator[str]:
        with container(image) as name:
            podman("exec", name, "sh", "-c", command)
            yield name

    return made()


def test_what_is_missing_is_named_with_what_to_type(image: str, dev: sky.Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UV_PYTHON_INSTALL_MIRROR", "file:///nowhere")

    def refused(name: str) -> tuple[str, str]:
        with pytest.raises(sky.SkyfabError) as raised:
            sky.Compute([replace(dev, container=name)], ui="none").open()
        return raised.value.message, str(raised.value.hint)

    with container(image) as name:
        podman("stop", "--time=0", name)
        assert refused(name) == (f"its container {name} is not running", f"podman start {name}")
    docker = shutil.which("docker")
    if docker is None or not subprocess.run([docker, "ps"], capture_output=True, check=False).returncode:
        assert refused(name) == (f"it has no container {name}", "podman ps --all")
    else:  # it might have the container
        message, hint = refused(name)
        assert (message.partition(":")[0], hint) == ("docker does not work", "docker ps")
    with broken(image, "rm /bin/sh") as name:
        assert refused(name)[0] == f"its container {name} has no /bin/sh"
    with broken(image, "rm /usr/bin/python3*") as name:
        message, hint = refused(name)
        assert message.startswith("cannot download Python")
        assert f"in its container {name}" in hint
