"""Fetches host keys, shows their fingerprints, and records them in known_hosts: for `skyfab trust`."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from skyfab.errors import HostKeyRefused, SkyfabError, Unreachable, UsageError
from skyfab.inventory import ssh_config
from skyfab.inventory.host import Host
from skyfab.session.fanout import Raised, for_each_host, one_error, results_of
from skyfab.ui.prompt import answer

_TIMEOUT: Final = 5
"""Timeout in seconds for fetching a host's keys."""


@dataclass(slots=True, kw_only=True)
class Entry:
    """Where a host's keys are fetched, and where they are recorded."""

    host: Host
    address: str
    port: str
    name: str
    """In known_hosts."""
    file: Path
    keys: frozenset[str] = frozenset()
    """Those that the host presents, each as "kind content"."""


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
    _fetch_keys(entries)
    new: list[Entry] = []
    for entry in entries:
        try:
            if not _is_known(entry, replace=replace):
                new.append(entry)
        except SkyfabError as error:
            failures.append(error)
    agreed = not new or _agreed(new, yes=yes)
    for entry in new if agreed else ():
        _record(entry)
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
    if {settings.get("proxyjump", "none"), settings.get("proxycommand", "none"), host.jump or "none"} != {"none"}:
        way = f"-J {host.jump} " if host.jump else ""
        way += f"-p {host.port} " if host.port else ""
        raise UsageError(
            "its key cannot be fetched through a jump host",
            host=host.name,
            hint=f"let ssh ask: ssh {way}-o StrictHostKeyChecking=ask {host.destination} true",
        )
    address, port = settings["hostname"], settings["port"]
    # ssh prints several files in one line, unquoted: each begins with a slash or a tilde.
    path = known_hosts or re.split(r" (?=[/~])", settings["userknownhostsfile"])[0]
    file = Path(path).expanduser().resolve()
    if path == "none" or (file.exists() and not file.is_file()):  # /dev/null
        raise UsageError(
            f"host keys cannot be recorded in {path}: not a regular file",
            hint="it is the UserKnownHostsFile of ssh_config; choose another: --known-hosts=FILE",
        )
    name = settings.get("hostkeyalias", address if port == "22" else f"[{address}]:{port}")
    return Entry(host=host, address=address, port=port, name=name, file=file)


def _fetch_keys(entries: Sequence[Entry]) -> None:
    """Asks each address once, also if several aliases lead to it: an sshd drops connections if many begin at once."""
    places = list({(one.address, one.port) for one in entries})
    scan = ("ssh-keyscan", "-T", str(_TIMEOUT), "-p")
    found = for_each_host(lambda place: _keys(*scan, place[1], "--", place[0]), places)
    keys = dict(zip(places, results_of(found), strict=True))
    for one in entries:
        one.keys = keys[one.address, one.port]


def _is_known(entry: Entry, *, replace: bool) -> bool:
    """Whether the keys are recorded already. Raises HostKeyRefused if others are, unless they are to be replaced."""
    if not entry.keys:
        raise Unreachable(
            f"no host key from {entry.address}:{entry.port}",
            host=entry.host.name,
            hint=f"is it up? ssh -p {entry.port} {entry.address}",
        )
    known = _known(entry)
    kinds = {key.split()[0] for key in known}
    changed = not known & entry.keys or any(key.split()[0] in kinds for key in entry.keys - known)
    if not known or (changed and replace):
        return False
    if changed:
        raise HostKeyRefused(
            f"its host key differs from the one in {entry.file}: the host was reinstalled, or this is another machine",
            host=entry.host.name,
            hint=f"if that is expected: skyfab trust --hosts={entry.host.name} --replace",
        )
    print(f"{entry.host.name}: already recorded in {entry.file}")
    return True


def _agreed(entries: Sequence[Entry], *, yes: bool) -> bool:
    """Shows the fingerprints and asks the user, unless `yes`."""
    for entry in entries:
        print(f"{entry.host.name} ({entry.address}:{entry.port}) presents these keys:")
        text = "".join(f"{key} {entry.host.name}\n" for key in sorted(entry.keys))
        for line in _run("ssh-keygen", "-lf", "-", text=text).stdout.splitlines():
            print(f"  {line}")
    if yes:
        return True
    hint = "compare the fingerprints, then repeat the command with --yes"
    return answer(f"record them in {entries[0].file}? [y/N] ", hint).lower() in ("y", "yes")


def _known(entry: Entry) -> frozenset[str]:
    """The recorded keys, none without a file; ssh-keygen also finds them in hashed lines."""
    return _keys("ssh-keygen", "-F", entry.name, "-f", str(entry.file))


def _record(entry: Entry) -> None:
    """Removes the recorded keys of a host, and appends the new ones in a single write."""
    try:
        entry.file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if _known(entry) and (done := _run("ssh-keygen", "-R", entry.name, "-f", str(entry.file))).returncode:
            raise UsageError(f"cannot remove the old key from {entry.file}: {done.stderr.strip()}")
        has_end = not entry.file.exists() or entry.file.read_bytes()[-1:] in (b"", b"\n")
        with os.fdopen(os.open(entry.file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "w") as file:
            file.write(("" if has_end else "\n") + "".join(f"{entry.name} {key}\n" for key in sorted(entry.keys)))
    except OSError as error:
        raise UsageError(
            f"cannot write {entry.file}: {error.strerror}", hint="choose another: --known-hosts=FILE"
        ) from None
    print(f"{entry.host.name}: recorded in {entry.file}")


def _keys(*argv: str) -> frozenset[str]:
    """The keys in the lines of known_hosts that a program prints."""
    lines = [line.split() for line in _run(*argv).stdout.splitlines() if not line.startswith(("#", "@"))]
    return frozenset(f"{words[1]} {words[2]}" for words in lines if len(words) >= 3)


def _run(*argv: str, text: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, input=text, capture_output=True, text=True, errors="replace")
