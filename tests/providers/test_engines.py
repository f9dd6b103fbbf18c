"""What is asked of podman and docker, and what is said where they are missing or refuse; without them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import skyfab as sky
from skyfab.providers import engine as engines
from skyfab.providers.engine import Engine

Put = Callable[..., None]


@pytest.fixture
def put(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Put:
    """``put("docker", "exit 1")``: a shell script that is found as a program; no engine of this machine is."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("sh", "cat", "rm", "ssh-keygen"):
        (folder / name).symlink_to(next(path for path in (Path("/bin", name), Path("/usr/bin", name)) if path.exists()))
    monkeypatch.setenv("PATH", str(folder))

    def put(name: str, script: str = "") -> None:
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)

    return put


@pytest.mark.parametrize(
    ("name", "said", "package"),
    [
        ("auto", "podman or docker", "podman"),
        ("docker", "need docker", "docker.io"),
    ],
)
def test_a_missing_engine_is_an_error_that_names_the_package(put: Put, name: Any, said: str, package: str) -> None:
    with pytest.raises(sky.UsageError, match=f"{said}, which this machine does not have") as raised:
        sky.Compute(provider=sky.Container(engine=name), ui="none").open()
    assert f"apt-get install {package}" in str(raised.value.hint)


def test_a_docker_without_its_daemon_is_an_error_that_says_so(put: Put, tmp_path: Path) -> None:
    put("docker", 'echo "Cannot connect to the Docker daemon at unix:///var/run/docker.sock." >&2; exit 1')
    with pytest.raises(sky.UsageError, match="Cannot connect to the Docker daemon") as raised:
        sky.Container(image="debian:12").start()
    assert "start the daemon" in str(raised.value.hint)


def test_a_network_that_cannot_be_made_is_an_error(put: Put) -> None:
    """The image is there, and no container is asked for."""
    put("podman", 'case $1 in network) echo "no plugin" >&2; exit 1 ;; image) echo 1a2b ;; run) echo "$@" >&2 ;; esac')
    with pytest.raises(sky.UsageError, match="podman could not create a network: no plugin"):
        sky.Container(image="debian:12").start()


@pytest.mark.parametrize(
    "wrong",
    [
        {"nodes": 0},
        {"gpus": "two"},
        {"options": "--privileged"},
    ],
)
def test_what_no_container_can_have_is_an_error(wrong: dict[str, Any]) -> None:
    with pytest.raises(sky.UsageError, match=next(iter(wrong))):
        sky.Container(**wrong).start()


def test_gpus_are_passed_through_where_there_are_some(put: Put, monkeypatch: pytest.MonkeyPatch) -> None:
    put("podman")
    put("docker")
    podman, docker = Engine("podman"), Engine("docker")
    monkeypatch.setattr(engines, "_nvidia", lambda: False)
    monkeypatch.setattr(engines, "_amd", lambda: False)
    assert podman.gpus("auto") == docker.gpus("auto") == []
    assert podman.gpus([0, 2]) == ["--device=nvidia.com/gpu=0", "--device=nvidia.com/gpu=2"]
    assert docker.gpus([0, 2]) == ['--gpus="device=0,2"']
    monkeypatch.setattr(engines, "_amd", lambda: True)
    assert podman.gpus("auto") == docker.gpus("all") == ["--device=/dev/kfd", "--device=/dev/dri"]
    monkeypatch.setattr(engines, "_amd", lambda: False)
    monkeypatch.setattr(engines, "_nvidia", lambda: True)
    assert docker.gpus("auto") == ["--gpus=all"]
    assert docker.gpus("none") == []


def test_podman_is_given_gpus_that_it_knows(put: Put, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a description of them (nvidia-ctk cdi generate) it would refuse to start; "all" insists."""
    put("podman")
    monkeypatch.setattr(engines, "_nvidia", lambda: True)
    monkeypatch.setattr(engines, "_amd", lambda: False)
    monkeypatch.setattr(engines, "_CDI", [str(tmp_path)])
    assert Engine("podman").gpus("auto") == []
    assert Engine("podman").gpus("all") == ["--device=nvidia.com/gpu=all"]
    (tmp_path / "nvidia.yaml").touch()
    assert Engine("podman").gpus("auto") == ["--device=nvidia.com/gpu=all"]


def test_a_provider_has_the_inventory() -> None:
    assert repr(sky.Compute(provider=sky.Container())) == "<Compute of a provider: not open>"
    with pytest.raises(sky.UsageError, match="its own inventory"):
        sky.Compute(provider=sky.Container(), inventory=sky.Inventory.parse("[hosts.node1]"))
    with pytest.raises(sky.UsageError, match="does not rent machines"):
        sky.Compute(provider="aws")  # type: ignore[arg-type]
