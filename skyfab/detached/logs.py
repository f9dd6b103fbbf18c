"""Reads the logs of a detached run from its hosts, merged by the times at which they were written."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from skyfab._util import schema
from skyfab.detached.folder import LATEST
from skyfab.errors import ProtocolError, SkyfabError
from skyfab.inventory.host import Host
from skyfab.session.ask import PASSING, Asker
from skyfab.session.question import Question, only


class LogLine(NamedTuple):
    """A line that a rank wrote."""

    rank: int
    stream: str
    """``out`` or ``err``."""
    text: str
    time: float
    """By the host's clock; when the run started, if that is not known."""
    host: str


@dataclass(frozen=True, slots=True)
class _Page:
    """An answer of skyfab.host.ask.logs."""

    lines: tuple[tuple[int, Literal["out", "err"], str, float], ...]
    cursors: Mapping[str, tuple[int, int, float]]
    more: bool

    def __post_init__(self) -> None:
        """A host may send anything. Raises schema.Invalid."""
        if not all(0 <= time < LATEST for *_, time in self.lines):
            raise schema.Invalid("out of range", ("lines",))


class LogReader:
    """Reads new lines of all logs of a run, again and again."""

    def __init__(
        self,
        asker: Asker,
        run: str,
        *,
        started: float = 0.0,
        rank: int | None = None,
        tail: int | None = None,
        since: float | None = None,
    ) -> None:
        """Of one `rank` only, if it is given; at first only the last `tail` lines, and those not before `since`."""
        self._asker = asker
        self._arguments = {"run": run, "started": started, "rank": rank, "since": since}
        self._tail = tail
        self._is_first = True
        self._cursors: dict[str, Mapping[str, tuple[int, int, float]]] = {}
        """How far the logs of each host have been read."""
        self.errors: list[SkyfabError] = []
        """Of the hosts that the last call of `new` has left out."""

    def new(self, *, rest: bool) -> Iterator[LogLine]:
        """Lines that were added since the last call; with `rest` also an incomplete last line.

        A host that does not answer now is left out, and its lines come with a later call.
        """
        first = self._asker.each(lambda host: self._ask(host, rest))
        self.errors = [outcome.error for outcome in first if outcome.error is not None]
        pages = [self._of_host(outcome.host, outcome.answer, rest) for outcome in first if outcome.answer]
        lines: Iterator[LogLine] = heapq.merge(*pages, key=lambda line: line.time)
        if self._tail is not None and self._is_first:
            lines = iter(deque(lines, maxlen=self._tail))
        self._is_first = False
        yield from lines

    def _of_host(self, host: Host, page: _Page, rest: bool) -> Iterator[LogLine]:
        while True:
            for line in page.lines:
                yield LogLine(*line, host.name)
            self._cursors[host.name] = page.cursors
            if not page.more:
                return
            if not page.lines:  # it would be asked for ever
                raise ProtocolError("invalid reply to 'logs': more lines, but none of them", host=host.name)
            try:
                page = self._ask(host, rest)
            except PASSING as error:
                self.errors.append(error)
                return

    def _ask(self, host: Host, rest: bool) -> _Page:
        known = self._cursors.get(host.name)
        arguments = {
            **self._arguments,
            "cursors": known or {},
            "rest": rest,
            "tail": self._tail if known is None else None,
        }
        question = Question("logs", lambda host, replies: schema.parse(_Page, only(replies)), arguments)
        return self._asker.ask_one(question, host)
