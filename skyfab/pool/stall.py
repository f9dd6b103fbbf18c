"""Stall detection: samples the stacks of a call's processes, and reports them, grouped, if one makes no progress.

A process makes no progress while its main thread has the same stack, ignoring the line in the innermost function.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Final

from skyfab.errors import SkyfabError
from skyfab.inspect.stacks import Stack, describe, frames_of, groups, likeness
from skyfab.pool.node import Node
from skyfab.protocol import messages
from skyfab.ui.events import Events, Stalled

LOOKS: Final = 10
"""Samples within the stall time."""

Process = tuple[Node, str, int | None]
"""Identifies a process: its node, worker name, and rank in a gang."""


def watch(
    future: Future[Any], processes: Callable[[], Sequence[Process]], stall: float, label: str, events: Events
) -> None:
    """Samples a call's processes until it ends. Emits `Stalled` when one has made no progress for `stall` seconds."""
    stall_watch = _StallWatch(processes, stall, label, events)
    over = threading.Event()
    Future.add_done_callback(future, lambda _: over.set())
    threading.Thread(target=stall_watch.run, args=(over,), name="skyfab-stall", daemon=True).start()


class _StallWatch:
    def __init__(self, processes: Callable[[], Sequence[Process]], stall: float, label: str, events: Events) -> None:
        self._processes = processes
        self._stall = stall
        self._label = label
        self._events = events
        self._stacks: dict[tuple[str, str], tuple[Stack, float]] = {}
        """The last stack of each process, and since when it has been the same."""
        self._reported: set[tuple[str, str]] = set()

    def run(self, over: threading.Event) -> None:
        while not over.wait(self._stall / LOOKS):
            for node, worker, rank in self._processes():
                try:
                    node.session.send(messages.DumpStacks(worker=worker), answer=self._hear(node, worker, rank))
                except SkyfabError:
                    pass  # the host is lost: the call itself reports that
            self._judge()

    def _hear(self, node: Node, worker: str, rank: int | None) -> Callable[[messages.Message, list[memoryview]], None]:
        def answer(message: messages.Message, _: list[memoryview]) -> None:
            frames = frames_of(message.text, node.name) if isinstance(message, messages.Done) else ()
            if frames:
                stack = Stack(host=node.name, rank=rank, pid=0, pool="", frames=frames)
                before = self._stacks.get((node.name, worker))
                still = before is not None and likeness(before[0]) == likeness(stack)
                self._stacks[node.name, worker] = (stack, before[1] if still and before else time.monotonic())

        return answer

    def _judge(self) -> None:
        now = time.monotonic()
        stacks = dict(self._stacks)
        stuck = {key for key, (_, since) in stacks.items() if now - since >= self._stall}
        if stuck and stuck != self._reported:
            text = "\n".join(describe(group) for group in groups([stack for stack, _ in stacks.values()]))
            host = stacks[min(stuck)][0].host
            self._events.emit(Stalled(host=host, function=self._label, seconds=self._stall, text=text))
        self._reported = stuck
