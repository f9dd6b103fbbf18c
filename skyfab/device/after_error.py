"""After an error: gradients and the state of optimizers and gradient scalers are as they were at the line that failed.

The error is raised by a later line. Until then, PyTorch may have made some that the host never computed, and would use
them in every step from then on.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from skyfab.device import plans
from skyfab.device.storages import by_address
from skyfab.device.tensors import is_plain, is_remote
from skyfab.host.device import wire


def forget(skipped: Iterable[Sequence[Any]]) -> None:
    """Removes those that would have been made by instructions which the host has not executed."""
    counts = plans.output_counts()
    lost: set[int] = set()
    for instruction in skipped:
        code = instruction[0]
        if code >= 0:
            lost.update(instruction[len(instruction) - counts.get(code, 0) :])
        elif code in (wire.EMPTY, wire.MAKE):
            lost.add(instruction[1])

    def is_lost(value: Any) -> bool:
        if not is_remote(value) or not is_plain(value):
            return False
        if value.layout is torch.sparse_coo:
            return is_lost(value._indices()) or is_lost(value._values())
        storage = by_address.get(value.untyped_storage().data_ptr())
        return storage is not None and storage.id in lost

    for found in gc.get_objects() if lost else ():  # nothing else knows all tensors and optimizers of a program
        kind = type(found)
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            if found.is_leaf and is_lost(found.grad):
                found.grad = None
        elif issubclass(kind, torch.optim.Optimizer):
            for parameter, state in list(found.state.items()):
                values = [value for value in tree_leaves(state) if is_remote(value)]
                if any(map(is_lost, values)) or (is_remote(parameter) and not values):  # half of it was made
                    del found.state[parameter]
        elif issubclass(kind, torch.amp.GradScaler) and found.is_enabled():
            if any(map(is_lost, tree_leaves([*found._per_optimizer_states.values()]))):
                found._per_optimizer_states.clear()
            if is_lost(found._scale) or is_lost(found._growth_tracker):
                found._scale = found._growth_tracker = None
