"""`Engine`: the podman or docker program of this machine, and the errors for its failures."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from skyfab.errors import UsageError

_ENGINES: Final = ("podman", "docker")
_CDI: Final = ("/etc/cdi", "/var/run/cdi")
"""Folders in which podman finds what belongs to a GPU."""
_AMD: Final = ("/dev/kfd", "/dev/dri")
_KINDS: Final = ("http_proxy", "https_proxy", "ftp_proxy", "no_proxy", "all_proxy")
_PROXIES: Final = (*_KINDS, *map(str.upper, _KINDS))


class Engine:
    """A program that runs containers."""

    def __init__(self, name: str) -> None:
        """`name` is "podman", "docker" or "auto". Raises UsageError if there is no such program here."""
        names = _ENGINES if name == "auto" else (name,)
        if not set(names) <= set(_ENGINES):
            raise UsageError(f"unknown engine {name!r}", hint='engine="podman", "docker" or "auto"')
        found = next((path for path in map(shutil.which, names) if path), None)
        if found is None:
            package = {"docker": "docker.io"}.get(name, "podman")
            raise UsageError(
                f"containers need {' or '.join(names)}, which this machine does not have",
                hint=f"install the package {package}, for example with: sudo apt-get install {package}",
            )
        self.program = found
        self.name = Path(found).name

    def run(self, *words: str) -> str:
        """What a command prints. Raises UsageError if it fails."""
        done = self.try_run(*words)
        if done.returncode:
            raise UsageError(f"{self.name} {words[0]} failed: {last_words(done.stderr)}", hint=self.hint(done.stderr))
        return done.stdout

    def try_run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Runs a command, whatever comes of it."""
        return run(self.program, *words)

    def proxies(self) -> tuple[list[str], list[str], list[str]]:
        """Options of `run`, `exec` and `commit`: only `exec` then has the proxies of this machine."""
        if self.name == "podman":
            return ["--http-proxy=false"], [f"--env={name}" for name in _PROXIES if name in os.environ], []
        return [], [], [f"--change=ENV {name}=" for name in _PROXIES]

    def hint(self, said: str) -> str | None:
        """What to do about an error that the engine has printed."""
        lowered = said.lower()
        if "cannot connect to the docker daemon" in lowered or "failed to connect to the docker api" in lowered:
            return "start the daemon (sudo systemctl start docker), or install podman, which needs none"
        if "permission denied" in lowered and "docker" in lowered:
            return "your user may not use docker: sudo usermod -aG docker $USER, or podman, which needs no group"
        if "rlimit" in lowered:
            which = "nproc" if "rlimit type 6" in lowered or "nproc" in lowered else "nofile"
            return f'a limit that this machine does not allow: add options=["--ulimit={which}=1024:1024"]'
        return None

    def gpus(self, wanted: str | Sequence[int]) -> list[str]:
        """The options of `run` that pass GPUs through: "all" or some; for "auto" those that this machine has."""
        if wanted == "none" or (wanted == "auto" and not self._has_gpus()):
            return []
        if isinstance(wanted, str) and not _nvidia() and _amd():
            return [f"--device={path}" for path in _AMD]
        numbers = ["all"] if isinstance(wanted, str) else [str(number) for number in wanted]
        if self.name == "podman":
            return [f"--device=nvidia.com/gpu={number}" for number in numbers]
        return ["--gpus=all" if numbers == ["all"] else f'--gpus="device={",".join(numbers)}"']

    def _has_gpus(self) -> bool:
        """Whether containers can have some: podman needs a description of them (nvidia-ctk cdi)."""
        described = self.name != "podman" or any(file for folder in _CDI for file in Path(folder).glob("*nvidia*"))
        return (_nvidia() and described) or _amd()


def _nvidia() -> bool:
    devices = ("/dev/nvidiactl", "/dev/dxg")  # the second is that of WSL
    return shutil.which("nvidia-smi") is not None and any(map(Path.exists, map(Path, devices)))


def _amd() -> bool:
    return all(map(Path.exists, map(Path, _AMD)))


def run(*words: str, cwd: str | os.PathLike[str] = ".") -> subprocess.CompletedProcess[str]:
    """Runs a program without input, and returns its output as text."""
    return subprocess.run(
        words,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        start_new_session=True,  # Ctrl-C is for this program: a container is not to get it
    )


def last_words(text: str) -> str:
    """The end of what a program has printed, on one line."""
    return " / ".join(line.strip() for line in text.strip().splitlines()[-3:]) or "no output"
