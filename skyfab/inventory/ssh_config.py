"""Reads the aliases of ssh_config: the names in its Host lines, with those of the files that it includes.

What an alias means is left to ssh, which is given its name.
"""

from __future__ import annotations

import glob
import itertools
import os
import re
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

from skyfab._util.suggest import did_you_mean
from skyfab.errors import InventoryError
from skyfab.inventory.builder import Listing
from skyfab.inventory.file import RESERVED, SPELLING
from skyfab.inventory.host import NAME, Address, expanded
from skyfab.inventory.selection import some
from skyfab.inventory.source import Contents, Source
from skyfab.inventory.text import lines_of, read_text

CONFIG: Final = "SKYFAB_SSH_CONFIG"
"""The environment variable with the path of a file to use instead of the user's ssh_config."""
_USERS: Final = "~/.ssh/config"
_SYSTEMS: Final = "/etc/ssh/ssh_config"
_DEEPEST: Final = 16
"""How many files may include each other; the same as for ssh."""
_MOST_FILES: Final = 1000
_MOST_WORDS: Final = 1000
"""On one line."""

_ACCOUNT: Final = ("port", "user", "proxyjump", "proxycommand")
"""With the address, what tells whether two aliases are the same account of the same machine."""
_MOST_COMPARED: Final = 500
"""Addresses are not compared where there are more aliases: each may depend on every line."""
_LINE: Final = re.compile(r'"?([A-Za-z0-9]+)"?(?:[ \t]*=[ \t]*|[ \t]+|$)(.*)')
_QUOTED: Final = r""""((?:\\.|[^"\\])*)"|'((?:\\.|[^'\\])*)'"""
_WORD: Final = re.compile(rf"""[ \t]*(#.*|(?:{_QUOTED}|\\.|\\$|[^ \t"'\\])+)""")
_ESCAPED: Final = re.compile(rf"{_QUOTED}|\\([\"'\\ ])")


def read(pattern: str = "*", path: str | os.PathLike[str] | None = None) -> Contents:
    """The aliases that `pattern` fits, which is a list as in a Host line, with commas. Raises InventoryError."""
    reader = _read(path)
    listing = reader.listing
    words = [word.strip() for word in pattern.split(",") if word.strip()]
    patterns = _Patterns(words if any(not word.startswith("!") for word in words) else ["*", *words])
    taken: dict[object, str] = {}
    """The first alias of each account."""
    for name, at in reader.aliases.items():
        if not patterns.fit(name):
            continue
        if not NAME.fullmatch(name):
            listing.left_out[name] = f"not a valid host name: {SPELLING}"
        elif name in RESERVED:
            listing.left_out[name] = "reserved in selections"
        elif reader.user_of(name) == "git":
            listing.left_out[name] = '"User git" is a Git server'
        elif circle := reader.circle_of(name):
            listing.left_out[name] = f"its jump hosts form a loop: {' → '.join(circle)}"
        elif (first := taken.setdefault(reader.account_of(name), name)) != name:
            listing.left_out[name] = f"same login as {first}"
        else:
            listing.add(name, at, {})
    return listing.read(did_you_mean(words, reader.aliases) or _hint(reader))


def aliases() -> frozenset[str]:
    """All aliases; none if ssh_config has mistakes, which ssh tells."""
    try:
        return frozenset(_read(None).aliases)
    except InventoryError:
        return frozenset()


def circle_of(name: str) -> list[str]:
    """The hosts that an alias is reached through, if their ProxyJump lines need each other; else empty."""
    try:
        return _read(None).circle_of(name)
    except InventoryError:
        return []


def _hint(reader: _Reader) -> str:
    names = list(reader.aliases)
    return f"its aliases are {some(names)}" if names else f"add lines to {_USERS}: Host node1, HostName 10.0.0.11"


def _read(path: str | os.PathLike[str] | None) -> _Reader:
    named = path or os.environ.get(CONFIG)
    files = [expanded(os.fspath(named))] if named else [expanded(_USERS), Path(_SYSTEMS)]
    reader = _Reader(Listing(str(files[0])))
    for file in files:
        if named or os.path.lexists(file):
            reader.read(file, expanded("~/.ssh") if file != Path(_SYSTEMS) else file.parent, (), ())
    return reader


class _Reader:
    def __init__(self, listing: Listing) -> None:
        self.listing = listing
        self.aliases: dict[str, str] = {}
        """Where each alias is."""
        self._values: dict[str, list[tuple[tuple[_Patterns, ...], str]]] = {
            keyword: [] for keyword in ("hostname", *_ACCOUNT)
        }
        """The conditions and the value of each line with such a keyword."""
        self._has_match = False
        """There are such lines whose conditions are left to ssh."""
        self._files = 0

    def user_of(self, name: str) -> str | None:
        """The user that an alias logs in as, as far as Host lines say it."""
        if all(user != "git" for _, user in self._values["user"]):  # the only one that matters here
            return None
        return self._value("user", name)

    def account_of(self, name: str) -> object:
        """The same for aliases that are the same account of the same machine, reached in the same way.

        Where Host lines do not say it, each alias is taken for an account of its own.
        """
        if self._has_match or len(self.aliases) > _MOST_COMPARED:
            return name
        values = {keyword: self._value(keyword, name) for keyword in self._values}
        if any("%" in (value or "") for value in values.values()):
            return name
        values["hostname"] = (values["hostname"] or name).lower()
        values["port"] = values["port"] or "22"
        return tuple(None if value is None or value.lower() == "none" else value for value in values.values())

    def circle_of(self, name: str) -> list[str]:
        """The hosts that an alias is reached through, if they need each other; empty if they do not.

        ssh would start one process after another. It looks up its first jump host; others are reached through that.
        """
        way: list[str] = []
        while name not in way:
            way.append(name)
            jump = self._value("proxyjump", name)
            if jump is None or jump.lower() == "none":
                return []
            address = Address.parse(jump.split(",")[0].removeprefix("ssh://"))
            if address is None:
                return []
            name = address.host
        return [*way, name]

    def _value(self, keyword: str, name: str) -> str | None:
        values = self._values[keyword]
        return next((value for hosts, value in values if all(patterns.fit(name) for patterns in hosts)), None)

    def read(self, path: Path, base: Path, outer: tuple[_Patterns, ...], above: tuple[str, ...]) -> None:
        """Reads a file: `base` is the folder of relative includes, `outer` are the Host lines above an Include."""
        here = os.path.realpath(path)
        self._files += 1
        if self._files > _MOST_FILES:
            raise InventoryError(f"{self.listing.source}: includes more than {_MOST_FILES} files", hint="see: ssh -G x")
        note = self.listing.mistakes.note
        active: tuple[_Patterns, ...] | None = outer
        for number, line in enumerate(lines_of(read_text(path, strict=False)), 1):
            at = f"{path}:{number}"
            try:
                keyword, words = _words(line)
            except ValueError as error:
                note(at, str(error), "quotes come in pairs, and a line is a keyword and its values")
                continue
            if keyword in ("host", "include", "match") and not 0 < len(words) <= _MOST_WORDS:
                what = f"has more than {_MOST_WORDS} words" if words else "has no value"
                note(at, f"{keyword.title()} {what}", "write what it is for, or take it out")
            elif keyword == "host":
                active = (*outer, _Patterns(words))
                for word in words:
                    if not _is_pattern(word) and all(patterns.fit(word) for patterns in active):
                        self.aliases.setdefault(word, at)
                self.listing.limit(len(self.aliases))
            elif keyword == "match":
                active = outer if [word.lower() for word in words] == ["all"] else None
            elif keyword in self._values and words and active is not None:
                self._values[keyword].append((active, " ".join(words)))
            elif keyword in self._values and words:
                self._has_match = True
            elif keyword == "include":
                self._has_match |= active is None
                for word in words:
                    self._include(word, at, base, outer if active is None else active, (*above, here))

    def _include(self, word: str, at: str, base: Path, outer: tuple[_Patterns, ...], above: tuple[str, ...]) -> None:
        note = self.listing.mistakes.note
        for path in _included(word, base):
            if os.path.realpath(path) in above:
                note(at, f"includes itself: {path}", "take one of the Include lines out")
            elif len(above) > _DEEPEST:
                note(at, f"is the {len(above)}th file that is included by another", f"ssh takes {_DEEPEST}")
            elif not path.is_file():
                note(at, f"includes what is no file: {path}", "name a file, or a pattern for files")
            else:
                try:
                    self.read(path, base, outer, above)
                except InventoryError as error:
                    note(at, f"includes {error.message}", error.hint)


def _included(word: str, base: Path) -> Iterator[Path]:
    """The files that an Include means; like ssh, none where there is no such file."""
    home = str(expanded("~"))
    text = re.sub(r"%([d%])", lambda match: home if match[1] == "d" else "%", word)
    text = re.sub(r"\$\{(\w+)\}", lambda match: os.environ.get(match[1], ""), text)
    found = glob.iglob(str(Path(base, expanded(text))))  # noqa: PTH207 - pathlib takes no absolute patterns
    return map(Path, sorted(itertools.islice(found, _MOST_FILES)))


def _words(line: str) -> tuple[str, list[str]]:
    """The keyword, in lower case, and the words after it; empty for a comment. Raises ValueError."""
    text = line.strip(" \t\f\r")
    if not text or text.startswith("#"):
        return "", []
    match = _LINE.fullmatch(text)
    if match is None:
        raise ValueError("is no line of ssh_config")
    keyword, rest = match[1].lower(), match[2]
    words, at = list[str](), 0
    while at < len(rest):
        found = _WORD.match(rest, at)
        if found is None:
            raise ValueError("has a quote that does not end")
        if found[1].startswith("#"):
            break
        words.append(_ESCAPED.sub(lambda part: part[1] or part[2] or part[3] or "", found[1]))
        at = found.end()
    return keyword, words


class _Patterns:
    """A list of patterns, as ssh has them: ``*`` and ``?``, and ``!`` before what must not fit."""

    def __init__(self, words: Iterable[str]) -> None:
        plain, self._wild, self._not = set[str](), list[str](), list[str]()
        for word in words:
            if word.startswith("!"):
                self._not.append(word[1:])
            elif _is_pattern(word):
                self._wild.append(word)
            else:
                plain.add(word)
        self._plain = frozenset(plain)

    def fit(self, name: str) -> bool:
        wanted = name in self._plain or any(_fits(name, word) for word in self._wild)
        return wanted and not any(_fits(name, word) for word in self._not)


def _is_pattern(word: str) -> bool:
    return not set("*?!").isdisjoint(word)


def _fits(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern.replace("[", "[[]")) if _is_pattern(pattern) else name == pattern


SOURCE = Source(word="ssh_config", takes="pattern", read=lambda pattern: read(pattern or "*"))
