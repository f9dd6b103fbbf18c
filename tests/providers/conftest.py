"""Containers for tests: an image made of Debian's packages, once for each machine."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator

import pytest
from stage.podman import podman

IMAGE = "localhost/skyfab-tests"
"""Kept between runs, because it takes minutes; `podman rmi localhost/skyfab-tests localhost/skyfab-tests-bare`."""
BARE = f"{IMAGE}-bare"
"""The same without sshd."""


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """podman, told what runs on small machines too: runc, and limits that need no rights."""
    needed = [name for name in ("podman", "debootstrap", "tar") if shutil.which(name) is None]
    if needed or os.geteuid() != 0:
        pytest.skip(f"containers are made by root with podman and debootstrap; missing: {', '.join(needed) or 'root'}")
    settings = tmp_path_factory.mktemp("podman") / "containers.conf"
    runtime = 'runtime = "runc"' if shutil.which("runc") else ""
    limits = 'default_ulimits = ["nofile=1024:1024", "nproc=10000:10000"]'
    settings.write_text(f"[containers]\n{limits}\n[engine]\n{runtime}\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CONTAINERS_CONF", str(settings))
        yield


@pytest.fixture(scope="session")
def image(engine: None, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Debian with sshd and Python, and a variable of the image's own."""
    if podman("images", "-q", IMAGE).strip() == "":
        root = tmp_path_factory.mktemp("debian") / "root"
        make = ["debootstrap", "--variant=minbase", "--include=openssh-server,python3", "bookworm", str(root)]
        made = subprocess.run(make, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        if made.returncode:
            pytest.skip(f"debootstrap makes no Debian here: {made.stdout[-300:]}")
        archive = root.with_name("root.tar")
        subprocess.run(["tar", "-C", str(root), "-cf", str(archive), "."], check=True)
        podman("import", "--change", "ENV GREETING=good=morning to all", str(archive), IMAGE)
        shutil.rmtree(root)
        archive.unlink()
    said = podman("run", "--rm", IMAGE, "echo", "it runs", check=False)
    if "it runs" not in said:
        pytest.skip(f"podman runs no containers here: {said}")
    return IMAGE


@pytest.fixture(scope="session")
def bare_image(image: str) -> str:
    """The same without sshd."""
    if podman("images", "-q", BARE).strip() == "":
        purge = "export DEBIAN_FRONTEND=noninteractive; apt-get -qq purge -y openssh-server; rm -rf /etc/ssh"
        podman("run", "--name=skyfab-tests-bare", image, "sh", "-c", purge)
        podman("commit", "skyfab-tests-bare", BARE)
        podman("rm", "skyfab-tests-bare")
    return BARE
