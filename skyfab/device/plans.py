"""Plans: how an operator is executed with certain shapes, dtypes and options; sent to the host once."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Final

import torch

from skyfab.device import tensors
from skyfab.device.arguments import is_recorded
from skyfab.device.stream import DeviceStream
from skyfab.device.tensors import DTYPE_NUMBERS, Layout, layout_of
from skyfab.host.device import wire

_MOST_PLANS: Final = 20_000
"""Plans that are kept. A program whose shapes never repeat makes new ones all the time."""


class Plan:
    """How a kind of call is executed."""

    __slots__ = ("number", "outputs", "results", "single", "stream", "writes")

    def __init__(self, number: int, stream: DeviceStream, outputs: Sequence[Layout | None], results: Any) -> None:
        self.number = number
        self.stream = stream
        self.outputs = outputs
        """The layouts of the new tensors."""
        self.results = results
        """What the call returns: outputs by index (int, or a list), or arguments ("argument", index)."""
        self.single = outputs[0] if results == [0] else None
        """The layout of the only result, if it is one new tensor."""
        self.writes = results is None or any(type(result) is tuple for result in results)
        """Whether it changes an argument in place."""


_new_number: Final = itertools.count().__next__
_caches: Final[list[dict[Any, Plan]]] = []


def new_plan(
    stream: DeviceStream, name: str, template: tuple[Any, Any], outputs: Sequence[torch.Tensor | None], results: Any
) -> Plan:
    """Makes a plan for a function of the host, and sends it. `outputs` are meta tensors."""
    layouts = [t if t is None else layout_of(tuple(t.shape), t.stride(), t.dtype, stream.index) for t in outputs]
    plan = Plan(_new_number(), stream, layouts, results)
    described = [one if one is None else (one.shape, one.stride, DTYPE_NUMBERS[one.dtype]) for one in layouts]
    stream.emit([wire.PLAN, plan.number, name, *template, described])
    return plan


def forget_plans() -> None:
    """Forgets all plans, in this program and on the hosts."""
    for cache in _caches:
        cache.clear()
    for stream in tensors.streams:
        stream.emit_always([wire.FORGET])


def new_cache() -> dict[Any, Plan]:
    """A cache of plans."""
    cache: dict[Any, Plan] = {}
    _caches.append(cache)
    return cache


def output_counts() -> dict[int, int]:
    """How many new tensors the plans make, by the plans' numbers."""
    return {plan.number: len(plan.outputs) for cache in _caches for plan in list(cache.values())}


def before_plan() -> None:
    """Makes room: must be called before a plan is made, and not while an instruction is being built for another."""
    if sum(map(len, _caches)) >= _MOST_PLANS:
        forget_plans()


def finish(plan: Plan, instruction: list[Any], args: Sequence[Any]) -> Any:
    """Makes the outputs of a call, emits the instruction, and returns what the call returns."""
    made: list[torch.Tensor | None] = []
    for layout in plan.outputs:
        if layout is None:
            made.append(None)
            instruction.append(0)
        else:
            tensor, ident = layout.new()
            made.append(tensor)
            instruction.append(ident)
    plan.stream.emit(instruction, recorded=plan.writes and is_recorded(args))
    if plan.results is None:
        return None
    found = [_result(result, made, args) for result in plan.results]
    return found[0] if len(found) == 1 else tuple(found)


def _result(result: Any, made: Sequence[Any], args: Sequence[Any]) -> Any:
    if type(result) is int:
        return made[result]
    return [made[at] for at in result] if type(result) is list else args[result[1]]
