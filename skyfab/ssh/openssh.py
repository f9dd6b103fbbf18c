"""The transport over the ssh program: the fastest one, with full support of ssh_config."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType

from skyfab.errors import HostLost, Unreachable
from skyfab.inventory.host import Host
from skyfab.inventory.inventory import Inventory
from skyfab.inventory.ssh_config import CONFIG, names_keyword
from skyfab.ssh import keys, refusals
from skyfab.ssh.askpass import Askpass, private_folder
from skyfab.ssh.base import ended
from skyfab.ssh.container import inside
from skyfab.ssh.logins import LOGINS
from skyfab.ssh.process import ProcessStream
from skyfab.ssh.prompts import Place, Prompts, by_ssh, places
from skyfab.ssh.tunnel import LOOPBACK, ProcessTunnel, is_ready, not_available
from skyfab.ui.prompt import TERMINAL

ALIVE_INTERVAL, ALIVE_COUNT = 10, 3
"""Seconds between keepalives, and how many may be unanswered: before there is an agent, nothing else detects a loss."""

CONNECT_TIMEOUT = 10
"""Seconds in which a server must accept a connection."""

_OPTIONS = {
    "BatchMode": "yes",
    "StrictHostKeyChecking": "yes",
    "UpdateHostKeys": "no",
    "NoHostAuthenticationForLocalhost": "no",
    "VerifyHostKeyDNS": "no",
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
}
_SINCE_8_7 = {"StdinNull": "no", "ForkAfterAuthentication": "no"}
_DRAFT = 25
"""Characters that ssh appends to the name of a socket while it makes it, and some more."""
_FASTEST = "^aes128-gcm@openssh.com"
"""The cipher, if this machine's processor has instructions for AES. Else OpenSSH's own first choice is: chacha20.

It would replace that of ssh_config: if that sets any, it is not used.
"""

_FORWARDING = {
    "ControlMaster": "yes",
    "ControlPersist": "no",
    "PermitLocalCommand": "yes",
    "LocalCommand": "echo",  # says that the login has succeeded
    "LogLevel": "INFO",  # reports connections that the host cannot make
}
_TIED = ("/bin/sh", "-c", 'exec 3<&0; { read -r _ <&3; kill 0; } >/dev/null 2>&1 & exec "$@" </dev/null 3<&-', "sh")
"""Becomes a program, which ends when stdin does: with this program, even if that is killed."""
_TIDY = 'trap : INT TERM HUP; "$@"; s=$?; eval "$0"; exit $s'
"""Runs a program, then the command that is its name."""


class OpenSSH:
    """Runs commands through ``ssh``, one process for each stream."""

    def __init__(self, host: Host, inventory: Inventory, connect_timeout: int = CONNECT_TIMEOUT) -> None:
        self._host = host
        self._inventory = inventory
        self._jumps = inventory.jump_chain(host)
        self._hops = (*self._jumps, host)
        self._connect_timeout = connect_timeout
        self.servers = servers_of(host, inventory)
        self._aliases = {
            hop: f"skyfab-jump-{number}" if hop.name in inventory.hosts or hop.host_key or hop.identity else hop.login
            for number, hop in enumerate(self._jumps)
        }
        """The name of each hop for ssh: by its own Host block if the inventory has settings for it, else literally."""
        self._folders: list[Path] = []
        """The folder of files that ssh needs, if it has been made."""
        self._prompts = Prompts()
        self._askpass: Askpass | None = None
        self._is_by_hand = False
        weakref.finalize(self, _remove, self._folders, os.getpid())

    def open(self, command: str, stopped: Callable[[], bool] = lambda: False) -> ProcessStream:
        return self._start(lambda: self.argv(inside(self._host, command)), stopped)

    def forward(self, port: int, to: tuple[str, int], stopped: Callable[[], bool] = lambda: False) -> ProcessTunnel:
        """By ``ssh -N``, whose ControlPath accepts ``-L``: on its command line, that would include ssh_config's."""
        with LOGINS.turn(self.servers, stopped):
            if not self._folders:
                self._folders.append(private_folder(suffix=_DRAFT))
            control = _quoted(str(self._file("socket")))
            options = _FORWARDING | {"ControlPath": control}
            stream = self._start(lambda: [*_TIED, *self.argv(None, options)], stopped)
            try:
                self._wait_for_login(stream, stopped)
                _listen(control, port, to)
            except BaseException:
                stream.close()
                raise
            finally:
                self.joined()
        return ProcessTunnel(stream)

    def _wait_for_login(self, stream: ProcessStream, stopped: Callable[[], bool]) -> None:
        while not is_ready(stream.fileno(), stream.stderr()):
            stream.drain()
            if stopped():
                raise HostLost("the pool was closed", host=self._host.name)
        if not stream.recv_into(memoryview(bytearray(16))):
            raise stream.explain()

    def _start(self, words: Callable[[], list[str]], stopped: Callable[[], bool]) -> ProcessStream:
        keys.check(self._hops)
        self._prompts = Prompts(stopped)
        if TERMINAL.is_attended():
            self._askpass = Askpass(self._answer)
        environ = None if self._askpass is None else self._askpass.environ
        try:
            return ProcessStream(words(), self._explain, environ)
        except BaseException:
            self.joined()
            raise

    def _answer(self, prompt: str, stopped: Callable[[], bool]) -> str | None:
        """Answers a prompt of ssh, which is about a server on the path or a key on this machine.

        Only what certainly is for one server is remembered: another one could ask for its password.
        """
        if not _is_since(8, 5):  # from then on ssh says before a server's own words which server asks
            return self._prompts.answer(self._host.login, prompt, stopped, once=True)
        who, text = by_ssh(prompt)
        user, _, name = who.rpartition("@")
        found = [
            place
            for hop, place in zip(self._hops, places(self._hops, user), strict=True)
            if name == (_alias(hop) if hop.host_key is not None else hop.destination.lower())
            if hop.user in (None, user)
        ]
        if who and not found:  # only ssh_config knows it
            found = [Place(name=who, login=who, way=("", self._host.login))]
        return self._prompts.answer(found[0] if len(found) == 1 else who, text, stopped, once=len(found) > 1)

    def _options(self) -> dict[str, str]:
        """The options of all hosts on the path. Without a terminal, ssh must not ask."""
        own = {"ConnectTimeout": str(self._connect_timeout), **({"EscapeChar": "~"} if self._is_by_hand else {})}
        if _has_aes() and not names_keyword("ciphers"):
            own["Ciphers"] = _FASTEST
        if _is_since(8, 7):
            own |= _SINCE_8_7
        return _OPTIONS | ({} if self._askpass is None and not self._is_by_hand else {"BatchMode": "no"}) | own

    def argv(self, command: str | None, options: Mapping[str, str] = MappingProxyType({})) -> list[str]:
        """The whole command line, with `options` instead of its own; without a command, ssh runs none.

        It never contains secrets.
        """
        words = ["ssh", "-T"]
        if config := self._config_file():
            words += ["-F", str(config)]
        for key, value in {**self._options(), **self._own_options(self._host), **options}.items():
            words += ["-o", f"{key}={value}"]
        if self._jumps:
            words += ["-J", ",".join(self._aliases[hop] for hop in self._jumps)]
        elif self._host.jump == "none":
            words += ["-o", "ProxyJump=none"]
        if command is None:
            return [*words, "-N", "--", self._host.destination]
        if _is_since(8, 7):
            words += ["-o", "SessionType=default"]
        return [*words, "--", self._host.destination, command]

    def by_hand(self, command: str, *, terminal: bool) -> list[str]:
        """The command line for a program that becomes ssh: the user is asked by ssh itself.

        Files that ssh needs are deleted after it, by a shell that waits for it.
        """
        keys.check(self._hops)
        self._is_by_hand = True
        words = self.argv(command)
        words[1] = "-t" if terminal else "-T"
        folders = [str(folder) for folder in self._folders]
        self._folders.clear()
        return words if not folders else ["/bin/sh", "-c", _TIDY, shlex.join(["rm", "-rf", *folders]), *words]

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
            if _is_since(8, 5):
                options["KnownHostsCommand"] = "none"
            options["HostKeyAlgorithms"] = ",".join(algorithms(host.host_key.split()[0]))
        return options

    def _known_hosts(self) -> Path:
        """A known_hosts file with the keys from the inventory."""
        hosts = [host for host in (self._host, *self._jumps) if host.host_key is not None]
        return self._file("known_hosts", "".join(f"{_alias(host)} {host.host_key}\n" for host in hosts))

    def _config_file(self) -> Path | None:
        """An ssh_config for jump hosts, whose keys, ports and users cannot be given on the command line.

        Its options for all hosts come before the user's settings, which may be less strict.
        """
        base = os.environ.get(CONFIG)
        if not self._jumps:
            return Path(base) if base else None
        lines: list[str] = []
        for jump in self._jumps:
            if self._aliases[jump] != jump.login:
                lines += [f"Host {self._aliases[jump]}", f"  HostName {jump.destination}"]
                lines += [f"  {key} {value}" for key, value in self._own_options(jump).items()]
        lines += ["Match all", *(f"  {key} {value}" for key, value in self._options().items())]
        for path in [base] if base else ["~/.ssh/config", "/etc/ssh/ssh_config"]:
            lines.append(f"Include {_quoted(str(Path(path).expanduser()))}")
        return self._file("config", "\n".join([*lines, ""]))

    def _file(self, name: str, text: str | None = None) -> Path:
        """The path of a file for ssh, in a folder that goes with the login; with `text`, writes it."""
        if not self._folders:
            self._folders.append(private_folder())
        path = self._folders[0] / name
        if text is not None:
            path.write_text(text)
        return path

    def _explain(self, code: int, errors: str) -> Exception:
        if code == 255 and "Permission denied" in errors:
            self._prompts.refused()
        return explain(self._hops, code, errors, self._inventory, typed=self._prompts.outcome)

    def joined(self) -> None:
        """Deletes the files, which ssh has read by now: a program that is killed later leaves none behind."""
        if self._askpass is not None:
            self._askpass.close()
            self._askpass = None
        _remove(self._folders, os.getpid())

    def close(self) -> None:
        self.joined()


def _listen(control: str, port: int, to: tuple[str, int]) -> None:
    """Has the ssh process at this ControlPath forward a port. Raises UsageError."""
    name, number = to
    spec = f"{LOOPBACK}:{port}:[{name}]:{number}"
    done = subprocess.run(
        ["ssh", "-F", os.devnull, "-o", f"ControlPath={control}", "-O", "forward", "-L", spec, "--", "forward"],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    if done.returncode:
        raise not_available(port, done.stderr.strip().rpartition(": ")[2])


@cache
def _has_aes(about: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this machine's processor has instructions for AES. True if that is unknown: all Macs have them."""
    try:
        return re.search(r"^(flags|Features)\b.*\baes\b", about.read_text(), re.MULTILINE) is not None
    except OSError:
        return True


def _is_since(*version: int) -> bool:
    """Whether ssh has at least this version."""
    return _version() >= version


@cache
def _version() -> tuple[int, ...]:
    """The version of OpenSSH; empty if it is unknown."""
    if shutil.which("ssh") is None:
        return ()
    done = subprocess.run(
        ["ssh", "-V"],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C would end it
    )
    version = re.match(r"OpenSSH_(\d+)\.(\d+)", done.stderr)
    return () if version is None else (int(version[1]), int(version[2]))


def servers_of(host: Host, inventory: Inventory) -> tuple[str, ...]:
    """The SSH servers on the path to a host that the inventory knows."""
    return tuple(f"{hop.destination} {hop.port or 22}" for hop in (*inventory.jump_chain(host), host))


def _remove(folders: list[Path], pid: int) -> None:
    while folders and os.getpid() == pid:  # in a forked child they still belong to the parent
        shutil.rmtree(folders.pop(), ignore_errors=True)


def explain(hops: Sequence[Host], code: int, errors: str, inventory: Inventory, *, typed: str = "") -> Exception:
    """Converts ssh's error output to the error to raise. `hops` are the path to the host, which is the last one."""
    host, jumps = hops[-1], hops[:-1]
    verbose = ("# ", "import ")  # lines of PYTHONVERBOSE
    lines = [line.strip() for line in errors.splitlines() if line.strip() and not line.startswith(verbose)]
    last = lines[-1] if lines else ""
    if code < 0:
        return Unreachable(f"ssh was killed on this machine by signal {-code}", host=host.name)
    if code != 255:  # that of a program on the host, whatever it has printed
        return ended(host, code, last)
    # What an inner ssh has reported is followed by an outer one that found no server.
    is_inner = "exchange_identification" in errors or "UNKNOWN port" in errors
    if "REMOTE HOST IDENTIFICATION HAS CHANGED" in errors or "REVOKED HOST KEY" in errors:
        named = re.search(r"[Hh]ost key for (\S+) (?:has changed|was revoked)", errors)
        at = _at(jumps, host, None, named and named[1]) if is_inner else host
        return refusals.revoked_key(host, at) if "REVOKED HOST KEY" in errors else refusals.changed_key(host, at)
    if "Host key verification failed" in errors or "host key is known for" in errors:
        named = re.search(r"host key is known for (\S+) and", errors)
        return refusals.unknown_key(host, _at(jumps, host, None, named and named[1]) if is_inner else host)
    unresolved = re.search(r"Could not resolve hostname ([^\s:]+)", errors)
    if unresolved and is_inner:
        return refusals.unknown_jump(_named(unresolved[1], jumps), host, inventory)
    if "Permission denied" in errors or "Too many authentication failures" in errors:
        denied = re.search(r"^(\S{1,256})@(\S{1,256}): Permission denied \((.*?)\)", errors, re.MULTILINE)
        user, name, methods = denied.groups() if denied else (None, None, "")
        at = _at(jumps, host, user, name) if is_inner else host
        return refusals.refused(hops, at, [method for method in methods.split(",") if method], typed=typed)
    if is_inner and (reason := _before_login(errors)):
        return refusals.no_answer(reason, hops, inventory, is_nameless=False)
    busy = re.search(r"exchange_identification: (.*)", errors)  # with a jump host, that of an inner ssh
    if busy:
        return refusals.busy(busy[1].strip(), hops)
    said = re.sub(r"^ssh: ", "", last) or f"{host.destination} does not respond"
    return refusals.no_answer(said, hops, inventory, is_nameless=unresolved is not None)


def _before_login(errors: str) -> str:
    """Why a jump host or a ProxyCommand gave ssh no connection to the host; empty where the server may be busy."""
    for what, pattern in (
        ("its jump host is unreachable", r"^ssh: (connect to host .*)"),
        ("its jump host cannot connect to it", r"^channel \d+: open failed: (?:connect failed: )?(.*)"),
        ("its ProxyCommand does not run", r"^\S*sh: (?:.*: )?(\S+: (?:command )?not found)"),
    ):
        if found := re.search(pattern, errors, re.MULTILINE):
            return f"{what}: {found[1].strip()}"
    return ""


def _at(jumps: Sequence[Host], host: Host, user: str | None, name: str | None) -> Host:
    """The jump host that ssh calls by that name. One that only ssh_config knows is named as ssh does."""
    name = name and re.sub(r"^\[(.*)\]:\d+$", r"\1", name)
    for jump in jumps:
        if name in (jump.destination.lower(), _alias(jump)) and (user is None or jump.user in (None, user)):
            return jump
    if jumps:
        return jumps[-1]
    return (name and Host.ad_hoc(f"{user}@{name}" if user else name)) or host


def _named(name: str, jumps: Sequence[Host]) -> str:
    """The name under which the user knows a jump host whose address could not be resolved."""
    return next((jump.name for jump in jumps if jump.destination.lower() == name), name)


def _alias(host: Host) -> str:
    return "skyfab-" + re.sub(r"[^A-Za-z0-9.-]", "_", host.name)


def _quoted(path: str) -> str:
    """Quotes a path for ssh_config."""
    return '"' + path.replace("%", "%%") + '"' if re.search(r"[\s%]", path) else path


def algorithms(kind: str) -> tuple[str, ...]:
    """The signatures by which a server can present a key of that kind."""
    return ("rsa-sha2-512", "rsa-sha2-256", "ssh-rsa") if kind == "ssh-rsa" else (kind,)
