"""The selection syntax for hosts: ``gpu,node[1-4],web*,!node3,ada@10.0.0.5:2222``."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

from skyfab._util import brackets
from skyfab._util.suggest import did_you_mean
from skyfab.errors import UnknownHost, UsageError
from skyfab.inventory.host import LOCAL, Address, Host

MOST = 10_000
"""The most hosts that one range may expand to. More is a typing error, not a cluster."""

_SPAN = r"[0-9]{1,9}(?:-[0-9]{1,9})?"
_RANGE = re.compile(rf"\[({_SPAN}(?:,{_SPAN})*)\]")
_ALMOST = re.compile(r"\[[0-9,\s-]*\]")


def split(text: str) -> list[str]:
    """The words of a selection: separated by commas, except inside brackets."""
    return [word.strip() for word in brackets.split(text, "[]") if word.strip()]


def expand(word: str) -> list[str]:
    """Expands the ranges of a word. Raises UsageError for an invalid or too large range.

    >>> expand("node[08-10]")
    ['node08', 'node09', 'node10']
    """
    parts = _RANGE.split(word)
    if word.count("[") != word.count("]") or any(map(_ALMOST.search, parts[::2])):
        raise UsageError(f"invalid range in {word!r}", hint="write ranges as node[1-4] or node[01-10,12]")
    choices = [_count(part) if index % 2 else [part] for index, part in enumerate(parts)]
    if math.prod(map(len, choices)) > MOST:
        raise UsageError(f"{word!r} expands to more than {MOST} hosts", hint="check the numbers")
    return ["".join(choice) for choice in itertools.product(*choices)]


def _count(spans: str) -> list[str]:
    """The numbers of a range; of one that is too large, as many as `expand` needs to refuse it."""
    numbers: list[str] = []
    for span in spans.split(","):
        low, _, high = span.partition("-")
        size = int(high or low) - int(low) + 1
        if size < 1:
            raise UsageError(f"[{spans}] counts down", hint=f"write [{high}-{low}]")
        width = len(low) if low.startswith("0") else 0
        numbers += [str(int(low) + step).zfill(width) for step in range(min(size, MOST + 1))]
    return numbers


class Names:
    """Looks up what a word refers to: hosts, groups, tags, addresses and patterns.

    `others` gives names that only hints need.
    """

    def __init__(
        self,
        hosts: Mapping[str, Host],
        groups: Mapping[str, Sequence[str]],
        others: Callable[[], Iterable[str]] = tuple,
    ) -> None:
        self.hosts = hosts
        self.groups = groups
        self.others = others
        self._tagged: dict[str, list[Host]] = {}
        self._at: dict[tuple[str | None, int], list[Host]] = {}
        for host in hosts.values():
            self._at.setdefault((host.address, host.port or 22), []).append(host)
            for tag in host.tags:
                self._tagged.setdefault(tag, []).append(host)

    def find(self, word: str) -> list[Host] | None:
        """The hosts that a word refers to, in the inventory's order; None if nothing matches."""
        if word == "all":
            return list(self.hosts.values())
        if word in self.hosts or word == LOCAL.name:
            return [self._host(word)]
        if word in self.groups:
            return [self._host(name) for name in self.groups[word]]
        return self._tagged.get(word) or self._fitting(word) or None

    def _host(self, name: str) -> Host:
        """`local` exists even if the inventory does not have it."""
        return LOCAL if name == LOCAL.name and name not in self.hosts else self.hosts[name]

    def _fitting(self, word: str) -> list[Host]:
        """Hosts that match an address or pattern. A known host's address means that host, with its key and settings."""
        address = Address.parse(word)
        if address is not None:
            hosts = self._at.get((address.host, address.port or 22), [])
            return [host for host in hosts if address.user in (None, host.user)]
        if not any(character in word for character in "*?["):  # no pattern, and a range may have made thousands of it
            return []
        try:
            return [host for name, host in self.hosts.items() if fnmatchcase(name, word)]
        except re.error:  # [z-a], before Python 3.11
            return []

    def nearest(self, words: Sequence[str]) -> str:
        """A hint for words that match nothing: similar names, or else the known ones."""
        if any(" " in word for word in words):
            return "separate names with commas"
        known = list(dict.fromkeys([*self.hosts, *self.groups, *self._tagged, "all", LOCAL.name]))
        return did_you_mean(words[:5], [*known, *self.others()]) or f"known names: {some(known)}"


def place(host: Host) -> tuple[str, int, str | None, str]:
    """Identifies a machine or a container. Behind another jump host, the same address is another machine."""
    return host.destination.casefold(), host.port or 22, host.jump, host.inside


def choose(
    items: Iterable[str | Host],
    names: Names,
    stranger: Callable[[str], Host | None] = lambda word: None,
) -> dict[str, Host]:
    """The selected hosts by name, in order of mention.

    `stranger` returns a host for a word that matches nothing, or None.
    Raises `UnknownHost` with all unknown words at once, and `UsageError` for an invalid selection.
    """
    wanted, unwanted = _sort(items)
    unknown: list[str] = []
    chosen: dict[str, Host] = {}
    for item in wanted or (["all"] if unwanted else []):
        for host in [item] if isinstance(item, Host) else _look_up(item, names, stranger, unknown):
            if chosen.setdefault(host.name, host) != host:
                raise UsageError(f"two different hosts are called {host.name}", hint="rename one of them")
    seen = Names({**names.hosts, **chosen}, names.groups, names.others)
    # A typing error here would run things on hosts where they must not run: an exclusion that matches nothing is an
    # error, and !node1 excludes root@node1 too.
    excluded = {place(host) for word in unwanted for host in _look_up(word, seen, lambda word: None, unknown)}
    if unknown:
        words = some([f'"{word}"' for word in unknown])
        raise UnknownHost(f"no host, group or tag matches {words}", hint=seen.nearest(unknown))
    return {name: host for name, host in chosen.items() if place(host) not in excluded}


def _look_up(word: str, names: Names, stranger: Callable[[str], Host | None], unknown: list[str]) -> Iterator[Host]:
    """The hosts of one word; names that are not found are added to `unknown`. A container may follow: node1/dev."""
    word, _, container = word.removeprefix("ssh://").partition("/")
    for name in expand(word):
        found = names.find(name)
        if found is None and (host := stranger(name)) is not None:
            found = [host]
        if found is None:
            unknown.append(name)
        for host in found or ():
            yield host.in_container(container) if container else host


def _sort(items: Iterable[str | Host]) -> tuple[list[str | Host], list[str]]:
    """Splits items into the wanted ones and the excluded ones, which follow a ``!``."""
    wanted: list[str | Host] = []
    unwanted: list[str] = []
    for item in items:
        if isinstance(item, Host):
            wanted.append(item)
        elif isinstance(item, str):
            for word in split(item):
                if word.startswith("!"):
                    unwanted.append(word[1:].strip())
                else:
                    wanted.append(word)
        else:
            raise UsageError(f"not a host selection: {item!r}", hint='names, as in "node1,node2" or ["node1", "node2"]')
    return wanted, unwanted


def some(words: Sequence[str], most: int = 5) -> str:
    """The first few words of a list, for messages."""
    shown = [word if word.isprintable() and word else repr(word) for word in words[:most]]
    rest = len(words) - len(shown)
    return ", ".join(shown) + (f" and {rest} more" if rest else "")
