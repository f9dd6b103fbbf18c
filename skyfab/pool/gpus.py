"""The GPUs of a pool and the workers that have them: one ledger for calls and actors.

A call with GPUs runs in a worker that sees only these. The worker is kept for the next call that needs as many, until
another worker needs one of its GPUs.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final

from skyfab.calls.call import check_gpus
from skyfab.context import GPU_SHARE
from skyfab.errors import HostLost, SkyfabError, UsageError
from skyfab.pool.node import Node, WorkerSpec
from skyfab.pool.task import RESERVED, Slot, Task

_FULL: Final = 1 + 1e-6
"""Shares of a GPU have rounding errors."""
_FREE, _LEAVING, _KEPT, _BUSY = range(4)
"""What is in the way on a GPU: nothing, workers that exit, workers that are kept without a call, calls or actors."""


class Gpus:
    """The ledger. Who reads or changes it holds `lock`; methods that do so themselves say so."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        """Also that of the scheduler, which adds calls to slots and removes them."""
        self._nodes: Sequence[Node] = ()
        self._spec_of: Callable[[Node, str], WorkerSpec]
        self.tree = ""
        """The project's files, which new processes import."""
        self.slots: list[Slot] = []
        """Those of calls, also while they have no call, and those of actors, in which a call is RESERVED."""
        self._numbers = itertools.count()

    def open(self, nodes: Sequence[Node], spec_of: Callable[[Node, str], WorkerSpec]) -> None:
        self._nodes, self._spec_of, self.tree, self.slots = nodes, spec_of, "", []

    def slots_for(self, gpus: float) -> int:
        """How many calls with `gpus` run at a time on all hosts. Raises UsageError if none can. Locks."""
        self.check(gpus, None, "a call")
        one = max(1, int(1 / gpus + 1e-6))
        return sum(len(node.gpus) * one // math.ceil(gpus) for node in self._nodes)

    def check(self, gpus: float, on: Node | None, label: str) -> None:
        """Raises UsageError if a call would wait forever: no host has as many GPUs, or actors have them. Locks."""
        check_gpus(gpus)
        nodes = self._nodes if on is None else [on]
        with self.lock:
            uses = self._uses(slot for slot in self.slots if _is_actors(slot))
            if not any(_choose(uses[node], gpus) if node in uses else len(node.gpus) >= gpus for node in nodes):
                raise _nowhere(nodes, gpus, label)

    # ---- calls

    def place(self, waiting: Iterable[Task]) -> tuple[Task, Slot | None] | list[Slot] | None:
        """The next call that can begin, and its slot (None: its hosts are lost); or the slots whose workers must exit.

        For each call that waits, one host is kept from those behind it, so that it does not wait forever.
        """
        uses = self._uses(self.slots)
        open_nodes = set(uses)
        for task in waiting:
            gpus = task.call.gpus
            able = [node for node in uses if task.on in (None, node) and len(uses[node]) >= gpus]
            if not able:
                return task, None
            nodes = [node for node in able if node in open_nodes]
            if not nodes:
                continue
            for slot in self.slots:
                if slot.is_kept and slot.wanted == gpus and slot.node in nodes:
                    return task, self._equipped(slot)
            found = [(*choice, node.index, node) for node in nodes if (choice := _choose(uses[node], gpus))]
            if found:
                obstacle, _, numbers, _, node = min(found)
                if obstacle == _FREE:
                    return task, self._add(f"solo.gpu{next(self._numbers)}", node, numbers, gpus)
                if obstacle == _KEPT:
                    return self._clear(node, numbers)
            else:
                node = max(nodes, key=lambda node: sum(use[0] < 1 for use in uses[node].values()))
            open_nodes.discard(node)
        return None

    def release(self, slots: Sequence[Slot]) -> None:
        """Ends workers that are in the way. Locks."""
        for slot in slots:
            with suppress(SkyfabError):  # the host is lost
                if not slot.node.release(slot.worker):
                    self.ended(slot.node, slot.worker)

    # ---- actors

    def reserve(self, worker: str, nodes: Sequence[Node], gpus: float, label: str) -> Slot:
        """GPUs for an actor, on the host with the fewest actors. Raises UsageError and HostLost. Locks."""
        with self.lock:
            uses = self._uses(self.slots)
            found = [(node, choice[2]) for node in nodes if node in uses and (choice := _choose(uses[node], gpus))]
            if not found:
                raise _nowhere(nodes, gpus, label)
            actors = [slot.node for slot in self.slots if _is_actors(slot)]
            node, numbers = min(found, key=lambda one: actors.count(one[0]))
            cleared = self._clear(node, numbers)
            slot = self._add(worker, node, numbers, gpus)
            slot.tasks.append(RESERVED)
        self.release(cleared)
        return slot

    def leave(self, worker: str) -> None:
        """The worker of an actor is asked to exit. Locks."""
        with self.lock:
            for slot in self.slots:
                slot.is_leaving |= slot.worker == worker

    def ended(self, node: Node, worker: str | None = None) -> None:
        """A worker has exited, of any kind, or a host is lost. Slots of calls stay, for their next process. Locks."""
        with self.lock:
            gone = [slot for slot in self.slots if slot.node is node and worker in (None, slot.worker)]
            self.slots = [slot for slot in self.slots if slot not in gone or not (slot.is_leaving or _is_actors(slot))]

    # ---- internals

    def _uses(self, slots: Iterable[Slot]) -> dict[Node, dict[int, list[float]]]:
        """For each GPU of hosts that are not lost: the shares of calls and actors, of kept workers, of leaving ones."""
        uses = {node: {gpu: [0.0, 0.0, 0.0] for gpu in node.gpus} for node in self._nodes if node.lost is None}
        for slot in slots:
            for number in uses.get(slot.node, {}).keys() & slot.gpus:
                uses[slot.node][number][2 if slot.is_leaving else int(slot.is_kept)] += min(slot.wanted, 1.0)
        return uses

    def _clear(self, node: Node, numbers: Sequence[int]) -> list[Slot]:
        """The slots of workers that are kept on these GPUs: they must be released."""
        found = [slot for slot in self.slots if slot.node is node and slot.is_kept and {*slot.gpus} & {*numbers}]
        for slot in found:
            slot.is_leaving = True
        return found

    def _add(self, worker: str, node: Node, numbers: tuple[int, ...], wanted: float) -> Slot:
        slot = Slot(node, worker, self._spec_of(node, self.tree))
        slot.gpus, slot.wanted = numbers, wanted
        self.slots.append(slot)
        return self._equipped(slot)

    def _equipped(self, slot: Slot) -> Slot:
        """Its next process imports the current code, and sees its GPUs only."""
        slot.spec = spec = self._spec_of(slot.node, self.tree)
        if slot.gpus:
            env = {**spec.env, "CUDA_VISIBLE_DEVICES": ",".join(map(str, slot.gpus))}
            if slot.wanted < 1:
                env[GPU_SHARE] = str(slot.wanted)
            count = dict.fromkeys(("accelerators", "total_accelerators"), len(slot.gpus))
            slot.spec = replace(spec, env=env, info={**spec.info, **count})
        return slot


def _is_actors(slot: Slot) -> bool:
    return RESERVED in slot.tasks and not slot.is_leaving


def _choose(uses: dict[int, list[float]], gpus: float) -> tuple[int, int, tuple[int, ...]] | None:
    """GPUs of a host to take: what is in their way, minus how many others are free, and they themselves."""
    share, count = min(gpus, 1.0), math.ceil(gpus)
    ranked = sorted((sum(had + share > _FULL for had in itertools.accumulate(uses[gpu])), gpu) for gpu in uses)
    chosen = ranked[:count]
    obstacle = chosen[-1][0] if chosen else _FREE
    if len(chosen) < count or obstacle == _BUSY:
        return None
    return obstacle, -sum(each == _FREE for each, _ in ranked), tuple(sorted(gpu for _, gpu in chosen))


def _nowhere(nodes: Sequence[Node], gpus: float, label: str) -> SkyfabError:
    alive = [node for node in nodes if node.lost is None]
    if not alive:
        return HostLost(f"no host is left for {label}", host=nodes[0].name)
    most = max(len(node.gpus) for node in alive)
    if not most:
        who = f"none of the {len(alive)} hosts has a GPU" if len(alive) > 1 else f"{alive[0].name} has no GPU"
        return UsageError(f"{who}: {label} needs {gpus}", hint="to see the GPUs of your hosts: skyfab hosts")
    have = f"none of the {len(nodes)} hosts has" if len(nodes) > 1 else f"{nodes[0].name} does not have"
    return UsageError(
        f"{have} {gpus} free {'GPU' if gpus == 1 else 'GPUs'} for {label}",
        hint="calls or actors use some: end an actor, or request fewer GPUs"
        if most >= gpus
        else f"gpus= can be at most {most}",
    )
