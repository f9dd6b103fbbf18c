"""Fetches host keys, shows their fingerprints, and records them in known_hosts: for `skyfab trust`."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from skyfab.errors import HostKeyRefused, SkyfabError, Unreachable, UsageError
from skyfab.inventory import ssh_config
from skyfab.inventory.host import Host
from skyfab.session.fanout import Raised, for_each_host, one_error
from skyfab.ui.prompt import answer

_TIMEOUT: Final = 5
"""Timeout in seconds for fetching a host's keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Where a host's keys are fetched, and where they are recorded."""

    host: Host
    address: str
    port: str
    place: str
    """Both, as ssh-keyscan prints them."""
    name: str
    """In known_hosts."""
    file: Path


def record(hosts: Sequence[Host], *, known_hosts: str | None, replace: bool, yes: bool) -> bool:
    """Fetches the hosts' keys, shows them and records them; returns whether the user agreed.

    Raises a HostError or PoolError for hosts whose keys cannot be recorded, after the others are recorded.
    """
    for program in ("ssh", "ssh-keyscan", "ssh-keygen"):
        if shutil.which(program) is None:
            raise UsageError(f"{program} is not installed on this machine", hint="install the package openssh-client")
    found = for_each_host(lambda host: _entry(host, known_hosts), hosts)
    failures: list[BaseException] = [one.error for one in found if isinstance(one, Raised)]
    entries = [one for one in found if not isinstance(one, Raised)]
    keys = _fetched(entries)
    new: list[Entry] = []
    for entry in entries:
        try:
            if not _is_known(entry, keys.get(entry.place, set()), replace=replace):
                new.append(entry)
        except SkyfabError as error:
            failures.append(error)
    agreed = not new or _agreed(new, keys, yes=yes)
    for entry in new if agreed else ():
        _record(entry, keys[entry.place])
    if failures:
        raise one_error(failures, len(hosts))
    return agreed


def _entry(host: Host, known_hosts: str | None) -> Entry:
    """Raises UsageError for a host whose keys cannot be fetched or recorded."""
    if host.host_key is not None:
        raise UsageError(
            "the inventory already has a host_key for it",
            host=host.name,
            hint=f"change or remove host_key in [hosts.{host.name}]",
        )
    settings = {keyword: values[0] for keyword, values in ssh_config.settings(host).items()}
    address, port = settings["hostname"], settings["port"]
    if {settings.get("proxyjump", "none"), settings.get("proxycommand", "none"), host.jump or "none"} != {"none"}:
        way = f"-J {host.jump} " if host.jump else ""
        raise UsageError(
            "its key cannot be fetched through a jump host",
            host=host.name,
            hint=f"let ssh ask: ssh {way}-o StrictHostKeyChecking=ask -p {port} {host.destination} true",
        )
    # ssh prints several files in one line, unquoted: each begins with a slash or a tilde.
    path = known_hosts or re.split(r" (?=[/~])", settings["userknownhostsfile"])[0]
    file = Path(path).expanduser().resolve()
    if file.exists() and not file.is_file():  # such as /dev/null
        raise UsageError(
            f"host keys cannot be recorded in {file}: not a regular file",
            hint="it is the UserKnownHostsFile of ssh_config; choose another: --known-hosts=FILE",
        )
    place = address if port == "22" else f"[{address}]:{port}"
    name = settings.get("hostkeyalias", place)
    return Entry(host=host, address=address, port=port, place=place, name=name, file=file)


def _fetched(entries: Sequence[Entry]) -> Mapping[str, set[str]]:
    """The keys of each place, as "kind content". Each place is asked once, also if several aliases lead to it."""
    addresses: dict[str, set[str]] = {}
    for entry in entries:
        addresses.setdefault(entry.port, set()).add(entry.address)

    def scan(port: str) -> str:
        return _run("ssh-keyscan", "-T", str(_TIMEOUT), "-p", port, "--", *sorted(addresses[port])).stdout

    with ThreadPoolExecutor(8) as threads:
        return _keys("".join(threads.map(scan, addresses)))


def _is_known(entry: Entry, keys: set[str], *, replace: bool) -> bool:
    """Whether the keys are recorded already. Raises HostKeyRefused if others are, unless they are to be replaced."""
    if not keys:
        raise Unreachable(
            f"no host key from {entry.address}:{entry.port}",
            host=entry.host.name,
            hint=f"is it up? ssh -p {entry.port} {entry.address}",
        )
    known = _known(entry)
    kinds = {key.split()[0] for key in known}
    changed = not known & keys or any(key.split()[0] in kinds for key in keys - known)
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


def _agreed(entries: Sequence[Entry], keys: Mapping[str, set[str]], *, yes: bool) -> bool:
    """Shows the fingerprints and asks the user, unless `yes`."""
    for entry in entries:
        print(f"{entry.host.name} ({entry.address}:{entry.port}) presents these keys:")
        text = "".join(f"{key} {entry.host.name}\n" for key in sorted(keys[entry.place]))
        for line in _run("ssh-keygen", "-lf", "-", text=text).stdout.splitlines():
            print(f"  {line}")
    if yes:
        return True
    if not sys.stdin.isatty():
        raise UsageError(
            "confirmation needs a terminal", hint="compare the fingerprints, then repeat the command with --yes"
        )
    return answer(f"record them in {entries[0].file}? [y/N] ").lower() in ("y", "yes")


def _known(entry: Entry) -> set[str]:
    """The recorded keys; ssh-keygen also finds them in hashed lines."""
    if not entry.file.exists():
        return set()
    found = _keys(_run("ssh-keygen", "-F", entry.name, "-f", str(entry.file)).stdout)
    return set().union(*found.values())


def _record(entry: Entry, keys: set[str]) -> None:
    """Removes the recorded keys of a host, and appends the new ones in a single write."""
    try:
        entry.file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if _known(entry) and (done := _run("ssh-keygen", "-R", entry.name, "-f", str(entry.file))).returncode:
            raise UsageError(f"cannot remove the old key from {entry.file}: {done.stderr.strip()}")
        has_end = not entry.file.exists() or entry.file.read_bytes()[-1:] in (b"", b"\n")
        with os.fdopen(os.open(entry.file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "w") as file:
            file.write(("" if has_end else "\n") + "".join(f"{entry.name} {key}\n" for key in sorted(keys)))
    except OSError as error:
        raise UsageError(
            f"cannot write {entry.file}: {error.strerror}", hint="choose another: --known-hosts=FILE"
        ) from None
    print(f"{entry.host.name}: recorded in {entry.file}")


def _keys(text: str) -> Mapping[str, set[str]]:
    """The keys in lines of known_hosts, by name."""
    found: dict[str, set[str]] = {}
    for line in text.splitlines():
        words = line.split()
        if len(words) >= 3 and not line.startswith(("#", "@")):
            found.setdefault(words[0], set()).add(f"{words[1]} {words[2]}")
    return found


def _run(*argv: str, text: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, input=text, capture_output=True, text=True, errors="replace")
