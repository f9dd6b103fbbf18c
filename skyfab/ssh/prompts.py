"""The prompts of logins: passwords are asked for once in a program and remembered, one-time codes each time."""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from skyfab.inventory.host import Host
from skyfab.ui.prompt import TERMINAL

_ONE_TIME: Final = re.compile(r"one[- ]?time|\b(otp|oath|pin|duo)\b|code|token|new password", re.IGNORECASE)
"""Words of prompts whose answer cannot be used again."""
_PASSWORD: Final = re.compile(r"passw|passphrase|kennwort", re.IGNORECASE)
_GRACE: Final = 110.0
"""Seconds for the prompts of one server: by default sshd hangs up after 120, unnoticed while the user types."""
_SECOND: Final = 2.0
"""Seconds in which the login that asked first may succeed."""
_BY_SSH: Final = re.compile(
    r"\((?P<who>[^\s@]+@\S+?)\) (?P<text>.*)|(?P<whose>[^\s@]+@\S+)'s (?P<plain>password: *)", re.DOTALL
)
"""How the ssh program words the prompts of servers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One server that a login may have prompts about."""

    name: str
    """As users know it."""
    login: str
    """``user@address:port``."""
    way: tuple[str, ...] = ()
    """The logins of the jump hosts before it: behind others, the same address may be another machine."""

    def __str__(self) -> str:
        return self.login if self.name == self.login else f"{self.name} ({self.login})"


def places(hops: Sequence[Host], user: str) -> list[Place]:
    """The servers on the path to a host, which is the last one; `user` is who logs in where none is named."""
    logins = [hop.login if hop.user else f"{user}@{hop.login}" for hop in hops]
    return [
        Place(name=hop.name, login=login, way=tuple(logins[:number]))
        for number, (hop, login) in enumerate(zip(hops, logins, strict=True))
    ]


def by_ssh(prompt: str) -> tuple[str, str]:
    """The server, as ``user@name``, and the question in a prompt of the ssh program. No server: about a local file."""
    match = _BY_SSH.fullmatch(prompt)
    if match is None:
        return "", prompt
    return match["who"] or match["whose"], match["text"] if match["who"] else match["plain"].capitalize()


class _Answers:
    """What the user has typed, kept only in the memory of this program."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, ...], str] = {}
        self._lock = threading.Lock()
        self._asked: Counter[tuple[str, ...]] = Counter()
        """How many logins wait for a one-time answer, by question."""

    def get(self, key: tuple[str, ...], wrong: str | None, ask: Callable[[], str | None]) -> str | None:
        """The known answer, unless it is `wrong`; else asks. Those who wait meanwhile for the same one are given it."""
        known = self._known.get(key)
        if known is not None and known != wrong:  # without waiting for a question about another server
            return known
        with self._lock:
            known = self._known.get(key)
            if known is None or known == wrong:
                self._known.pop(key, None)
                known = ask()
                if known is not None:
                    self._known[key] = known
            return known

    def get_new(self, key: tuple[str, ...], stopped: Callable[[], bool], ask: Callable[[], str | None]) -> str | None:
        """Asks for what can be used once. One that had to wait for another asks only if it is still wanted after that:
        of several attempts to reconnect, the first that succeeds ends the others.
        """
        is_second = self._asked[key] > 0
        self._asked[key] += 1
        try:
            with self._lock:
                until = time.monotonic() + (_SECOND if is_second else 0)
                while time.monotonic() < until and not stopped():
                    time.sleep(0.05)
                return ask()
        finally:
            self._asked[key] -= 1

    def forget(self, key: tuple[str, ...], wrong: str) -> None:
        with self._lock:
            if self._known.get(key) == wrong:
                del self._known[key]


_ANSWERS: Final = _Answers()


class Prompts:
    """The prompts of one login. The same one again means that the answer was wrong."""

    def __init__(self, stopped: Callable[[], bool] = lambda: False) -> None:
        self._stopped = stopped
        self._given: dict[tuple[str, ...], str] = {}
        self._until: dict[Place | str, float] = {}
        self._count = 0
        self.declined = False
        """The user gave no answer in time, or it is no longer wanted: nothing else is asked."""

    @property
    def outcome(self) -> str:
        """Why the login failed, if the user was asked; else empty."""
        if self.declined:
            return "there was no input in time"
        return "the input was not accepted" if self._count else ""

    def answer(
        self, place: Place | str, text: str, stopped: Callable[[], bool] = lambda: False, *, once: bool = False
    ) -> str | None:
        """Answers a question about a server, or about what `place` calls by its name; None if the user does not.

        With `once` the user is asked whatever is known, and the answer is not remembered.
        """
        if self.declined:
            return None
        again = ""
        until = self._until.setdefault(place, time.monotonic() + _GRACE)

        def over() -> bool:
            return stopped() or self._stopped() or time.monotonic() > until

        def ask() -> str | None:
            return TERMINAL.ask(f"{again}{place}: {text}" if str(place) else f"{again}{text}", over)

        key = ("password", *place.way, place.login) if isinstance(place, Place) else (place, text)
        if not once and _PASSWORD.search(text) and not _ONE_TIME.search(text):
            wrong = self._given.get(key)
            again = "not accepted; try again: " if wrong is not None else ""
            found = _ANSWERS.get(key, wrong, ask)
            if found is not None:
                self._given[key] = found
        else:
            found = _ANSWERS.get_new((*key, text), over, ask)
        self.declined = found is None
        self._count += found is not None
        return found

    def refused(self) -> None:
        """The login failed: what was answered is forgotten, unless it failed for want of an answer."""
        if self.declined:
            return
        for key, answer in self._given.items():
            _ANSWERS.forget(key, answer)
        self._given.clear()
