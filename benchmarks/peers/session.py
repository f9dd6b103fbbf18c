"""The programs of contestants: ``python -m benchmarks.peers.by_NAME SITE JOB``.

A program job runs and ends. With the job ``session`` the program connects, prints READY, and then answers each line
with a JSON object: the line names a warm job, and the answer has the seconds that it took, or the error. It ends when
its input does.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

from benchmarks.peers import work
from benchmarks.peers.site import Site

READY = "ready"
SESSION = "session"

Warm = Mapping[str, Callable[[], float]]
"""Each warm job by its name: does the job once, and returns its seconds."""


def main(
    programs: Mapping[str, Callable[[Site], None]],
    session: Callable[[Site], AbstractContextManager[Warm]] | None = None,
) -> None:
    """Runs the job that the command line names."""
    path, job = sys.argv[1:]
    site = Site.read(path)
    if job != SESSION:
        programs[job](site)
        return
    assert session is not None
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # some libraries print
    with session(site) as jobs:
        print(READY, file=answers)
        for line in sys.stdin:
            print(json.dumps(_answer(jobs[line.strip()])), file=answers)


def _answer(job: Callable[[], float]) -> dict[str, Any]:
    try:
        return {"seconds": job()}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:300]}


def timed(action: Callable[[], Any], right: Any = None) -> float:
    """The seconds of an action. Raises AssertionError if it does not return what is right."""
    started = time.perf_counter()
    result = action()
    taken = time.perf_counter() - started
    if right is not None and result != right:
        raise AssertionError(f"returned {result!r:.100}")
    return taken


def warm(
    site: Site,
    *,
    call: Callable[[int], int],
    everywhere: Callable[[], list[str]],
    squares: Callable[[range], list[int]],
    reverse: Callable[[Any], Any],
) -> Warm:
    """The four warm jobs, from the four things that a contestant can do.

    `call` adds one on the first host, `everywhere` asks each host for its name, `squares` computes squares on all of
    them, and `reverse` sends an array to a function on the first host, and returns what that returns.
    """
    numbers = range(site.tasks)
    right = [work.square(number) for number in numbers]
    seeds = _seeds()

    def calls() -> list[int]:
        return [call(number) for number in range(site.calls)]

    def array() -> float:
        sent = work.array(site.array, next(seeds))
        started = time.perf_counter()
        back = reverse(sent)
        taken = time.perf_counter() - started
        if back.shape != sent.shape or back[0] != sent[-1] or back[-1] != sent[0]:
            raise AssertionError("returned another array")
        return taken

    def named() -> list[str]:
        return sorted(everywhere())

    hosts = sorted(site.names[: work.HOSTS])
    for _ in range(2):  # warm-up
        named()
        squares(range(work.HOSTS * 8))
        reverse(work.array(1, next(seeds)))
        for number in range(20):
            call(number)
    return {
        "calls": lambda: timed(calls, list(range(1, site.calls + 1))),
        "everywhere": lambda: timed(named, hosts),
        "map": lambda: timed(lambda: squares(numbers), right),
        "array": array,
    }


def _seeds() -> Iterator[int]:
    """Numbers that differ in each program too."""
    start = time.time_ns() % 10**9
    while True:
        yield start
        start += 1
