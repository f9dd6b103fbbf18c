"""Devices are opened, closed and opened again: their numbers, what they are called, and which host may have one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from stage.device_node import Node

import skyfab as sky
from skyfab.device import stream as streams
from skyfab.device.devices import _refusal, open_device
from skyfab.device.stream import DeviceStream

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.lab


def node_of(version: Any = torch.__version__) -> Node:
    """A host that replies to everything with a version of torch, or with nonsense."""
    return Node({"torch": version} if version is not None else "nonsense")


@pytest.fixture
def opened() -> Iterator[Callable[..., DeviceStream]]:
    """``opened(version)``: a device of such a host, closed after the test."""
    made: list[DeviceStream] = []

    def open_one(version: Any = torch.__version__) -> DeviceStream:
        made.append(open_device("cpu", node_of(version)))
        return made[-1]

    yield open_one
    for stream in made:
        stream.close()


def test_a_number_is_used_again_when_nothing_is_left_of_its_device(opened: Callable[..., DeviceStream]) -> None:
    first, second = opened(), opened()
    assert second.index == first.index + 1
    kept = torch.ones(3, device=first.torch_device)
    first.close()
    assert opened().index == second.index + 1, "a tensor of the closed device is left"
    del kept
    again = opened()
    assert again.index == first.index
    assert streams.streams[first.index] is again
    made = torch.ones(3, device=again.torch_device) + 1
    assert made.device == again.torch_device, "nothing that was planned for the closed device is used"
    with pytest.raises(sky.UsageError, match="closed"):
        first.check()


@pytest.mark.parametrize("version", ["1.9.0", None, "", 5])
def test_a_host_with_another_torch_or_none_is_refused(version: Any) -> None:
    node = node_of(version)
    with pytest.raises(sky.HostUnfit, match="no torch" if not version else "major and minor version") as caught:
        open_device("cpu", node)
    assert node.is_closed
    assert caught.value.host == "node1"
    assert "torch" in str(caught.value.hint)


REGISTERS = """
import os
from skyfab.device import backend
from skyfab.errors import UsageError
import torch

backend.check()
if not os.fork():
    torch.utils.rename_privateuse1_backend("mine")
    try:
        backend.check()
    except UsageError as error:
        print(error.message, flush=True)
    os._exit(0)
os.wait()
backend.register()
backend.register()
backend.check()
print(torch.sky.device_count())
"""


def test_the_device_type_is_registered_once_and_needs_the_place_of_another(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", REGISTERS], capture_output=True, text=True, cwd=tmp_path)
    taken = "the device type 'mine' is already registered in this process; PyTorch allows only one"
    assert done.stdout.splitlines() == [taken, "0"], done.stderr
    assert ("one accelerator per process" in done.stderr) == torch.cuda.is_available()


def test_the_first_device_is_that_of_accelerate(
    opened: Callable[..., DeviceStream], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And of transformers' Trainer. A device that the user has named stays."""
    variable = "ACCELERATE_TORCH_DEVICE"
    monkeypatch.delenv(variable, raising=False)
    first, second = opened(), opened()
    assert os.environ[variable] == str(first.torch_device)
    second.close()
    assert os.environ[variable] == str(first.torch_device)
    first.end("its process ended")
    third = opened()
    assert os.environ[variable] == str(third.torch_device), "not that of a device which is lost"
    third.close()
    assert variable not in os.environ
    monkeypatch.setenv(variable, "cpu")
    opened().close()
    assert os.environ[variable] == "cpu"


def test_a_hint_is_no_command_of_the_host() -> None:
    for version, hint in (("1.2.3+cu126", "pip install torch==1.2.3"), ("1.2; reboot", None)):
        refused = _refusal({"torch": version}, "node1", "99.0", seeded=False)
        assert refused is not None and refused.hint == hint
