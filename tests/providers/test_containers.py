"""Containers as hosts, with podman: they serve calls, and are gone after any end of the program."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from stage import traces
from stage.podman import podman
from stage.podman import traces as of_podman
from stage.remote import greeted
from stage.spot import until

import skyfab as sky
from skyfab.providers.container import _WITH_SSHD, Container

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # the first of them makes an image


@pytest.fixture(autouse=True)
def nothing_stays(image: str) -> Iterator[None]:
    """A test leaves no container, network or folder."""
    before = of_podman()
    yield
    left = traces.left([of_podman], before, timeout=170)
    assert not left, f"left behind by this test: {sorted(left)}"


def where() -> Any:
    return sky.function(greeted)()


def test_calls_run_in_containers_that_are_made_for_the_pool(image: str) -> None:
    """They have what the image sets with ENV, as a container's first process has."""
    before = of_podman()
    with sky.Compute(provider=sky.Container(nodes=2, image=image, engine="podman"), ui="none") as compute:
        assert len(of_podman() - before) == 4  # two containers, a network and a folder
        assert where() @ compute == [("node1", "good=morning to all"), ("node2", "good=morning to all")]
        assert where() >> compute == ("node1", "good=morning to all")
        assert repr(compute) == "<Compute node1, node2: open>"
        assert compute.hosts[1].connection.run("hostname", hide=True, in_stream=False).stdout == "node2\n"
    assert of_podman() == before


def test_a_pool_can_be_opened_again_and_has_the_hosts_that_it_selects(image: str) -> None:
    compute = sky.Compute("node2", provider=Container(nodes=2, image=image), ui="none")
    for _ in range(2):
        with compute:
            assert [node.name for node in compute.hosts] == ["node2"]
            assert where() >> compute == ("node2", "good=morning to all")


def test_containers_without_a_pool_are_an_inventory(image: str) -> None:
    """Two sets at once know nothing of each other, and the end of one is not that of the other."""
    with Container(nodes=1, image=image) as others:
        provider = Container(nodes=2, image=image)
        with provider as inventory:
            assert list(inventory.hosts) == ["node1", "node2"]
            with pytest.raises(sky.UsageError, match="are already running"):
                provider.start()
        with sky.Compute(inventory=others, ui="none") as compute:
            assert where() >> compute == ("node1", "good=morning to all")


def test_another_host_key_is_refused(image: str) -> None:
    """The keys that containers made for themselves are the ones that count."""
    from dataclasses import replace

    with Container(nodes=2, image=image) as inventory:
        one, two = inventory.hosts.values()
        assert one.host_key != two.host_key
        with pytest.raises(sky.HostKeyRefused), sky.Compute([replace(one, host_key=two.host_key)], ui="none"):
            pass


def test_limits_hold(image: str) -> None:
    with sky.Compute(provider=Container(image=image, cpus=0.5, memory="256m"), ui="none"):
        (name,) = podman("ps", "--format", "{{.Names}}", "--filter", "label=skyfab").split()
        said = podman("inspect", "--format", "{{.HostConfig.Memory}} {{.HostConfig.NanoCpus}}", name)
        assert said.split() == [str(256 << 20), "500000000"]


def test_the_example_prints_a_mean_for_each_container(image: str, tmp_path: Path) -> None:
    example = Path(sky.__file__).parents[1] / "examples" / "containers.py"
    ran = subprocess.run([sys.executable, str(example), image], cwd=tmp_path, capture_output=True, text=True)
    assert ran.stdout.splitlines()[-2:] == ["node1 2.0", "node2 3.0"], ran.stderr


def test_the_example_has_hosts_for_commands_until_enter(image: str, tmp_path: Path) -> None:
    example = Path(sky.__file__).parents[1] / "examples" / "container_hosts.py"
    words = [sys.executable, str(example), image]
    with subprocess.Popen(words, cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdin is not None and running.stdout is not None
        name, _, file = running.stdout.readline().removeprefix("export ").strip().partition("=")
        hosts = [sys.executable, "-m", "skyfab", "hosts", "--json"]
        shown = subprocess.run(hosts, cwd=tmp_path, env={**os.environ, name: file}, capture_output=True, text=True)
        assert [host["name"] for host in json.loads(shown.stdout)] == ["node1", "node2"], shown.stderr
        running.stdin.write("\n")
        running.stdin.flush()
        assert running.wait(60) == 0
    assert not Path(file).exists()


# ---- sshd for images that have none

LIMITS = ["--ulimit=nofile=1024:1024", "--ulimit=nproc=1024:1024"]


@pytest.fixture
def no_image_with_sshd(bare_image: str) -> Iterator[str]:
    """The name of the image that is made of the one without sshd; it is not there before or after."""
    name = f"{_WITH_SSHD}:{podman('image', 'inspect', '--format={{.Id}}', bare_image).strip()}"
    podman("rmi", "--force", name, check=False)
    yield name
    podman("rmi", "--force", name, check=False)


def test_an_image_without_sshd_is_given_one_once(
    bare_image: str, no_image_with_sshd: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The image that is made has nothing of the containers for which it was made, nor a proxy of this machine."""
    monkeypatch.setenv("https_proxy", "http://me:SECRET@127.0.0.1:9")
    options = ["--env=TOKEN=SECRET", "--label", "token=SECRET", "--expose=4999", *LIMITS]
    told: list[str] = []
    for _ in range(2):
        provider = Container(image=bare_image, options=options)
        inventory = provider.start(told.append)
        try:
            with sky.Compute(inventory=inventory, ui="none") as compute:
                assert where() >> compute == ("node1", "good=morning to all")
        finally:
            provider.stop()
    assert len(told) == 1 and "has no sshd: installing it once" in told[0]
    about = podman("image", "inspect", no_image_with_sshd) + podman("history", "--no-trunc", no_image_with_sshd)
    assert "SECRET" not in about and "4999" not in about


def test_where_no_sshd_can_be_installed_the_error_says_so(bare_image: str, no_image_with_sshd: str) -> None:
    with pytest.raises(sky.HostUnfit, match=r"has no sshd, and installing one failed: ") as raised:
        Container(image=bare_image, options=[*LIMITS, "--ulimit=fsize=1:1"]).start()
    assert "openssh-server" in str(raised.value.hint)


# ---- errors


def test_an_image_that_is_nowhere_is_an_error(image: str) -> None:
    with pytest.raises(sky.UsageError, match="cannot pull the image localhost/skyfab-no-such"):
        Container(image="localhost/skyfab-no-such").start()


def test_an_option_that_the_engine_refuses_is_an_error(image: str) -> None:
    with pytest.raises(sky.HostUnfit, match=r"its container ended: .*no-such-option"):
        Container(nodes=2, image=image, options=["--no-such-option"]).start()


# ---- whatever happens


def test_a_failure_in_the_pool_removes_them(image: str) -> None:
    with pytest.raises(ZeroDivisionError), sky.Compute(provider=Container(nodes=2, image=image), ui="none") as compute:
        sky.function(lambda: 1 // 0)() >> compute
    with (
        pytest.raises(sky.UsageError, match="only 1"),
        sky.Compute(provider=Container(image=image), nodes=2, ui="none"),
    ):
        pass


PROGRAM = """
import os, sys, time
import skyfab as sky

print("starting", flush=True)
with sky.Compute(provider=sky.Container(nodes=2, image=sys.argv[1]), ui="none") as compute:
    if sys.argv[2] == "forked" and os.fork() == 0:
        time.sleep(60)
        os._exit(0)
    print("calling", flush=True)
    sky.function(lambda: time.sleep(600))() @ compute
"""


@pytest.mark.parametrize(
    ("moment", "wait", "number"),
    [
        ("starting", 0.1, signal.SIGKILL),
        ("starting", 0.9, signal.SIGKILL),
        ("starting", 0.6, signal.SIGINT),
        ("calling", 0.2, signal.SIGTERM),
        ("forked", 0.2, signal.SIGKILL),
    ],
)
def test_a_program_that_is_killed_leaves_nothing(image: str, moment: str, wait: float, number: int) -> None:
    """Whatever it does at that moment, and even if a child of it lives on."""
    before = of_podman()
    env = {**os.environ, "PYTHONPATH": str(Path(sky.__file__).parents[1])}
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, image, moment],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    try:
        assert program.stdout is not None
        reached = "starting" if moment == "starting" else "calling"
        assert any(line.strip() == reached for line in program.stdout)
        time.sleep(wait)
        if reached == "calling":
            assert len(of_podman() - before) == 4
        program.send_signal(number)
        program.wait(60)
        until(lambda: of_podman() == before, timeout=170)
    finally:
        try:
            os.killpg(program.pid, signal.SIGKILL)  # the child of one that was forked
        except ProcessLookupError:
            pass
        program.stdout.close()  # type: ignore[union-attr]
        program.wait()
