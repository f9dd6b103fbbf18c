"""What test functions do on a host. Standard library only: hosts import it as a part of the project."""

from __future__ import annotations

import importlib
import os
import sys
import time
from pathlib import Path


def leave(path: str, text: str = "") -> None:
    """Writes a file, whole or not at all, for whoever waits for it."""
    Path(f"{path}.{os.getpid()}.new").write_text(text)
    Path(f"{path}.{os.getpid()}.new").replace(path)


def wait_for(path: str, timeout: float = 100.0) -> str:
    """The text of a file, once it is there."""
    deadline = time.monotonic() + timeout
    while not Path(path).exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path} never came")
        time.sleep(0.005)
    return Path(path).read_text()


def linger(path: str) -> None:
    """Leaves this process's number at `path` and stays until somebody ends it."""
    leave(path, str(os.getpid()))
    wait_for(f"{path}.never", timeout=600)


def version_of(module: str) -> str:
    """What an installed module says of itself."""
    return str(importlib.import_module(module).version)


def where() -> tuple[str, str]:
    """The interpreter, and the environment that it belongs to."""
    return sys.executable, sys.prefix


def variables(*names: str) -> list[str | None]:
    """What this process finds in its environment."""
    return [os.environ.get(name) for name in names]


def flood_link(session: str) -> int:
    """Writes 70 MB to the stderr of the link of an agent."""
    for path in Path("/proc").glob("[0-9]*"):
        if (path / "cmdline").read_bytes().split(b"\0")[-3:-1] == [session.encode(), b"start"]:
            with (path / "fd" / "2").open("wb", buffering=0) as stderr:
                return sum(stderr.write(bytes(1_000_000)) or 0 for _ in range(70))
    return 0


def stumble() -> None:
    """Fails, with secrets in its environment."""
    print("about to fail")
    if os.environ["TOKEN"] and os.environ["HF_TOKEN"]:
        raise RuntimeError("stumbled")


def greeted() -> tuple[str, str | None]:
    """The host's name, and a variable of the image that containers are made of."""
    return os.uname().nodename, os.environ.get("GREETING")
