"""Projects: small folders of files, and the `skyfab` command run in them as a person would."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path


def skyfab(
    folder: Path,
    *words: str,
    inventory: Path | None = None,
    processes: int | None = None,
    timeout: float = 170,
    **environ: str,
) -> subprocess.CompletedProcess[str]:
    """Runs the command in a folder. With `processes`, this user may have that many more than now; root may have any."""
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    env.pop("SKYFAB_INVENTORY", None)
    env |= environ
    if inventory is not None:
        env["SKYFAB_INVENTORY"] = str(inventory)

    def limit() -> None:
        if processes is not None:
            most = sum(1 for _ in Path("/proc").glob("[0-9]*/task/*")) + processes  # threads count too
            resource.setrlimit(resource.RLIMIT_NPROC, (most, most))

    argv = [sys.executable, "-m", "skyfab", *words]
    return subprocess.run(
        argv,
        cwd=folder,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
        preexec_fn=limit,
        check=False,
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
