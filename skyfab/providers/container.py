"""`Container`: hosts that are podman or docker containers, created for a pool and removed afterwards."""

from __future__ import annotations

import os
import re
import secrets
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from skyfab._util.reaper import Reaper
from skyfab._util.scripts import read
from skyfab.errors import HostUnfit, UsageError
from skyfab.inventory.host import Host
from skyfab.inventory.inventory import Inventory
from skyfab.providers.base import LOG, Provider, Tell
from skyfab.providers.engine import Engine, last_words

_KEEP: Final = read("providers/container_set.sh")
_SERVE: Final = read("providers/container.sh")
_INSTALL: Final = read("providers/install.sh")
_WITH_SSHD: Final = "localhost/skyfab-with-sshd"
"""Name of the images that were given an sshd; their tags are the ids of the images that had none."""
_START: Final = 120.0
"""Seconds for containers to start."""
_INSTALLATION: Final = "900"
_NEEDED: Final = re.compile("--(ulimit|network|net|dns|add-host|security-opt|runtime|cgroups|platform)=|--privileged$")
"""Options that a container may need in order to start, and of which an image that is made of it keeps nothing."""


@dataclass(kw_only=True, eq=False)
class Container(Provider):
    """Containers as hosts: ``Compute(provider=Container(nodes=2))``, or ``with Container(nodes=2) as inventory``.

    `nodes` is their number, and `image` a name that the engine knows or can pull. If it has no sshd, one is installed,
    once. `engine` is "podman", "docker", or "auto" for the first that is installed.

    `cpus` and `memory` (as in "4g") limit each container. `gpus` are "all", "none", a list of numbers, or "auto" for
    those of this machine. `options` are further arguments for the engine's ``run``.

    They are removed when the pool is closed, even if this program is killed.
    """

    nodes: int = 1
    image: str = f"docker.io/library/python:{sys.version_info.major}.{sys.version_info.minor}-slim"
    engine: Literal["auto", "podman", "docker"] = "auto"
    cpus: float | None = None
    memory: str | None = None
    gpus: Literal["auto", "all", "none"] | Sequence[int] = "auto"
    options: Sequence[str] = ()
    _set: _ContainerSet | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if type(self.nodes) is not int or self.nodes < 1:
            raise UsageError(f"nodes must be 1 or more, not {self.nodes!r}")
        if isinstance(self.gpus, str) and self.gpus not in ("auto", "all", "none"):
            raise UsageError(f"invalid gpus={self.gpus!r}", hint='use "auto", "all", "none" or a list: gpus=[0, 1]')
        if isinstance(self.options, str):
            raise UsageError("options must be a list of strings", hint=f"options={self.options.split()!r}")

    def start(self, tell: Tell = LOG.info) -> Inventory:
        """Starts the containers; see `Provider.start`, also for `tell`. Raises UsageError and HostUnfit."""
        if self._set is not None:
            raise UsageError("these containers are already running", hint="create a Container for each pool")
        engine = Engine(self.engine)
        try:
            hosts = self._serve(engine, tell)
        except BaseException:
            self.stop()
            raise
        return Inventory(hosts={host.name: host for host in hosts})

    def stop(self) -> None:
        """Removes the containers."""
        made, self._set = self._set, None
        if made is not None:
            made.close()

    def _serve(self, engine: Engine, tell: Tell) -> list[Host]:
        made = self._keep(engine, self.nodes, [*engine.gpus(self.gpus), *self.options])
        key = made.folder / "key"
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "skyfab", "-f", str(key)], check=True)
        made.begin(_SERVE, key.with_name("key.pub").read_text().strip())
        image, source = self._find(engine, tell)  # meanwhile the network is made
        said = made.run(image, _START)
        if ["bare"] in said.values():
            if image != self.image:
                raise HostUnfit(f"the image {image} has no sshd", hint=f"{engine.name} rmi {image}")
            self.stop()
            self._add_sshd(engine, source, tell)
            return self._serve(engine, tell)
        ports = made.ports()
        return [
            Host(
                name=node,
                address="127.0.0.1",
                port=ports[node],
                user="root",
                identity=str(key),
                host_key=" ".join(said[node][1:]),
                jump="none",
            )
            for node in made.nodes
        ]

    def _keep(self, engine: Engine, count: int, options: Sequence[str]) -> _ContainerSet:
        limits = [f"--cpus={self.cpus}"] if self.cpus is not None else []
        limits += [f"--memory={self.memory}"] if self.memory is not None else []
        self._set = _ContainerSet(engine, count, [*limits, *options])
        return self._set

    def _find(self, engine: Engine, tell: Tell) -> tuple[str, str]:
        """The image to run, which may be one that was given an sshd; and the id of the one that was asked for."""
        with ThreadPoolExecutor(1) as threads:
            listed = threads.submit(engine.try_run, "images", "--format={{.Tag}}", _WITH_SSHD)
            found = engine.try_run("image", "inspect", "--format={{.Id}}", self.image)
        if found.returncode:
            tell(f"pulling {self.image} with {engine.name}")
            pulled = engine.try_run("pull", self.image)
            if pulled.returncode:
                hint = engine.hint(pulled.stderr) or f"try: {engine.name} pull {self.image}"
                raise UsageError(f"cannot pull the image {self.image}: {last_words(pulled.stderr)}", hint=hint)
            found = engine.try_run("image", "inspect", "--format={{.Id}}", self.image)
        source = found.stdout.strip().removeprefix("sha256:")
        return (f"{_WITH_SSHD}:{source}" if source in listed.result().stdout.split() else self.image), source

    def _add_sshd(self, engine: Engine, source: str, tell: Tell) -> None:
        """Makes an image of a container in which sshd was installed. Raises HostUnfit if it cannot be installed.

        The image keeps that container's variables and labels: it has none of the user's, and no proxy.
        """
        tell(f"{self.image} has no sshd: installing it once, in a new image {_WITH_SSHD}")
        for_run, for_exec, for_commit = engine.proxies()
        made = self._keep(engine, 1, [*for_run, *filter(_NEEDED.match, self.options)])
        made.begin('echo "$0 waits"; cat >/dev/null', "")
        made.run(self.image, _START)
        container = made.container(made.nodes[0])
        done = engine.try_run("exec", *for_exec, container, "timeout", _INSTALLATION, "sh", "-c", _INSTALL)
        if done.returncode:
            raise HostUnfit(
                f"{self.image} has no sshd, and installing one failed: {last_words(done.stderr)}",
                hint="use an image that has one (Debian, Fedora: openssh-server), or check the network",
            )
        engine.run("commit", "--pause=false", *for_commit, container, f"{_WITH_SSHD}:{source}")
        self.stop()


class _ContainerSet:
    """A set of containers of one image, with a network of their own.

    They exist as long as this process does: at its end, however that comes, the reaper removes them.
    """

    def __init__(self, engine: Engine, count: int, options: Sequence[str]) -> None:
        """`options` are those of the engine's run."""
        self.folder = Path(tempfile.mkdtemp(prefix="skyfab-containers-"))
        self.name = f"skyfab-{secrets.token_hex(6)}"
        self.nodes = [f"node{number}" for number in range(1, count + 1)]
        self._engine = engine
        self._options = options
        self._reaper: Reaper | None = None
        self._said = b""

    def begin(self, script: str, argument: str) -> None:
        """Starts the process, which makes the network. `script` is what containers run, with their name and that."""
        words = [str(self.folder), self.name, str(len(self.nodes)), script, argument, *self._options]
        self._reaper = Reaper(_KEEP, self._engine.program, *words)

    def run(self, image: str, timeout: float) -> dict[str, list[str]]:
        """Starts the containers; returns the words that the script of each has printed.

        Raises HostUnfit for a container that ends instead, or prints nothing for `timeout` seconds.
        """
        assert self._reaper is not None
        try:
            self._reaper.stdin.write(f"{image}\n".encode())
        except BrokenPipeError:
            raise UsageError("the process that runs the containers has ended") from None
        said: dict[str, list[str]] = {}
        deadline = time.monotonic() + timeout
        while len(said) < len(self.nodes):
            name, *words = self._line(deadline).split()
            if words == ["ended"] and name not in said:
                raise self._failed(name)
            said.setdefault(name, words)
        return said

    def _line(self, deadline: float) -> str:
        assert self._reaper is not None
        while b"\n" not in self._said:
            ready, _, _ = select.select([self._reaper.stdout], [], [], max(0, deadline - time.monotonic()))
            if not ready:
                raise HostUnfit("its sshd did not start in time", host=self.nodes[0])
            data = os.read(self._reaper.stdout.fileno(), 65_536)
            if not data:
                raise UsageError("the process that runs the containers has ended")
            self._said += data
        line, _, self._said = self._said.partition(b"\n")
        return line.decode(errors="replace")

    def _failed(self, name: str) -> HostUnfit | UsageError:
        """The error for a container that has ended, with what was printed last."""
        log = (self.folder / name).read_text(errors="replace")
        if name == "network":
            return UsageError(
                f"{self._engine.name} could not create a network: {last_words(log)}", hint=self._engine.hint(log)
            )
        return HostUnfit(f"its container ended: {last_words(log)}", host=name, hint=self._engine.hint(log))

    def container(self, node: str) -> str:
        """The name of a container."""
        return f"{self.name}-{node}"

    def ports(self) -> dict[str, int]:
        """The port of this machine that leads to each container's sshd."""
        form = '{{(index (index .NetworkSettings.Ports "22/tcp") 0).HostPort}}'
        said = self._engine.run("inspect", "--format", form, *map(self.container, self.nodes))
        return dict(zip(self.nodes, map(int, said.split()), strict=True))

    def close(self) -> None:
        """Removes the containers, their network and the folder; returns when they are gone."""
        reaper, self._reaper = self._reaper, None
        if reaper is not None:
            reaper.close()
        shutil.rmtree(self.folder, ignore_errors=True)
