"""The reaper of a lab: a small process that takes the lab down when its owner exits, even if that was killed."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from skyfab._util.scripts import read

from .process import Process, spawn

SCRIPT = read("lab/reaper.sh")

_pipes: dict[Path, int] = {}
"""By lab folder, our end of a pipe to the reaper. When this process exits, the kernel closes it: the signal to reap."""


def watch(folder: Path) -> None:
    """Starts the reaper of the lab in that folder, whose owner is this process."""
    its_end, ours = os.pipe()
    package = str(Path(__file__).resolve().parents[2])
    env = {"PATH": os.environ.get("PATH", os.defpath), "PYTHONPATH": package}
    try:
        reaper = spawn(["sh", "-c", SCRIPT, sys.executable, str(folder)], env=env, stdin=its_end)
    except BaseException:
        os.close(ours)
        raise
    finally:
        os.close(its_end)
    (folder / "reaper.pid").write_text(str(reaper))
    _pipes[folder] = ours


def shut_down(folder: Path) -> None:
    """Ends the reaper, if there is one and it is not this process."""
    try:
        Process.parse((folder / "reaper.pid").read_text()).end()
    except FileNotFoundError:
        pass
    end = _pipes.pop(folder, None)
    if end is not None:
        os.close(end)
