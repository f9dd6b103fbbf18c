"""The transport over the ssh program: the fastest one, with full support of ssh_config."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import tempfile
import weakref
from pathlib import Path
from typing import TextIO

from skyfab.errors import AuthenticationRefused, HostKeyRefused, HostLost, Unreachable
from skyfab.inventory.host import Host
from skyfab.inventory.inventory import Inventory
from skyfab.session.transport.logins import ServerBusy
from skyfab.session.transport.process import ProcessStream

CONFIG = "SKYFAB_SSH_CONFIG"
"""The environment variable with the path of a file to use instead of the user's ssh_config."""

ALIVE_INTERVAL, ALIVE_COUNT = 10, 3
"""Seconds between keepalives, and how many may be unanswered: before there is an agent, nothing else detects a loss."""

REVOKED = "its host key is revoked in known_hosts"

_OPTIONS = {
    "BatchMode": "yes",
    "StrictHostKeyChecking": "yes",
    "UpdateHostKeys": "no",
    "ConnectTimeout": "10",
    "ServerAliveInterval": str(ALIVE_INTERVAL),
    "ServerAliveCountMax": str(ALIVE_COUNT),
    "ControlMaster": "no",
    "ControlPath": "none",  # a shared connection was verified by other rules, or not at all
    "ClearAllForwardings": "yes",
    "ForwardAgent": "no",
    "ForwardX11": "no",
    "PermitLocalCommand": "no",
    "RemoteCommand": "none",
    "EscapeChar": "none",
    "LogLevel": "ERROR",
    "Ciphers": "^aes128-gcm@openssh.com",
}


class OpenSSH:
    """Runs commands through ``ssh``, one process for each stream."""

    def __init__(self, host: Host, inventory: Inventory) -> None:
        self._host = host
        self._jumps = inventory.jump_chain(host)
        self.servers = servers_of(host, inventory)
        self._aliases = {
            hop: f"skyfab-jump-{number}" if hop.name in inventory.hosts else hop.login
            for number, hop in enumerate(self._jumps)
        }
        """The name of each hop for ssh: a host of the inventory by its own Host block, any other literally."""
        self._known: Path | None = None
        self._config: Path | None = None
        self._files: list[Path] = []
        weakref.finalize(self, _remove_here, self._files, os.getpid())

    def open(self, command: str) -> ProcessStream:
        return ProcessStream(self.argv(command), self._explain)

    def argv(self, command: str) -> list[str]:
        """The whole command line. It never contains secrets."""
        words = ["ssh", "-T"]
        if config := self._config_file():
            words += ["-F", str(config)]
        for key, value in (_OPTIONS | self._own_options(self._host)).items():
            words += ["-o", f"{key}={value}"]
        if self._jumps:
            words += ["-J", ",".join(self._aliases[hop] for hop in self._jumps)]
        elif self._host.jump == "none":
            words += ["-o", "ProxyJump=none"]
        return [*words, "--", self._host.destination, command]

    def _own_options(self, host: Host) -> dict[str, str]:
        """The options of this host alone."""
        options: dict[str, str] = {}
        if host.port is not None:
            options["Port"] = str(host.port)
        if host.user is not None:
            options["User"] = host.user
        if host.identity is not None:
            options["IdentityFile"] = _quoted(host.identity)
            options["IdentitiesOnly"] = "yes"
        if host.host_key is not None:
            options["HostKeyAlias"] = _alias(host)
            options["UserKnownHostsFile"] = _quoted(str(self._known_hosts()))
            options["GlobalKnownHostsFile"] = "none"
            options["HostKeyAlgorithms"] = _algorithms(host.host_key.split()[0])
        return options

    def _known_hosts(self) -> Path:
        """A known_hosts file with the keys from the inventory."""
        if self._known is None:
            self._known, file = self._new_file("skyfab-known-")
            with file:
                for host in (self._host, *self._jumps):
                    if host.host_key is not None:
                        file.write(f"{_alias(host)} {host.host_key}\n")
        return self._known

    def _config_file(self) -> Path | None:
        """An ssh_config for jump hosts, whose keys, ports and users cannot be given on the command line.

        Its options for all hosts come before the user's settings, which may be less strict.
        """
        base = os.environ.get(CONFIG)
        if not self._jumps:
            return Path(base) if base else None
        if self._config is None:
            self._config, file = self._new_file("skyfab-ssh-")
            with file:
                for jump in self._jumps:
                    if self._aliases[jump] == jump.login:
                        continue
                    file.write(f"Host {self._aliases[jump]}\n  HostName {jump.destination}\n")
                    for key, value in self._own_options(jump).items():
                        file.write(f"  {key} {value}\n")
                file.write("Match all\n")
                for key, value in _OPTIONS.items():
                    file.write(f"  {key} {value}\n")
                for path in [base] if base else ["~/.ssh/config", "/etc/ssh/ssh_config"]:
                    file.write(f"Include {_quoted(str(Path(path).expanduser()))}\n")
        return self._config

    def _new_file(self, prefix: str) -> tuple[Path, TextIO]:
        fd, name = tempfile.mkstemp(prefix=prefix)
        self._files.append(Path(name))
        return Path(name), os.fdopen(fd, "w")

    def _explain(self, code: int, errors: str) -> Exception:
        return explain(self._host, code, errors)

    def joined(self) -> None:
        """Deletes the files, which ssh has read by now: a program that is killed later leaves none behind."""
        _remove(self._files)
        self._known = self._config = None

    def close(self) -> None:
        self.joined()


def servers_of(host: Host, inventory: Inventory) -> tuple[str, ...]:
    """The SSH servers on the path to a host, as far as the inventory knows them."""
    return tuple(f"{hop.destination} {hop.port or 22}" for hop in (*inventory.jump_chain(host), host))


def _remove(files: list[Path]) -> None:
    while files:
        with contextlib.suppress(OSError):
            files.pop().unlink()


def _remove_here(files: list[Path], pid: int) -> None:
    if os.getpid() == pid:  # in a forked child they still belong to the parent
        _remove(files)


def by_hand(host: Host, command: str = "") -> str:
    """The ssh command that a user would type to reach the host."""
    words = ["ssh", *(["-p", str(host.port)] if host.port else []), *(["-i", host.identity] if host.identity else [])]
    place = host.destination if host.user is None else f"{host.user}@{host.destination}"
    return shlex.join([*words, place, *command.split()])


def changed_key(host: Host) -> str:
    """What to do when a host's key differs from the known one."""
    if host.host_key is not None:
        return f"if that is right, change host_key under [hosts.{host.name}] in the inventory"
    return f"if that is right, skyfab trust --hosts={host.name} --replace"


def revoked_key(host: Host) -> HostKeyRefused:
    """For a key that known_hosts marks with ``@revoked``."""
    return HostKeyRefused(REVOKED, host=host.name, hint="anyone with that key can impersonate it: give it another one")


def explain(host: Host, code: int, errors: str) -> Exception:
    """Converts ssh's error output to the error to raise."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    last = lines[-1] if lines else ""
    if "REMOTE HOST IDENTIFICATION HAS CHANGED" in errors:
        return HostKeyRefused(
            "its host key is not the one on record: it was set up anew, or another machine answers instead",
            host=host.name,
            hint=changed_key(host),
        )
    if "REVOKED HOST KEY" in errors:
        return revoked_key(host)
    if "Host key verification failed" in errors or "host key is known for" in errors:
        return HostKeyRefused("its host key is unknown", host=host.name, hint=f"skyfab trust --hosts={host.name}")
    if "Permission denied" in errors or "Too many authentication failures" in errors:
        methods = re.search(r"Permission denied \((.*?)\)", errors)
        offered = f" (the host takes {methods[1]})" if methods else ""
        who = f" for {host.user}" if host.user else ""
        return AuthenticationRefused(
            f"every key was refused{who}{offered}",
            host=host.name,
            hint=f"try: {by_hand(host)}",
        )
    busy = re.search(r"exchange_identification: (.*)", errors)  # with a jump host, that of an inner ssh
    if code == 255 and busy:
        return ServerBusy(
            f"its SSH server, or a jump host's, hung up before the login: {busy[1].strip()}",
            host=host.name,
            hint=f"is it up? one that is busy turns logins away (MaxStartups); try: {by_hand(host)}",
        )
    if code == 255:
        said = re.sub(r"^ssh: ", "", last) or f"{host.destination} does not answer"
        return Unreachable(said, host=host.name, hint=f"is it up? try: {by_hand(host)}")
    if code < 0:
        return Unreachable(f"ssh was ended on this machine, by signal {-code}", host=host.name)
    return HostLost(f"the connection ended{': ' + last if last else ''}", host=host.name)


def _alias(host: Host) -> str:
    return "skyfab-" + re.sub(r"[^A-Za-z0-9.-]", "_", host.name)


def _quoted(path: str) -> str:
    """Quotes a path for ssh_config."""
    return '"' + path.replace("%", "%%") + '"' if re.search(r"[\s%]", path) else path


def _algorithms(kind: str) -> str:
    return "rsa-sha2-512,rsa-sha2-256,ssh-rsa" if kind == "ssh-rsa" else kind
