"""Recording host keys: `skyfab trust`."""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from skyfab.commands.fanout import load
from skyfab.errors import HostKeyRefused, PoolError, SkyfabError, Unreachable, UsageError
from skyfab.inventory import Host
from skyfab.transport.openssh import CONFIG

_PATIENCE: Final = 5
"""Seconds to wait for a host's keys."""


@dataclass(frozen=True, slots=True)
class Key:
    """A public host key."""

    kind: str
    content: str

    @property
    def fingerprint(self) -> str:
        """As ssh prints it."""
        digest = hashlib.sha256(base64.b64decode(self.content)).digest()
        return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What the host says its keys are, and what known_hosts would call it."""

    host: Host
    address: str
    name: str
    keys: tuple[Key, ...]
    file: Path


def trust(selection: str | None, inventory: str | None, *, known_hosts: str | None, replace: bool, yes: bool) -> int:
    """Fetches the selected hosts' keys, shows them and records them; returns 1 when somebody said no, else 0.

    Raises a HostError or PoolError for hosts whose keys are not to be had, after the others are recorded.
    """
    hosts = [host for host in load(inventory).select(selection) if host.transport != "local"]
    if not hosts:
        raise UsageError("only this machine is selected: it needs no host key", hint="name others: --hosts=…")
    for program in ("ssh", "ssh-keyscan", "ssh-keygen"):
        if shutil.which(program) is None:
            raise UsageError(f"{program} is not installed here", hint="it is in the package openssh-client")
    failures: list[Exception] = []
    declined = False
    with ThreadPoolExecutor(len(hosts)) as pool:
        for entry in [pool.submit(_fetch, host, known_hosts) for host in hosts]:
            try:
                declined |= not _settle(entry.result(), replace=replace, yes=yes)
            except SkyfabError as error:
                failures.append(error)
    if len(failures) == 1:
        raise failures[0]
    if failures:
        raise PoolError(f"{len(failures)} of {len(hosts)} hosts failed", failures)
    return int(declined)


def _fetch(host: Host, known_hosts: str | None) -> Entry:
    """Asks the host for its keys."""
    if host.host_key is not None:
        raise UsageError(
            "the inventory has its host key, and nothing else counts",
            host=host.name,
            hint=f"change host_key under [hosts.{host.name}], or leave it out",
        )
    settings = _settings(host)
    address, port = settings["hostname"], settings["port"]
    if {settings.get("proxyjump", "none"), settings.get("proxycommand", "none"), host.jump or "none"} != {"none"}:
        way = f"-J {host.jump} " if host.jump else ""
        raise UsageError(
            "it is reached through another host: its key cannot be fetched from here yet",
            host=host.name,
            hint=f"let ssh ask: ssh {way}-o StrictHostKeyChecking=ask -p {port} {host.destination} true",
        )
    said = _run("ssh-keyscan", "-T", str(_PATIENCE), "-p", port, "--", address)
    keys = tuple(_keys(said))
    if not keys:
        raise Unreachable(f"no host key from {address}:{port}", host=host.name, hint=f"is it up? ssh {host.login}")
    place = address if port == "22" else f"[{address}]:{port}"
    file = known_hosts or settings["userknownhostsfile"].split()[0]
    return Entry(
        host=host,
        address=f"{address}:{port}",
        name=settings.get("hostkeyalias", place),
        keys=keys,
        file=Path(file).expanduser().resolve(),
    )


def _settings(host: Host) -> dict[str, str]:
    """How ssh would reach the host, ssh_config and all."""
    words = ["ssh", "-G"]
    if config := os.environ.get(CONFIG):
        words += ["-F", config]
    if host.port is not None:
        words += ["-p", str(host.port)]
    said = _run(*words, "--", host.destination)
    pairs = dict(line.split(" ", 1) for line in said.splitlines() if " " in line)
    if "hostname" not in pairs:
        raise UsageError("ssh cannot make sense of it", host=host.name, hint=f"try: ssh -G {host.destination}")
    return pairs


def _settle(entry: Entry, *, replace: bool, yes: bool) -> bool:
    """Records a host's keys if that is needed and wanted; whether they are on record now."""
    known = _known(entry)
    kinds = {key.kind: key for key in entry.keys}
    changed = any(key.kind in kinds and key != kinds[key.kind] for key in known)
    if not changed and known & set(entry.keys):
        print(f"{entry.host.name}: already on record in {entry.file}")
        return True
    if changed and not replace:
        raise HostKeyRefused(
            f"its host key is not the one in {entry.file}: the machine was set up anew, or somebody is in between",
            host=entry.host.name,
            hint=f"if that is right, skyfab trust --hosts={entry.host.name} --replace",
        )
    print(f"{entry.host.name} ({entry.address}) says that its host keys are")
    for key in entry.keys:
        print(f"  {key.kind:<20} {key.fingerprint}")
    if not yes and not _agreed(f"record them in {entry.file}? [y/N] "):
        return False
    _record(entry, replace=changed)
    print(f"{entry.host.name}: recorded in {entry.file}")
    return True


def _agreed(question: str) -> bool:
    if not sys.stdin.isatty():
        raise UsageError("nobody is here to agree", hint="compare the fingerprints, then type it again with --yes")
    return input(question).strip().lower() in ("y", "yes")


def _known(entry: Entry) -> set[Key]:
    """The keys on record; ssh-keygen finds them in hashed lines too."""
    return set(_keys(_run("ssh-keygen", "-F", entry.name, "-f", str(entry.file)))) if entry.file.exists() else set()


def _record(entry: Entry, *, replace: bool) -> None:
    """Adds the keys, in one step: a reader sees the old file or the new one."""
    lines = "".join(f"{entry.name} {key.kind} {key.content}\n" for key in entry.keys)
    with _draft(entry.file) as draft:
        if replace:
            _run("ssh-keygen", "-R", entry.name, "-f", str(draft))
        old = draft.read_text()
        draft.write_text(old + ("\n" if old and not old.endswith("\n") else "") + lines)


@contextmanager
def _draft(file: Path) -> Iterator[Path]:
    """A copy to work on, for this user's eyes only, that takes the file's place at the end."""
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=file.parent, prefix=".skyfab-") as folder:
            draft = Path(folder, file.name)
            draft.write_bytes(file.read_bytes() if file.exists() else b"")
            draft.chmod(0o600)
            yield draft
            draft.replace(file)
    except OSError as error:
        raise UsageError(f"{file} cannot be written: {error.strerror}", hint="name another: --known-hosts=…") from None


def _keys(text: str) -> Iterator[Key]:
    """The keys in lines of known_hosts."""
    for line in text.splitlines():
        words = line.split()
        if len(words) >= 3 and not line.startswith(("#", "@")):
            yield Key(words[1], words[2])


def _run(*argv: str) -> str:
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
    return done.stdout
