"""podman in tests: its commands, and what of skyfab's it has."""

from __future__ import annotations

import subprocess
from pathlib import Path


def podman(*words: str, check: bool = True) -> str:
    done = subprocess.run(["podman", *words], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert not check or done.returncode == 0, done.stderr
    return done.stdout if check else done.stdout + done.stderr


def traces() -> set[str]:
    """Containers, networks and folders of `sky.Container`."""
    found = set(podman("ps", "-a", "--format", "container {{.Names}}", "--filter", "label=skyfab").splitlines())
    found |= set(podman("network", "ls", "--format", "network {{.Name}}", "--filter", "label=skyfab").splitlines())
    return found | {str(path) for path in Path("/tmp").glob("skyfab-containers-*")}
