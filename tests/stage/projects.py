"""Projects: small folders of files, and the `skyfab` command run in them as a person would."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

BASE = str(sys._base_executable)  # type: ignore[attr-defined]
"""The interpreter that the tests' environment was made from: it has the standard library, and nothing of skyfab's."""


def skyfab(
    folder: Path, *words: str, inventory: Path | None = None, processes: int | None = None, timeout: float = 60
) -> subprocess.CompletedProcess[str]:
    """Runs the command in a folder; with `processes`, so many more than there are now are the most for this user."""
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    env.pop("SKYFAB_INVENTORY", None)
    if inventory is not None:
        env["SKYFAB_INVENTORY"] = str(inventory)

    def limit() -> None:
        if processes is not None:
            most = sum(1 for entry in Path("/proc").iterdir() if entry.name.isdigit()) + processes
            resource.setrlimit(resource.RLIMIT_NPROC, (most, most))

    argv = [sys.executable, "-m", "skyfab.cli", *words]
    return subprocess.run(
        argv, cwd=folder, env=env, capture_output=True, text=True, timeout=timeout, preexec_fn=limit, check=False
    )


def inventory(path: Path, hosts: list[object]) -> Path:
    """Writes the hosts to a file, as `skyfab` reads it."""
    lines = []
    for host in hosts:
        lines.append(f"[hosts.{host.name}]")  # type: ignore[attr-defined]
        for key in ("address", "port", "user", "identity", "host_key", "python", "transport", "cache", "workdir"):
            value = getattr(host, key)
            if value is not None:
                lines.append(f"{key} = {value if isinstance(value, int) else repr(str(value))}")
    path.write_text("\n".join(lines) + "\n")
    return path
