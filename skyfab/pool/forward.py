"""Port forwarding: `Compute.forward`. A port of this machine leads to one of a host, over its own SSH connection."""

from __future__ import annotations

import re
import socket
import threading
from dataclasses import replace
from typing import Final

from skyfab._util.scripts import given, read
from skyfab.errors import AuthenticationRefused, HostKeyRefused, HostUnfit, SkyfabError, UsageError
from skyfab.inventory.host import Host
from skyfab.inventory.inventory import Inventory
from skyfab.session.bootstrap import open_shell
from skyfab.session.timing import Backoff
from skyfab.ssh import transport_for
from skyfab.ssh.logins import retry
from skyfab.ssh.tunnel import LOOPBACK, PROHIBITED, Tunnel, not_available
from skyfab.ui.events import Events, Notice

_FIND: Final = read("pool/container_port.sh")
_FIRST_PAUSE: Final = 0.5
_LONGEST_PAUSE: Final = 10.0
"""Seconds between attempts to reconnect."""


class Forward:
    """A port of this machine that is forwarded to one of a host, until it is closed; also a context manager."""

    def __init__(self, host: Host, inventory: Inventory, target: tuple[str, int], port: int, events: Events) -> None:
        """Blocks until the port listens. Raises a HostError; UsageError if something else uses the port."""
        self._host = host
        self._inventory = inventory
        self._target = target
        self._events = events
        self._notice = ""
        """What was last said about this forward; each thing is said once."""
        self.port: Final = port
        """The port on this machine, at 127.0.0.1."""
        self._closing = threading.Event()
        self._transport = transport_for(host, inventory)
        self._tunnel = self._open()
        self._thread = threading.Thread(target=self._run, name=f"skyfab-forward-{port}", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """The port on this machine as an address for a browser."""
        return f"http://{LOOPBACK}:{self.port}"

    @property
    def to(self) -> str:
        """Where it leads: ``node1:6006``."""
        name, number = self._target
        return f"{self._host.name}:{name}:{number}" if name else f"{self._host.name}:{number}"

    @property
    def is_closed(self) -> bool:
        return self._closing.is_set()

    def __repr__(self) -> str:
        return f"<Forward {self.url} → {self.to}{': closed' if self.is_closed else ''}>"

    def __enter__(self) -> Forward:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stops listening and ends open connections. Closing it again does nothing."""
        self._closing.set()
        self._tunnel.end()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def leave_to_parent(self) -> None:
        """In a forked child: the tunnel belongs to the parent."""
        self._closing = threading.Event()  # threads of the parent may have held its lock
        self._closing.set()
        self._tunnel.leave_to_parent()

    def _open(self) -> Tunnel:
        name, number = self._target
        stopped = self._closing.is_set
        to = (name or "localhost", number)
        if self._host.container and not name:
            to = _of_container(self._host, self._inventory, number)
        return retry(lambda: self._transport.forward(self.port, to, stopped), stopped)

    # ---- on its own thread

    def _run(self) -> None:
        while True:
            ended = self._tunnel.wait(self._refused)
            self._transport.close()
            if self.is_closed:
                return
            self._say(f"port {self.port} is disconnected, reconnecting: {_message(ended)}")
            if not self._reopen():
                self._closing.set()
                return
            if self.is_closed:  # `close` has ended the tunnel before
                self._tunnel.end()
            else:
                self._say(f"port {self.port} is connected again")

    def _reopen(self) -> bool:
        """Opens a new tunnel as soon as the host can be reached; False if the forward was closed, or login fails."""
        pauses = Backoff(_FIRST_PAUSE, _LONGEST_PAUSE, factor=2)
        while not self._closing.wait(pauses.next()):
            try:
                self._tunnel = self._open()
                return True
            except (AuthenticationRefused, HostKeyRefused) as error:
                self._say(f"port {self.port} is closed: {error.message}")
                return False
            except (SkyfabError, OSError):  # OSError: this machine lacks processes, descriptors or space
                pass
        return False

    def _refused(self, reason: str) -> None:
        name, number = self._target
        if PROHIBITED in reason:
            self._say("its SSH server does not allow port forwarding (AllowTcpForwarding)")
        elif name:
            self._say(f"could not connect to {name}:{number}: {reason}")
        else:
            own = " (in its container, at more than 127.0.0.1)" if self._host.container else ""
            self._say(f"nothing listens on port {number} yet{own}")

    def _say(self, text: str) -> None:
        if text != self._notice:
            self._events.emit(Notice(host=self._host.name, text=text))
        self._notice = text


class Forwards:
    """The forwards of a pool."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._all: list[Forward] = []

    def open(self, host: Host, inventory: Inventory, port: int | str, local: int | None) -> Forward:
        """See `Compute.forward`."""
        target = _target(port)
        here = _local_port(target[1], local, taken=target[1] if _is_this_machine(host) else 0)
        opened = Forward(host, inventory, target, here, self._events)
        self._all = [*(one for one in self._all if not one.is_closed), opened]
        return opened

    def close(self) -> None:
        for one in self._all:
            one.close()

    def leave_to_parent(self) -> None:
        """In a forked child: all of them belong to the parent."""
        for one in self._all:
            if not one.is_closed:
                one.leave_to_parent()


def _message(error: Exception) -> str:
    return error.message if isinstance(error, SkyfabError) else str(error)


def _target(port: int | str) -> tuple[str, int]:
    """The address that the host connects to, as name and number; no name for the host itself.

    >>> _target(6006), _target("db:5432"), _target("[fd00::1]:80")
    (('', 6006), ('db', 5432), ('fd00::1', 80))
    """
    match = re.fullmatch(r"(?:\[([^\]]+)\]:|([^:\s]+):)?([0-9]{1,5})", str(port), re.ASCII)
    if match is None or isinstance(port, bool) or not 0 < int(match[3]) < 65536:
        raise UsageError(f"{port!r:.60} is not a port", hint='a number from 1 to 65535, or "name:number"')
    return match[1] or match[2] or "", int(match[3])


def _of_container(host: Host, inventory: Inventory, number: int) -> tuple[str, int]:
    """Where a host reaches a port of its container. Raises HostUnfit if it does not."""
    outside = replace(host, container=None)
    with open_shell(outside, transport_for(outside, inventory)) as shell:
        said = shell.run(given(container=host.container or "", port=number) + _FIND)
    found = re.search(r"^(?:host|0\.0\.0\.0|\[::\]|([0-9.]+)):([0-9]{1,5})$", said, re.MULTILINE)
    if found is None:
        hint = f"create the container with --publish=127.0.0.1::{number} or --network=host"
        raise HostUnfit(f"it does not reach port {number} of {host.inside}", host=host.name, hint=hint)
    return found[1] or "localhost", int(found[2])


def _is_this_machine(host: Host) -> bool:
    """Whether the host's ports are this machine's own: a port that led to the same number would lead to itself."""
    return host.transport == "local" or (host.destination in ("localhost", LOOPBACK, "::1") and not host.jump)


def _local_port(wanted: int, local: int | None, *, taken: int) -> int:
    """A port of this machine that is free: `local`, or else `wanted` if possible; not `taken`. Raises UsageError."""
    if local == taken and local:
        raise UsageError(f"port {local} of this machine would forward to itself", hint="local=0 uses a free one")
    for number in ([0] if wanted == taken else [wanted, 0]) if local is None else [local]:
        try:
            with socket.create_server((LOOPBACK, number)) as free:
                return int(free.getsockname()[1])
        except OSError as error:
            reason = error.strerror or str(error)
    raise not_available(local or 0, reason)
