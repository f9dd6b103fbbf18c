"""Aliases of ssh_config, with what ``ssh -G`` says about them, and the names of hosts in known_hosts."""

from __future__ import annotations

import glob
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

from skyfab._util.suggest import did_you_mean
from skyfab.errors import InventoryError
from skyfab.inventory.builder import Listing
from skyfab.inventory.file import RESERVED, SPELLING
from skyfab.inventory.host import NAME, Address, Host, expanded
from skyfab.inventory.selection import some
from skyfab.inventory.source import Contents, Source, lines_of, read_text

CONFIG: Final = "SKYFAB_SSH_CONFIG"
"""The environment variable with the path of a file to use instead of the user's ssh_config."""
_USERS: Final = "~/.ssh/config"
_SYSTEMS: Final = "/etc/ssh/ssh_config"
_ACCOUNT: Final = ("hostname", "port", "user", "proxyjump", "proxycommand")
"""What is equal for two aliases of the same account on the same machine."""
_LINE: Final = re.compile(r'\s*"?([a-z]+)"?(?:\s*=\s*|\s+)(.*)', re.IGNORECASE)
_KNOWN_HOSTS: Final = "~/.ssh/known_hosts"
_SERVICES: Final = re.compile(
    r"(.*\.)?(github|gitlab|bitbucket|codeberg|sr|azure|visualstudio)\.(com|org|ht)|.*\.hf\.co"
)
"""They take keys, and run no programs."""

Settings = dict[str, list[str]]
"""Values by keyword, in lower case."""


def read(pattern: str = "") -> Contents:
    """The aliases that match `pattern`, which is a list as in a Host line, with commas; empty for all.

    A host has the alias as its name and no address: ssh resolves it. Raises InventoryError if ssh rejects its
    configuration, or if nothing matches.
    """
    listing = Listing(str(expanded(os.environ.get(CONFIG) or _USERS)))
    known = _aliases()
    words = [word.strip() for word in pattern.split(",") if word.strip()]
    names = [name for name in known if _matches(name, words)]
    usable = [name for name in names if NAME.fullmatch(name) and name not in RESERVED]
    from concurrent.futures import ThreadPoolExecutor  # imported late: few programs read aliases

    with ThreadPoolExecutor(8) as threads:
        found = dict(zip(usable, threads.map(lambda name: settings(Host(name=name)), usable), strict=True))
    taken: dict[object, str] = {}
    """The first alias of each account."""
    for name in names:
        if name not in found:
            reason = "reserved in selections" if name in RESERVED else f"not a valid host name: {SPELLING}"
            listing.left_out[name] = reason
        elif found[name].get("user") == ["git"]:
            listing.left_out[name] = '"User git" is a Git server'
        elif loop := loop_of(name, found):
            listing.left_out[name] = f"its jump hosts form a loop: {' → '.join(loop)}"
        elif (first := taken.setdefault(_account(name, found[name]), name)) != name:
            listing.left_out[name] = f"same login as {first}"
        else:
            listing.add(name, listing.source, {})
    return listing.read(did_you_mean(words, known) or _hint(known))


def aliases() -> frozenset[str]:
    """All aliases; none if ssh_config is not readable."""
    try:
        return frozenset(_aliases())
    except InventoryError:
        return frozenset()


def settings(host: Host, config: str | os.PathLike[str] | None = None) -> Settings:
    """What ssh would use for a host, ssh_config included (``ssh -G``). Empty if there is no ssh.

    `config` is another file than the user's. Raises InventoryError if ssh rejects the file.
    """
    if shutil.which("ssh") is None:
        return {}
    config = config or os.environ.get(CONFIG)
    words = ["ssh", "-G", *(["-F", os.fspath(config)] if config else [])]
    words += [*(["-p", str(host.port)] if host.port else []), "--", host.destination]
    done = subprocess.run(words, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL)
    if "jumphost loop" in done.stderr:  # ssh refuses a host that is its own jump host
        return {"proxyjump": [host.destination]}
    if done.returncode != 0:
        reason = next(iter(done.stderr.splitlines()), "no reason given")
        raise InventoryError(f"ssh rejects its configuration: {reason}", hint=f"ssh -G {host.destination}")
    found: Settings = {}
    for line in done.stdout.splitlines():
        keyword, _, value = line.partition(" ")
        found.setdefault(keyword, []).append(value)
    return found


def known_settings(host: Host) -> Settings:
    """As `settings`; empty too if ssh rejects the file."""
    try:
        return settings(host)
    except InventoryError:
        return {}


def names_keyword(keyword: str) -> bool:
    """Whether ssh_config has a line with this keyword, in lower case, for any host."""
    try:
        return any(found == keyword for found, _ in _lines())
    except InventoryError:  # it is not readable
        return False


def loop_of(name: str, known: Mapping[str, Settings]) -> list[str]:
    """The hosts that an alias is reached through, if their ProxyJump lines need each other; else empty.

    Follows first jump hosts, which ssh looks up; it reaches the others through them. `known` has settings of some.
    """
    way: list[str] = []
    while name not in way:
        way.append(name)
        host = Host.ad_hoc(name)
        found = known.get(name) or ({} if host is None else known_settings(host))
        (jump,) = found.get("proxyjump", ["none"])
        address = None if jump == "none" else Address.parse(jump.split(",")[0].removeprefix("ssh://"))
        if address is None:
            return []
        name = address.host
    return [*way, name]


def _account(name: str, found: Settings) -> object:
    """The same for aliases of the same account on the same machine; an alias whose settings contain it is its own."""
    values = [tuple(found.get(keyword, ())) for keyword in _ACCOUNT]
    return name if not found or any("%n" in value for each in values for value in each) else tuple(values)


def _hint(known: Sequence[str]) -> str:
    return f"its aliases are {some(known)}" if known else f"add lines to {_USERS}: Host node1, HostName 10.0.0.11"


def known_hosts(path: str | os.PathLike[str] = _KNOWN_HOSTS) -> list[str]:
    """One name for each host, as ``node1`` or ``10.0.0.5:2222``, in the order of the file. None without a file.

    Hashed names cannot be read.
    """
    try:
        entries = [line.split() for line in lines_of(read_text(expanded(os.fspath(path))))]
    except InventoryError:
        return []
    first = [words[0].split(",")[0] for words in entries if len(words) >= 3 and not words[0].startswith(("#", "@"))]
    found = dict.fromkeys(re.sub(r"^\[(.+)\]:([0-9]+)$", _with_port, name) for name in first)
    return [name for name in found if Address.parse(name) is not None and not _SERVICES.fullmatch(name)]


def _with_port(match: re.Match[str]) -> str:
    host = f"[{match[1]}]" if ":" in match[1] else match[1]
    return f"{host}:{match[2]}"


# ---- its lines


def _aliases() -> list[str]:
    """The names in Host lines."""
    found: dict[str, None] = {}
    for keyword, words in _lines():
        if keyword == "host":
            unwanted = [word[1:] for word in words if word.startswith("!")]
            names = (word for word in words if not set("*?!") & {*word} and not _matches_any(word, unwanted))
            found.update(dict.fromkeys(names))
    return list(found)


def _lines() -> Iterator[tuple[str, list[str]]]:
    """Keywords, in lower case, and their words: of the user's and the system's file, or of another one."""
    config = os.environ.get(CONFIG)
    files = [expanded(config)] if config else [expanded(_USERS), Path(_SYSTEMS)]
    for file in files:
        if config or file.exists():
            base = file.parent if file == Path(_SYSTEMS) else expanded("~/.ssh")
            yield from _lines_of(read_text(file, strict=False), base, {file.resolve()})


def _lines_of(text: str, base: Path, seen: set[Path]) -> Iterator[tuple[str, list[str]]]:
    """Those of included files too. `base` is the folder of relative includes, `seen` are the files that were read.

    Leaves mistakes to ssh.
    """
    for line in lines_of(text):
        match = _LINE.match(line)
        try:
            words = shlex.split(re.sub(r"(^|\s)#.*", "", match[2])) if match else []
        except ValueError:  # a quote does not end
            continue
        if match and match[1].lower() != "include":
            yield match[1].lower(), words
            continue
        for path in (path for word in words for path in _included(word, base)):
            if path.is_file() and path.resolve() not in seen:
                seen.add(path.resolve())
                yield from _lines_of(read_text(path, strict=False), base, seen)


def _included(word: str, base: Path) -> list[Path]:
    """The files that an Include means."""
    home = str(expanded("~"))
    text = re.sub(r"%([d%])", lambda match: home if match[1] == "d" else "%", word)
    text = re.sub(r"\$\{(\w+)\}", lambda match: os.environ.get(match[1], ""), text)
    found = glob.iglob(str(Path(base, expanded(text))))  # noqa: PTH207 - pathlib takes no absolute patterns
    return [Path(path) for path in sorted(found)]


def _matches(name: str, words: Sequence[str]) -> bool:
    """Whether a name matches a list of patterns; ``!`` excludes, and a list of exclusions is about all names."""
    unwanted = [word[1:] for word in words if word.startswith("!")]
    wanted = [word for word in words if not word.startswith("!")]
    return _matches_any(name, wanted or ["*"]) and not _matches_any(name, unwanted)


def _matches_any(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern.replace("[", "[[]")) for pattern in patterns)


SOURCE = Source(word="ssh_config", takes="pattern", read=read)
