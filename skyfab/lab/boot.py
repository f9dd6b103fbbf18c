"""Starts a namespace host: the shell script that sets up its namespaces and root, and the handshake with it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from skyfab._util.scripts import read

from . import sshd
from .process import Process, spawn
from .root import PATH

TOOLS = ("ip", "unshare", "nsenter", "mount", "umount", "pivot_root")
UNSHARE = ("unshare", "--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child")

TRIAL = read("lab/trial.sh")
SCRIPT = read("lab/boot.sh")


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One host that is starting. Its script waits for `go`, and exits if this is closed before."""

    process: Process
    """`unshare`, the parent of the host's first process."""
    answer: int
    word: int

    @classmethod
    def begin(cls, folder: Path, *, name: str, addresses: Mapping[str, str], lent: Sequence[str], log: Path) -> Start:
        for layer in ("root", "work"):
            (folder / layer).mkdir(exist_ok=True)
        pairs = " ".join(f"{interface}={address}" for interface, address in addresses.items())
        argv = [*UNSHARE, "sh", "-c", SCRIPT, "boot", str(folder), name, pairs, sshd.program(), *lent]
        answer, its_answer = os.pipe()
        its_word, word = os.pipe()
        try:
            process = spawn(argv, env={"PATH": PATH}, stdin=its_word, stdout=its_answer, log=log)
        except BaseException:
            os.close(answer)
            os.close(word)
            raise
        finally:
            os.close(its_answer)
            os.close(its_word)
        return cls(process=process, answer=answer, word=word)

    def first(self) -> int:
        """Waits for the pid of the host's first process. Raises EOFError if that exits before it has sent the pid."""
        told = os.read(self.answer, 32)
        if not told:
            raise EOFError
        return int(told)

    def go(self) -> None:
        """Its network interfaces exist: the script may continue."""
        os.write(self.word, b"go\n")

    def up(self) -> bool:
        """Waits until the setup is complete and sshd is about to start. Returns False if the script has failed."""
        return os.read(self.answer, 32) != b""

    def __enter__(self) -> Start:
        return self

    def __exit__(self, *exc: object) -> None:
        os.close(self.answer)
        os.close(self.word)


def make_room(folder: Path) -> str | None:
    """Prepares `folder` for the files of namespace hosts; returns why that is impossible, or None.

    Not every file system supports the upper layer of an overlay (in a container, for example); then a tmpfs is mounted.
    """
    if sys.platform != "linux":
        return f"network namespaces are Linux's, and this is {sys.platform}"
    if os.geteuid() != 0:
        return "making network namespaces takes root"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"programs are missing: {', '.join(missing)} (packages iproute2, util-linux)"
    obstacle = _try(folder)
    if obstacle is None:
        return None
    memory = ["mount", "-t", "tmpfs", "-o", "mode=700", "skyfab-lab", str(folder)]
    if subprocess.run(memory, capture_output=True).returncode:
        return obstacle
    return _try(folder)


def give_back(folder: Path) -> None:
    """Undoes `make_room`: unmounts the tmpfs, if there is one, and so deletes its files."""
    if folder.is_mount():
        subprocess.run(["umount", str(folder)], check=True)


def _try(folder: Path) -> str | None:
    trial = folder / "trial"
    for name in ("upper", "work", "root"):
        (trial / name).mkdir(parents=True)
    tried = subprocess.run([*UNSHARE, "sh", "-c", TRIAL, "trial", str(trial)], capture_output=True, text=True)
    shutil.rmtree(trial)
    return None if tried.returncode == 0 else tried.stderr.strip() or "namespaces are refused"
