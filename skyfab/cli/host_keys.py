"""Fetches host keys, shows their fingerprints, and records them in known_hosts: for `skyfab trust`."""

from __future__ import annotations

import base64
import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from skyfab.env.uv import alone
from skyfab.errors import HostKeyRefused, SkyfabError, Unreachable, UsageError
from skyfab.inventory import ssh_config
from skyfab.inventory.host import Host
from skyfab.session.fanout import Raised, for_each_host, one_error
from skyfab.ui.prompt import answer

_TIMEOUT: Final = 5
"""Timeout in seconds for fetching a host's keys."""


@dataclass(frozen=True, slots=True)
class Key:
    """A public host key."""

    kind: str
    content: str

    @property
    def fingerprint(self) -> str:
        """The SHA256 fingerprint, as ssh prints it."""
        digest = hashlib.sha256(base64.b64decode(self.content)).digest()
        return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """The keys that a host presented, and its name in known_hosts."""

    host: Host
    address: str
    name: str
    keys: tuple[Key, ...]
    file: Path


def record(hosts: Sequence[Host], *, known_hosts: str | None, replace: bool, yes: bool) -> bool:
    """Fetches the hosts' keys, shows them and records them; returns whether the user agreed.

    Raises a HostError or PoolError for hosts whose keys cannot be recorded, after the others are recorded.
    """
    for program in ("ssh", "ssh-keyscan", "ssh-keygen"):
        if shutil.which(program) is None:
            raise UsageError(f"{program} is not installed on this machine", hint="install the package openssh-client")
    new: list[Entry] = []
    failures: list[BaseException] = []
    scans = _Scans()
    for fetched in for_each_host(lambda host: _fetch(host, known_hosts, scans), hosts):
        try:
            if isinstance(fetched, Raised):
                raise fetched.error
            if not _is_known(fetched, replace=replace):
                new.append(fetched)
        except SkyfabError as error:
            failures.append(error)
    agreed = not new or _agreed(new, yes=yes)
    for entry in new if agreed else ():
        _record(entry)
    if failures:
        raise one_error(failures, len(hosts))
    return agreed


class _Scans:
    """The keys of each address, fetched once: an sshd that many aliases lead to drops many connections at a time."""

    def __init__(self) -> None:
        self._locks: dict[tuple[str, str], threading.Lock] = {}
        self._keys: dict[tuple[str, str], tuple[Key, ...]] = {}

    def keys(self, address: str, port: str) -> tuple[Key, ...]:
        place = address, port
        with self._locks.setdefault(place, threading.Lock()):
            if place not in self._keys:
                self._keys[place] = tuple(_keys(_run("ssh-keyscan", "-T", str(_TIMEOUT), "-p", port, "--", address)))
            return self._keys[place]


def _fetch(host: Host, known_hosts: str | None, scans: _Scans) -> Entry:
    """Fetches a host's keys. Raises UsageError or Unreachable."""
    if host.host_key is not None:
        raise UsageError(
            "the inventory already has a host_key for it",
            host=host.name,
            hint=f"change or remove host_key in [hosts.{host.name}]",
        )
    settings = {keyword: values[0] for keyword, values in ssh_config.settings(host).items()}
    if "hostname" not in settings:
        raise UsageError("ssh is not installed", host=host.name, hint="install OpenSSH")
    address, port = settings["hostname"], settings["port"]
    if {settings.get("proxyjump", "none"), settings.get("proxycommand", "none"), host.jump or "none"} != {"none"}:
        way = f"-J {host.jump} " if host.jump else ""
        raise UsageError(
            "its key cannot be fetched through a jump host",
            host=host.name,
            hint=f"let ssh ask: ssh {way}-o StrictHostKeyChecking=ask -p {port} {host.destination} true",
        )
    keys = scans.keys(address, port)
    if not keys:
        raise Unreachable(
            f"no host key from {address}:{port}", host=host.name, hint=f"is it up? ssh -p {port} {address}"
        )
    place = address if port == "22" else f"[{address}]:{port}"
    # ssh prints several files in one line, unquoted: each begins with a slash or a tilde.
    file = known_hosts or re.split(r" (?=[/~])", settings["userknownhostsfile"])[0]
    place_of_record = Path(file).expanduser().resolve()
    _check_regular(place_of_record)
    return Entry(
        host=host,
        address=f"{address}:{port}",
        name=settings.get("hostkeyalias", place),
        keys=keys,
        file=place_of_record,
    )


def _is_known(entry: Entry, *, replace: bool) -> bool:
    """Whether the keys are recorded already. Raises HostKeyRefused if others are, unless they are to be replaced."""
    known = _known(entry)
    same = known.intersection(entry.keys)
    kinds = {key.kind for key in known}
    changed = not same or any(key.kind in kinds for key in set(entry.keys) - known)
    if not known or (changed and replace):
        return False
    if changed:
        raise HostKeyRefused(
            f"its host key differs from the one in {entry.file}: it was reinstalled, or another machine answers",
            host=entry.host.name,
            hint=f"if that is expected: skyfab trust --hosts={entry.host.name} --replace",
        )
    print(f"{entry.host.name}: already recorded in {entry.file}")
    return True


def _agreed(entries: list[Entry], *, yes: bool) -> bool:
    """Shows the keys and asks the user, unless `yes`."""
    for entry in entries:
        print(f"{entry.host.name} ({entry.address}) presents these keys:")
        for key in entry.keys:
            print(f"  {key.kind:<20} {key.fingerprint}")
    if yes:
        return True
    if not sys.stdin.isatty():
        raise UsageError(
            "no terminal to confirm at", hint="compare the fingerprints, then repeat the command with --yes"
        )
    return answer(f"record them in {entries[0].file}? [y/N] ").lower() in ("y", "yes")


def _known(entry: Entry) -> set[Key]:
    """The recorded keys; ssh-keygen also finds them in hashed lines."""
    return set(_keys(_run("ssh-keygen", "-F", entry.name, "-f", str(entry.file)))) if entry.file.exists() else set()


def _record(entry: Entry) -> None:
    """Replaces the recorded keys of a host atomically: a reader sees the old file or the new one."""
    lines = "".join(f"{entry.name} {key.kind} {key.content}\n" for key in entry.keys).encode()
    with alone(str(entry.file)), _draft(entry.file) as draft:
        _run("ssh-keygen", "-R", entry.name, "-f", str(draft))
        old = draft.read_bytes()
        draft.write_bytes(old + (b"\n" if old and not old.endswith(b"\n") else b"") + lines)
    print(f"{entry.host.name}: recorded in {entry.file}")


@contextmanager
def _draft(file: Path) -> Iterator[Path]:
    """A private copy (mode 600) to work on, which replaces the file at the end."""
    _check_regular(file)
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=file.parent, prefix=".skyfab-") as folder:
            draft = Path(folder, file.name)
            draft.write_bytes(file.read_bytes() if file.exists() else b"")
            draft.chmod(0o600)
            yield draft
            draft.replace(file)
    except OSError as error:
        raise UsageError(f"cannot write {file}: {error.strerror}", hint="choose another: --known-hosts=FILE") from None


def _check_regular(file: Path) -> None:
    """Raises UsageError for a path that must not be replaced by a file, such as /dev/null."""
    if file.exists() and not file.is_file():
        raise UsageError(
            f"host keys cannot be recorded in {file}: not a regular file",
            hint="it is the UserKnownHostsFile of ssh_config; choose another: --known-hosts=FILE",
        )


def _keys(text: str) -> Iterator[Key]:
    """The keys in lines of known_hosts."""
    for line in text.splitlines():
        words = line.split()
        if len(words) >= 3 and not line.startswith(("#", "@")):
            yield Key(words[1], words[2])


def _run(*argv: str) -> str:
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
    return done.stdout
