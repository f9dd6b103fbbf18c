"""`ContainerSet`: the process that starts a set of containers, and removes them when this program stops it or exits."""

from __future__ import annotations

import os
import secrets
import select
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from skyfab._util.reaper import Reaper
from skyfab._util.scripts import read
from skyfab.errors import HostUnfit, UsageError
from skyfab.providers.engine import Engine, last_words

_SCRIPT: Final = read("providers/container_set.sh")


class ContainerSet:
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
        self._reaper = Reaper(_SCRIPT, self._engine.program, *words)

    def run(self, image: str, timeout: float) -> dict[str, list[str]]:
        """Starts the containers; returns the words that the script of each has printed.

        Raises HostUnfit for a container that ends instead, or says nothing for so long.
        """
        assert self._reaper is not None
        try:
            self._reaper.stdin.write(f"{image}\n".encode())
        except BrokenPipeError:
            raise UsageError("the process that keeps the containers has ended") from None
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
                raise UsageError("the process that keeps the containers has ended")
            self._said += data
        line, _, self._said = self._said.partition(b"\n")
        return line.decode(errors="replace")

    def _failed(self, name: str) -> HostUnfit | UsageError:
        """The error for a container that has ended, with what was printed last."""
        log = (self.folder / name).read_text(errors="replace")
        if name == "network":
            return UsageError(
                f"{self._engine.name} could not make a network: {last_words(log)}", hint=self._engine.hint(log)
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
