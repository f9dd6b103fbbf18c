"""Ray on one host: starts the processes of a Ray node as children of an actor, and ends them with it."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

from skyfab import context
from skyfab.errors import HostUnfit
from skyfab.host.agent.processes import SUBREAPER, end_children, prctl

TYPE_CHECKING = False  # as in all modules that hosts import
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_PROGRAMS = (b"raylet", b"gcs_server")
"""Every Ray node has the first, its head the second too."""
_GRACE = 5.0
"""Seconds for Ray's processes to exit by themselves."""
_LINES = 5
"""Lines of the output of ``ray start`` that an error shows."""
_DEATH_SIGNAL = 1
"""A setting of prctl."""


class RayNode:
    """An actor that owns the Ray node of its host."""

    def __init__(self, host: str) -> None:
        """Raises HostUnfit if Ray is not installed or too old, or if another Ray of this user runs there."""
        self._host = host
        found = importlib.util.find_spec("ray")
        if found is None or not found.submodule_search_locations:
            command = f"uv pip install --python={sys.executable} ray"
            hint = f"plugins.ray() installs nothing for local, or for a Python or lock that you chose: {command}"
            raise HostUnfit(f"Ray is not installed for {sys.executable}", host=host, hint=hint)
        if not os.path.isdir(f"{found.submodule_search_locations[0]}/_private/authentication"):
            raise HostUnfit("its Ray does not check tokens", host=host, hint='plugins.ray(version=">=2.52")')
        if pid := _running():
            hint = "`ray stop` ends it; if a killed skyfab program had started it, it ends by itself within the lease"
            raise HostUnfit(f"another Ray of this user is running, pid {pid}", host=host, hint=hint)
        prctl(SUBREAPER, 1)  # Ray's processes stay our descendants, whatever becomes of their parents
        self._folder = tempfile.mkdtemp(prefix="ray-", dir=context.own_folder())
        self._place = os.open(self._folder, os.O_RDONLY)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, options: Sequence[str], env: Mapping[str, str], *, head: bool) -> tuple[str, int]:
        """Starts the node with these options of ``ray start``, and waits until it has joined.

        Returns Ray's address, and the port of the dashboard; 0 if there is none. Raises HostUnfit.
        """
        if not head:
            return self._launch(options, env), 0
        options = [*options, "--head", "--port=0", "--disable-usage-stats", "--dashboard-host=127.0.0.1"]
        has_dashboard = importlib.util.find_spec("aiohttp_cors") is not None  # of ray[default]
        with socket.create_server(("127.0.0.1", 0)) as first, socket.create_server(("127.0.0.1", 0)) as second:
            port, client = (int(one.getsockname()[1]) for one in (first, second))
        options += [f"--dashboard-port={port}", f"--include-dashboard={has_dashboard}"]
        if importlib.util.find_spec("grpc") is not None:  # of ray[client] and ray[default]
            options.append(f"--ray-client-server-port={client}")
        return self._launch(options, env), port if has_dashboard else 0

    def _launch(self, options: Sequence[str], env: Mapping[str, str]) -> str:
        """Runs ``ray start``. It stays, and writes Ray's address to a file when its node is ready; returns that."""
        # Ray's sockets are in this folder, and their paths are limited to 107 bytes: a short name for it.
        temp = f"/proc/{os.getpid()}/fd/{self._place}"
        inherited = {name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", "RAY_TMPDIR")}
        with open(f"{self._folder}/output", "wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", f"--temp-dir={temp}", *options],
                env={**inherited, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **env},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                # It ends with this process, also if the zygote was killed before.
                preexec_fn=functools.partial(prctl, _DEATH_SIGNAL, signal.SIGKILL),  # noqa: PLW1509  # no threads here
            )
        while True:
            code = self._process.poll()
            with contextlib.suppress(FileNotFoundError), open(f"{self._folder}/ray_current_cluster") as file:
                if address := file.read():
                    return address
            if code is not None:
                end_children()
                with open(f"{self._folder}/output", errors="replace") as file:
                    lines = [line.rstrip() for line in file if line.strip()]
                said = "\n".join(lines[-_LINES:])
                raise HostUnfit(f"`ray start` ended with code {code}: {said}", host=self._host)
            time.sleep(0.02)

    def stop(self) -> None:
        """Ends all processes of the node, and removes its files."""
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.terminate()
                self._process.wait(_GRACE)
            self._process.kill()
        end_children()
        os.close(self._place)
        shutil.rmtree(self._folder, ignore_errors=True)


def _running() -> int:
    """The pid of a Ray process of this user, those in containers excepted; 0 if there is none."""
    with contextlib.suppress(OSError):  # no /proc
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError), open(f"/proc/{name}/cmdline", "rb") as file:
                program = file.read().partition(b"\0")[0].rpartition(b"/")[2]
                is_ours = program in _PROGRAMS and os.fstat(file.fileno()).st_uid == os.getuid()
                if is_ours and os.readlink(f"/proc/{name}/ns/pid") == os.readlink("/proc/self/ns/pid"):
                    return int(name)
    return 0
