"""A container image made of Debian's packages, for tests and benchmarks: no registry is needed."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

IMAGE = "localhost/skyfab-tests"
"""Debian with sshd and Python. Kept, because it takes a minute: ``podman rmi localhost/skyfab-tests``."""


class Unavailable(Exception):
    """This machine cannot make or run containers."""


def configure(folder: Path) -> dict[str, str]:
    """The variables with which podman runs on small machines too: runc, and limits that need no rights."""
    settings = folder / "containers.conf"
    runtime = 'runtime = "runc"' if shutil.which("runc") else ""
    limits = 'default_ulimits = ["nofile=1024:1024", "nproc=10000:10000"]'
    settings.write_text(f"[containers]\n{limits}\n[engine]\n{runtime}\n")
    return {"CONTAINERS_CONF": str(settings)}


def make() -> str:
    """The name of the image, which is made if it is missing. Raises Unavailable."""
    needed = [name for name in ("podman", "debootstrap", "tar") if shutil.which(name) is None]
    if needed or os.geteuid() != 0:
        raise Unavailable(f"root makes containers with podman and debootstrap; missing: {', '.join(needed) or 'root'}")
    if subprocess.run(["podman", "image", "exists", IMAGE]).returncode:
        with tempfile.TemporaryDirectory(prefix="skyfab-image-") as folder:
            root, archive = f"{folder}/root", f"{folder}/root.tar"
            _run("debootstrap", "--variant=minbase", "--include=openssh-server,python3", "bookworm", root)
            _run("tar", "-C", root, "-cf", archive, ".")
            _run("podman", "import", "--change", "ENV GREETING=good=morning to all", archive, IMAGE)
    _run("podman", "run", "--rm", IMAGE, "true")
    return IMAGE


def _run(*words: str) -> None:
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise Unavailable(f"{words[0]} failed: {done.stdout[-300:]}")
