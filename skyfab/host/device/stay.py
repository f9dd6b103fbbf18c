"""The process of a device that stays: it runs the call of a detached run, and programs come and go.

A program's worker passes it its pipes (host/agent/join.py); from then on this process is that worker. When the program
ends, everything of it is freed except what it has kept by name.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Final

from skyfab import context
from skyfab.errors import SkyfabError
from skyfab.host import phase
from skyfab.host.agent.join import SOCKET, VERSIONS
from skyfab.host.agent.worker import Worker

if TYPE_CHECKING:
    import torch

    from skyfab.host.device.memory import Moved

_UNUSED: Final = "; unused, in the memory of the host"


class Stay:
    """What is kept, and the program that uses the device."""

    current: ClassVar[Stay]

    def __init__(self, device: str, keep: float, idle: float | None) -> None:
        self.kept: dict[str, Any] = {}
        self.idle = idle
        self._device = device
        self._keep = keep
        self._output = [os.dup(1), os.dup(2)]
        """That of the run. While there is a program, this process writes to that of the program."""
        self._moved: Moved = []
        self._said = ""
        self._holder = ""
        """The program that uses it."""
        self._listener = socket.socket(socket.AF_UNIX)
        before = os.getcwd()
        os.chdir(os.path.dirname(context.own_folder()))  # the length of socket paths is limited
        self._listener.bind(SOCKET)
        os.chdir(before)
        self._listener.listen(8)

    def run(self) -> None:
        """Serves one program after another, until none has come for long enough."""
        while (link := self._next()) is not None:
            with link, contextlib.suppress(OSError, ValueError, KeyError, SkyfabError):  # its program has ended
                link.settimeout(5)
                data, fds, _, _ = socket.recv_fds(link, 65536, 4)
                try:
                    self._accept(link, json.loads(data), fds)
                finally:
                    for fd in fds:
                        os.close(fd)
        self._say("freed, because no program has attached to it in time")

    def _next(self) -> socket.socket | None:
        """Waits for a program. None: there was none for too long."""
        end = time.strftime("%m-%d %H:%M UTC", time.gmtime(time.time() + self._keep))
        self._say(f"kept until {end}: {self._contents()}")
        waits = [self._keep] if self.idle is None else [self.idle, max(1.0, self._keep - self.idle)]
        for seconds in waits:
            self._listener.settimeout(seconds)
            with contextlib.suppress(TimeoutError):
                return self._listener.accept()[0]
            self.move_out()
        return None

    def _accept(self, link: socket.socket, about: Mapping[str, Any], fds: list[int]) -> None:
        """Is the worker of a program until that ends."""
        if about["versions"] != VERSIONS:
            link.sendall(b"it was started by another version of skyfab")
            return
        link.sendall(b"accepted")
        from skyfab.host.device import worker  # it imports torch, which may take longer than the worker waits

        self._holder = about["holder"]
        phase.enter("in use")
        self._say(f"in use by {self._holder}: {self._contents()}")
        worker.begin(about["device"], self._device)
        attached = _AttachedWorker(self, fds[0], fds[1], about)
        context.client = attached
        try:
            self._write_to(fds[2:])
            attached.serve()
        finally:  # it may have ended while a reply was sent
            attached.flush()
            phase.leave()
            with contextlib.suppress(RuntimeError):
                self.restore()  # what is not kept is freed, wherever it is
            self._write_to(self._output)
            worker.begin(about["device"], self._device)
            attached.check()

    def _write_to(self, output: list[int]) -> None:
        for fd, target in zip(output, (1, 2), strict=True):
            os.dup2(fd, target)

    # ---- what is kept

    def keep(self, values: Mapping[str, Any]) -> None:
        """Keeps values by name; None removes a name. Raises TypeError for what cannot be given back."""
        import torch

        from skyfab.host.device.host_results import describe_result

        describe_result(dict(values), torch.device(self._device))
        self.kept = {name: value for name, value in {**self.kept, **values}.items() if value is not None}
        self._say(f"in use by {self._holder}: {self._contents()}")

    def _tensors(self) -> list[torch.Tensor]:
        """All that are in use."""
        import torch
        from torch.utils._pytree import tree_leaves

        from skyfab.host.device import worker

        found = (*tree_leaves(self.kept), *worker.executor(self._device).tensors())
        return [leaf for leaf in found if isinstance(leaf, torch.Tensor)]

    def move_out(self) -> None:
        """Moves all tensors into the memory of the host, if they are to be moved when they are not used."""
        if self.idle is not None and not self._moved:
            from skyfab.host.device.memory import move_out

            self._moved = move_out(self._tensors())
            self._say(self._said + (_UNUSED if self._moved else ""))

    def restore(self) -> None:
        """Moves them back. Raises RuntimeError if they do not fit into the memory of the device now."""
        if self._moved:
            from skyfab.host.device.memory import restore

            restore(self._moved)
            self._say(self._said.removesuffix(_UNUSED))

    def _contents(self) -> str:
        """The names that are kept, and the memory of all tensors."""
        if not self.kept:
            return "no tensors"
        from skyfab.host.device.memory import storages_of

        storages = [*storages_of(self._tensors()), *(copy for _, copy in self._moved)]
        size = sum(storage.nbytes() for storage in storages)
        amount = f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
        return f"{', '.join(self.kept)} ({amount})"

    def _say(self, text: str) -> None:
        """Writes a line to the output of the run: `skyfab runs` and `skyfab top` show the last one."""
        if text != self._said:
            self._said = text
            with contextlib.suppress(OSError):
                os.write(self._output[0], f"{self._device}: {text}\n".encode())


class _AttachedWorker(Worker):
    """The worker of a program, in the process that has the tensors."""

    def __init__(self, stay: Stay, source: int, sink: int, about: Mapping[str, Any]) -> None:
        super().__init__(source, sink, about["stores"], plain=about["plain"])
        self._stay = stay

    def _pump(self) -> bool:
        idle = self._stay.idle
        if idle is not None and not select.select([self.source], [], [], idle)[0]:
            self._stay.move_out()
        return super()._pump()

    def _function(self, digest: str) -> Any:
        self._stay.restore()  # before anything is executed
        return super()._function(digest)

    def _enter(self, plugins: tuple[Any, ...]) -> None:
        """The call of the run has entered them."""

    def check(self) -> None:
        """Raises RuntimeError if no other program can use this process."""
        if self._spoiled:
            raise RuntimeError("CUDA no longer works in this process; its tensors are lost")


# ---- what programs call


def device_that_stays(device: str, keep: float, idle: float | None) -> None:
    """The call of the run. Without a program it ends after `keep` seconds; unused tensors are moved after `idle`."""
    Stay.current = Stay(device, keep, idle)
    Stay.current.run()


def keep(values: Mapping[str, Any]) -> None:
    """Keeps values by name after the program has ended."""
    Stay.current.keep(values)


def kept() -> dict[str, Any]:
    """What is kept, by name."""
    return Stay.current.kept
