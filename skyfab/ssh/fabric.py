"""The transport over Fabric (paramiko): a Fabric connection with a channel of our own.

Fabric provides ssh_config, jump hosts, passwords and forwarding. Data does not pass through `Connection.run`. Host keys
are checked here; Fabric does not check them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import fabric
import paramiko

from skyfab.errors import HostError, SkyfabError, Unreachable
from skyfab.inventory.host import Host
from skyfab.inventory.inventory import Inventory
from skyfab.inventory.ssh_config import CONFIG
from skyfab.protocol.frames import Buffer
from skyfab.ssh import keys, refusals
from skyfab.ssh.base import ended
from skyfab.ssh.client import Client, Refused
from skyfab.ssh.container import inside
from skyfab.ssh.openssh import ALIVE_COUNT, ALIVE_INTERVAL, CONNECT_TIMEOUT, algorithms, servers_of
from skyfab.ssh.prompts import Place, Prompts, places
from skyfab.ssh.tunnel import LOOPBACK, ThreadTunnel

_LOG: Final = logging.getLogger("skyfab")
_REVOKED: Final = "revoked"
_PACKET: Final = 1024 * 1024
"""paramiko becomes very slow with larger pieces."""
_WIDE: Final = 256 * 1024
"""Size of a socket's buffer, a third of which holds a packet of 32 kB and the kernel's overhead."""


def connection(host: Host, inventory: Inventory, stopped: Callable[[], bool] = lambda: False) -> fabric.Connection:
    """Returns a Fabric connection to the host, not yet open, that refuses unknown and changed host keys.

    Opening it asks for passwords and codes at a terminal, unless `stopped`, and raises a HostError.
    """
    hops = (*inventory.jump_chain(host), host)
    keys.check(hops)
    prompts = Prompts(stopped)
    gateway: Any = False if host.jump == "none" else None  # None: use ssh_config's setting
    for hop in hops:
        gateway = _connection(hop, gateway=gateway)
        _equip(gateway, hop, hops, inventory, prompts)
        _check_keys(gateway, hop)
    assert isinstance(gateway, fabric.Connection)
    return gateway


def _connection(host: Host, *, gateway: Any = None) -> fabric.Connection:
    config = fabric.Config(runtime_ssh_path=os.environ.get(CONFIG))
    keywords: dict[str, Any] = {"disabled_algorithms": {}}
    if host.identity is not None:
        keywords |= {"key_filename": host.identity, "look_for_keys": False, "allow_agent": False}
    return fabric.Connection(
        host.destination,
        user=host.user,
        port=host.port,
        config=config,
        gateway=gateway,
        connect_timeout=CONNECT_TIMEOUT,
        connect_kwargs=keywords,
        forward_agent=False,
    )


def _equip(made: fabric.Connection, at: Host, hops: Sequence[Host], inventory: Inventory, prompts: Prompts) -> None:
    """Gives the connection to `at`, one of `hops`, a client that asks and explains; so too its ProxyJump's."""

    def client(of: Host, place: Place) -> Client:
        return Client(place, prompts, lambda error: _explain(hops, of, error, inventory, prompts))

    made.client = client(at, places(hops, made.user)[hops.index(at)])
    for hop in _chain(made.gateway):
        if not isinstance(hop.client, Client):  # of ssh_config's ProxyJump
            host = Host(name=hop.host, user=hop.user, port=int(hop.port))
            hop.client = client(host, Place(name=host.login, login=host.login, way=("", hops[-1].login)))


def hang_up(connection: Any) -> None:
    """Closes a connection and its gateways, even if never opened: a failed login leaves a thread and a socket."""
    for hop in _chain(connection):
        hop.close()
        hop.client.close()


def _chain(connection: Any) -> list[fabric.Connection]:
    """A connection and its gateways, the nearest to the host first."""
    found = []
    while isinstance(connection, fabric.Connection):
        found.append(connection)
        connection = connection.gateway
    return found


def _tune(connection: fabric.Connection) -> None:
    """Sends small packets at once, and detects a lost host with the same timeouts as ssh's ServerAlive options.

    Behind jump hosts only the loss of the first one is detected: paramiko does not wait for keepalive replies.
    """
    for hop in _chain(connection):
        transport = hop.client.get_transport()
        transport.set_keepalive(ALIVE_INTERVAL)
        if isinstance(transport.sock, socket.socket):  # behind a jump host it is a channel
            transport.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if hasattr(socket, "TCP_USER_TIMEOUT"):  # unlike paramiko, the kernel checks acknowledgements
                patience = 1000 * ALIVE_INTERVAL * ALIVE_COUNT
                transport.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, patience)


def _check_keys(made: fabric.Connection, host: Host) -> None:
    client = made.client
    for hop in _chain(made.gateway):  # ssh_config's ProxyJump: Fabric would accept any key there
        _go_by_known_hosts(hop.client)
    if host.host_key is None:
        _go_by_known_hosts(client)
        return
    client.set_missing_host_key_policy(paramiko.RejectPolicy())
    kind, content = host.host_key.split()[:2]
    entry = paramiko.hostkeys.HostKeyEntry.from_line(f"{made.host} {kind} {content}")
    place = made.host if made.port == 22 else f"[{made.host}]:{made.port}"
    client.get_host_keys().add(place, kind, entry.key)
    # Only a key of the known type can be compared.
    keys = [name for name in paramiko.Transport._preferred_keys if name not in algorithms(kind)]  # noqa: SLF001 - paramiko has no other
    made.connect_kwargs["disabled_algorithms"] = {"keys": keys}


def _go_by_known_hosts(client: paramiko.SSHClient) -> None:
    """Accepts only the keys in the user's known_hosts, without those that any line of it revokes.

    paramiko does not understand lines with a marker (`@revoked`, `@cert-authority`), and stops at them.
    """
    try:
        lines = Path("~/.ssh/known_hosts").expanduser().read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    entries = []
    revoked = set()
    for line in lines:
        marker, rest = [*line.split(maxsplit=1), "", ""][:2]
        if marker == "@revoked" and (entry := _entry(rest)):
            revoked.add(entry.key.asbytes())
        elif not marker.startswith(("@", "#")) and (entry := _entry(line)):
            entries.append(entry)
    client.set_missing_host_key_policy(_Refusal(revoked))
    entries = [entry for entry in entries if entry.key.asbytes() not in revoked]
    client.get_host_keys()._entries += entries  # noqa: SLF001 - with `add`, each would be compared with all others


def _entry(line: str) -> Any:
    """Parses a line of known_hosts; None if paramiko cannot use it."""
    try:
        return paramiko.hostkeys.HostKeyEntry.from_line(line.strip())
    except (paramiko.SSHException, paramiko.hostkeys.InvalidHostKey, ValueError):
        return None


class _Refusal(paramiko.RejectPolicy):  # type: ignore[misc]  # paramiko has no type hints
    """Refuses an unknown key; reports a revoked one as such."""

    def __init__(self, revoked: set[bytes]) -> None:
        self._revoked = revoked

    def missing_host_key(self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey) -> None:
        if key.asbytes() in self._revoked:
            raise paramiko.SSHException(_REVOKED)
        super().missing_host_key(client, hostname, key)


class Fabric:
    """Opens one channel on a Fabric connection."""

    def __init__(self, host: Host, inventory: Inventory, connect_timeout: int = CONNECT_TIMEOUT) -> None:
        self._host = host
        self._inventory = inventory
        self._connect_timeout = connect_timeout
        self.servers = servers_of(host, inventory)
        self._connection: fabric.Connection | None = None
        self._stream: ChannelStream | None = None

    def open(self, command: str, stopped: Callable[[], bool] = lambda: False) -> ChannelStream:
        with self._connected(stopped) as transport:
            channel = transport.open_session(window_size=64 * 1024 * 1024, max_packet_size=32768)
            channel.exec_command(inside(self._host, command))
        self._stream = ChannelStream(channel, self._host)
        return self._stream

    def forward(self, port: int, to: tuple[str, int], stopped: Callable[[], bool] = lambda: False) -> ThreadTunnel:
        def connect() -> Any:
            try:
                return transport.open_channel("direct-tcpip", to, (LOOPBACK, port))
            except (paramiko.SSHException, EOFError) as error:
                raise ConnectionError(getattr(error, "text", "") or str(error)) from error

        with self._connected(stopped) as transport:
            return ThreadTunnel(port, connect, transport.is_active)

    @contextlib.contextmanager
    def _connected(self, stopped: Callable[[], bool]) -> Iterator[Any]:
        """Logs in; gives paramiko's transport. Closes the connection if the block fails."""
        _LOG.debug("fabric: connecting to %s", self._host.login)
        made = connection(self._host, self._inventory, stopped)
        made.connect_timeout = self._connect_timeout
        try:
            made.open()
            _tune(made)
            yield made.client.get_transport()
        except Exception as error:
            hang_up(made)
            if isinstance(error, SkyfabError):
                raise
            hops = (*self._inventory.jump_chain(self._host), self._host)
            raise _explain(hops, self._host, error, self._inventory, Prompts()) from error
        _CONNECTIONS.add(made)
        self._connection = made

    def joined(self) -> None:
        if self._stream is not None:
            self._stream.joined = True

    def close(self) -> None:
        hang_up(self._connection)


_CONNECTIONS: Final[weakref.WeakSet[fabric.Connection]] = weakref.WeakSet()


def _leave_all_to_parent() -> None:
    """In a forked child: closes the sockets, which would otherwise keep connections open after the parent's end."""
    for made in list(_CONNECTIONS):
        for hop in _chain(made):
            transport = hop.client.get_transport()
            if transport is not None and isinstance(transport.sock, socket.socket):
                transport.sock.close()
    _CONNECTIONS.clear()


os.register_at_fork(after_in_child=_leave_all_to_parent)


def _first_socket(channel: Any) -> socket.socket | None:
    """The socket to the first machine, behind all channels through jump hosts; None for a ProxyCommand."""
    while isinstance(channel, paramiko.Channel):
        channel = channel.get_transport().sock
    return channel if isinstance(channel, socket.socket) else None


class ChannelStream:
    """A non-blocking paramiko channel."""

    def __init__(self, channel: paramiko.Channel, host: Host) -> None:
        self.is_used = False
        self._channel = channel
        self._host = host
        channel.settimeout(0.0)
        self._socket = _first_socket(channel)
        self._writable = select.poll()
        if self._socket is not None:
            self._writable.register(self._socket, select.POLLOUT)
        self._fd: int = channel.fileno()
        self._said = b""
        self._held = memoryview(b"")
        self.joined = False

    def fileno(self) -> int:
        return self._fd

    def sink(self) -> int | None:
        return None

    def stderr(self) -> int | None:
        return None

    def drain(self) -> bytes:
        data = b""
        while self._channel.recv_stderr_ready():  # unread, it would use up the channel's window
            data += self._channel.recv_stderr(65536)
        self._said = (self._said + data)[-65536:]
        return data

    def recv_into(self, view: memoryview) -> int:
        self.drain()
        if not self._held:
            # While a marker is searched in a shell's output, reads are of one byte, and paramiko would move its whole
            # buffer for each: read more, and keep it. Later nothing may be kept here: `poll` would not report it.
            size = len(view) if self.joined else max(len(view), 4096)
            try:
                self._held = memoryview(self._channel.recv(min(size, _PACKET)))
            except TimeoutError:
                raise BlockingIOError from None
        taken = min(len(view), len(self._held))
        view[:taken] = self._held[:taken]
        self._held = self._held[taken:]
        return taken

    def send(self, buffers: Sequence[Buffer]) -> int:
        """Sends small buffers together: a frame in two packets costs a delayed acknowledgement."""
        data = buffers[0] if len(buffers) == 1 else b"".join(buffers[:64])
        try:
            sent: int = self._channel.send(memoryview(data)[: self._room()])
        except (BlockingIOError, TimeoutError):
            raise BlockingIOError from None
        except (EOFError, OSError, paramiko.SSHException) as error:
            raise BrokenPipeError(str(error)) from error
        if not sent:
            raise BrokenPipeError("the channel is closed")
        return sent

    def _room(self) -> int:
        """How many bytes paramiko may be given. Raises BlockingIOError if the socket's buffer is full.

        Whatever the channel's timeout, paramiko waits until the socket has taken a packet: with all locks held, and
        for as long as the network is down. Linux reports a socket as writable if a third of its buffer is free.
        """
        if self._socket is None:
            return _PACKET
        if not self._writable.poll(0):
            raise BlockingIOError
        return _PACKET if self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) > _WIDE else 8192

    def explain(self) -> Exception:
        if not self._channel.get_transport().is_active():
            return Unreachable("the connection broke", host=self._host.name)
        self._channel.status_event.wait(2)  # it follows the end of the output
        return ended(self._host, self._channel.exit_status, self._said.decode(errors="replace"))

    def close(self) -> None:
        self._channel.close()


def _explain(hops: Sequence[Host], at: Host, error: Exception, inventory: Inventory, prompts: Prompts) -> HostError:
    """Converts an exception of paramiko or Fabric, about the server `at` on the path to a host, to one of ours."""
    host = hops[-1]
    if isinstance(error, paramiko.BadHostKeyException):
        return refusals.changed_key(host, at)
    text = str(error) or type(error).__name__
    if text == _REVOKED:
        return refusals.revoked_key(host, at)
    if "not found in known_hosts" in text:
        return refusals.unknown_key(host, at)
    if isinstance(error, paramiko.AuthenticationException):
        methods = error.methods if isinstance(error, Refused) else ()
        return refusals.refused(hops, at, methods, typed=prompts.outcome)
    if "protocol banner" in text:
        return refusals.busy(text, hops)
    is_nameless = isinstance(error, socket.gaierror)
    if is_nameless and at is not host:
        return refusals.unknown_jump(at.name, host, inventory)
    return refusals.no_answer(f"{at.destination}: {text}", hops, inventory, is_nameless=is_nameless)
