"""What a program keeps by name on a device that outlives it (host/device/stay.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.utils._pytree import tree_map, tree_map_only

from skyfab.device import manual_kernels, remote_functions
from skyfab.device.tensors import TYPE
from skyfab.errors import SkyfabError
from skyfab.host.device import stay

if TYPE_CHECKING:
    from skyfab.device.stream import DeviceStream

_HERE: Final = "skyfab.here"
"""The only key of a dict that has a tensor of this program's memory: a later program has it in its own."""


def keep(stream: DeviceStream, values: Mapping[str, Any]) -> None:
    """Keeps these values, as they are now."""
    states = tree_map_only(torch.Tensor, _marked, {name: _state(value) for name, value in values.items()})
    remote_functions.run(stream, stay.keep, (states,), {})


def kept(stream: DeviceStream) -> dict[str, Any]:
    """What is kept: modules and optimizers as their state dicts."""
    found = tree_map(_fetched, remote_functions.run(stream, stay.kept, (), {}), is_leaf=_is_marked)
    return tree_map(lambda leaf: leaf[_HERE].result() if _is_marked(leaf) else leaf, found, is_leaf=_is_marked)  # type: ignore[no-any-return]


def save(stream: DeviceStream, values: Mapping[str, Any]) -> None:
    """The program ends: keeps everything once more, as it is now."""
    try:
        stream.consume(stream.earlier_error)
        keep(stream, values)
    except SkyfabError as error:
        stream.link.notice(f"kept as of the last sky.keep, not as it is now: {error.message}")


def _state(value: Any) -> Any:
    value = getattr(value, "_orig_mod", value)  # of a compiled module, whose state dict has other names
    return value.state_dict() if hasattr(value, "state_dict") else value


def _marked(tensor: torch.Tensor) -> Any:
    return tensor if tensor.device.type == TYPE else {_HERE: tensor}


def _is_marked(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() == {_HERE}


def _fetched(leaf: Any) -> Any:
    return {_HERE: manual_kernels.fetch_later(leaf[_HERE])} if _is_marked(leaf) else leaf
